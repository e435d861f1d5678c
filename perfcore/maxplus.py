"""Max-plus algebra of steps: folding into matrices, composition, eigenvalues and steady states.

A matrix entry `(i, j)` is the longest path from clock j at the start to clock i at the end, -inf where
there is none; `a ⊗ b` is "first b, then a". The eigenvalue is the largest mean weight of a cycle
(Karp, *A characterization of the minimum cycle mean in a digraph*, 1978), which is the growth per
iteration of the largest clock, whether or not the matrix is irreducible or aperiodic.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfcore.compiled import compiled, inner
from perfcore.steps import CLOCKS, Opcode, Steps

Array = NDArray[np.float64]

_HOST, _LAUNCH, _WAIT = int(Opcode.HOST), int(Opcode.LAUNCH), int(Opcode.WAIT)
_BLOCK, _COLLECTIVE = int(Opcode.BLOCK), int(Opcode.COLLECTIVE)
NEVER = -np.inf

_IN_PLACE: dict[str, Any] = {"error_model": "numpy", "_nrt": False}  # nothing is allocated, nor divided by 0


def fold(steps: Steps) -> Array:
    """`(n, c * r, c * r)`: each candidate's iteration as one matrix over (rank, clock)."""
    size = steps.clocks * steps.num_ranks
    out = np.empty((steps.num_candidates, size, size))
    _fold_all(steps.table, steps.durations_us, steps.masks, out)
    return out


def fold_ranks(steps: Steps) -> Array:
    """`(n, r, 4, 4)`: each rank's own matrix; for steps without collectives."""
    out = np.empty((steps.num_candidates, steps.num_ranks, CLOCKS, CLOCKS))
    alone = np.empty((steps.num_candidates, CLOCKS, CLOCKS))
    for rank in range(steps.num_ranks):
        durations = np.ascontiguousarray(steps.durations_us[:, :, rank : rank + 1])
        masks = np.ascontiguousarray(steps.masks[:, :, rank : rank + 1])
        _fold_all(steps.table, durations, masks, alone)
        out[:, rank] = alone
    return out


def compose(later: NDArray[Any], earlier: NDArray[Any]) -> NDArray[Any]:
    """`later ⊗ earlier`; both `(..., k, k)`."""
    lead, size = np.broadcast_shapes(later.shape[:-2], earlier.shape[:-2]), later.shape[-1]
    full = (*lead, size, size)
    flat = [np.ascontiguousarray(np.broadcast_to(m, full)).reshape(-1, size, size) for m in (later, earlier)]
    for matrices in flat:
        matrices.flags.writeable = False  # a type of its own for compiled code, of which there shall be one
    out = np.empty(flat[0].shape, flat[0].dtype)
    _compose(flat[0], flat[1], out)
    return out.reshape(full)


@compiled(**_IN_PLACE)
def _compose(later: Any, earlier: Any, out: Any) -> None:
    for e in range(len(out)):
        for i in range(out.shape[1]):
            for j in range(out.shape[2]):
                best = later[e, i, 0] + earlier[e, 0, j]
                for k in range(1, out.shape[1]):
                    best = max(best, later[e, i, k] + earlier[e, k, j])
                out[e, i, j] = best


def eigenvalue(matrix: Array) -> Array:
    """`(...)`: the largest cycle mean of each `(..., k, k)` matrix; -inf where there is no cycle."""
    flat = np.ascontiguousarray(matrix, dtype=np.float64).reshape(-1, *matrix.shape[-2:])
    out, size = np.empty(len(flat)), flat.shape[1]
    _eigenvalues(flat, np.empty((size + 1, size)), out)
    return out.reshape(matrix.shape[:-2])


@compiled(**_IN_PLACE)
def _eigenvalues(matrices: Array, walks: Array, out: Array) -> None:
    for i in range(len(matrices)):
        out[i] = cycle_mean(matrices[i], len(walks) - 1, walks)


@inner(**_IN_PLACE)
def cycle_mean(matrix: NDArray[Any], size: int, walks: NDArray[Any]) -> float:
    """Karp's formula with a walk allowed to start anywhere, of the first `size` clocks; `walks` is `(size + 1, size)` scratch at least."""
    for i in range(size):
        walks[0, i] = 0.0
    for length in range(size):
        for i in range(size):
            best = matrix[i, 0] + walks[length, 0]
            for j in range(1, size):
                candidate = matrix[i, j] + walks[length, j]
                best = candidate if candidate > best else best
            walks[length + 1, i] = best
    mean = NEVER
    for i in range(size):
        last = walks[size, i]
        if last == NEVER:
            continue
        smallest = np.inf
        for length in range(size):
            if walks[length, i] > NEVER:
                smallest = min(smallest, (last - walks[length, i]) / (size - length))
        mean = max(mean, smallest)
    return mean


@inner(**_IN_PLACE)
def apply_step(step: Any, durations: Array, masks: Any, candidate: int, state: Array) -> None:
    """One step on clocks by rank, `(clocks * r, columns)`."""
    ranks, columns = durations.shape[2], state.shape[1]
    clocks = state.shape[0] // ranks
    opcode, target, awaited = step.opcode, step.target, step.awaited
    if opcode == _COLLECTIVE:
        _apply_collective(step, durations, masks, candidate, state)
        return
    for r in range(ranks):
        if step.mask >= 0 and not masks[step.mask, candidate, r]:
            continue
        row, host = clocks * r + target, clocks * r
        if opcode == _HOST:
            for j in range(columns):
                state[row, j] += step.us
        elif opcode == _LAUNCH:
            us = durations[step.launch, candidate, r]
            for j in range(columns):
                state[row, j] = max(state[row, j] + step.gap_us, state[host, j] + step.latency_us)
            _await(awaited, host, clocks, row, state)
            for j in range(columns):
                state[row, j] += us
        else:
            _await(awaited, host, clocks, row, state)


