"""Runs one structure's program on a block of candidates: row by row, all candidates a row.

The state of a candidate of which p ranks decide is a `(4p, 4p)` max-plus matrix, kept as p² matrices `(4, 4)`:
that of rank k's clocks over rank l's is number `k p + l`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from perfcore.bulk_vector import launch, multiply
from perfcore.by_pointer import ByPointer
from perfcore.compiled import inner
from perfcore.curves import at
from perfcore.instructions import COLUMNS, Instruction
from perfcore.steps import CLOCKS

Array = NDArray[np.float64]

# No NaN arises: -inf is only ever added to what is finite or -inf. So maxima compile to single instructions.
FAST = {"nnan", "nsz"}
part = inner(fastmath=FAST, error_model="numpy", _nrt=False)
# Plain numbers in a call would be types of their own, for each of which a function is compiled once more.
ZERO, ONE = cast("tuple[int, int]", tuple(np.arange(2)))
BLOCK = 128  # candidates whose state and codes stay in the first-level cache

_KIND, _KEY, _OFFSET, _LENGTH, _TARGET, _AWAITED, _COLLECTIVE, _COUNT, _EXPONENT, _POINTS = range(
    len(COLUMNS)
)
_LOCAL, _RANKED, _JOINT = int(Instruction.LOCAL), int(Instruction.RANKED), int(Instruction.JOINT)
_CLEAR, _ADD, _OPEN = int(Instruction.CLEAR), int(Instruction.ADD), int(Instruction.OPEN)
_FILL, _GUARD, _CURVE = int(Instruction.FILL), int(Instruction.GUARD), int(Instruction.CURVE)


@dataclass(frozen=True, slots=True, eq=False)
class Block(ByPointer):
    """Working memory of a block of at most b candidates of one structure.

    Attributes:
        members: `(b,)` candidates.
        columns: `(a, b)` codes.
        position: `(keys,)`: of each key, its row in `places`.
        places: `(u, b)`: where a candidate lies in a table of the structure's u-th key.
        held: `(b, r)` bytes.
        there: `(b, r)` bytes of memory.
        alive: `(b, r)`: the ranks that decide, first.
        taken: `(2, b)`: which of the block take a row, outside and inside a guard.
        amount: `(b,)`.
        buckets: `(slots, 4, b)`: filled, cap, what is still to come, and what counts as nothing to come.
        state: `(m, 16)` matrices, room for `max(b, r²)`.
        pending: `(b, 16)`.
        spare: `(3, 16)`.
        weights: `(1, 16)`.
        clocks: `(2, 4 r)`.
        dominators: `(r,)`: bit b of a rank's says that rank b is nowhere faster.
        matrix: `(4 r, 4 r)`.
        walks: `(4 r + 1, 4 r)`.
    """

    members: NDArray[np.int64]
    columns: NDArray[np.int32]
    position: NDArray[np.int64]
    places: NDArray[np.int32]
    held: Array
    there: Array
    alive: NDArray[np.int64]
    taken: NDArray[np.int64]
    amount: Array
    buckets: Array
    state: NDArray[np.float32]
    pending: NDArray[np.float32]
    spare: NDArray[np.float32]
    weights: NDArray[np.float32]
    clocks: NDArray[np.float32]
    dominators: NDArray[np.uint64]
    matrix: NDArray[np.float32]
    walks: NDArray[np.float32]


def new_block(*, axes: int, keys: int, ranks: int, slots: int) -> Block:
    """Working memory for programs of so many keys, ranks and bucket lists on a grid of so many axes."""
    size = CLOCKS * ranks
    return Block(
        members=np.empty(BLOCK, dtype=np.int64),
        columns=np.empty((axes, BLOCK), dtype=np.int32),
        position=np.empty(keys, dtype=np.int64),
        places=np.empty((keys, BLOCK), dtype=np.int32),
        held=np.empty((BLOCK, ranks)),
        there=np.empty((BLOCK, ranks)),
        alive=np.zeros((BLOCK, ranks), dtype=np.int64),
        taken=np.empty((2, BLOCK), dtype=np.int64),
        amount=np.empty(BLOCK),
        buckets=np.empty((slots, 4, BLOCK)),
        state=aligned(max(BLOCK, ranks * ranks)),
        pending=aligned(BLOCK),
        spare=aligned(3),
        weights=aligned(1),
        clocks=np.empty((2, size), dtype=np.float32),
        dominators=np.empty(ranks, dtype=np.uint64),
        matrix=np.empty((size, size), dtype=np.float32),
        walks=np.empty((size + 1, size), dtype=np.float32),
    )


def aligned(count: int) -> NDArray[np.float32]:
    """`(count, 16)`, each row a cache line of its own: 64 bytes from a multiple of 64."""
    raw = np.empty(16 * count + 16, dtype=np.float32)
    begin = -raw.ctypes.data % 64 // 4
    return raw[begin : begin + 16 * count].reshape(count, 16)


@part
def run(programs: Any, structure: int, block: Block, count: int, ranks: int) -> None:
    """The program of the first `count` of a block, of each of which `ranks` ranks decide.

    What all ranks do alike is multiplied once, in `pending`, until something tells them apart.
    """
    _identities(block.state, count, ranks)
    for q in range(count):
        block.taken[0, q], block.amount[q] = q, 0.0
    rows, caps, state, pending = programs.rows, programs.caps, block.state, block.pending
    row, end = programs.row_bounds[structure], programs.row_bounds[structure + 1]
    guard_end, taken, waiting = row, block.taken[0, :count], False
    while row < end:
        if row == guard_end:
            taken = block.taken[0, :count]
        kind, places = rows[row, _KIND], block.places[block.position[rows[row, _KEY]]]
        if kind == _LOCAL:
            if ranks > 1 and row >= guard_end:
                if not waiting:
                    _identities(pending, count, ONE)
                waiting = True
                _local(programs.matrices, rows[row, _OFFSET], places, pending, taken, ONE)
            else:
                _local(programs.matrices, rows[row, _OFFSET], places, state, taken, ranks * ranks)
        elif kind == _GUARD:
            taken = block.taken[1, : _within(block, count)]
            guard_end = row + rows[row, _COUNT] + 1
            if len(taken) == 0:
                row = guard_end - 1
            else:
                waiting = waiting and _flush(pending, state, count, ranks)
        elif kind in (_RANKED, _JOINT, _CURVE):
            waiting = waiting and _flush(pending, state, count, ranks)
            if kind == _RANKED:
                _ranked(
                    programs.matrices, rows[row, _OFFSET], rows[row, _LENGTH], places, block, taken, ranks
                )
            else:
                _launches(rows[row], caps[row], programs.values, places, block, taken, ranks)
        else:
            _sums(rows[row], caps[row], programs.values, places, block, count)
        row += 1
    if waiting:
        _flush(pending, state, count, ranks)


@part
def _flush(pending: Any, state: Any, count: int, ranks: int) -> bool:
    """The matrix that all ranks share, applied to each; nothing waits then."""
    size = ranks * ranks
    for q in range(count):
        for m in range(q * size, q * size + size):
            multiply(pending, q, state, m, state, m)
    return False


@part
def _identities(state: Any, count: int, ranks: int) -> None:
    for m in range(count * ranks * ranks):
        for x in range(CLOCKS * CLOCKS):
            state[m, x] = np.float32(-np.inf)
    for q in range(count):
        for k in range(ranks):
            for clock in range(CLOCKS):
                state[(q * ranks + k) * ranks + k, (CLOCKS + 1) * clock] = np.float32(0.0)


@part
def _local(matrices: Any, offset: int, places: Any, state: Any, taken: Any, size: int) -> None:
    """One matrix for all `size` parts of a candidate's state."""
    if size == 1:
        for q in taken:
            multiply(matrices, offset + places[q], state, q, state, q)
        return
    for q in taken:
        x = offset + places[q]
        for m in range(q * size, q * size + size):
            multiply(matrices, x, state, m, state, m)


