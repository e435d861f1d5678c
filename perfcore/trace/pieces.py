"""One step of a trace as pieces of host time: ops between waits, and the waits themselves.

The host is one clock over all its threads: what an op overlaps with the one before it (autograd and main
thread) is counted once. An op that calls a synchronisation is cut there, so that each wait is a piece of its own.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from perfcore.trace.records import HostOp, Interval, Kernel, KinetoTrace, RuntimeCall

END_OF_STEP = "(end of step)"
# Launches in flight above which a launch call that takes long waits for the queue (about 1,024 fit).
FULL_QUEUE = 900
USUAL_DEPTH = 1024


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of host time between the previous piece's end and this one's.

    Attributes:
        name: of the op, with what distinguishes the piece.
        op: name of the op.
        t1_us: from the previous piece's end to this one's start.
        start_us: on the trace's clock.
        end_us: likewise.
        launches: calls that launch kernels, in order.
        waits: calls that let a stream wait for an event, in order.
        sync: the call for which the piece stands, that waits for the device.
    """

    name: str
    op: str
    t1_us: float
    start_us: float
    end_us: float
    launches: tuple[RuntimeCall, ...] = ()
    waits: tuple[RuntimeCall, ...] = ()
    sync: RuntimeCall | None = None


def step_pieces(trace: KinetoTrace, step: Interval) -> list[Piece]:
    """The pieces of a step, in order; the last one ends with the step."""
    items = [op for op in trace.ops if step.start_us <= op.start_us < step.end_us]
    items += [
        HostOp(call.name, call.start_us, call.end_us, (call,), ())
        for call in trace.loose_calls
        if step.start_us <= call.start_us < step.end_us
    ]
    items.sort(key=lambda op: (op.start_us, op.end_us))
    pieces: list[Piece] = []
    clock = step.start_us
    for op in items:
        if op.end_us <= clock and not any(c.kernels for c in op.calls):
            continue
        pieces += _pieces_of(op, clock, step.end_us)
        clock = max(clock, min(op.end_us, step.end_us))
    pieces.append(Piece(END_OF_STEP, END_OF_STEP, step.end_us - clock, step.end_us, step.end_us))
    return pieces


def _pieces_of(op: HostOp, clock_us: float, step_end_us: float) -> Iterator[Piece]:
    end = max(clock_us, min(op.end_us, step_end_us))
    at = max(clock_us, op.start_us)
    before, name = at - clock_us, op.name
    calls: list[RuntimeCall] = []
    for call in op.calls:
        if not call.blocks or call.kernels:
            calls.append(call)
            continue
        begin = min(max(call.start_us, at), end)
        if calls or begin > at:
            yield _piece(name, op.name, before, at, begin, calls)
            before = 0.0
        stop = min(max(call.end_us, begin), end)
        yield Piece(f"{call.name} in {op.name}", op.name, before, begin, stop, sync=call)
        at, before, calls, name = stop, 0.0, [], f"{op.name} after {call.name}"
    if end > at or calls or before:
        yield _piece(name, op.name, before, at, end, calls)


def _piece(
    name: str, op: str, t1_us: float, start_us: float, end_us: float, calls: Sequence[RuntimeCall]
) -> Piece:
    return Piece(
        name,
        op,
        t1_us,
        start_us,
        end_us,
        launches=tuple(c for c in calls if c.kernels),
        waits=tuple(c for c in calls if "WaitEvent" in c.name),
    )


def host_us(
    piece: Piece, ends_us: Sequence[float], *, waited_us: float = 0.0, queue_us: Sequence[float] = ()
) -> tuple[float, ...]:
    """Host times of a piece in the order in which its steps spend them: T1, T2, T4, (T5, T4)..., T3; or T1, alone.

    Args:
        piece: of a step.
        ends_us: when the kernels of its launches end: a blocking launch costs what follows that.
        waited_us: how long its synchronisation waited.
        queue_us: what each launch call waited for a full queue.
    """
    if not piece.launches:
        return (piece.t1_us, max(0.0, piece.end_us - piece.start_us - waited_us))
    out, at = [piece.t1_us], piece.start_us
    for number, call in enumerate(piece.launches):
        begin = min(max(call.start_us, at), piece.end_us)
        stop = min(max(call.end_us, begin), piece.end_us)
        out.append(begin - at)
        if call.blocks:
            # What the call costs beyond its kernel's end is host time after it.
            out.append(0.0)
            at = min(max(ends_us[number], begin), stop)
        else:
            waits = queue_us[number] if queue_us else 0.0
            out.append(max(0.0, stop - begin - waits))
            at = stop
    return (*out, piece.end_us - at)


@dataclass(frozen=True, slots=True, eq=False)
class LaunchQueue:
    """The queue between host and device, as a trace shows it.

    Attributes:
        starts_us: of launch calls, in order.
        ends_us: of their kernels.
        waits_us: by correlation, what a call waited because the queue was full.
        depth: launches in flight that fill it.
    """

    starts_us: tuple[float, ...]
    ends_us: tuple[float, ...]
    waits_us: dict[int, float]
    depth: int

    def backlog_us(self, at_us: float) -> tuple[float, ...]:
        """When the kernels of the last launches before a time end, from that time on."""
        made = bisect_left(self.starts_us, at_us)
        return tuple(end - at_us for end in self.ends_us[max(0, made - self.depth) : made])


def launch_queue(trace: KinetoTrace) -> LaunchQueue:
    """A call made with at least `FULL_QUEUE` launches in flight waits for all that exceeds the median call."""
    ends: dict[int, float] = {}
    for kernel in trace.kernels:
        ends[kernel.correlation] = max(ends.get(kernel.correlation, 0.0), kernel.end_us)
    calls = sorted(
        (c for op in trace.ops for c in op.calls if c.kernels and not c.blocks), key=lambda c: c.start_us
    )
    finished = sorted(ends[c.correlation] for c in calls)
    usual = float(np.median([c.duration_us for c in calls])) if calls else 0.0
    waits, depths = {}, []
    for number, call in enumerate(calls):
        in_flight = number - bisect_right(finished, call.end_us)
        if in_flight >= FULL_QUEUE and call.duration_us > usual:
            waits[call.correlation] = call.duration_us - usual
            depths.append(in_flight)
    return LaunchQueue(
        starts_us=tuple(c.start_us for c in calls),
        ends_us=tuple(ends[c.correlation] for c in calls),
        waits_us=waits,
        depth=round(float(np.median(depths))) if depths else USUAL_DEPTH,
    )


def kernels_by_correlation(trace: KinetoTrace) -> dict[int, list[Kernel]]:
    """Device work by what its launch carries too."""
    found: dict[int, list[Kernel]] = {}
    for kernel in trace.kernels:
        found.setdefault(kernel.correlation, []).append(kernel)
    return found
