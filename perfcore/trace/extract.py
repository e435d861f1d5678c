"""Host overheads T1 to T5 from a trace: samples per op, and the account of where the host's step went.

Means are never trimmed: overheads are heavy-tailed and their sum is what matters. Each sample knows how many
profiled events lie in it, so that the profiler's own cost can be taken off a mean.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from perfcore.errors import TraceError
from perfcore.trace.kineto import HostOp, Interval, KinetoTrace

Array = NDArray[np.float64]


class Overhead(StrEnum):
    """Kinds of host time."""

    T1 = "t1"
    T2 = "t2"
    T3 = "t3"
    T4 = "t4"
    T5 = "t5"
    ALONE = "alone"
    BLOCKING = "blocking"


@dataclass(frozen=True, slots=True)
class Sample:
    """One stretch of host time of an op, and the profiled events that began in it."""

    op: str
    kind: Overhead
    us: float
    events: int


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """All samples of one kind of one op: `us` and `events` have shape `(n,)`."""

    us: Array
    events: Array

    def mean_us(self, *, profiler_us_per_event: float = 0.0) -> float:
        """Untrimmed mean without the profiler's cost, at least 0."""
        return max(0.0, float(np.mean(self.us - profiler_us_per_event * self.events)))

    def median_us(self, *, profiler_us_per_event: float = 0.0) -> float:
        """Median without the profiler's cost, at least 0."""
        return max(0.0, float(np.median(self.us - profiler_us_per_event * self.events)))


@dataclass(frozen=True, slots=True)
class Account:
    """Host time of one step, microseconds by kind; `step_us` is the measured length of the same step."""

    t1_us: float
    t2_us: float
    t3_us: float
    t4_us: float
    t5_us: float
    alone_us: float
    blocking_us: float
    step_us: float

    @property
    def explained_us(self) -> float:
        """Sum of all kinds."""
        return float(sum(getattr(self, f.name) for f in fields(self) if f.name != "step_us"))


def extract_overheads(trace: KinetoTrace, *, skip_steps: int = 0) -> dict[str, dict[Overhead, Samples]]:
    """Samples by op name and kind over all steps but the first `skip_steps`.

    Raises:
        TraceError: no step is left.
    """
    return gather(s for step in kept_steps(trace, skip_steps=skip_steps) for s in step_samples(trace, step))


def gather(samples: Iterable[Sample]) -> dict[str, dict[Overhead, Samples]]:
    """Samples by op name and kind."""
    lists: dict[str, dict[Overhead, list[Sample]]] = defaultdict(lambda: defaultdict(list))
    for sample in samples:
        lists[sample.op][sample.kind].append(sample)
    return {op: {kind: _samples(found) for kind, found in kinds.items()} for op, kinds in lists.items()}


def account_steps(trace: KinetoTrace, *, skip_steps: int = 0) -> list[Account]:
    """One account a step.

    Raises:
        TraceError: no step is left.
    """
    accounts = []
    for step in kept_steps(trace, skip_steps=skip_steps):
        sums = dict.fromkeys(Overhead, 0.0)
        for sample in step_samples(trace, step):
            sums[sample.kind] += sample.us
        accounts.append(Account(**{f"{k}_us": v for k, v in sums.items()}, step_us=step.duration_us))
    return accounts


def kept_steps(trace: KinetoTrace, *, skip_steps: int) -> tuple[Interval, ...]:
    """The steps after the first `skip_steps`, which hold warm-up.

    Raises:
        TraceError: none is left.
    """
    if skip_steps < 0 or skip_steps >= len(trace.steps):
        raise TraceError(f"`0 <= skip_steps < {len(trace.steps)}` (steps) must hold, but got {skip_steps=}.")
    return trace.steps[skip_steps:]


def step_samples(trace: KinetoTrace, step: Interval) -> Iterator[Sample]:
    """Samples of the ops that start in a step, the host being one clock over all its threads.

    What an op overlaps with the op before it (autograd and main thread, at most tens of microseconds) is
    counted once. The time from the step's start to its first op is that op's T1; the time from its last op to
    its end is the T1 of an op called `(end of step)`.
    """
    clock = step.start_us
    loose = [c for c in trace.loose_calls if step.start_us <= c.start_us < step.end_us]
    for op in trace.ops:
        if not step.start_us <= op.start_us < step.end_us or op.end_us <= clock:
            continue
        waited = sum(_overlap(call, clock, op.start_us) for call in loose)
        yield from _gap(op.name, max(0.0, op.start_us - clock), waited)
        yield from _op_samples(op, max(clock, op.start_us), min(op.end_us, step.end_us))
        clock = min(op.end_us, step.end_us)
    waited = sum(_overlap(call, clock, step.end_us) for call in loose)
    yield from _gap("(end of step)", step.end_us - clock, waited)


