"""Fit the table of neighbours: Gaussian processes over (n, k), one for each m of a grid of measured products.

The covariance is exponential in the octaves between two pairs, with lengths of its own along `n` and `k`. A measured
pair is predicted from the others, in closed form; a pair that was not measured, from all.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from perfcore.cost.neighbours import Neighbours
from perfcore.cost.roofline import GemmShapes

Array = NDArray[np.float64]

LENGTHS = (
    (1.0, 4.0),
    (0.3, 4.0),
    (2.0, 0.3),
    (0.1, 6.0),
)  # octaves along n and k, a column of the table each
NOISE = 1e-4
FEWEST_PAIRS = 20
GRID_SHARE = 0.5  # of the grid's points that must have been measured


def fit_neighbours(shapes: GemmShapes, values: Array) -> Neighbours | None:
    """The table of `(s,)` values of products; `None` where the products lie on no grid.

    Args:
        shapes: dims, one row a shape.
        values: log(measured / analytic).
    """
    axes = tuple(np.unique(d) for d in (shapes.m, shapes.n, shapes.k))
    pairs, pair_of = np.unique(np.stack([shapes.n, shapes.k], axis=1), axis=0, return_inverse=True)
    pair_of = pair_of.ravel()
    if min(map(len, axes)) < 2 or len(pairs) < FEWEST_PAIRS:
        return None
    if len(values) < GRID_SHARE * len(axes[0]) * len(pairs):
        return None
    measured = np.full((len(axes[0]), len(pairs)), np.nan)
    measured[np.searchsorted(axes[0], shapes.m), pair_of] = values
    complete = _filled(np.log2(axes[0]), measured)
    everywhere = np.stack([x.ravel() for x in np.meshgrid(axes[1], axes[2], indexing="ij")], axis=1)
    told = [_told(complete, np.log2(pairs), np.log2(everywhere), np.array(length)) for length in LENGTHS]
    table = np.stack(told, axis=-1).reshape(len(axes[0]), len(axes[1]), len(axes[2]), len(LENGTHS))
    m, n, k = (np.log2(a).astype(np.float32) for a in axes)
    return Neighbours((m, n, k), table.astype(np.float16).astype(np.float32))


def _filled(m: Array, measured: Array) -> Array:
    """`(m, p)`: what is missing, from the same pair's neighbours in `m`."""
    out = np.array(measured)
    for pair in out.T:
        gap = np.isnan(pair)
        pair[gap] = np.interp(m[gap], m[~gap], pair[~gap])
    return out


def _told(values: Array, pairs: Array, everywhere: Array, length: Array) -> Array:
    """`(m, q)`: at all points of the grid, from the `(m, p)` values of measured pairs, its own left out."""
    mean = values.mean(axis=1, keepdims=True)
    inverse = np.linalg.inv(_covariance(pairs, pairs, length) + NOISE * np.eye(len(pairs)))
    weights = (values - mean) @ inverse
    told = mean + weights @ _covariance(pairs, everywhere, length)
    left_out = values - weights / np.diag(inverse)
    at = {tuple(pair): i for i, pair in enumerate(everywhere.tolist())}
    told[:, [at[tuple(pair)] for pair in pairs.tolist()]] = left_out
    return np.asarray(told)


def _covariance(a: Array, b: Array, length: Array) -> Array:
    distance = np.sqrt((((a[:, None] - b[None]) / length) ** 2).sum(axis=-1))
    return np.asarray(np.exp(-distance))
