"""Reads a Kineto trace (`torch.profiler`'s Chrome trace) into top-level host ops, runtime calls and kernels.

Category names from 2021 (`Operator`, `Runtime`, `Kernel`) to today are understood, as are integer microseconds
and nanosecond fractions. Runtime calls and kernels belong together by their correlation id, never by name.
"""

from __future__ import annotations

import gzip
import json
import zlib
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perfcore.errors import TraceError

_OP_CATEGORIES = {"cpu_op", "operator"}
_ANNOTATION_CATEGORIES = {"user_annotation"}
_RUNTIME_CATEGORIES = {"cuda_runtime", "cuda_driver", "hip_runtime", "runtime", "driver"}
_DEVICE_CATEGORIES = {"kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset"}
ROUNDING_US = 1.0
_STEP_PREFIX = "ProfilerStep#"
_BACKWARD_PREFIX = "autograd::engine::evaluate_function: "
# Annotations that stand for work of their own; all others only group ops.
_WORKING_ANNOTATIONS = ("Optimizer.", "enumerate(DataLoader)", "nccl:")
# Ops that run inside another op (a hook), but which a graph describes as ops of their own.
_PROMOTED_OPS = ("c10d::", "nccl:")


@dataclass(frozen=True, slots=True)
class Interval:
    """A named stretch of time, in microseconds of the trace's clock."""

    name: str
    start_us: float
    end_us: float

    @property
    def duration_us(self) -> float:
        """Length."""
        return self.end_us - self.start_us


@dataclass(frozen=True, slots=True)
class Kernel(Interval):
    """Work on a device: a kernel, a copy or a fill."""

    stream: int
    correlation: int


@dataclass(frozen=True, slots=True)
class RuntimeCall(Interval):
    """A call of the CUDA or HIP runtime.

    Attributes:
        correlation: what its kernels carry too.
        kernels: how many it launched; 0 for calls that launch nothing, hundreds for a graph.
        blocks: its end waits for device work (synchronisations, pageable copies to the host).
    """

    correlation: int
    kernels: int
    blocks: bool


@dataclass(frozen=True, slots=True)
class HostOp(Interval):
    """A top-level op of the host.

    Attributes:
        calls: runtime calls inside, in order.
        event_starts_us: starts of all profiled events inside, in order: each cost the profiler some time.
    """

    calls: tuple[RuntimeCall, ...]
    event_starts_us: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class KinetoTrace:
    """One process's trace.

    Attributes:
        device_name: of the first device that the file lists; empty when it lists none.
        steps: one window an iteration, on the host's clock.
        ops: top-level host ops of the main and autograd threads, by start.
        loose_calls: blocking runtime calls outside all ops, by start.
        kernels: device work, by start.
    """

    device_name: str
    steps: tuple[Interval, ...]
    ops: tuple[HostOp, ...]
    loose_calls: tuple[RuntimeCall, ...]
    kernels: tuple[Kernel, ...]


def read_kineto(path: Path) -> KinetoTrace:
    """The trace in a `.json` or `.json.gz` file.

    Raises:
        TraceError: the file is missing, truncated, not JSON, or holds no profiler events.
    """
    return parse_kineto(_load(path), origin=path.name)


def parse_kineto(data: Any, *, origin: str = "trace") -> KinetoTrace:
    """The trace in a parsed Chrome trace: a mapping with `traceEvents`, or the bare list of events.

    Raises:
        TraceError: there are no profiler events in it.
    """
    events = data.get("traceEvents") if isinstance(data, Mapping) else data
    if not isinstance(events, list):
        raise TraceError(f"{origin}: a Kineto trace has a list `traceEvents`, but there is none.")
    groups = _by_category(events)
    if not groups["op"]:
        raise TraceError(
            f"{origin}: no profiled op among {len(events)} events.",
            hint="Record with torch.profiler and activities=[CPU, CUDA].",
        )
    kernels = tuple(sorted((_kernel(e) for e in groups["device"]), key=lambda k: (k.start_us, k.end_us)))
    calls = _calls_by_thread(groups["runtime"], kernels)
    threads = _host_threads(groups["op"], groups["annotation"], calls)
    ops, loose = _host_ops(groups, calls, threads)
    properties = data.get("deviceProperties") if isinstance(data, Mapping) else None
    name = str(properties[0].get("name", "")) if properties else ""
    return KinetoTrace(name, _steps(groups["annotation"], ops), ops, loose, kernels)


def _load(path: Path) -> Any:
    try:
        raw = path.read_bytes()
        text = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
        return json.loads(text)
    except OSError as err:
        raise TraceError(f"{path.name}: cannot be read: {err.strerror or err}.") from None
    except (EOFError, zlib.error):
        raise TraceError(f"{path.name}: the gzip data is truncated or damaged.") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as err:
        raise TraceError(f"{path.name}: not JSON, or truncated: {err}.") from None


def _by_category(events: Iterable[Any]) -> dict[str, list[Mapping[str, Any]]]:
    """Complete events by role; old files call annotations operators, so those are told by their names."""
    groups: dict[str, list[Mapping[str, Any]]] = {k: [] for k in ("op", "annotation", "runtime", "device")}
    for event in events:
        if not isinstance(event, Mapping) or event.get("ph") != "X" or "dur" not in event:
            continue
        category = str(event.get("cat", "")).lower()
        if category in _DEVICE_CATEGORIES:
            groups["device"].append(event)
        elif category in _RUNTIME_CATEGORIES:
            if "INVALID" not in str(event["name"]):
                groups["runtime"].append(event)
        elif category in _ANNOTATION_CATEGORIES or (
            category in _OP_CATEGORIES
            and str(event["name"]).startswith((_STEP_PREFIX, *_WORKING_ANNOTATIONS))
        ):
            groups["annotation"].append(event)
        elif category in _OP_CATEGORIES:
            groups["op"].append(event)
    return groups


