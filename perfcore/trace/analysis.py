"""Traces in, what they say out: accounts, replay errors, left-out predictions, of each rank and of all together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perfcore.errors import TraceError
from perfcore.steps import Steps
from perfcore.trace.account import StepAccount, account_of
from perfcore.trace.joint import join, joint_seeds_us, shared_collectives, transfers_us
from perfcore.trace.pool import HostPool
from perfcore.trace.records import KinetoTrace
from perfcore.trace.replay import DeviceTimes, HostTimes, device_times, replay_steps, replayed_us, walked_us
from perfcore.trace.workload import TracedStep, TraceGraphs

Array = NDArray[np.float64]

# Leading steps this much longer or shorter than the median are warm-up.
WARM_UP_RATIO = 1.5
_FEWEST_STEPS = 3
_OTHERS = 3  # graphs of other steps that a wholly left-out step is predicted from


@dataclass(frozen=True, slots=True)
class Errors:
    """Signed errors of predicted against measured steps, %."""

    pct: tuple[float, ...]

    @property
    def mean_abs_pct(self) -> float:
        """Mean of their sizes."""
        return float(np.mean(np.abs(self.pct))) if self.pct else float("nan")

    @property
    def max_abs_pct(self) -> float:
        """The largest size."""
        return float(np.max(np.abs(self.pct))) if self.pct else float("nan")


@dataclass(frozen=True, slots=True, eq=False)
class RankAnalysis:
    """One trace.

    Attributes:
        trace: what was read.
        steps: that were kept.
        dropped: warm-up steps left out.
        accounts: one a step.
        exact: each step's own host times.
        mean: mean host times over all kept steps.
        leave_one_out: mean host times over the other steps; kernels as measured in the step. Empty with one step.
        leave_all_out: nothing of the step: graphs, kernels and host times of other steps. Likewise.
        shared: mean host times over all steps of the other traces. Empty with one trace.
    """

    trace: KinetoTrace
    steps: tuple[TracedStep, ...]
    dropped: int
    accounts: tuple[StepAccount, ...]
    exact: Errors
    mean: Errors
    leave_one_out: Errors
    leave_all_out: Errors
    shared: Errors

    @property
    def measured_us(self) -> float:
        """Mean length of the kept steps."""
        return float(np.mean([s.window.duration_us for s in self.steps]))


@dataclass(frozen=True, slots=True, eq=False)
class JointAnalysis:
    """All ranks of one job; one error a rank and step, the first step of all ranks, then the next.

    Attributes:
        exact: own host times.
        mean: mean host times over all ranks.
        leave_one_out: mean host times over the other ranks.
        waiting_share: share of collective kernel time that is waiting for other ranks.
        steps: that all ranks have.
    """

    exact: Errors
    mean: Errors
    leave_one_out: Errors
    waiting_share: float
    steps: int


@dataclass(frozen=True, slots=True, eq=False)
class Analysis:
    """All traces.

    Attributes:
        ranks: one a trace, in order of rank.
        joint: of traces of one job; `None` where they are of one rank or of different programs.
        not_joint: why not, empty where there is nothing to say.
        device: launch latency and gap over all traces.
        pool: host times of all kept steps.
    """

    ranks: tuple[RankAnalysis, ...]
    joint: JointAnalysis | None
    not_joint: str
    device: DeviceTimes
    pool: HostPool


def analyse(traces: Sequence[KinetoTrace]) -> Analysis:
    """Accounts and replay errors of traces that were recorded on one kind of machine.

    Raises:
        TraceError: there is no trace.
    """
    if not traces:
        raise TraceError("At least one trace is needed, but got none.")
    traces = sorted(traces, key=lambda t: t.rank)
    device = device_times(traces)
    kept = [_kept_steps(t) for t in traces]
    pool = HostPool(s for steps, _ in kept for s in steps)
    joinable = len({t.rank for t in traces}) == len(traces) > 1
    joint, reason = None, ""
    transfers: list[list[dict[int, float]]] = []
    if joinable:
        try:
            transfers, joint = _joint([s for s, _ in kept], traces, device, pool)
        except TraceError as err:
            reason = err.message
    ranks = tuple(
        _rank(
            traces[i],
            *kept[i],
            device,
            [by_rank[i] for by_rank in transfers],
            [s for j, (steps, _) in enumerate(kept) if j != i for s in steps],
        )
        for i in range(len(traces))
    )
    return Analysis(ranks, joint, reason, device, pool)


def _kept_steps(trace: KinetoTrace) -> tuple[tuple[TracedStep, ...], int]:
    lengths = [s.duration_us for s in trace.steps]
    usual, dropped = float(np.median(lengths)), 0
    if len(lengths) >= _FEWEST_STEPS:
        while max(lengths[dropped] / usual, usual / max(lengths[dropped], 1e-9)) > WARM_UP_RATIO:
            dropped += 1
    graphs = TraceGraphs(trace)
    return tuple(graphs.step(s) for s in trace.steps[dropped:]), dropped


def _rank(
    trace: KinetoTrace,
    steps: Sequence[TracedStep],
    dropped: int,
    device: DeviceTimes,
    transfers: Sequence[dict[int, float]],
    elsewhere: Sequence[TracedStep],
) -> RankAnalysis:
    pool, pool_elsewhere = HostPool(steps), HostPool(elsewhere)
    own = [replayed_us(s, replay_steps(s, device)) for s in steps]
    mean = [replayed_us(s, replay_steps(s, device, host_us=pool.host_us(s))) for s in steps]
    shared = [
        replayed_us(s, replay_steps(s, device, host_us=pool_elsewhere.host_us(s))) for s in steps if elsewhere
    ]
    left: list[float] = []
    all_left: list[float] = []
    if len(steps) > 1:
        for number, step in enumerate(steps):
            others = [s for i, s in enumerate(steps) if i != number]
            without = HostPool(others)
            left.append(replayed_us(step, replay_steps(step, device, host_us=without.host_us(step))))
            all_left.append(_from_others(others, without, device))
    accounts = [
        account_of(trace, s, transfers_us=transfers[i] if i < len(transfers) else None)
        for i, s in enumerate(steps)
    ]
    measured = [s.window.duration_us for s in steps]
    return RankAnalysis(
        trace=trace,
        steps=tuple(steps),
        dropped=dropped,
        accounts=tuple(accounts),
        exact=_errors(own, measured),
        mean=_errors(mean, measured),
        leave_one_out=_errors(left, measured),
        leave_all_out=_errors(all_left, measured),
        shared=_errors(shared, measured),
    )


def _from_others(others: Sequence[TracedStep], pool: HostPool, device: DeviceTimes) -> float:
    """Mean over other steps' graphs, started as they were."""
    chosen = others[:: max(1, len(others) // _OTHERS)]
    return float(np.mean([replayed_us(s, replay_steps(s, device, host_us=pool.host_us(s))) for s in chosen]))


def _joint(
    kept: Sequence[Sequence[TracedStep]], traces: Sequence[KinetoTrace], device: DeviceTimes, pool: HostPool
) -> tuple[list[list[dict[int, float]]], JointAnalysis]:
    without = [
        HostPool(s for other, steps in enumerate(kept) if other != rank for s in steps)
        for rank in range(len(kept))
    ]
    count = min(map(len, kept))
    exact: list[float] = []
    mean: list[float] = []
    left: list[float] = []
    transfers: list[list[dict[int, float]]] = []
    waits, busy = 0.0, 0.0
    for number in range(count):
        steps = [rank[number] for rank in kept]
        starts = [s.window.start_us + t.base_us for s, t in zip(steps, traces, strict=True)]
        exact += joint_errors(steps, starts, device, [s.host_us for s in steps])
        mean += joint_errors(steps, starts, device, [pool.host_us(s) for s in steps])
        left += joint_errors(
            steps, starts, device, [p.host_us(s) for p, s in zip(without, steps, strict=True)]
        )
        common, shortest = shared_collectives(steps), transfers_us(steps)
        own = np.array([np.array(s.durations_us)[common[:, r]] for r, s in enumerate(steps)])
        transfers.append(
            [dict(zip(common[:, r].tolist(), shortest.tolist(), strict=True)) for r in range(len(kept))]
        )
        waits, busy = waits + float((own - shortest).sum()), busy + float(own.sum())
    return transfers, JointAnalysis(
        Errors(tuple(exact)), Errors(tuple(mean)), Errors(tuple(left)), waits / busy if busy else 0.0, count
    )


def joint_errors(
    steps: Sequence[TracedStep], starts_us: Sequence[float], device: DeviceTimes, host_us: Sequence[HostTimes]
) -> list[float]:
    """Signed errors, %, of all ranks that start when they did."""
    joined = joint_steps(steps, device, host_us)
    predicted = walked_us(joined, joint_seeds_us(steps, starts_us, clocks=joined.clocks))
    return list(_errors(predicted.tolist(), [s.window.duration_us for s in steps]).pct)


def joint_steps(steps: Sequence[TracedStep], device: DeviceTimes, host_us: Sequence[HostTimes]) -> Steps:
    """All ranks as one program."""
    return join([replay_steps(s, device, host_us=h) for s, h in zip(steps, host_us, strict=True)], steps)


def _errors(predicted: Sequence[float], measured: Sequence[float]) -> Errors:
    return Errors(tuple(100.0 * (p / m - 1.0) for p, m in zip(predicted, measured, strict=False) if m > 0))
