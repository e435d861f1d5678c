"""Which kernel waits for which: from `cuda_sync` records, else inferred from the order of calls and from times.

A wait can be wrong in one way that a trace shows: the kernel started before the awaited one ended. Such waits are
never taken.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from perfcore.trace.pieces import Piece
from perfcore.trace.records import EventRecord, Kernel, KinetoTrace, RuntimeCall, SyncRecord

# Times of host and device agree to about a microsecond; whole microseconds add one.
TOLERANCE_US = 2.0
# A kernel this much later than its launch and its stream allow waited for something.
LATE_US = 5.0
# What is left of a kernel when others find room beside its last blocks: at most.
LAST_BLOCKS_US = 50.0
LAST_BLOCKS_SHARE = 0.25
_LOOK_BACK = 16


@dataclass(frozen=True, slots=True)
class Launched:
    """A launch of a step in program order.

    Attributes:
        call: its runtime call.
        kernel: what it launched on one stream; for a CUDA graph, from its first kernel's start to its last one's end.
        piece: index of the piece that it is made in.
        name: of the op.
    """

    call: RuntimeCall
    kernel: Kernel
    piece: int
    name: str

    @property
    def collective(self) -> bool:
        """It communicates with other ranks."""
        return is_collective(self.kernel.name)


def is_collective(name: str) -> bool:
    """The kernel is a collective of NCCL or RCCL."""
    return "nccl" in name[:40].lower()


@dataclass(frozen=True, slots=True)
class Wait:
    """Launch `later` starts after launch `earlier` has ended; `how` says what it was read from."""

    earlier: int
    later: int
    how: str


def stream_waits(
    trace: KinetoTrace, pieces: Sequence[Piece], launched: Sequence[Launched], *, latency_us: float
) -> tuple[list[Wait], dict[int, float]]:
    """Waits between streams within a step, one per kernel and awaited stream: the latest.

    Args:
        trace: the whole trace.
        pieces: of the step.
        launched: in the step.
        latency_us: from a launch call's start to its kernel's earliest start, as a rule.

    Returns:
        The waits, and by launch how long it was kept out by what was launched after it, µs.
    """
    records = {s.correlation: s for s in trace.syncs if s.stream >= 0}
    calls = {c.correlation: c for c in trace.event_calls}
    found: list[Wait] = []
    by_stream = _by_stream(launched)
    sources = _sources(records, trace.event_records, calls)
    if any(source.stream >= 0 for source in sources.values()):
        found += _recorded(records, sources, pieces, launched, by_stream)
    else:
        found += _from_calls(pieces, launched)
    timed, delays = _from_times(launched, latency_us=latency_us)
    found += timed
    latest: dict[tuple[int, int], Wait] = {}
    for wait in found:
        key = (wait.later, launched[wait.earlier].kernel.stream)
        if key not in latest or latest[key].earlier < wait.earlier:
            latest[key] = wait
    return sorted(latest.values(), key=lambda w: (w.later, w.earlier)), delays


def awaited_streams(
    sync: RuntimeCall,
    record: SyncRecord | None,
    launched: Sequence[Launched],
    ended: Sequence[tuple[float, int]],
) -> tuple[int, ...]:
    """Streams whose end a synchronising call waits for.

    Args:
        sync: the call.
        record: its `cuda_sync` row, where there is one.
        launched: launches made until then.
        ended: `(end, stream)` of kernels that ended while it lasted, in order.
    """
    last = {x.kernel.stream: x.kernel.end_us for x in launched}
    late = {stream for stream, end in last.items() if end > sync.end_us + TOLERANCE_US}
    known = [s for s in dict.fromkeys([*last, *(s for _, s in ended)]) if s not in late]
    if "DeviceSynchronize" in sync.name:
        return tuple(sorted(known))
    recorded = (record.awaited_stream if record.awaited_stream >= 0 else record.stream) if record else -1
    if recorded in known:
        return (recorded,)
    candidates = [stream for _, stream in reversed(ended)]
    if launched:
        candidates.append(launched[-1].kernel.stream)
    return next(((s,) for s in candidates if s in known), ())


def _by_stream(launched: Sequence[Launched]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = defaultdict(list)
    for index, launch in enumerate(launched):
        found[launch.kernel.stream].append(index)
    return found


def _possible(launched: Sequence[Launched], earlier: int, later: int) -> bool:
    return launched[earlier].kernel.end_us <= launched[later].kernel.start_us + TOLERANCE_US


@dataclass(frozen=True, slots=True)
class _Source:
    """Where an awaited event was recorded: stream (-1: unknown), and when the call was made (`None`: unknown)."""

    stream: int
    at_us: float | None


def _sources(
    records: Mapping[int, SyncRecord], recorded: Sequence[EventRecord], calls: Mapping[int, RuntimeCall]
) -> dict[int, _Source]:
    """By the waiting call's correlation.

    The event is found by the recording call's correlation, else by its id: the last time it was recorded before the wait.
    """
    by_correlation = {r.correlation: r for r in recorded}
    by_id: dict[int, list[tuple[float, int]]] = defaultdict(list)
    for r in recorded:
        if r.event_id >= 0 and r.correlation in calls:
            by_id[r.event_id].append((calls[r.correlation].start_us, r.correlation))
    out = {}
    for correlation, sync in records.items():
        source, waiting = sync.record_correlation, calls.get(correlation)
        if source < 0 and waiting is not None:
            times = by_id.get(sync.event_id, [])
            before = bisect_left(times, (waiting.start_us, correlation))
            source = times[before - 1][1] if before else -1
        call, record = calls.get(source), by_correlation.get(source)
        stream = record.stream if record and sync.awaited_stream < 0 else sync.awaited_stream
        out[correlation] = _Source(stream, call.start_us if call else None)
    return out


def _recorded(
    records: Mapping[int, SyncRecord],
    sources: Mapping[int, _Source],
    pieces: Sequence[Piece],
    launched: Sequence[Launched],
    by_stream: Mapping[int, Sequence[int]],
) -> Iterator[Wait]:
    """From `cuda_sync` rows: who waits, for whom, and when the event was recorded (else: just now)."""
    starts = [x.call.start_us for x in launched]
    for call in (c for piece in pieces for c in piece.waits):
        record, source = records.get(call.correlation), sources.get(call.correlation)
        if record is None or source is None or source.stream in (-1, record.stream):
            continue
        made = bisect_left(starts, call.start_us if source.at_us is None else source.at_us)
        earlier = [i for i in by_stream.get(source.stream, ()) if i < made]
        later = [i for i in by_stream.get(record.stream, ()) if starts[i] >= call.start_us]
        if earlier and later and _possible(launched, earlier[-1], later[0]):
            yield Wait(earlier[-1], later[0], "recorded")


def _from_calls(pieces: Sequence[Piece], launched: Sequence[Launched]) -> Iterator[Wait]:
    """A collective waits for the stream that it is called from; who waits outside of one waits for one."""
    communicating = [i for i, x in enumerate(launched) if x.collective]
    starts = [x.call.start_us for x in launched]
    for number, piece in enumerate(pieces):
        for call in piece.waits:
            after = bisect_left(starts, call.start_us)
            if after == len(launched):
                continue
            own = [x for x in launched[max(0, after - _LOOK_BACK) : after] if x.piece == number]
            if any(x.collective for x in own):
                continue
            if launched[after].collective:
                earlier = next((i for i in range(after - 1, -1, -1) if not launched[i].collective), None)
                if earlier is not None and _possible(launched, earlier, after):
                    yield Wait(earlier, after, "inferred from calls")
                continue
            made = communicating[: bisect_left(communicating, after)][-_LOOK_BACK:]
            ended = next((i for i in reversed(made) if _possible(launched, i, after)), None)
            if ended is not None:
                yield Wait(ended, after, "inferred from calls")


def _from_times(launched: Sequence[Launched], *, latency_us: float) -> tuple[list[Wait], dict[int, float]]:
    """A kernel that started late, just when one of another stream ended, waited for it.

    It waited for an event, or for room: a kernel that fills the device keeps others out until its last blocks run,
    shortly before its end. What was launched later in the program cannot be awaited in program order; it delays the
    kernel all the same.
    """
    waits: list[Wait] = []
    delays: dict[int, float] = {}
    free: dict[int, float] = defaultdict(lambda: float("-inf"))
    ended = sorted((x.kernel.end_us, i) for i, x in enumerate(launched))
    ends = [end for end, _ in ended]
    for later, launch in enumerate(launched):
        kernel = launch.kernel
        could = max(free[kernel.stream], launch.call.end_us, launch.call.start_us + latency_us)
        free[kernel.stream] = max(free[kernel.stream], kernel.end_us)
        if kernel.start_us - could <= LATE_US:
            continue
        first, last = (bisect_left(ends, kernel.start_us + x) for x in (-LATE_US, LAST_BLOCKS_US))
        around = [i for _, i in ended[first:last] if _keeps_out(launched[i].kernel, kernel)]
        if not around:
            continue
        earlier = min(around, key=lambda i: abs(launched[i].kernel.end_us - kernel.start_us))
        if earlier < later:
            waits.append(Wait(earlier, later, "inferred from times"))
        elif launched[earlier].kernel.start_us <= could + LATE_US:
            delays[later] = kernel.start_us - could
    return waits, delays


def _keeps_out(running: Kernel, kernel: Kernel) -> bool:
    """It ran on another stream until about the kernel's start, but for its last blocks."""
    rest = running.end_us - kernel.start_us
    return running.stream != kernel.stream and rest < LAST_BLOCKS_SHARE * max(running.duration_us, LATE_US)
