"""The inner loop of bulk prediction: places, memory, deciding ranks and iteration time, block by block."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfcore.bulk_program import BLOCK, FAST, ONE, ZERO, Block, part, run
from perfcore.bulk_vector import multiply
from perfcore.compiled import compiled
from perfcore.maxplus import cycle_mean
from perfcore.steps import CLOCKS

Array = NDArray[np.float64]

AGREEMENT = 2e-7  # of two bounds of an eigenvalue in float32


def grouped(structures: Any, count: int) -> Any:
    """`(n,)` candidates by structure, in order within each, and `(s + 1,)` where each structure begins."""
    order, bounds = np.empty(len(structures), dtype=np.int64), np.zeros(count + 2, dtype=np.int64)
    _group(np.ascontiguousarray(structures, dtype=np.int64), order, bounds)
    return order, bounds[:-1]


@compiled(_nrt=False)
def _group(structures: Any, order: Any, bounds: Any) -> None:
    """As `grouped`; `bounds` has a place more, and is 0."""
    for s in structures:
        bounds[s + 2] += 1
    for s in range(2, len(bounds)):
        bounds[s] += bounds[s - 1]
    # What stands before a structure's end is how many of it are in place.
    for i in range(len(structures)):
        s = structures[i] + 1
        order[bounds[s]] = i
        bounds[s] += 1


@compiled(fastmath=FAST, error_model="numpy", _nrt=False)
def evaluate(
    programs: Any,
    order: Any,
    bounds: Any,
    codes: Any,
    sizes: Any,
    deciding: Any,
    block: Block,
    out: tuple[Array, Array, Array],
) -> bool:
    """Iteration time and memory of every candidate.

    Args:
        programs: of all structures.
        order: candidates by structure, as `grouped` gives them.
        bounds: likewise.
        codes: `(n, a)`.
        sizes: `(a,)` of the grid's axes.
        deciding: `(n,)` by place in `order`: of the ranks that decide, bit r for rank r; filled in.
        block: working memory.
        out: `(n,)` each, filled in: time in µs, bytes of the fullest rank, bytes that it has left.

    Returns:
        Whether all codes are on the grid; the first that is not ends the work.
    """
    time_us = out[0]
    for s in range(len(bounds) - 1):
        alike = programs.rank_bounds[s] == programs.rank_bounds[s + 1]
        for begin in range(bounds[s], bounds[s + 1], BLOCK):
            end = min(begin + BLOCK, bounds[s + 1])
            for j in range(end - begin):
                block.members[j] = order[begin + j]
            if not _read(codes, end - begin, sizes, block):
                return False
            _place(programs, s, end - begin, block)
            _fullest(programs, s, end - begin, block, out[1], out[2])
            if alike:
                for j in range(end - begin):
                    block.alive[j, 0] = 0
                _iterate(programs, s, end - begin, block, ONE, time_us)
            else:
                _decide(programs, s, block, deciding[begin:end])
        if not alike:
            members = order[bounds[s] : bounds[s + 1]]
            _by_ranks(programs, s, members, deciding[bounds[s] : bounds[s + 1]], codes, sizes, block, time_us)
    return True


@part
def _by_ranks(
    programs: Any,
    structure: int,
    members: Any,
    deciding: Any,
    codes: Any,
    sizes: Any,
    block: Block,
    time_us: Array,
) -> None:
    """Iteration times of one structure's candidates; those of which equally many ranks decide run together."""
    for ranks in range(1, block.alive.shape[1] + 1):
        room, count = min(len(block.state) // (ranks * ranks), BLOCK), 0
        for i in range(len(members)):
            if _ones(deciding[i]) == ranks:
                block.members[count] = members[i]
                _spread(deciding[i], block.alive[count])
                count += 1
            if count and (count == room or i == len(members) - 1):
                _read(codes, count, sizes, block)
                _place(programs, structure, count, block)
                _iterate(programs, structure, count, block, ranks, time_us)
                count = 0


@part
def _ones(bits: Any) -> int:
    count = 0
    while bits:
        bits &= bits - np.uint64(1)
        count += 1
    return count


@part
def _spread(bits: Any, ranks: Any) -> None:
    """The ranks whose bits are set, in order."""
    count = 0
    for r in range(len(ranks)):
        if (bits >> np.uint64(r)) & np.uint64(1):
            ranks[count] = r
            count += 1


@part
def _read(codes: Any, count: int, sizes: Any, block: Block) -> bool:
    """The members' codes, one axis a row; whether all are on the grid."""
    sound = True
    for j in range(count):
        i = block.members[j]
        for axis in range(len(sizes)):
            code = codes[i, axis]
            block.columns[axis, j] = code
            sound &= (code >= 0) & (code < sizes[axis])
    return sound


@part
def _place(programs: Any, structure: int, count: int, block: Block) -> None:
    """Where the block's candidates lie in the tables of the structure's keys."""
    begin, end = programs.key_bounds[structure], programs.key_bounds[structure + 1]
    for u in range(begin, end):
        key, places = programs.keys[u], block.places[u - begin]
        block.position[key] = u - begin
        for j in range(count):
            places[j] = 0
        for v in range(programs.key_term_bounds[key], programs.key_term_bounds[key + 1]):
            column, stride = block.columns[programs.key_terms[v, 0]], np.int32(programs.key_terms[v, 1])
            for j in range(count):
                places[j] += column[j] * stride


@part
def _fullest(
    programs: Any, structure: int, count: int, block: Block, hbm_bytes: Array, left_bytes: Array
) -> None:
    """Bytes of the rank that has the least memory left, and what it has left."""
    held, there, values = block.held, block.there, programs.values
    ranks = held.shape[1]
    for j in range(count):
        for r in range(ranks):
            held[j, r] = there[j, r] = 0.0
    for z in range(programs.memory_bounds[structure], programs.memory_bounds[structure + 1]):
        row = programs.memory_rows[z]
        places, offset, ranked = block.places[block.position[row[0]]], row[1], row[2]
        sums = there if row[3] else held
        for j in range(count):
            start = offset + places[j] * (ranks if ranked else 1)
            for r in range(ranks):
                sums[j, r] += values[start + (r if ranked else 0)]
    for j in range(count):
        fullest = 0
        for r in range(1, ranks):
            if there[j, r] - held[j, r] < there[j, fullest] - held[j, fullest]:
                fullest = r
        hbm_bytes[block.members[j]] = held[j, fullest]
        left_bytes[block.members[j]] = there[j, fullest] - held[j, fullest]


@part
def _decide(programs: Any, structure: int, block: Block, deciding: Any) -> None:
    """Ranks that no other dominates in every table; of equal ranks the first."""
    dominators, ranks = block.dominators, len(block.dominators)
    for j in range(len(deciding)):
        for r in range(ranks):
            dominators[r] = ~np.uint64(0)
        for y in range(programs.rank_bounds[structure], programs.rank_bounds[structure + 1]):
            place = block.places[block.position[programs.rank_rows[y, 0]], j]
            start = programs.rank_rows[y, 1] + place * ranks
            for r in range(ranks):
                dominators[r] &= programs.dominators[start + r]
        alive = np.uint64(0)
        for r in range(ranks):
            if not _dominated(dominators, r):
                alive |= np.uint64(1) << np.uint64(r)
        deciding[j] = alive


@part
def _dominated(dominators: Any, rank: int) -> bool:
    bit = np.uint64(1) << np.uint64(rank)
    others = dominators[rank] & ~bit
    if others & (bit - np.uint64(1)):
        return True
    for other in range(rank + 1, len(dominators)):
        if (others >> np.uint64(other)) & np.uint64(1) and not dominators[other] & bit:
            return True
    return False


@part
def _iterate(programs: Any, structure: int, count: int, block: Block, ranks: int, time_us: Array) -> None:
    """Iteration times of a block."""
    run(programs, structure, block, count, ranks)
    for q in range(count):
        us = _mean_of_one(block, q) if ranks == 1 else _mean_of_many(block, q, ranks)
        time_us[block.members[q]] = us


@part
def _mean_of_one(block: Block, q: int) -> float:
    """The largest cycle mean of one rank's matrix: of its powers' diagonals."""
    state, spare, x = block.state, block.spare, ZERO
    multiply(state, q, state, q, spare, x)
    multiply(state, q, spare, x, spare, x + 1)
    multiply(spare, x, spare, x, spare, x + 2)
    one, two = _largest_loop(state, q), _largest_loop(spare, x) * 0.5
    three, four = _largest_loop(spare, x + 1) * (1.0 / 3.0), _largest_loop(spare, x + 2) * 0.25
    return max(max(one, two), max(three, four))


@part
def _largest_loop(matrices: Any, x: int) -> float:
    return float(max(max(matrices[x, 0], matrices[x, 5]), max(matrices[x, 10], matrices[x, 15])))


@part
def _mean_of_many(block: Block, q: int, ranks: int) -> float:
    """The largest cycle mean over several ranks.

    No cycle's mean exceeds the largest growth of any clocks in an iteration, and none is below that of a
    loop. The two mostly meet after a few iterations; Karp's formula settles the rest.
    """
    state, now, after = block.state, block.clocks[0], block.clocks[1]
    loop = np.float32(-np.inf)
    for k in range(ranks):
        loop = max(loop, np.float32(_largest_loop(state, (q * ranks + k) * ranks + k)))
    for i in range(CLOCKS * ranks):
        now[i] = np.float32(0.0)
    for length in range(CLOCKS * ranks):
        growth = _advance(state, q, ranks, now, after)
        if growth <= loop * (1.0 + AGREEMENT * (1 + length)):
            return float(loop)
        now, after = after, now
    return _karp(block, q, ranks)


@part
def _advance(state: Any, q: int, ranks: int, now: Any, after: Any) -> float:
    """All clocks one iteration on; the most that one of them grows."""
    growth = np.float32(-np.inf)
    for k in range(ranks):
        for i in range(CLOCKS):
            best = np.float32(-np.inf)
            for other in range(ranks):
                m, x, y = (q * ranks + k) * ranks + other, CLOCKS * i, CLOCKS * other
                a, b = state[m, x] + now[y], state[m, x + 1] + now[y + 1]
                c, d = state[m, x + 2] + now[y + 2], state[m, x + 3] + now[y + 3]
                best = max(best, max(max(a, b), max(c, d)))
            after[CLOCKS * k + i] = best
            growth = max(growth, best - now[CLOCKS * k + i])
    return float(growth)


@part
def _karp(block: Block, q: int, ranks: int) -> float:
    size = CLOCKS * ranks
    for i in range(size):
        for j in range(size):
            x = (q * ranks + i // CLOCKS) * ranks + j // CLOCKS
            block.matrix[i, j] = block.state[x, CLOCKS * (i % CLOCKS) + j % CLOCKS]
    return cycle_mean(block.matrix, size, block.walks)