def _times(event: Mapping[str, Any]) -> tuple[float, float]:
    start = float(event["ts"])
    return start, start + float(event["dur"])


def _arguments(event: Mapping[str, Any]) -> Mapping[str, Any]:
    args = event.get("args")
    return args if isinstance(args, Mapping) else {}


def _correlation(event: Mapping[str, Any]) -> int:
    args = _arguments(event)
    return int(args.get("correlation", args.get("Correlation", -1)))


def _kernel(event: Mapping[str, Any]) -> Kernel:
    stream = int(_arguments(event).get("stream", 0))
    return Kernel(str(event["name"]), *_times(event), stream, _correlation(event))


def _calls_by_thread(
    events: Iterable[Mapping[str, Any]], kernels: Iterable[Kernel]
) -> dict[str, list[RuntimeCall]]:
    launched: dict[int, list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        launched[kernel.correlation].append(kernel)
    calls: dict[str, list[RuntimeCall]] = defaultdict(list)
    for event in events:
        own = launched[_correlation(event)]
        name = str(event["name"])
        blocks = "Synchronize" in name or any("DtoH (Device -> Pageable)" in k.name for k in own)
        # A synchronisation may share its correlation id with a record of the wait: it launches nothing.
        count = 0 if "Synchronize" in name else len(own)
        calls[str(event["tid"])].append(RuntimeCall(name, *_times(event), _correlation(event), count, blocks))
    return {tid: sorted(c, key=lambda call: call.start_us) for tid, c in calls.items()}


def _host_threads(
    ops: Sequence[Mapping[str, Any]],
    annotations: Sequence[Mapping[str, Any]],
    calls: Mapping[str, Sequence[RuntimeCall]],
) -> set[str]:
    """The main thread (the steps', else the busiest), and those of autograd and of launches with ops."""
    stepping = {str(e["tid"]) for e in annotations if str(e["name"]).startswith(_STEP_PREFIX)}
    autograd = {str(e["tid"]) for e in ops if str(e["name"]).startswith(_BACKWARD_PREFIX)}
    launching = {tid for tid, made in calls.items() if any(c.kernels for c in made)}
    with_ops: dict[str, int] = defaultdict(int)
    for event in ops:
        with_ops[str(event["tid"])] += 1
    busiest = {max(sorted(with_ops.keys() - autograd or autograd), key=lambda tid: with_ops[tid])}
    return (stepping or busiest) | autograd | (launching & set(with_ops))


def _host_ops(
    groups: Mapping[str, Sequence[Mapping[str, Any]]],
    calls: Mapping[str, Sequence[RuntimeCall]],
    threads: set[str],
) -> tuple[tuple[HostOp, ...], tuple[RuntimeCall, ...]]:
    working = [e for e in groups["annotation"] if str(e["name"]).startswith(_WORKING_ANNOTATIONS)]
    spans: dict[str, list[Interval]] = {tid: [] for tid in threads}
    for event in (*groups["op"], *working):
        if (tid := str(event["tid"])) in spans:
            spans[tid].append(Interval(str(event["name"]), *_times(event)))
    ops: list[HostOp] = []
    loose: list[RuntimeCall] = []
    for tid, intervals in spans.items():
        found, outside = _thread_ops(intervals, calls.get(tid, []))
        ops += found
        loose += outside
    return (
        tuple(sorted(ops, key=lambda op: (op.start_us, op.end_us))),
        tuple(sorted(loose, key=lambda call: call.start_us)),
    )


def _thread_ops(
    intervals: list[Interval], calls: Sequence[RuntimeCall]
) -> tuple[list[HostOp], list[RuntimeCall]]:
    """Top-level ops of one thread; launches outside all ops become ops of their own."""
    intervals.sort(key=lambda i: (i.start_us, -i.end_us))
    pieces: list[Interval] = []
    for interval in intervals:
        if pieces and _inside(interval, pieces[-1]):
            if interval.name.startswith(_PROMOTED_OPS) and not pieces[-1].name.startswith(_PROMOTED_OPS):
                pieces[-1:] = _split(pieces[-1], interval)
            continue
        pieces.append(interval)
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


def _inside(interval: Interval, around: Interval) -> bool:
    """Whole microseconds: a child may end after its parent, a sibling begin before its neighbour's end."""
    return interval.end_us <= around.end_us or around.end_us - interval.start_us > ROUNDING_US


def _split(around: Interval, inner: Interval) -> list[Interval]:
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
    name = piece.name.removeprefix(_BACKWARD_PREFIX)
    return HostOp(name, piece.start_us, piece.end_us, calls, tuple(events[first:last]))


def _steps(annotations: Sequence[Mapping[str, Any]], ops: Sequence[HostOp]) -> tuple[Interval, ...]:
    """Spacing of step starts; the last step ends with its own record. Without steps, `zero_grad` cuts."""
    marks = [
        Interval(str(e["name"]), *_times(e)) for e in annotations if str(e["name"]).startswith(_STEP_PREFIX)
    ]
    if not marks:
        cuts = [op.start_us for op in ops if op.name.startswith("Optimizer.zero_grad")]
        first, last = min(op.start_us for op in ops), max(op.end_us for op in ops)
        marks = [Interval("step", cut, last) for cut in cuts] or [Interval("step", first, last)]
    marks.sort(key=lambda mark: mark.start_us)
    ends = [mark.start_us for mark in marks[1:]] + [marks[-1].end_us]
    return tuple(Interval(m.name, m.start_us, end) for m, end in zip(marks, ends, strict=True))
