"""Exact enumeration of a small space."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from dse.search.found import Found
from dse.search.protocol import Codes, Evaluator, Pool, Space

CHUNK = 16_384


@dataclass(frozen=True, slots=True)
class EnumerateChunk:
    """Prices the canonical, allowed candidates among the grid's points `start <= index < stop`."""

    start: int
    stop: int

    def __call__(self, space: Space, evaluator: Evaluator, /) -> Found:
        """What the chunk holds."""
        codes = grid(space, self.start, self.stop)
        codes = codes[(space.canonical(codes) == codes).all(axis=1) & space.allowed(codes)]
        return Found.among(codes, evaluator.evaluate(codes))


def grid(space: Space, start: int, stop: int) -> Codes:
    """`(stop - start, a)` points of the full product of the axes, the last axis running fastest."""
    sizes = [len(axis.values) for axis in space.axes]
    index = np.arange(start, stop)
    columns = []
    for size in reversed(sizes):
        index, code = np.divmod(index, size)
        columns.append(code)
    return np.stack(columns[::-1], axis=1).astype(np.int16)


def grid_size(space: Space) -> int:
    """Points of the full product, inactive combinations included."""
    return math.prod(len(axis.values) for axis in space.axes)


def chunk_count(space: Space) -> int:
    """Chunks of the full product."""
    return -(-grid_size(space) // CHUNK)


def enumerate_space(space: Space, pool: Pool, *, first: int = 0) -> Iterator[Found]:
    """What each chunk of the space holds, in order, from chunk `first` on."""
    total = grid_size(space)
    starts = range(first * CHUNK, total, CHUNK)
    yield from pool.map(EnumerateChunk(start, min(start + CHUNK, total)) for start in starts)
