"""Values on a grid: on which axes an array depends, and its table over just those.

A grid array broadcasts to `(c_1, ..., c_k, r)`: one dimension per search axis, rank last.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Axes: TypeAlias = "tuple[int, ...]"


def axes_of(arrays: Iterable[Any], *, num_axes: int) -> Axes:
    """Axes on which any of the grid arrays depends."""
    found: set[int] = set()
    for array in arrays:
        shape = np.shape(array)
        lead = shape[:-1]
        found |= {num_axes - len(lead) + d for d, size in enumerate(lead) if size > 1}
    return tuple(sorted(found))


def entries(axes: Axes, sizes: Sequence[int]) -> int:
    """Combinations of the axes' values."""
    return math.prod(sizes[a] for a in axes)


def tabulate(array: Any, axes: Axes, sizes: Sequence[int]) -> NDArray[Any]:
    """`(e, r)`, r as in the array: a grid array over all combinations of `axes`, the last fastest."""
    values = np.asarray(array)
    missing = len(sizes) + 1 - values.ndim
    # Constants of a graph have a candidate axis even where the grid has none.
    values = values.reshape((1,) * missing + values.shape[max(0, -missing) :])
    ranks = values.shape[-1]
    values = values[tuple(slice(None) if a in axes else 0 for a in range(len(sizes)))]
    return np.broadcast_to(values, (*(sizes[a] for a in axes), ranks)).reshape(-1, ranks)


def expand(table: NDArray[Any], own: Axes, axes: Axes, sizes: Sequence[int]) -> NDArray[Any]:
    """`(e', ...)`: a table over `own` axes repeated over a larger set of axes."""
    rest = table.shape[1:]
    shape = tuple(sizes[a] if a in own else 1 for a in axes)
    full = tuple(sizes[a] for a in axes)
    return np.broadcast_to(table.reshape((*shape, *rest)), (*full, *rest)).reshape((-1, *rest))


def shrink(table: NDArray[Any], axes: Axes, sizes: Sequence[int]) -> tuple[NDArray[Any], Axes]:
    """The table without the axes along which it is constant."""
    values = table.reshape((*(sizes[a] for a in axes), *table.shape[1:]))
    kept: list[int] = []
    for axis in axes:
        position = len(kept)
        first = np.take(values, [0], axis=position)
        if (values == first).all():
            values = np.take(values, 0, axis=position)
        else:
            kept.append(axis)
    return np.ascontiguousarray(values.reshape((-1, *table.shape[1:]))), tuple(kept)