def launch_latency_us(trace: KinetoTrace) -> Samples:
    """From a launch call's start to its kernel's start, where the kernel's stream was idle at the call."""
    latencies = [
        first.start_us - launch_us
        for launch_us, free_us, first in _first_kernels(trace)
        if free_us < launch_us
    ]
    return Samples(np.array(latencies), np.ones(len(latencies)))


def kernel_gap_us(trace: KinetoTrace, *, queued_us: float) -> Samples:
    """Between consecutive kernels of a stream, the later one launched `queued_us` before the earlier ended."""
    gaps = [
        first.start_us - free_us
        for launch_us, free_us, first in _first_kernels(trace)
        if np.isfinite(free_us) and launch_us + queued_us < free_us
    ]
    return Samples(np.array(gaps), np.zeros(len(gaps)))


def graph_gap_us(trace: KinetoTrace) -> Samples:
    """Between consecutive kernels of one stream that one call launched: the inside of a CUDA graph."""
    last: dict[int, tuple[int, float]] = {}
    gaps = []
    for kernel in trace.kernels:
        correlation, end_us = last.get(kernel.stream, (-1, 0.0))
        if correlation == kernel.correlation and correlation > 0:
            gaps.append(kernel.start_us - end_us)
        last[kernel.stream] = (kernel.correlation, kernel.end_us)
    return Samples(np.array(gaps), np.zeros(len(gaps)))


def _first_kernels(trace: KinetoTrace) -> Iterator[tuple[float, float, Interval]]:
    """`(launch start, stream free since, kernel)` for the first kernel of every launch in an op."""
    launches = {c.correlation: c.start_us for op in trace.ops for c in op.calls if c.kernels}
    free: dict[int, float] = defaultdict(lambda: -np.inf)
    for kernel in trace.kernels:
        launch_us = launches.pop(kernel.correlation, None)
        if launch_us is not None:
            yield launch_us, free[kernel.stream], kernel
        free[kernel.stream] = max(free[kernel.stream], kernel.end_us)


def _samples(found: list[Sample]) -> Samples:
    return Samples(np.array([s.us for s in found]), np.array([float(s.events) for s in found]))


def _gap(op: str, us: float, waited_us: float) -> Iterator[Sample]:
    yield Sample(op, Overhead.T1, us - waited_us, 1)
    if waited_us:
        yield Sample(op, Overhead.BLOCKING, waited_us, 0)


def _overlap(interval: Interval, start_us: float, end_us: float) -> float:
    return max(0.0, min(interval.end_us, end_us) - max(interval.start_us, start_us))


def _op_samples(op: HostOp, start_us: float, end_us: float) -> Iterator[Sample]:
    """T2 to T5 of one op between the given times; a blocking call's time is blocking, never T4."""
    launches = [c for c in op.calls if c.kernels and c.end_us > start_us]
    waits = [c for c in op.calls if c.blocks and not c.kernels]
    edges = [
        start_us,
        *(t for c in launches for t in (max(c.start_us, start_us), min(c.end_us, end_us))),
        end_us,
    ]
    kinds = [Overhead.T2, *[Overhead.T5] * (len(launches) - 1), Overhead.T3] if launches else [Overhead.ALONE]
    for kind, begin, end in zip(kinds, edges[::2], edges[1::2], strict=True):
        waited = sum(_overlap(call, begin, end) for call in waits)
        events = bisect_left(op.event_starts_us, end) - bisect_left(op.event_starts_us, begin)
        yield Sample(op.name, kind, max(0.0, end - begin) - waited, events)
        if waited:
            yield Sample(op.name, Overhead.BLOCKING, waited, 0)
    for call, begin, end in zip(launches, edges[1::2], edges[2::2], strict=False):
        yield Sample(op.name, Overhead.BLOCKING if call.blocks else Overhead.T4, end - begin, 1)


def merge(tables: Iterable[Mapping[str, Mapping[Overhead, Samples]]]) -> dict[str, dict[Overhead, Samples]]:
    """Samples of many traces in one table."""
    parts: dict[str, dict[Overhead, list[Samples]]] = defaultdict(lambda: defaultdict(list))
    for table in tables:
        for op, kinds in table.items():
            for kind, samples in kinds.items():
                parts[op][kind].append(samples)
    return {
        op: {
            kind: Samples(np.concatenate([p.us for p in found]), np.concatenate([p.events for p in found]))
            for kind, found in kinds.items()
        }
        for op, kinds in parts.items()
    }
