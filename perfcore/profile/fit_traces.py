"""Host overheads T1 to T5 of a GPU's host, from eager training loops traced and measured without the profiler.

The profiler's cost of one event is what makes the profiled steps agree with the same steps measured without
it: time added by the profiler over events in a step. It is taken off every mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from perfcore.errors import ProfileError
from perfcore.measure.record import DesignSample
from perfcore.overheads import OverheadTable
from perfcore.profile.overhead_table import Built, assemble
from perfcore.profile.profile import load_profile
from perfcore.profile.published_overheads import Means
from perfcore.trace.extract import (
    Overhead,
    Samples,
    extract_overheads,
    kept_steps,
    kernel_gap_us,
    launch_latency_us,
    merge,
)
from perfcore.trace.kineto import KinetoTrace, read_kineto

SKIP_STEPS = 3
QUEUED_US = 20.0
# Constants that eager traces do not show are those of this bundled profile.
LENDER = "a100-sxm4-80gb"


@dataclass(frozen=True, slots=True, eq=False)
class TracedLoop:
    """A training loop's trace, and its iteration time without the profiler."""

    trace: KinetoTrace
    measured_us: float


def read_traces(loops: Sequence[DesignSample], traces: Path) -> list[TracedLoop]:
    """The loops that have a trace.

    Raises:
        ProfileError: none has.
        TraceError: a trace cannot be read.
    """
    found = [
        TracedLoop(read_kineto(path), s.iteration.median_us)
        for s in loops
        if s.iteration is not None and (path := traces / f"{s.name}.json.gz").exists()
    ]
    if not found:
        raise ProfileError(
            f"{traces}: host overheads need a traced training loop, but there is none.",
            hint="Measure with a larger --budget.",
        )
    return found


def profiler_cost_us(loops: Sequence[TracedLoop]) -> float:
    """The profiler's cost of one event: the median over loops of added time by events in a step, at least 0."""
    costs = []
    for loop in loops:
        kept = kept_steps(loop.trace, skip_steps=SKIP_STEPS)
        table = extract_overheads(loop.trace, skip_steps=SKIP_STEPS)
        events = sum(s.events.sum() for kinds in table.values() for s in kinds.values()) / len(kept)
        step_us = float(np.median([step.duration_us for step in kept]))
        costs.append((step_us - loop.measured_us) / events)
    return max(0.0, float(np.median(costs)))


def fit_traces(loops: Sequence[DesignSample], traces: Path, *, source: str) -> OverheadTable:
    """The table of a GPU's host.

    Raises:
        ProfileError: no loop has a trace.
        TraceError: a trace cannot be read.
    """
    return overheads_of(read_traces(loops, traces), source=source)


def overheads_of(traced: Sequence[TracedLoop], *, source: str) -> OverheadTable:
    """Means over all loops without the profiler's cost; what no loop shows is filled from the mean over ops."""
    if not any(loop.trace.kernels for loop in traced):
        raise ProfileError(
            "The traces hold no kernel of a GPU, but its host's overheads are asked of them.",
            hint="Measure again where the profiler may watch the GPU (CUPTI).",
        )
    cost = profiler_cost_us(traced)
    pooled = merge(extract_overheads(loop.trace, skip_steps=SKIP_STEPS) for loop in traced)
    means: Means = {
        # T4 is a median: a full launch queue blocks the call.
        (op, kind): (samples.median_us if kind is Overhead.T4 else samples.mean_us)(
            profiler_us_per_event=cost
        )
        for op, kinds in pooled.items()
        for kind, samples in kinds.items()
        if kind not in (Overhead.T1, Overhead.BLOCKING)
    }
    t1 = {
        op: kinds[Overhead.T1].mean_us(profiler_us_per_event=cost) if Overhead.T1 in kinds else 0.0
        for op, kinds in pooled.items()
    }
    seen = {op: max(len(s.us) for s in kinds.values()) for op, kinds in pooled.items()}
    lender = load_profile(LENDER).overheads
    lent = lender.provenance["constants"]
    latency = _all(launch_latency_us(loop.trace) for loop in traced)
    gap = _all(kernel_gap_us(loop.trace, queued_us=QUEUED_US) for loop in traced)
    return assemble(
        Built(means, seen),
        t1_us=t1,
        constants={
            "launch_latency_us": (
                latency.median_us(profiler_us_per_event=cost)
                if len(latency.us)
                else lender.launch_latency_us,
                f"median where the stream was idle, {source}"
                if len(latency.us)
                else lent["launch_latency_us"],
            ),
            "kernel_gap_us": (
                gap.median_us() if len(gap.us) else lender.kernel_gap_us,
                f"median between queued kernels, {source}" if len(gap.us) else lent["kernel_gap_us"],
            ),
            "graph_launch_us": (
                lender.graph_launch_us,
                f"taken over from {LENDER}: {lent['graph_launch_us']}",
            ),
            "graph_gap_us": (lender.graph_gap_us, f"taken over from {LENDER}: {lent['graph_gap_us']}"),
        },
        provenance={
            "method": "means over traced training loops, less the profiler's cost of one event",
            "sources": source,
            "factors": {},
            "profiler_us_per_event": round(cost, 3),
            "loops": len(traced),
        },
    )


def _all(parts: Iterable[Samples]) -> Samples:
    listed = list(parts)
    return Samples(np.concatenate([p.us for p in listed]), np.concatenate([p.events for p in listed]))
