"""What products of neighbouring shapes took: a table over a grid of `m`, `n` and `k`, read between its points.

Each value is a log(measured / analytic) at a point of the grid, told by the points of other `(n, k)` pairs: what was
measured at the point itself is left out, so that a correction that looks at it learns how far neighbours can be trusted.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Columns = NDArray[np.float32]

LOG_DIMS = slice(1, 4)  # of the features of a product: log2 of m, n and k
_CORNERS = tuple(itertools.product((0, 1), repeat=3))


@dataclass(frozen=True, slots=True, eq=False)
class Neighbours:
    """The table.

    Attributes:
        axes: log2 of the grid's `m`, `n` and `k`, increasing, two or more each.
        values: `(m, n, k, c)`, `c` ways to weigh the neighbours.
    """

    axes: tuple[Columns, Columns, Columns]
    values: Columns

    def columns(self, features: Columns) -> Columns:
        """`(s, c)`: the table at the shapes of `(s, f)` features, by trilinear interpolation; beyond the grid its edge."""
        low, part = zip(
            *(_place(axis, x) for axis, x in zip(self.axes, features.T[LOG_DIMS], strict=True)), strict=True
        )
        out = np.zeros((len(features), self.values.shape[-1]), dtype=np.float32)
        for corner in _CORNERS:
            at = tuple(i + up for i, up in zip(low, corner, strict=True))
            weight = np.ones(len(features), dtype=np.float32)
            for share, up in zip(part, corner, strict=True):
                weight *= share if up else 1 - share
            out += weight[:, None] * self.values[at]
        return out

    def beside(self, features: Columns) -> Columns:
        """`(s, f + c)`: the features and the table's columns."""
        return np.concatenate([features.T, self.columns(features).T]).T

    def arrays(self) -> dict[str, NDArray[Any]]:
        """As a file holds it, in half precision."""
        names = ("grid_m", "grid_n", "grid_k")
        return {**dict(zip(names, self.axes, strict=True)), "grid": self.values.astype(np.float16)}


def neighbours_from(arrays: Mapping[str, NDArray[Any]]) -> Neighbours:
    """The table of `arrays()`."""
    m, n, k = (np.asarray(arrays[name], dtype=np.float32) for name in ("grid_m", "grid_n", "grid_k"))
    return Neighbours((m, n, k), arrays["grid"].astype(np.float32))


def _place(axis: Columns, values: Columns) -> tuple[NDArray[np.intp], Columns]:
    """`(s,)`: the grid point below, and how far on the way to the next, in [0, 1]."""
    low = np.clip(np.searchsorted(axis, values, side="right") - 1, 0, len(axis) - 2)
    part = (values - axis[low]) / (axis[low + 1] - axis[low])
    return low, np.clip(part, 0.0, 1.0).astype(np.float32)
