"""Replaying a traced step: the schedule of its graph with its own, with mean, or with left-out host times."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfcore.compiled import compiled
from perfcore.overheads import OpOverheads, OverheadTable
from perfcore.steps import Steps, compile_steps
from perfcore.trace.extract import kernel_gap_us, launch_latency_us
from perfcore.trace.records import KinetoTrace
from perfcore.trace.workload import TracedStep
from perfcore.walk import walk_from, walk_step

Array = NDArray[np.float64]
HostTimes = Sequence[Sequence[float]]

QUEUED_US = 20.0


@dataclass(frozen=True, slots=True)
class DeviceTimes:
    """What the device adds to a launch, µs.

    Attributes:
        latency_us: from a launch call's start to its kernel's earliest start.
        gap_us: between queued kernels of a stream.
    """

    latency_us: float
    gap_us: float


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """One step of one rank, as it is scheduled.

    Attributes:
        step: of a trace.
        host_us: host times of each op in the order in which its steps spend them.
        durations_us: of its kernels.
        device: launch latency and gap.
        trace: that the step is of.
    """

    step: TracedStep
    host_us: HostTimes
    durations_us: Sequence[float]
    device: DeviceTimes
    trace: KinetoTrace

    def steps(self) -> Steps:
        """Ready for the schedule."""
        return replay_steps(self.step, self.device, host_us=self.host_us, durations_us=self.durations_us)


def device_times(traces: Iterable[KinetoTrace]) -> DeviceTimes:
    """Medians over all traces: of launches to an idle stream, and of kernels that were queued long before."""
    latencies, gaps = [], []
    for trace in traces:
        latencies.append(launch_latency_us(trace).us)
        gaps.append(kernel_gap_us(trace, queued_us=QUEUED_US).us)
    return DeviceTimes(_median(latencies), _median(gaps))


def replay_steps(
    step: TracedStep,
    device: DeviceTimes,
    *,
    host_us: HostTimes | None = None,
    durations_us: Sequence[float] | None = None,
) -> Steps:
    """The step's graph, ready for the schedule.

    Args:
        step: of a trace.
        device: launch latency and gap.
        host_us: host times of each op in the order in which its steps spend them; the step's own by default.
        durations_us: of its kernels; the measured ones by default. Delays by later launches come on top.
    """
    steps = _compiled(step, device)
    durations = np.array(durations_us or step.durations_us) + np.array(step.delays_us)
    rows = steps.table.copy()
    rows["us"][rows["kind"] >= 0] = [us for times in host_us or step.host_us for us in times]
    return replace(steps, table=rows, durations_us=durations[:, None, None])


@lru_cache(maxsize=64)
def _compiled(step: TracedStep, device: DeviceTimes) -> Steps:
    """The graph's steps, whose host times and durations are still to be filled in."""
    durations = [np.zeros(())] * len(step.launched)
    return compile_steps(step.graph, durations, _form_table(device))


def walked_us(steps: Steps, seeds_us: Array) -> Array:
    """`(r,)`: host time from the given clocks, `(r * c,)`, at the start to the end of one iteration."""
    state = walk_from(steps.table, steps.durations_us, steps.masks, 0, seeds_us)
    return np.asarray(state[:: steps.clocks] - seeds_us[:: steps.clocks])


@dataclass(frozen=True, slots=True, eq=False)
class Walked:
    """One iteration from given clocks, µs.

    Attributes:
        start_us: `(l, r)`, NaN where a rank has no such launch; a collective starts when its rank arrives.
        end_us: `(l, r)`.
        host_us: `(S, r)`: the host's clock after each step.
    """

    start_us: Array
    end_us: Array
    host_us: Array


def walk(steps: Steps, seeds_us: Array) -> Walked:
    """Every start and end of one iteration that starts with the given clocks, `(r * c,)`."""
    launches, ranks = len(steps.launch_ops), steps.num_ranks
    start, end = np.full((launches, ranks), np.nan), np.full((launches, ranks), np.nan)
    host = np.empty((len(steps.table), ranks))
    _walk(steps.table, steps.durations_us, steps.masks, seeds_us.copy(), start, end, host)
    return Walked(start, end, host)


@compiled()
def _walk(
    table: Any, durations: Array, masks: Any, state: Array, start: Array, end: Array, host: Array
) -> None:
    ranks = durations.shape[2]
    clocks = len(state) // ranks
    sources, starts = np.empty(ranks, dtype=np.int64), np.empty(ranks)
    for i in range(len(table)):
        step = table[i]
        walk_step(step, durations, masks, 0, state, sources, starts)
        for r in range(ranks):
            host[i, r] = state[clocks * r]
            if sources[r] >= 0 and step.launch >= 0:
                start[step.launch, r], end[step.launch, r] = starts[r], state[clocks * r + step.target]


def replayed_us(step: TracedStep, steps: Steps) -> float:
    """Length of a step of one rank that starts as the measured one did: same backlog, same launch queue."""
    state = step.seeds_us.copy()
    ring = np.full(step.queue_depth, -np.inf)
    backlog = step.backlog_us[-step.queue_depth :]
    ring[len(ring) - len(backlog) :] = backlog
    _queued_walk(steps.table, steps.durations_us, steps.masks, state, ring)
    return float(state[0])


@compiled()
def _queued_walk(table: Any, durations: Array, masks: Any, state: Array, ring: Array) -> None:
    sources, starts = np.empty(1, dtype=np.int64), np.empty(1)
    made = 0
    for i in range(len(table)):
        step = table[i]
        if step.launch >= 0:
            state[0] = max(state[0], ring[made % len(ring)])
        walk_step(step, durations, masks, 0, state, sources, starts)
        if step.launch >= 0:
            ring[made % len(ring)] = state[step.target]
            made += 1


def _form_table(device: DeviceTimes) -> OverheadTable:
    """Overheads that only hold the places of host times."""
    nothing = OpOverheads(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    return OverheadTable({}, nothing, device.latency_us, device.gap_us, 0.0, 0.0, 1)


def _median(samples: Sequence[Array]) -> float:
    joined = np.concatenate(samples) if samples else np.empty(0)
    return max(0.0, float(np.median(joined))) if len(joined) else 0.0