@inner(**_IN_PLACE)
def _await(awaited: int, host: int, clocks: int, row: int, state: Array) -> None:
    for clock in range(clocks):
        if awaited >> clock & 1:
            for j in range(state.shape[1]):
                state[row, j] = max(state[row, j], state[host + clock, j])


@inner(**_IN_PLACE)
def _apply_collective(step: Any, durations: Array, masks: Any, candidate: int, state: Array) -> None:
    ranks, columns = durations.shape[2], state.shape[1]
    clocks = state.shape[0] // ranks
    transfer = 0.0
    for r in range(ranks):
        if step.mask >= 0 and not masks[step.mask, candidate, r]:
            continue
        row, host = clocks * r + step.target, clocks * r
        for j in range(columns):
            state[row, j] = max(state[row, j] + step.gap_us, state[host, j] + step.latency_us)
        _await(step.awaited, host, clocks, row, state)
        transfer = max(transfer, durations[step.launch, candidate, r])
    for j in range(columns):
        arrival = NEVER
        for r in range(ranks):
            if step.mask < 0 or masks[step.mask, candidate, r]:
                arrival = max(arrival, state[clocks * r + step.target, j])
        for r in range(ranks):
            if step.mask < 0 or masks[step.mask, candidate, r]:
                state[clocks * r + step.target, j] = arrival + transfer


@compiled(**_IN_PLACE)
def _fold_all(table: Any, durations: Array, masks: Any, out: Array) -> None:
    size = out.shape[1]
    for candidate in range(len(out)):
        for i in range(size):
            for j in range(size):
                out[candidate, i, j] = 0.0 if i == j else NEVER
        for i in range(len(table)):
            apply_step(table[i], durations, masks, candidate, out[candidate])


def steady_state(matrix: Array, state: Array) -> tuple[float, int]:
    """Clocks at the start of a steady iteration.

    Clocks that the critical cycle reaches get the eigenvector of it, so they advance by the eigenvalue
    exactly. The others (a host that runs ahead) advance at a rate of their own and can only be early:
    they are put one iteration before the moment at which they would delay anything.

    Args:
        matrix: `(k, k)`, with a finite diagonal.
        state: `(k,)`, filled in.

    Returns:
        The eigenvalue, and a clock on the critical cycle.
    """
    size = len(matrix)
    nodes, settled = np.empty(size, dtype=np.int64), np.zeros(size, dtype=np.int64)
    part, walks, vectors = np.empty((size, size)), np.empty((size + 1, size)), np.empty((2, size))
    eigenvalue, root = _steady_state(matrix, state, nodes, settled, part, walks, vectors)
    return float(eigenvalue), int(root)


@compiled(**_IN_PLACE)
def _steady_state(
    matrix: Array, state: Array, nodes: Any, settled: Any, part: Array, walks: Array, vectors: Array
) -> tuple[float, int]:
    """As `steady_state`; rates of settled clocks, and longest paths from the root, in `vectors`; the rest is scratch."""
    rate, vector = vectors[0], vectors[1]
    eigenvalue, first = 0.0, -1
    while True:
        left = _unsettled(settled, nodes)
        if left == 0:
            return eigenvalue, first
        for i in range(left):
            for j in range(left):
                part[i, j] = matrix[nodes[i], nodes[j]]
        mean = cycle_mean(part, left, walks)
        root = _eigenvector(part, left, mean, vector)
        late = early = 0.0
        if first < 0:
            eigenvalue, first = mean, nodes[root]
        else:
            late, early = _lateness(matrix, state, rate, settled, nodes, left, vector), eigenvalue
        for i in range(left):
            if vector[i] > NEVER:
                state[nodes[i]], rate[nodes[i]], settled[nodes[i]] = vector[i] - late - early, mean, 1


@inner(**_IN_PLACE)
def _unsettled(settled: Any, nodes: Any) -> int:
    """How many clocks are not settled; they are noted."""
    count = 0
    for i in range(len(settled)):
        if not settled[i]:
            nodes[count] = i
            count += 1
    return count


@inner(**_IN_PLACE)
def _lateness(
    matrix: Array, state: Array, rate: Array, settled: Any, nodes: Any, left: int, values: Array
) -> float:
    """By how much `values` of the nodes left would delay the clocks that are settled already."""
    late = NEVER
    for i in range(len(matrix)):
        if settled[i]:
            for j in range(left):
                if values[j] > NEVER:
                    late = max(late, matrix[i, nodes[j]] + values[j] - rate[i] - state[i])
    return late if late > NEVER else 0.0


@inner(**_IN_PLACE)
def _eigenvector(paths: Array, size: int, mean: float, vector: Array) -> int:
    """Longest paths of `paths - mean` from a node of the critical cycle, into `vector`; returns that node."""
    for i in range(size):
        for j in range(size):
            paths[i, j] -= mean
    for k in range(size):
        paths[k, k] = min(paths[k, k], 0.0)  # rounding; a cycle of positive weight would double with every k
        for i in range(size):
            for j in range(size):
                paths[i, j] = max(paths[i, j], paths[i, k] + paths[k, j])
    root = 0
    for i in range(size):
        root = i if paths[i, i] > paths[root, root] else root
    for i in range(size):
        vector[i] = paths[i, root]
    vector[root] = 0.0
    return root