@part
def _ranked(
    matrices: Any, offset: int, length: int, places: Any, block: Block, taken: Any, ranks: int
) -> None:
    state = block.state
    for q in taken:
        x = offset + places[q] * length
        for k in range(ranks):
            for m in range((q * ranks + k) * ranks, (q * ranks + k + 1) * ranks):
                multiply(matrices, x + block.alive[q, k], state, m, state, m)


@part
def _within(block: Block, count: int) -> int:
    """How many have an amount that is not 0; they are noted."""
    inside = 0
    for q in range(count):
        block.taken[1, inside] = q
        inside += block.amount[q] > 0
    return inside


@part
def _launches(row: Any, caps: Any, values: Any, places: Any, block: Block, taken: Any, ranks: int) -> None:
    """A launch on every deciding rank; absent where its duration is negative."""
    target, offset, length = row[_TARGET], row[_OFFSET], row[_LENGTH]
    _weigh(block.weights[0], target, row[_AWAITED], caps[0], caps[1])
    ranked, curve = row[_KIND] == _JOINT and length > 1, row[_KIND] == _CURVE
    paced = curve and row[_COUNT] > 0
    collective = row[_COLLECTIVE] and ranks > 1
    for q in taken:
        start = offset + places[q] * length
        shared = 0.0
        if curve:
            shared = _curve_us(row, values, start, block.amount[q])
        elif not ranked:
            shared = values[start]
        for k in range(ranks):
            us = values[start + block.alive[q, k]] if ranked else shared
            if us < 0:
                continue
            if paced:
                us *= values[start + row[_COUNT] + block.alive[q, k]]
            for m in range((q * ranks + k) * ranks, (q * ranks + k + 1) * ranks):
                launch(block.state, m, block.weights, target, np.float32(0.0 if collective else us))
        if collective:
            _join(target, ranked, values, start, shared, block, q, ranks)


