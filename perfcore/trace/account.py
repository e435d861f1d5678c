"""Where a measured step went: host time by kind, waits, and what nothing recorded explains."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

from perfcore.steps import HostKind
from perfcore.trace.link import is_collective
from perfcore.trace.pieces import Piece
from perfcore.trace.pool import kinds
from perfcore.trace.records import KinetoTrace
from perfcore.trace.workload import TracedStep

# A wait may find the device idle for as long as a launch needs to get there, and the host to notice the end.
_UNAVOIDABLE_US = 50.0
_HOST_FIELDS = (
    "t1_us",
    "t2_us",
    "t3_us",
    "t4_us",
    "t5_us",
    "alone_us",
    "blocking_us",
    "queue_us",
    "unexplained_us",
)


@dataclass(frozen=True, slots=True)
class StepAccount:
    """A step's time, µs: the first nine add up to `step_us`, the others describe the device.

    Attributes:
        t1_us: between ops.
        t2_us: from an op's start to its first launch.
        t3_us: from its last launch to its end.
        t4_us: launch calls.
        t5_us: between launches of one op.
        alone_us: ops that launch nothing.
        blocking_us: the host waits for work on the device.
        queue_us: launch calls wait because the launch queue is full.
        unexplained_us: the host waits while the device does nothing that was recorded.
        step_us: the measured step.
        device_busy_us: at least one kernel runs.
        communication_us: at least one collective runs.
        exposed_communication_us: only collectives run.
        waiting_for_ranks_us: collectives run longer than on the rank that came last; 0 where one rank is known.
    """

    t1_us: float
    t2_us: float
    t3_us: float
    t4_us: float
    t5_us: float
    alone_us: float
    blocking_us: float
    queue_us: float
    unexplained_us: float
    step_us: float
    device_busy_us: float
    communication_us: float
    exposed_communication_us: float
    waiting_for_ranks_us: float = 0.0

    @property
    def explained_us(self) -> float:
        """Sum of the host's kinds, the unexplained one included."""
        return float(sum(getattr(self, name) for name in _HOST_FIELDS))


def account_of(
    trace: KinetoTrace, step: TracedStep, *, transfers_us: Mapping[int, float] | None = None
) -> StepAccount:
    """The account of one step; with the transfers of its collectives, by launch, also their waiting for other ranks."""
    sums = dict.fromkeys(HostKind, 0.0)
    waited = queued = 0.0
    for piece, times in zip(step.pieces, step.host_us, strict=True):
        for kind, us in zip(kinds(len(times)), times, strict=True):
            sums[kind] += us
        waited += piece.t1_us + piece.end_us - piece.start_us - sum(times)
    queued = min(step.queue_us, max(0.0, waited))
    begin, end = step.window.start_us, step.window.end_us
    running = [(k.start_us, k.end_us, is_collective(k.name)) for k in trace.kernels if k.end_us > begin]
    busy = _union((max(a, begin), min(b, end)) for a, b, _ in running)
    computing = _union((max(a, begin), min(b, end)) for a, b, c in running if not c)
    collecting = _union((max(a, begin), min(b, end)) for a, b, c in running if c)
    unexplained = sum(_idle_us(piece, busy) for piece in step.pieces)
    transfers = (transfers_us or {}).items()
    return StepAccount(
        t1_us=sums[HostKind.T1],
        t2_us=sums[HostKind.T2],
        t3_us=sums[HostKind.T3],
        t4_us=sums[HostKind.T4],
        t5_us=sums[HostKind.T5],
        alone_us=sums[HostKind.ALONE],
        blocking_us=waited - queued - unexplained,
        queue_us=queued,
        unexplained_us=unexplained,
        step_us=step.window.duration_us,
        device_busy_us=_length(busy),
        communication_us=_length(collecting),
        exposed_communication_us=_length(busy) - _length(computing),
        waiting_for_ranks_us=sum(max(0.0, step.durations_us[i] - us) for i, us in transfers),
    )


def mean_account(accounts: Sequence[StepAccount]) -> StepAccount:
    """Means over steps."""
    names = [f.name for f in fields(StepAccount)]
    return StepAccount(*(sum(getattr(a, name) for a in accounts) / len(accounts) for name in names))


def _waiting(piece: Piece) -> Iterator[tuple[float, float]]:
    """Stretches in which the host waits for the device."""
    if piece.sync is not None:
        yield piece.start_us, piece.end_us
    for call in piece.launches:
        if call.blocks:
            yield call.start_us, min(call.end_us, piece.end_us)


def _idle_us(piece: Piece, busy: Sequence[tuple[float, float]]) -> float:
    """Time of a piece's waits in which the device does nothing, beyond what is unavoidable."""
    total = 0.0
    for begin, end in _waiting(piece):
        worked = sum(max(0.0, min(b, end) - max(a, begin)) for a, b in busy)
        total += max(0.0, end - begin - worked - _UNAVOIDABLE_US)
    return total


def _union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    out: list[tuple[float, float]] = []
    for begin, end in sorted(i for i in intervals if i[1] > i[0]):
        if out and begin <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((begin, end))
    return out


def _length(intervals: Iterable[tuple[float, float]]) -> float:
    return sum(end - begin for begin, end in intervals)


def union_us(starts_us: Sequence[float], ends_us: Sequence[float]) -> float:
    """Time that at least one of the intervals covers."""
    return _length(_union(zip(starts_us, ends_us, strict=True)))
