"""Reads a Kineto trace (`torch.profiler`'s Chrome trace) into top-level host ops, runtime calls and kernels.

Category names from 2021 (`Operator`, `Runtime`, `Kernel`) to today are understood, as are integer microseconds
and nanosecond fractions. Runtime calls and kernels belong together by their correlation id, never by name.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from perfcore.errors import TraceError
from perfcore.trace.events import STEP_PREFIX, WORKING_ANNOTATIONS, Event, Events, whole
from perfcore.trace.load import read_events, without_garbage_collection
from perfcore.trace.nesting import BACKWARD_PREFIX, thread_ops
from perfcore.trace.records import (
    EventRecord,
    HostOp,
    Interval,
    Kernel,
    KinetoTrace,
    LeafCall,
    RuntimeCall,
    SyncRecord,
)

_NS_PER_US = 1e3

__all__ = [
    "HostOp",
    "Interval",
    "Kernel",
    "KinetoTrace",
    "LeafCall",
    "RuntimeCall",
    "SyncRecord",
    "parse_kineto",
    "read_kineto",
]


def read_kineto(path: Path) -> KinetoTrace:
    """The trace in a `.json` or `.json.gz` file.

    Raises:
        TraceError: the file is missing, truncated, not JSON, or holds no profiler events.
    """
    with without_garbage_collection():
        head, pieces = read_events(path)
        events = Events()
        for piece in pieces:
            events.add(piece)
        return _trace(head, events, origin=path.name)


def parse_kineto(data: Any, *, origin: str = "trace") -> KinetoTrace:
    """The trace in a parsed Chrome trace: a mapping with `traceEvents`, or the bare list of events.

    Raises:
        TraceError: there are no profiler events in it.
    """
    listed = data.get("traceEvents") if isinstance(data, Mapping) else data
    if not isinstance(listed, list):
        raise TraceError(f"{origin}: a Kineto trace has a list `traceEvents`, but there is none.")
    events = Events()
    events.add(listed)
    return _trace(data if isinstance(data, Mapping) else {}, events, origin=origin)


def _trace(head: Mapping[str, Any], events: Events, *, origin: str) -> KinetoTrace:
    if not events.op:
        raise TraceError(
            f"{origin}: no profiled op among {events.count} events.",
            hint="Record with torch.profiler and activities=[CPU, CUDA].",
        )
    kernels = tuple(sorted(map(_kernel, events.device), key=lambda k: (k.start_us, k.end_us)))
    calls = _calls_by_thread(events.runtime, kernels)
    threads = _host_threads(events.op, events.annotation, calls)
    ops, loose = _host_ops(events, calls, threads)
    every = (c for made in calls.values() for c in made)
    about_events = [c for c in every if "WaitEvent" in c.name or "EventRecord" in c.name]
    rank, world_size = _distributed(head)
    device_name, device_bytes = _device(head)
    return KinetoTrace(
        device_name=device_name,
        steps=_steps(events.annotation, ops),
        ops=ops,
        loose_calls=loose,
        kernels=kernels,
        event_calls=tuple(sorted(about_events, key=lambda c: c.start_us)),
        syncs=tuple(map(_sync, events.sync)),
        event_records=tuple(map(_event_record, sorted(events.event, key=lambda e: e.start_us))),
        rank=rank,
        world_size=world_size,
        base_us=whole(head.get("baseTimeNanoseconds"), otherwise=0) / _NS_PER_US,
        device_bytes=device_bytes,
        pid=events.pid,
        nested=_nested(events),
        name=origin,
    )


def _nested(events: Events) -> tuple[tuple[Event, ...], ...]:
    by_thread: dict[str, list[Event]] = defaultdict(list)
    for event in (*events.op, *events.annotation):
        by_thread[event.tid].append(event)
    return tuple(tuple(sorted(t, key=lambda e: (e.start_us, -e.end_us))) for t in by_thread.values())


def _device(head: Mapping[str, Any]) -> tuple[str, float]:
    """Name and memory of the first device: files list all of the machine, of one kind as a rule."""
    properties = head.get("deviceProperties")
    first = properties[0] if isinstance(properties, list) and properties else None
    if not isinstance(first, Mapping):
        return "", 0.0
    return str(first.get("name", "")), float(max(0, whole(first.get("totalGlobalMem"))))


def _distributed(head: Mapping[str, Any]) -> tuple[int, int]:
    """Rank and world size."""
    info = head.get("distributedInfo")
    if not isinstance(info, Mapping):
        return 0, 1
    return whole(info.get("rank"), otherwise=0), whole(info.get("world_size"), otherwise=1)


def _kernel(event: Event) -> Kernel:
    stream, size = whole(event.arguments.get("stream"), otherwise=0), event.arguments.get("bytes", 0)
    size = float(size) if isinstance(size, (int, float)) else 0.0
    return Kernel(event.name, event.start_us, event.end_us, stream, event.correlation, size)


def _sync(event: Event) -> SyncRecord:
    names = ("stream", "wait_on_stream", "wait_on_cuda_event_record_corr_id", "wait_on_cuda_event_id")
    return SyncRecord(event.correlation, *(whole(event.arguments.get(name)) for name in names))


def _event_record(event: Event) -> EventRecord:
    args = event.arguments
    event_id = whole(args.get("cuda_event_id", args.get("event_id")))
    return EventRecord(event.correlation, whole(args.get("stream")), event_id)


def _calls_by_thread(events: Iterable[Event], kernels: Iterable[Kernel]) -> dict[str, list[RuntimeCall]]:
    launched: dict[int, list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        launched[kernel.correlation].append(kernel)
    calls: dict[str, list[RuntimeCall]] = defaultdict(list)
    for event in events:
        own = launched.get(event.correlation, []) if event.correlation >= 0 else []
        waits = "Synchronize" in event.name
        blocks = waits or any("DtoH (Device -> Pageable)" in k.name for k in own)
        # A synchronisation may share its correlation id with a record of the wait: it launches nothing.
        count = 0 if waits else len(own)
        calls[event.tid].append(
            RuntimeCall(event.name, event.start_us, event.end_us, event.correlation, count, blocks)
        )
    return {tid: sorted(c, key=lambda call: call.start_us) for tid, c in calls.items()}


def _host_threads(
    ops: Sequence[Event], annotations: Sequence[Event], calls: Mapping[str, Sequence[RuntimeCall]]
) -> set[str]:
    """The main thread (the steps', else the busiest), and those of autograd and of launches with ops."""
    stepping = {e.tid for e in annotations if e.name.startswith(STEP_PREFIX)}
    autograd = {e.tid for e in ops if e.name.startswith(BACKWARD_PREFIX)}
    launching = {tid for tid, made in calls.items() if any(c.kernels for c in made)}
    with_ops: dict[str, int] = defaultdict(int)
    for event in ops:
        with_ops[event.tid] += 1
    busiest = {max(sorted(with_ops.keys() - autograd or autograd), key=lambda tid: with_ops[tid])}
    return (stepping or busiest) | autograd | (launching & set(with_ops))


def _host_ops(
    events: Events, calls: Mapping[str, Sequence[RuntimeCall]], threads: set[str]
) -> tuple[tuple[HostOp, ...], tuple[RuntimeCall, ...]]:
    spans: dict[str, list[Event]] = {tid: [] for tid in threads}
    for event in events.op:
        if event.tid in spans:
            spans[event.tid].append(event)
    for event in events.annotation:
        if event.tid in spans and event.name.startswith(WORKING_ANNOTATIONS):
            spans[event.tid].append(event)
    ops: list[HostOp] = []
    loose: list[RuntimeCall] = []
    for tid, intervals in spans.items():
        found, outside = thread_ops(intervals, calls.get(tid, []))
        ops += found
        loose += outside
    return (
        tuple(sorted(ops, key=lambda op: (op.start_us, op.end_us))),
        tuple(sorted(loose, key=lambda call: call.start_us)),
    )


def _steps(annotations: Sequence[Event], ops: Sequence[HostOp]) -> tuple[Interval, ...]:
    """Spacing of step starts; the last step ends with its own record. Without steps, `zero_grad` cuts."""
    found = [Interval(e.name, e.start_us, e.end_us) for e in annotations if e.name.startswith(STEP_PREFIX)]
    marks = list({mark.start_us: mark for mark in found}.values())
    if not marks:
        cuts = [op.start_us for op in ops if op.name.startswith("Optimizer.zero_grad")]
        first, last = min(op.start_us for op in ops), max(op.end_us for op in ops)
        marks = [Interval("step", cut, last) for cut in cuts] or [Interval("step", first, last)]
    marks.sort(key=lambda mark: mark.start_us)
    ends = [mark.start_us for mark in marks[1:]] + [marks[-1].end_us]
    return tuple(Interval(m.name, m.start_us, end) for m, end in zip(marks, ends, strict=True))