@part
def _curve_us(row: Any, values: Any, start: int, amount: float) -> float:
    """A duration that follows the amount; negative where the launch is absent."""
    if amount > 0:
        return at(values, start, row[_EXPONENT], row[_POINTS], amount)
    return float(min(values[start], 0.0))


@part
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


@part
def _join(
    target: int, ranked: Any, values: Any, start: int, shared: float, block: Block, q: int, ranks: int
) -> None:
    """The ranks of a collective, which have arrived, end together."""
    state, x = block.state, CLOCKS * target
    for other in range(ranks):
        a = b = c = d = np.float32(-np.inf)
        for k in range(ranks):
            us = values[start + block.alive[q, k]] if ranked else shared
            if us >= 0:
                m = (q * ranks + k) * ranks + other
                a, b = max(a, state[m, x]), max(b, state[m, x + 1])
                c, d = max(c, state[m, x + 2]), max(d, state[m, x + 3])
        for k in range(ranks):
            us = np.float32(values[start + block.alive[q, k]] if ranked else shared)
            if us >= 0:
                m = (q * ranks + k) * ranks + other
                state[m, x], state[m, x + 1] = a + us, b + us
                state[m, x + 2], state[m, x + 3] = c + us, d + us


@part
def _sums(row: Any, caps: Any, values: Any, places: Any, block: Block, count: int) -> None:
    """A step of a sum or of a bucket; never behind a guard."""
    kind, offset, amount = row[_KIND], row[_OFFSET], block.amount
    if kind == _ADD:
        for q in range(count):
            amount[q] += values[offset + places[q]]
    elif kind == _FILL:
        _fill(block.buckets[row[_COUNT]], caps[1], values, offset, places, amount, count)
    elif kind == _OPEN:
        _open(block.buckets[row[_COUNT]], caps[0], amount, count)
    else:
        for q in range(count):
            amount[q] = 0.0


@part
def _open(bucket: Any, cap: float, amount: Array, count: int) -> None:
    """Empty buckets."""
    for q in range(count):
        bucket[0, q], bucket[1, q], bucket[2, q] = 0.0, cap, amount[q]
        # Terms are summed in another order than they are taken away, so the rest may miss 0 by rounding.
        bucket[3, q] = amount[q] * 1e-12


@part
def _fill(
    bucket: Any, next_cap: float, values: Any, offset: int, places: Any, amount: Array, count: int
) -> None:
    """`Bucket.value`'s rule, one term further; the amount is the bytes that close here."""
    for q in range(count):
        value = values[offset + places[q]]
        filled, rest, cap = bucket[0, q] + value, bucket[2, q] - value, bucket[1, q]
        closes = (filled >= cap) | (rest <= bucket[3, q])
        amount[q] = filled if closes else 0.0
        bucket[0, q] = 0.0 if closes else filled
        bucket[1, q] = next_cap if closes & (filled > 0) else cap
        bucket[2, q] = rest
