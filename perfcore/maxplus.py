"""Max-plus algebra of steps: folding into matrices, composition, eigenvalues and steady states.

A matrix entry `(i, j)` is the longest path from clock j at the start to clock i at the end, -inf where
there is none; `a ⊗ b` is "first b, then a". The eigenvalue is the largest mean weight of a cycle
(Karp, *A characterization of the minimum cycle mean in a digraph*, 1978), which is the growth per
iteration of the largest clock, whether or not the matrix is irreducible or aperiodic.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from perfcore.steps import CLOCKS, Opcode, Steps

Array = NDArray[np.float64]

_HOST, _LAUNCH, _WAIT = int(Opcode.HOST), int(Opcode.LAUNCH), int(Opcode.WAIT)
_BLOCK, _COLLECTIVE = int(Opcode.BLOCK), int(Opcode.COLLECTIVE)
NEVER = -np.inf


def fold(steps: Steps) -> Array:
    """`(n, c * r, c * r)`: each candidate's iteration as one matrix over (rank, clock)."""
    size = steps.clocks * steps.num_ranks
    out = np.empty((steps.num_candidates, size, size))
    _fold_all(steps.table, steps.durations_us, steps.masks, out)
    return out


def fold_ranks(steps: Steps) -> Array:
    """`(n, r, 4, 4)`: each rank's own matrix; for steps without collectives."""
    out = np.empty((steps.num_candidates, steps.num_ranks, CLOCKS, CLOCKS))
    _fold_ranks(steps.table, steps.durations_us, steps.masks, out)
    return out


def compose(later: NDArray[Any], earlier: NDArray[Any]) -> NDArray[Any]:
    """`later ⊗ earlier`; both `(..., k, k)`."""
    lead, size = np.broadcast_shapes(later.shape[:-2], earlier.shape[:-2]), later.shape[-1]
    full = (*lead, size, size)
    flat = [np.broadcast_to(m, full).reshape(-1, size, size) for m in (later, earlier)]
    out = np.empty_like(flat[0])
    _compose(flat[0], flat[1], out)
    return out.reshape(full)


@numba.njit(cache=True)
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
    out = np.empty(len(flat))
    _eigenvalues(flat, out)
    return out.reshape(matrix.shape[:-2])


@numba.njit(cache=True)
def _eigenvalues(matrices: Array, out: Array) -> None:
    scratch = np.empty((matrices.shape[1] + 1, matrices.shape[1]), dtype=matrices.dtype)
    for i in range(len(matrices)):
        out[i] = cycle_mean(matrices[i], scratch)


@numba.njit(cache=True)
def cycle_mean(matrix: NDArray[Any], walks: NDArray[Any]) -> float:
    """Karp's formula with a walk allowed to start anywhere; `walks` is `(k + 1, k)` scratch."""
    size = matrix.shape[0]
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


@numba.njit(cache=True)
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


@numba.njit(cache=True)
def _await(awaited: int, host: int, clocks: int, row: int, state: Array) -> None:
    for clock in range(clocks):
        if awaited >> clock & 1:
            for j in range(state.shape[1]):
                state[row, j] = max(state[row, j], state[host + clock, j])


@numba.njit(cache=True)
def _apply_collective(step: Any, durations: Array, masks: Any, candidate: int, state: Array) -> None:
    ranks, columns = durations.shape[2], state.shape[1]
    clocks = state.shape[0] // ranks
    arrival = np.full(columns, NEVER)
    transfer = 0.0
    for r in range(ranks):
        if step.mask >= 0 and not masks[step.mask, candidate, r]:
            continue
        row, host = clocks * r + step.target, clocks * r
        for j in range(columns):
            state[row, j] = max(state[row, j] + step.gap_us, state[host, j] + step.latency_us)
        _await(step.awaited, host, clocks, row, state)
        for j in range(columns):
            arrival[j] = max(arrival[j], state[row, j])
        transfer = max(transfer, durations[step.launch, candidate, r])
    for r in range(ranks):
        if step.mask < 0 or masks[step.mask, candidate, r]:
            for j in range(columns):
                state[clocks * r + step.target, j] = arrival[j] + transfer


@numba.njit(cache=True)
def _identity(state: Array) -> None:
    state[:] = NEVER
    for i in range(state.shape[0]):
        state[i, i] = 0.0


@numba.njit(cache=True)
def _fold_all(table: Any, durations: Array, masks: Any, out: Array) -> None:
    for candidate in range(len(out)):
        _identity(out[candidate])
        for i in range(len(table)):
            apply_step(table[i], durations, masks, candidate, out[candidate])


@numba.njit(cache=True)
def _fold_ranks(table: Any, durations: Array, masks: Any, out: Array) -> None:
    for r in range(out.shape[1]):
        own_durations, own_masks = durations[:, :, r : r + 1], masks[:, :, r : r + 1]
        for candidate in range(len(out)):
            _identity(out[candidate, r])
            for i in range(len(table)):
                apply_step(table[i], own_durations, own_masks, candidate, out[candidate, r])


@numba.njit(cache=True)
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
    left, rate = np.ones(size, dtype=np.bool_), np.zeros(size)
    eigenvalue, first = 0.0, -1
    while left.any():
        nodes = np.flatnonzero(left)
        part = np.empty((len(nodes), len(nodes)))
        for i in range(len(nodes)):
            for j in range(len(nodes)):
                part[i, j] = matrix[nodes[i], nodes[j]]
        mean = cycle_mean(part, np.empty((len(nodes) + 1, len(nodes))))
        vector, root = _eigenvector(part, mean)
        new = nodes[vector > NEVER]
        values = vector[vector > NEVER]
        if first < 0:
            eigenvalue, first = mean, nodes[root]
        else:
            values = values - _lateness(matrix, state, rate, left, new, values) - eigenvalue
        state[new], rate[new], left[new] = values, mean, False
    return eigenvalue, first


@numba.njit(cache=True)
def _lateness(matrix: Array, state: Array, rate: Array, left: Any, new: Any, values: Array) -> float:
    """By how much `values` would delay the clocks that are settled already."""
    late = NEVER
    for i in range(len(matrix)):
        if not left[i]:
            for j in range(len(new)):
                late = max(late, matrix[i, new[j]] + values[j] - rate[i] - state[i])
    return late if late > NEVER else 0.0


@numba.njit(cache=True)
def _eigenvector(matrix: Array, mean: float) -> tuple[Array, int]:
    """Longest paths of `matrix - mean` from a node of the critical cycle, and that node."""
    size = len(matrix)
    paths = matrix - mean
    for k in range(size):
        paths[k, k] = min(paths[k, k], 0.0)  # rounding; a cycle of positive weight would double with every k
        for i in range(size):
            for j in range(size):
                paths[i, j] = max(paths[i, j], paths[i, k] + paths[k, j])
    root = 0
    for i in range(size):
        root = i if paths[i, i] > paths[root, root] else root
    vector = paths[:, root].copy()
    vector[root] = 0.0
    return vector, root
