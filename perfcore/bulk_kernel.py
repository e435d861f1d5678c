"""The inner loop of bulk prediction: runs each candidate's program of gathered segments."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from perfcore.curves import at
from perfcore.instructions import COLUMNS, Instruction
from perfcore.maxplus import cycle_mean
from perfcore.steps import CLOCKS

Array = NDArray[np.float64]

# No NaN arises: -inf is only ever added to what is finite or -inf. So maxima compile to single instructions.
FAST = {"nnan", "nsz"}


_KIND, _KEY, _OFFSET, _LENGTH, _TARGET, _AWAITED, _COLLECTIVE, _COUNT, _EXPONENT, _POINTS = range(
    len(COLUMNS)
)
_LOCAL, _RANKED, _JOINT = int(Instruction.LOCAL), int(Instruction.RANKED), int(Instruction.JOINT)
_CLEAR, _ADD, _OPEN = int(Instruction.CLEAR), int(Instruction.ADD), int(Instruction.OPEN)
_FILL, _GUARD, _CURVE = int(Instruction.FILL), int(Instruction.GUARD), int(Instruction.CURVE)


@numba.njit(cache=True, fastmath=FAST)
def evaluate(
    programs: Any, order: Any, structures: Any, codes: Any, ranks: int, time_us: Array, hbm_bytes: Array
) -> None:
    """Iteration time and memory of every candidate: `structures` `(n,)`, `codes` `(n, a)`.

    `order` says which comes first: those of one structure together keep its program and tables in cache.
    """
    index = np.zeros(len(programs.key_term_bounds) - 1, dtype=np.int64)
    alive, dominators = np.zeros(ranks, dtype=np.int64), np.zeros(ranks, dtype=np.uint64)
    size = CLOCKS * ranks
    cells, path = np.empty(size * size, dtype=np.float32), np.empty((size + 1) * size, dtype=np.float32)
    pending, by_rank = np.empty((CLOCKS, CLOCKS), dtype=np.float32), np.empty(ranks)
    buckets, us = np.empty((programs.slots, 4)), np.empty(ranks)
    square = cells[: CLOCKS * CLOCKS].reshape(CLOCKS, CLOCKS)
    short = path[: (CLOCKS + 1) * CLOCKS].reshape(CLOCKS + 1, CLOCKS)
    for i in order:
        s = structures[i]
        for u in range(programs.key_bounds[s], programs.key_bounds[s + 1]):
            key = programs.keys[u]
            place = 0
            for v in range(programs.key_term_bounds[key], programs.key_term_bounds[key + 1]):
                place += codes[i, programs.key_terms[v, 0]] * programs.key_terms[v, 1]
            index[key] = place
        hbm_bytes[i] = _memory(programs, s, index, by_rank)
        count = _survivors(programs, s, index, dominators, alive)
        if count == 1:
            _run_single(programs, s, index, alive[0], square, buckets)
            time_us[i] = _cycle_mean_square(square, short)
            continue
        used = CLOCKS * count
        state = cells[: used * used].reshape(used, used)
        walks = path[: (used + 1) * used].reshape(used + 1, used)
        _run_joint(programs, s, index, alive[:count], state, pending, buckets, us)
        time_us[i] = cycle_mean(state, walks)


@numba.njit(cache=True, fastmath=FAST)
def _cycle_mean_square(matrix: Any, walks: Any) -> float:
    """`cycle_mean` of a `(4, 4)` matrix with a finite diagonal, so every walk is finite."""
    for i in range(CLOCKS):
        walks[0, i] = np.float32(0.0)
    for length in range(CLOCKS):
        a, b, c, d = walks[length, 0], walks[length, 1], walks[length, 2], walks[length, 3]
        for i in range(CLOCKS):
            walks[length + 1, i] = max(
                max(matrix[i, 0] + a, matrix[i, 1] + b), max(matrix[i, 2] + c, matrix[i, 3] + d)
            )
    mean = -np.inf
    for i in range(CLOCKS):
        last = np.float64(walks[CLOCKS, i])
        half, third = (last - walks[2, i]) * 0.5, (last - walks[1, i]) * (1.0 / 3.0)
        mean = max(mean, min(min(last * 0.25, third), min(half, last - walks[3, i])))
    return mean


@numba.njit(cache=True, fastmath=FAST)
def _memory(programs: Any, structure: int, index: Any, by_rank: Array) -> float:
    by_rank[:] = 0.0
    shared = 0.0
    ranks = len(by_rank)
    for z in range(programs.memory_bounds[structure], programs.memory_bounds[structure + 1]):
        place, offset = index[programs.memory_rows[z, 0]], programs.memory_rows[z, 1]
        if programs.memory_rows[z, 2]:
            for r in range(ranks):
                by_rank[r] += programs.values[offset + place * ranks + r]
        else:
            shared += programs.values[offset + place]
    return float(by_rank.max() + shared)


@numba.njit(cache=True, fastmath=FAST)
def _survivors(programs: Any, structure: int, index: Any, dominators: Any, alive: Any) -> int:
    """Ranks that no other dominates in every table, in order; of equal ranks the first."""
    begin, end = programs.rank_bounds[structure], programs.rank_bounds[structure + 1]
    ranks = len(alive)
    if begin == end:
        alive[0] = 0
        return 1
    dominators[:] = ~np.uint64(0)
    for y in range(begin, end):
        start = programs.rank_rows[y, 1] + index[programs.rank_rows[y, 0]] * ranks
        for r in range(ranks):
            dominators[r] &= programs.dominators[start + r]
    count = 0
    for r in range(ranks):
        dropped = False
        for other in range(ranks):
            if (dominators[r] >> np.uint64(other)) & np.uint64(1):
                equal = (dominators[other] >> np.uint64(r)) & np.uint64(1)
                dropped = dropped or not equal or other < r
        if not dropped:
            alive[count] = r
            count += 1
    return count


@numba.njit(cache=True, fastmath=FAST)
def _run_single(programs: Any, structure: int, index: Any, rank: int, state: Any, buckets: Any) -> None:
    """The program of a candidate of which one rank decides: `state` `(4, 4)`."""
    _identity(state)
    amount = 0.0
    rows, values, caps = programs.rows, programs.values, programs.caps
    row, end = programs.row_bounds[structure], programs.row_bounds[structure + 1]
    while row < end:
        kind, place = rows[row, _KIND], index[rows[row, _KEY]]
        offset, length = rows[row, _OFFSET], rows[row, _LENGTH]
        if kind == _LOCAL:
            _multiply_square(programs.matrices[offset + place], state)
        elif kind == _RANKED:
            _multiply_square(programs.matrices[offset + place * length + rank], state)
        elif kind == _JOINT:
            us = values[offset + place * length + (rank if length > 1 else 0)]
            _launch_square(rows[row], caps[row, 0], caps[row, 1], us, state)
        elif kind == _CURVE:
            us = _curve(rows[row], values, offset + place * length, amount)
            _launch_square(rows[row], caps[row, 0], caps[row, 1], us, state)
        elif kind == _GUARD:
            if not amount > 0:
                row += rows[row, _COUNT]
        else:
            amount = _sum_step(rows[row], values[offset + place], caps[row], amount, buckets)
        row += 1


@numba.njit(cache=True, fastmath=FAST)
def _run_joint(
    programs: Any, structure: int, index: Any, alive: Any, state: Any, pending: Any, buckets: Any, us: Any
) -> None:
    """The program of a candidate of which several ranks decide: `state` `(4p, 4p)`.

    What all ranks do alike is multiplied once, in `pending`, until something tells them apart.
    """
    _identity(state)
    waiting, amount = False, 0.0
    rows, values, caps = programs.rows, programs.values, programs.caps
    row, end = programs.row_bounds[structure], programs.row_bounds[structure + 1]
    while row < end:
        kind, place = rows[row, _KIND], index[rows[row, _KEY]]
        offset, length = rows[row, _OFFSET], rows[row, _LENGTH]
        if kind == _LOCAL:
            if not waiting:
                _identity(pending)
                waiting = True
            _multiply_square(programs.matrices[offset + place], pending)
        elif kind == _GUARD:
            if not amount > 0:
                row += rows[row, _COUNT]
        elif kind in (_RANKED, _JOINT, _CURVE):
            if waiting:
                _flush(pending, state)
                waiting = False
            start = offset + place * length
            if kind == _RANKED:
                for k in range(len(alive)):
                    _multiply(programs.matrices[start + alive[k]], state, CLOCKS * k)
            else:
                for k in range(len(alive)):
                    if kind == _JOINT:
                        us[k] = values[start + (alive[k] if length > 1 else 0)]
                    else:
                        us[k] = us[0] if k else _curve(rows[row], values, start, amount)
                _launch(rows[row], caps[row, 0], caps[row, 1], us[: len(alive)], state)
        else:
            amount = _sum_step(rows[row], values[offset + place], caps[row], amount, buckets)
        row += 1
    if waiting:
        _flush(pending, state)


@numba.njit(cache=True, fastmath=FAST)
def _identity(state: Any) -> None:
    state[:] = np.float32(-np.inf)
    for j in range(len(state)):
        state[j, j] = np.float32(0.0)


@numba.njit(cache=True, fastmath=FAST)
def _curve(row: Any, values: Any, start: int, amount: float) -> float:
    """Duration of a launch that follows the amount; negative where it is absent."""
    if amount > 0:
        return at(values, start, row[_EXPONENT], row[_POINTS], amount)
    return float(min(values[start], 0.0))


@numba.njit(cache=True, fastmath=FAST)
def _sum_step(row: Any, value: float, caps: Any, amount: float, buckets: Any) -> float:
    """The amount after a step of a sum or of a bucket."""
    kind = row[_KIND]
    if kind == _ADD:
        return amount + value
    if kind == _FILL:
        return _fill(buckets[row[_COUNT]], caps[1], value)
    if kind == _OPEN:
        _open(buckets[row[_COUNT]], caps[0], amount)
        return amount
    return 0.0


@numba.njit(cache=True, fastmath=FAST)
def _open(bucket: Array, cap: float, total: float) -> None:
    """An empty bucket: filled, cap, what is still to come, and what counts as nothing to come."""
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


@numba.njit(cache=True, fastmath=FAST)
def _launch_square(row: Any, gap_us: float, latency_us: float, us: float, state: Any) -> None:
    """A launch on the one rank; absent where `us` is negative."""
    if us < 0:
        return
    gap, latency, duration = np.float32(gap_us), np.float32(latency_us), np.float32(us)
    target, awaited = row[_TARGET], row[_AWAITED]
    for j in range(CLOCKS):
        state[target, j] = max(state[target, j] + gap, state[0, j] + latency)
    for clock in range(1, CLOCKS):
        if awaited >> clock & 1:
            for j in range(CLOCKS):
                state[target, j] = max(state[target, j], state[clock, j])
    for j in range(CLOCKS):
        state[target, j] += duration


@numba.njit(cache=True, fastmath=FAST)
def _launch(row: Any, gap_us: float, latency_us: float, us: Any, state: Any) -> None:
    """A launch on every surviving rank; a collective's ranks end together."""
    gap, latency = np.float32(gap_us), np.float32(latency_us)
    target, awaited, collective = row[_TARGET], row[_AWAITED], row[_COLLECTIVE]
    for k in range(len(us)):
        base, at_rank = CLOCKS * k, CLOCKS * k + target
        if us[k] < 0:
            continue
        for j in range(len(state)):
            state[at_rank, j] = max(state[at_rank, j] + gap, state[base, j] + latency)
        for clock in range(1, CLOCKS):
            if awaited >> clock & 1:
                for j in range(len(state)):
                    state[at_rank, j] = max(state[at_rank, j], state[base + clock, j])
        if not collective:
            for j in range(len(state)):
                state[at_rank, j] += np.float32(us[k])
    if collective:
        _join(target, us, state)


