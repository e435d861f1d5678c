"""The critical-path traversal: steps → the steady iteration.

The iteration is folded into one max-plus matrix, whose eigenvalue is the exact spacing of iterations and
whose eigenvector is the state in which they repeat; one walk from that state gives every start and end. The matrix
grows with the square of the ranks, and its longest paths with the cube: of many ranks `perfcore.steady` finds the same
state by walks alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfcore.compiled import compiled, inner
from perfcore.errors import DesignError
from perfcore.maxplus import fold, steady_state
from perfcore.steady import steady_states
from perfcore.steps import HostKind, Opcode, Steps, compile_steps
from perfcore.timeline import Timeline
from perfcore.walk import walk_step

__all__ = ["compile_steps", "schedule", "spacing_with_queue"]

Array = NDArray[np.float64]

_HOST = int(Opcode.HOST)
HOST_KINDS = len(HostKind) - 1  # without `NONE`
MAX_ITERATIONS = 1000
MOST_FOLDED = 64  # ranks


def schedule(steps: Steps) -> Timeline:
    """The steady iteration of every candidate.

    A collective starts on a rank when that rank arrives and ends for all ranks together. The host may run
    any number of launches ahead; `spacing_with_queue` bounds that.
    """
    steady = _folded if steps.num_ranks <= MOST_FOLDED else steady_states
    iteration_time_us, roots, states = steady(steps)
    n = len(states)
    start_us = np.full((n, len(steps.launch_ops), steps.num_ranks), np.nan)
    end_us, host_us = np.full_like(start_us, np.nan), np.zeros((n, steps.num_ranks, HOST_KINDS))
    sources, starts = np.empty(steps.num_ranks, dtype=np.int64), np.empty(steps.num_ranks)
    out = start_us, end_us, host_us
    _walks(steps.table, steps.durations_us, steps.masks, states.copy(), sources, starts, out)
    return Timeline(
        steps=steps,
        iteration_time_us=iteration_time_us,
        host_us=host_us,
        start_us=start_us,
        end_us=end_us,
        start_state_us=states,
        critical_clock=roots,
    )


def spacing_with_queue(steps: Steps, *, queue_depth: int) -> Array:
    """`(n,)` µs: the spacing when a launch waits until at most `queue_depth` launches are unfinished.

    Iterations are walked until the spacing repeats. It exceeds `schedule`'s only where a full queue keeps
    the host from work that the device needs later in time.

    Raises:
        DesignError: the queue holds no launch.
    """
    if queue_depth < 1:
        raise DesignError(f"`queue_depth >= 1` must hold, but got {queue_depth=}.")
    out = np.empty(steps.num_candidates)
    for candidate in range(len(out)):
        out[candidate] = _queued_spacing(
            steps.table, steps.durations_us, steps.masks, candidate, steps.clocks, queue_depth
        )
    return out


def _folded(steps: Steps) -> tuple[Array, NDArray[np.int64], Array]:
    """As `perfcore.steady.steady_states`, from the matrices of the iterations."""
    matrices = fold(steps)
    n, size = len(matrices), matrices.shape[1]
    iteration_time_us, roots, states = np.empty(n), np.empty(n, dtype=np.int64), np.empty((n, size))
    for i in range(n):
        iteration_time_us[i], roots[i] = steady_state(matrices[i], states[i])
    return iteration_time_us, roots, states


@compiled(_nrt=False)
def _walks(
    table: Any,
    durations: Array,
    masks: Any,
    states: Array,
    sources: Any,
    starts: Array,
    out: tuple[Array, Array, Array],
) -> None:
    """Starts, ends and the host's work of an iteration from each state, into `out`; the states are walked on."""
    (start, end, host), ranks = out, durations.shape[2]
    clocks = states.shape[1] // ranks
    for candidate in range(len(states)):
        state = states[candidate]
        for i in range(len(table)):
            step = table[i]
            walk_step(step, durations, masks, candidate, state, sources, starts)
            for r in range(ranks):
                if sources[r] >= 0 and step.opcode == _HOST:
                    host[candidate, r, step.kind] += step.us
                elif sources[r] >= 0 and step.launch >= 0:
                    start[candidate, step.launch, r] = starts[r]
                    end[candidate, step.launch, r] = state[clocks * r + step.target]


@compiled()
def _queued_spacing(
    table: Any, durations: Array, masks: Any, candidate: int, clocks: int, depth: int
) -> float:
    ranks = durations.shape[2]
    state = np.zeros(clocks * ranks)
    sources, starts = np.empty(ranks, dtype=np.int64), np.empty(ranks)
    # The launch made `depth` before this one must have ended: a ring of the last ends by rank.
    ring, made = np.zeros((ranks, depth)), np.zeros(ranks, dtype=np.int64)
    largest = np.zeros(MAX_ITERATIONS + 1)
    for iteration in range(1, MAX_ITERATIONS + 1):
        for i in range(len(table)):
            step = table[i]
            if step.launch >= 0:
                for r in range(ranks):
                    if step.mask < 0 or masks[step.mask, candidate, r]:
                        state[clocks * r] = max(state[clocks * r], ring[r, made[r] % depth])
            walk_step(step, durations, masks, candidate, state, sources, starts)
            if step.launch >= 0:
                for r in range(ranks):
                    if sources[r] >= 0:
                        ring[r, made[r] % depth] = state[clocks * r + step.target]
                        made[r] += 1
        largest[iteration] = state.max()
        period = _repeats(largest, iteration)
        if period and made.min() >= depth:
            return float((largest[iteration] - largest[iteration - period]) / period)
    half = MAX_ITERATIONS // 2
    return float(largest[MAX_ITERATIONS] - largest[half]) / (MAX_ITERATIONS - half)


@inner()
def _repeats(largest: Array, iteration: int) -> int:
    """The smallest period, up to 8, with which the spacing has repeated 16 times; 0 where none has."""
    for period in range(1, 9):
        if iteration < 16 + period + 1:
            return 0
        same = True
        for i in range(iteration - 15, iteration + 1):
            now, then = largest[i] - largest[i - 1], largest[i - period] - largest[i - period - 1]
            same = same and abs(now - then) <= 1e-9 * largest[iteration]
        if same:
            return period
    return 0
