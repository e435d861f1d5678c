"""Which op contains which, and which op a runtime call belongs to, on one thread.

Times may be whole microseconds: a child may end after its parent, a sibling begin before its neighbour's end.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import replace

from perfcore.trace.events import Event
from perfcore.trace.records import HostOp, Interval, LeafCall, RuntimeCall

ROUNDING_US = 1.0
BACKWARD_PREFIX = "autograd::engine::evaluate_function: "
# Ops that run inside another op (a hook), but which a graph describes as ops of their own.
_PROMOTED_OPS = ("c10d::", "nccl:")


def thread_ops(
    intervals: list[Event], calls: Sequence[RuntimeCall]
) -> tuple[list[HostOp], list[RuntimeCall]]:
    """Top-level ops of one thread; launches outside all ops become ops of their own.

    Args:
        intervals: ops of the thread, sorted here by start.
        calls: runtime calls of the thread, by start.

    Returns:
        The ops, and blocking calls outside of all ops.
    """
    intervals.sort(key=lambda i: (i.start_us, -i.end_us))
    calls = _with_leaves(intervals, calls)
    pieces = _outermost(intervals)
    starts = [p.start_us for p in pieces]
    inside: list[list[RuntimeCall]] = [[] for _ in pieces]
    outside: list[RuntimeCall] = []
    for call in calls:
        at = bisect_right(starts, call.start_us) - 1
        contained = at >= 0 and call.start_us < pieces[at].end_us
        (inside[at] if contained else outside).append(call)
    events = sorted([i.start_us for i in intervals] + [c.start_us for c in calls])
    ops = [_op(piece, tuple(own), events) for piece, own in zip(pieces, inside, strict=True)]
    ops += [_op(Interval(c.name, c.start_us, c.end_us), (c,), []) for c in outside if c.kernels]
    return ops, [c for c in outside if c.blocks and not c.kernels]


def _outermost(intervals: Sequence[Event]) -> list[Interval]:
    pieces: list[Interval] = []
    for event in intervals:
        if pieces and _inside(event, pieces[-1]):
            if event.name.startswith(_PROMOTED_OPS) and not pieces[-1].name.startswith(_PROMOTED_OPS):
                pieces[-1:] = _split(pieces[-1], event)
            continue
        pieces.append(Interval(event.name, event.start_us, event.end_us))
    return pieces


def _with_leaves(intervals: Sequence[Event], calls: Sequence[RuntimeCall]) -> list[RuntimeCall]:
    """The calls with the innermost op around each that launches something."""
    open_ops: list[Event] = []
    at, out = 0, []
    for call in calls:
        while at < len(intervals) and intervals[at].start_us <= call.start_us:
            open_ops.append(intervals[at])
            at += 1
        while open_ops and open_ops[-1].end_us <= call.start_us:
            open_ops.pop()
        if call.kernels:
            around = next((op for op in reversed(open_ops) if op.end_us > call.start_us), None)
            leaf = LeafCall(around.name, around.shapes, around.types) if around else None
            call = replace(call, leaf=leaf)
        out.append(call)
    return out


def _inside(interval: Event, around: Interval) -> bool:
    return interval.end_us <= around.end_us or around.end_us - interval.start_us > ROUNDING_US


def _split(around: Interval, inner: Event) -> list[Interval]:
    """The op around ends where the promoted op begins; what follows it belongs to the promoted op."""
    if inner.start_us <= around.start_us:
        return [Interval(inner.name, inner.start_us, around.end_us)]
    return [
        Interval(around.name, around.start_us, inner.start_us),
        Interval(inner.name, inner.start_us, around.end_us),
    ]


def _op(piece: Interval, calls: tuple[RuntimeCall, ...], events: Sequence[float]) -> HostOp:
    first = bisect_right(events, piece.start_us)
    last = bisect_left(events, piece.end_us)
    name = piece.name.removeprefix(BACKWARD_PREFIX)
    return HostOp(name, piece.start_us, piece.end_us, calls, tuple(events[first:last]))