@numba.njit(cache=True, fastmath=FAST)
def _join(clock: int, us: Any, state: Any) -> None:
    for j in range(len(state)):
        latest = np.float32(-np.inf)
        for k in range(len(us)):
            if us[k] >= 0:
                latest = max(latest, state[CLOCKS * k + clock, j])
        for k in range(len(us)):
            if us[k] >= 0:
                state[CLOCKS * k + clock, j] = latest + np.float32(us[k])


@numba.njit(cache=True, fastmath=FAST)
def _multiply_square(matrix: Any, state: Any) -> None:
    """`state` becomes `matrix ⊗ state`, both `(4, 4)`; fixed bounds let the compiler unroll."""
    for j in range(CLOCKS):
        a, b, c, d = state[0, j], state[1, j], state[2, j], state[3, j]
        for k in range(CLOCKS):
            state[k, j] = max(
                max(matrix[4 * k] + a, matrix[4 * k + 1] + b),
                max(matrix[4 * k + 2] + c, matrix[4 * k + 3] + d),
            )


@numba.njit(cache=True, fastmath=FAST)
def _flush(pending: Any, state: Any) -> None:
    """The matrix that all ranks share, applied to each."""
    flat = pending.reshape(CLOCKS * CLOCKS)
    for base in range(0, len(state), CLOCKS):
        _multiply(flat, state, base)


@numba.njit(cache=True, fastmath=FAST)
def _multiply(matrix: Any, state: Any, base: int) -> None:
    """Four rows of `state` from `base` on become `matrix ⊗` them."""
    m0, m1, m2, m3 = matrix[0], matrix[1], matrix[2], matrix[3]
    m4, m5, m6, m7 = matrix[4], matrix[5], matrix[6], matrix[7]
    m8, m9, m10, m11 = matrix[8], matrix[9], matrix[10], matrix[11]
    m12, m13, m14, m15 = matrix[12], matrix[13], matrix[14], matrix[15]
    for j in range(state.shape[1]):
        a, b, c, d = state[base, j], state[base + 1, j], state[base + 2, j], state[base + 3, j]
        state[base, j] = max(max(m0 + a, m1 + b), max(m2 + c, m3 + d))
        state[base + 1, j] = max(max(m4 + a, m5 + b), max(m6 + c, m7 + d))
        state[base + 2, j] = max(max(m8 + a, m9 + b), max(m10 + c, m11 + d))
        state[base + 3, j] = max(max(m12 + a, m13 + b), max(m14 + c, m15 + d))
