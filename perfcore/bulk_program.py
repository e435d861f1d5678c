"""Runs one structure's program on a block of candidates: row by row, all candidates a row.

The state of a candidate of which p ranks decide is a `(4p, 4p)` max-plus matrix, kept as p² matrices `(4, 4)`:
that of rank k's clocks over rank l's is number `k p + l`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from perfcore.bulk_vector import launch, multiply
from perfcore.curves import at
from perfcore.instructions import COLUMNS, Instruction
from perfcore.steps import CLOCKS

Array = NDArray[np.float64]

# No NaN arises: -inf is only ever added to what is finite or -inf. So maxima compile to single instructions.
FAST = {"nnan", "nsz"}
BLOCK = 128  # candidates whose state and codes stay in the first-level cache

_KIND, _KEY, _OFFSET, _LENGTH, _TARGET, _AWAITED, _COLLECTIVE, _COUNT, _EXPONENT, _POINTS = range(
    len(COLUMNS)
)
_LOCAL, _RANKED, _JOINT = int(Instruction.LOCAL), int(Instruction.RANKED), int(Instruction.JOINT)
_CLEAR, _ADD, _OPEN = int(Instruction.CLEAR), int(Instruction.ADD), int(Instruction.OPEN)
_FILL, _GUARD, _CURVE = int(Instruction.FILL), int(Instruction.GUARD), int(Instruction.CURVE)


class Block(NamedTuple):
    """Working memory of a block of at most b candidates.

    Attributes:
        columns: `(a, b)` codes.
        position: `(keys,)`: of each key, its row in `places`.
        places: `(u, b)`: where a candidate lies in a table of the structure's u-th key.
        alive: `(b, r)`: the ranks that decide, first `counts`, `(b,)`, of them.
        lanes: `(b,)`: candidates that run together.
        taken: `(2, b)`: which of `lanes` take a row, outside and inside a guard.
        amount: `(b,)` by lane.
        buckets: `(slots, b, 4)` by lane: filled, cap, what is still to come, and what counts as nothing to come.
        state: `(m, 16)` matrices by lane, room for `max(b, r²)`.
        held: `(b, r)` bytes.
        spare: `(3, 16)`.
        weights: `(1, 16)`.
    """

    columns: NDArray[np.int32]
    position: NDArray[np.int64]
    places: NDArray[np.int32]
    alive: NDArray[np.int64]
    counts: NDArray[np.int64]
    lanes: NDArray[np.int64]
    taken: NDArray[np.int64]
    amount: Array
    buckets: Array
    state: NDArray[np.float32]
    held: Array
    spare: NDArray[np.float32]
    weights: NDArray[np.float32]


def new_block(*, axes: int, keys: int, ranks: int, slots: int) -> Block:
    """Working memory for programs of so many keys, ranks and bucket lists on a grid of so many axes."""
    return Block(
        columns=np.empty((axes, BLOCK), dtype=np.int32),
        position=np.empty(keys, dtype=np.int64),
        places=np.empty((keys, BLOCK), dtype=np.int32),
        alive=np.empty((BLOCK, ranks), dtype=np.int64),
        counts=np.empty(BLOCK, dtype=np.int64),
        lanes=np.empty(BLOCK, dtype=np.int64),
        taken=np.empty((2, BLOCK), dtype=np.int64),
        amount=np.empty(BLOCK),
        buckets=np.empty((slots, BLOCK, 4)),
        state=aligned(max(BLOCK, ranks * ranks)),
        held=np.empty((BLOCK, ranks)),
        spare=aligned(3),
        weights=aligned(1),
    )


def aligned(count: int) -> NDArray[np.float32]:
    """`(count, 16)`, each row a cache line of its own: 64 bytes from a multiple of 64."""
    raw = np.empty(16 * count + 16, dtype=np.float32)
    begin = -raw.ctypes.data % 64 // 4
    return raw[begin : begin + 16 * count].reshape(count, 16)


@numba.njit(cache=True, fastmath=FAST)
def run(programs: Any, structure: int, block: Block, lanes: int, ranks: int) -> None:
    """The program of the first `lanes` of `block.lanes`, of each of which `ranks` ranks decide."""
    _identities(block.state, lanes, ranks)
    for q in range(lanes):
        block.taken[0, q], block.amount[q] = q, 0.0
    rows, caps = programs.rows, programs.caps
    row, end = programs.row_bounds[structure], programs.row_bounds[structure + 1]
    guard_end, taken = row, block.taken[0, :lanes]
    while row < end:
        if row == guard_end:
            taken = block.taken[0, :lanes]
        kind, places = rows[row, _KIND], block.places[block.position[rows[row, _KEY]]]
        if kind == _LOCAL:
            _local(programs.matrices, rows[row, _OFFSET], places, block, taken, ranks)
        elif kind == _RANKED:
            _ranked(programs.matrices, rows[row, _OFFSET], rows[row, _LENGTH], places, block, taken, ranks)
        elif kind in (_JOINT, _CURVE):
            _launches(rows[row], caps[row], programs.values, places, block, taken, ranks)
        elif kind == _GUARD:
            taken = _within(block, lanes)
            guard_end = row + rows[row, _COUNT] + 1
            if len(taken) == 0:
                row = guard_end - 1
        else:
            _sums(rows[row], caps[row], programs.values, places, block, taken)
        row += 1


@numba.njit(cache=True, fastmath=FAST)
def _identities(state: Any, lanes: int, ranks: int) -> None:
    for m in range(lanes * ranks * ranks):
        for x in range(CLOCKS * CLOCKS):
            state[m, x] = np.float32(-np.inf)
    for q in range(lanes):
        for k in range(ranks):
            for clock in range(CLOCKS):
                state[(q * ranks + k) * ranks + k, (CLOCKS + 1) * clock] = np.float32(0.0)


@numba.njit(cache=True, fastmath=FAST)
def _local(matrices: Any, offset: int, places: Any, block: Block, taken: Any, ranks: int) -> None:
    if ranks == 1:
        for q in taken:
            multiply(matrices, offset + places[block.lanes[q]], block.state, q, block.state, q)
        return
    size = ranks * ranks
    for q in taken:
        x = offset + places[block.lanes[q]]
        for m in range(q * size, q * size + size):
            multiply(matrices, x, block.state, m, block.state, m)


@numba.njit(cache=True, fastmath=FAST)
def _ranked(
    matrices: Any, offset: int, length: int, places: Any, block: Block, taken: Any, ranks: int
) -> None:
    for q in taken:
        lane = block.lanes[q]
        x = offset + places[lane] * length
        for k in range(ranks):
            for m in range((q * ranks + k) * ranks, (q * ranks + k + 1) * ranks):
                multiply(matrices, x + block.alive[lane, k], block.state, m, block.state, m)


@numba.njit(cache=True, fastmath=FAST)
def _within(block: Block, lanes: int) -> Any:
    """Of all lanes, those whose amount is not 0."""
    count = 0
    for q in range(lanes):
        block.taken[1, count] = q
        count += block.amount[q] > 0
    return block.taken[1, :count]


@numba.njit(cache=True, fastmath=FAST)
def _launches(row: Any, caps: Any, values: Any, places: Any, block: Block, taken: Any, ranks: int) -> None:
    """A launch on every deciding rank; absent where its duration is negative."""
    target, collective = row[_TARGET], row[_COLLECTIVE] and ranks > 1
    _weigh(block.weights[0], target, row[_AWAITED], caps[0], caps[1])
    for q in taken:
        lane = block.lanes[q]
        start = row[_OFFSET] + places[lane] * row[_LENGTH]
        ranked = row[_KIND] == _JOINT and row[_LENGTH] > 1
        shared = 0.0 if ranked else _shared_us(row, values, start, block.amount[q])
        for k in range(ranks):
            us = values[start + block.alive[lane, k]] if ranked else shared
            if us < 0:
                continue
            for m in range((q * ranks + k) * ranks, (q * ranks + k + 1) * ranks):
                launch(block.state, m, block.weights, target, np.float32(0.0 if collective else us))
        if collective:
            _join(row, values, start, shared, block, q, ranks)


@numba.njit(cache=True, fastmath=FAST)
def _shared_us(row: Any, values: Any, start: int, amount: float) -> float:
    """A duration that is the same on all ranks; that of a curve follows the amount."""
    if row[_KIND] == _CURVE and amount > 0:
        return at(values, start, row[_EXPONENT], row[_POINTS], amount)
    return float(min(values[start], 0.0) if row[_KIND] == _CURVE else values[start])


@numba.njit(cache=True, fastmath=FAST)
def _weigh(weights: Any, target: int, awaited: int, gap_us: float, latency_us: float) -> None:
    """What a launch adds to each clock that it waits for."""
    for clock in range(CLOCKS):
        weight = np.float32(0.0 if awaited >> clock & 1 else -np.inf)
        if clock == 0:
            weight = np.float32(latency_us)
        elif clock == target:
            weight = np.float32(gap_us)
        for column in range(CLOCKS):
            weights[CLOCKS * clock + column] = weight


@numba.njit(cache=True, fastmath=FAST)
def _join(row: Any, values: Any, start: int, shared: float, block: Block, q: int, ranks: int) -> None:
    """The ranks of a collective, which have arrived, end together."""
    ranked, lane = row[_KIND] == _JOINT and row[_LENGTH] > 1, block.lanes[q]
    first, begin = q * ranks * ranks, CLOCKS * row[_TARGET]
    for other in range(ranks):
        for x in range(begin, begin + CLOCKS):
            latest = np.float32(-np.inf)
            for k in range(ranks):
                us = values[start + block.alive[lane, k]] if ranked else shared
                if us >= 0:
                    latest = max(latest, block.state[first + k * ranks + other, x])
            for k in range(ranks):
                us = values[start + block.alive[lane, k]] if ranked else shared
                if us >= 0:
                    block.state[first + k * ranks + other, x] = latest + np.float32(us)


@numba.njit(cache=True, fastmath=FAST)
def _sums(row: Any, caps: Any, values: Any, places: Any, block: Block, taken: Any) -> None:
    """A step of a sum or of a bucket."""
    kind, offset, amount, lanes = row[_KIND], row[_OFFSET], block.amount, block.lanes
    if kind == _ADD:
        for q in taken:
            amount[q] += values[offset + places[lanes[q]]]
    elif kind == _FILL:
        for q in taken:
            amount[q] = _fill(block.buckets[row[_COUNT], q], caps[1], values[offset + places[lanes[q]]])
    elif kind == _OPEN:
        for q in taken:
            _open(block.buckets[row[_COUNT], q], caps[0], amount[q])
    else:
        for q in taken:
            amount[q] = 0.0


@numba.njit(cache=True, fastmath=FAST)
def _open(bucket: Array, cap: float, total: float) -> None:
    """An empty bucket."""
    # Terms are summed in another order than they are taken away, so the rest may miss 0 by rounding.
    bucket[0], bucket[1], bucket[2], bucket[3] = 0.0, cap, total, total * 1e-12


@numba.njit(cache=True, fastmath=FAST)
def _fill(bucket: Array, next_cap: float, value: float) -> float:
    """`Bucket.value`'s rule, one term further; the bytes that close here."""
    filled = bucket[0] + value
    bucket[2] -= value
    if filled < bucket[1] and bucket[2] > bucket[3]:
        bucket[0] = filled
        return 0.0
    bucket[0] = 0.0
    if filled > 0:
        bucket[1] = next_cap
    return float(filled)
