"""What a bulk program is made of: instructions, and the tables that they gather from."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from perfcore.by_pointer import ByPointer

Array = NDArray[np.float64]


class Instruction(IntEnum):
    """What one row of a program does; the columns are those of `COLUMNS`."""

    LOCAL = 0  # state = matrix ⊗ state on every rank
    RANKED = 1  # likewise, each rank with its own matrix
    JOINT = 2  # a collective with tabulated durations
    CLEAR = 3  # amount = 0
    ADD = 4  # amount += term
    OPEN = 5  # the first bucket of terms whose sum is amount
    FILL = 6  # the next term falls into the bucket; amount = its size if it closes here, else 0
    GUARD = 7  # skip `count` rows if amount is 0
    CURVE = 8  # a launch or collective whose duration follows the amount; times a rank's factor, the `count`th of an entry


COLUMNS = (
    "kind",
    "key",
    "offset",
    "length",
    "target",
    "awaited",
    "collective",
    "count",
    "exponent",
    "points",
)


@dataclass(frozen=True, slots=True, eq=False)
class Programs(ByPointer):
    """Programs of all structures, and the tables that they gather from.

    Attributes:
        rows: `(i, 10)` instructions of all structures; `length` is that of a table's entry.
        caps: `(i, 2)`: gap and latency of a launch; the first and the later caps of a bucket.
        row_bounds: `(s + 1,)`: each structure's part of `rows`; the other bounds likewise.
        keys: which places a structure needs.
        key_terms: `(v, 2)`: axis and stride, summed into a key's place.
        rank_rows: `(y, 2)`: key, and offset into `dominators`.
        memory_rows: `(z, 4)`: key, offset into `values`, whether by rank, and whether there (1) or needed (0).
        matrices: `(m, 16)`.
        values: durations, terms and curves.
        dominators: by entry and rank: bit b says that rank b is nowhere faster.
        slots: lists of terms that fill buckets, at most, in one structure.
    """

    rows: NDArray[np.int64]
    caps: Array
    row_bounds: NDArray[np.int64]
    keys: NDArray[np.int64]
    key_bounds: NDArray[np.int64]
    key_terms: NDArray[np.int64]
    key_term_bounds: NDArray[np.int64]
    rank_rows: NDArray[np.int64]
    rank_bounds: NDArray[np.int64]
    memory_rows: NDArray[np.int64]
    memory_bounds: NDArray[np.int64]
    matrices: NDArray[np.float32]
    values: Array
    dominators: NDArray[np.uint64]
    slots: int
