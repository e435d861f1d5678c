"""Replaying a traced step: the schedule of its graph with its own, with mean, or with left-out host times."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

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
    durations = [
        np.array(us + delay)
        for us, delay in zip(durations_us or step.durations_us, step.delays_us, strict=True)
    ]
    steps = compile_steps(step.graph, durations, _form_table(device))
    rows = steps.table.copy()
    rows["us"][rows["kind"] >= 0] = [us for times in host_us or step.host_us for us in times]
    return replace(steps, table=rows)


def walked_us(steps: Steps, seeds_us: Array) -> Array:
    """`(r,)`: host time from the given clocks, `(r * c,)`, at the start to the end of one iteration."""
    state = walk_from(steps.table, steps.durations_us, steps.masks, 0, seeds_us)
    return np.asarray(state[:: steps.clocks] - seeds_us[:: steps.clocks])


def replayed_us(step: TracedStep, steps: Steps) -> float:
    """Length of a step of one rank that starts as the measured one did: same backlog, same launch queue."""
    state = step.seeds_us.copy()
    ring = np.full(step.queue_depth, -np.inf)
    backlog = step.backlog_us[-step.queue_depth :]
    ring[len(ring) - len(backlog) :] = backlog
    _queued_walk(steps.table, steps.durations_us, steps.masks, state, ring)
    return float(state[0])


@numba.njit(cache=True)
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
