"""One step after the other on the clocks of all ranks, with the clock that decided each."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfcore.compiled import compiled, inner
from perfcore.steps import Opcode

Array = NDArray[np.float64]

_HOST, _COLLECTIVE = int(Opcode.HOST), int(Opcode.COLLECTIVE)


@inner(_nrt=False)
def arrival(step: Any, state: Array, rank: int, clocks: int) -> tuple[float, int]:
    """When a launch could start on a rank, and the clock that decides it (ties: the target first)."""
    base = clocks * rank
    source = base + step.target
    best = state[source] + step.gap_us
    for clock in range(clocks):
        if step.awaited >> clock & 1 and state[base + clock] > best:
            best, source = state[base + clock], base + clock
    if state[base] + step.latency_us > best:
        best, source = state[base] + step.latency_us, base
    return best, source


@inner(_nrt=False)
def awaited_end(step: Any, state: Array, rank: int, clocks: int) -> tuple[float, int]:
    """The value of a wait's target, and the clock that decides it (ties: the target)."""
    base = clocks * rank
    source = base + step.target
    best = state[source]
    for clock in range(clocks):
        if step.awaited >> clock & 1 and state[base + clock] > best:
            best, source = state[base + clock], base + clock
    return best, source


@inner(_nrt=False)
def walk_step(
    step: Any, durations: Array, masks: Any, candidate: int, state: Array, sources: Any, starts: Array
) -> None:
    """One step on `(c * r,)` clocks; `sources`, `starts` `(r,)`: deciding clock (-1: not taken), arrival."""
    clocks = len(state) // len(sources)
    last, first_arrival, transfer = -1, -np.inf, 0.0
    for r in range(len(sources)):
        sources[r] = -1
        if step.mask >= 0 and not masks[step.mask, candidate, r]:
            continue
        at = clocks * r + step.target
        if step.opcode == _HOST:
            sources[r] = at
            state[at] += step.us
        elif step.launch < 0:
            state[at], sources[r] = awaited_end(step, state, r, clocks)
        else:
            starts[r], sources[r] = arrival(step, state, r, clocks)
            us = durations[step.launch, candidate, r]
            state[at] = starts[r] + us
            if step.opcode == _COLLECTIVE:
                transfer = max(transfer, us)
                if starts[r] > first_arrival:
                    first_arrival, last = starts[r], sources[r]
    if last >= 0:
        for r in range(len(sources)):
            if sources[r] >= 0:
                state[clocks * r + step.target], sources[r] = first_arrival + transfer, last


def deciding_clocks(
    table: Any, durations: Array, masks: Any, candidate: int, state: Array
) -> NDArray[np.int64]:
    """`(S, r)`: the clock `clocks * rank + clock` that decided each step, -1 where it is not taken."""
    sources = np.empty((len(table), durations.shape[2]), dtype=np.int64)
    _walk(table, durations, masks, candidate, state.copy(), sources, np.empty(durations.shape[2]))
    return sources


def walk_from(table: Any, durations: Array, masks: Any, candidate: int, state: Array) -> Array:
    """`(c * r,)`: the clocks after one iteration that starts with the given ones."""
    walked, ranks = state.copy(), durations.shape[2]
    _walk(table, durations, masks, candidate, walked, np.empty((1, ranks), dtype=np.int64), np.empty(ranks))
    return walked


@compiled(_nrt=False)
def _walk(
    table: Any, durations: Array, masks: Any, candidate: int, state: Array, sources: Any, starts: Array
) -> None:
    """One iteration; the clocks that decided each step in `(S, r)` sources, of the last alone in `(1, r)`."""
    for i in range(len(table)):
        walk_step(table[i], durations, masks, candidate, state, sources[min(i, len(sources) - 1)], starts)
