"""A few iterations under `torch.profiler`: time by class of op, the device's busy time, and the traces on request.

The profiler slows the host, so times that the host spends are scaled to iterations measured without it; times of a
device are what they are.
"""

from __future__ import annotations

import gzip
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from perfcore.measure.op_classes import OPTIMIZER_STEP, class_of

STEP_PREFIX = "ProfilerStep#"  # what torch.profiler's own schedule calls a step
PROFILED_STEPS = 5
LONGEST_PROFILE_US = 2e6
_CPU, _CUDA = "CPU", "CUDA"


@dataclass(frozen=True, slots=True)
class Profiled:
    """What the profiler says of one iteration.

    Attributes:
        op_us: time by class of op: of kernels on a GPU, of ops on a CPU, where they add up to the iteration.
        active_us: a GPU runs at least one kernel; `None` on a CPU.
        note: why there is nothing, where there is nothing.
    """

    op_us: dict[str, float]
    active_us: float | None = None
    note: str = ""


def profile_steps(
    step: Callable[[], object], *, device: str, median_us: float, keep: Path | None = None
) -> Profiled:
    """Run a few iterations under the profiler.

    Args:
        step: one iteration.
        device: what runs it.
        median_us: an iteration without the profiler.
        keep: base name of the files `.kineto.json.gz` and `.et.json`, a pair of one window.
    """
    from torch.profiler import ProfilerActivity, profile, record_function

    on_cuda = device.startswith("cuda")
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    steps = max(1, min(PROFILED_STEPS, int(LONGEST_PROFILE_US / median_us)))
    observer = None if keep is None else _observer(keep)
    with profile(activities=activities, execution_trace_observer=observer) as profiler:
        for number in range(steps):
            with record_function(f"{STEP_PREFIX}{number}"):
                step()
        if on_cuda:
            torch.cuda.synchronize(device)
    if observer is not None:
        observer.unregister_callback()
    if keep is not None:
        write_trace(profiler, keep.with_name(f"{keep.name}.kineto.json.gz"))
    events = profiler.events() or []
    if on_cuda:
        busy = _busy_us(events) / steps
        if not busy:
            return Profiled({}, note="the profiler saw no kernel of the GPU: it may not be allowed to")
        return Profiled(_by_class(events, steps, on_cuda=True), busy)
    sums = _by_class(events, 1, on_cuda=False)
    whole = max(sum(sums.values()), 1e-9)
    return Profiled({name: us / whole * median_us for name, us in sums.items()})


def write_trace(profiler: Any, path: Path) -> None:
    """The profiler's trace, gzipped."""
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(plain))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(plain.read_bytes(), 6))


def _observer(keep: Path) -> Any:
    from torch.profiler import ExecutionTraceObserver

    keep.parent.mkdir(parents=True, exist_ok=True)
    observer = ExecutionTraceObserver()
    observer.register_callback(str(keep.with_name(f"{keep.name}.et.json")))
    return observer


def _by_class(events: Iterable[Any], steps: int, *, on_cuda: bool) -> dict[str, float]:
    """µs of one iteration by class of op, from the events' own times."""
    ops = [e for e in events if e.device_type.name == _CPU]
    dense = _dense_steps(ops)
    sums: dict[str, float] = {}
    for event in ops:
        around = _around(event)
        us = float(event.self_device_time_total if on_cuda else event.self_cpu_time_total)
        names = [e.name for e in around if not _is_runtime(e.name)]
        if not names or (len(names) == 1 and names[0].startswith(STEP_PREFIX)):
            continue  # the loop itself, outside of all ops
        name = class_of(names, first_optimizer=any(e.id in dense for e in around))
        sums[name.value] = sums.get(name.value, 0.0) + us / steps
    return sums


def _dense_steps(ops: Sequence[Any]) -> set[int]:
    """Of each iteration's optimizer steps the first."""
    by_step: dict[int, list[Any]] = {}
    for event in ops:
        if event.name.startswith(OPTIMIZER_STEP):
            by_step.setdefault(_around(event)[-1].id, []).append(event)
    return {min(found, key=lambda e: e.time_range.start).id for found in by_step.values()}


def _around(event: Any) -> list[Any]:
    """The event, then those around it."""
    out = [event]
    while out[-1].cpu_parent is not None:
        out.append(out[-1].cpu_parent)
    return out


def _is_runtime(name: str) -> bool:
    """A call of CUDA's runtime: it is part of the op around it."""
    return name.startswith(("cuda", "cu", "hip")) and "::" not in name


def _busy_us(events: Iterable[Any]) -> float:
    """Union of all kernels and copies of the device."""
    spans = sorted(
        (e.time_range.start, e.time_range.end)
        for e in events
        if e.device_type.name == _CUDA and not _is_mark(e)
    )
    busy, end = 0.0, float("-inf")
    for start, stop in spans:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return busy


def _is_mark(event: Any) -> bool:
    """What the profiler draws over kernels, and is none."""
    return bool(getattr(event, "is_user_annotation", False)) or event.name.startswith(
        (STEP_PREFIX, OPTIMIZER_STEP, "Optimizer.zero_grad#")
    )
