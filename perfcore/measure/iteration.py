"""Iteration times of a real training loop, in the steady state, with no profiler running."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle, pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from perfcore.design.design import Design
from perfcore.design.training import EmbeddingFusion, Launches, Precision
from perfcore.errors import UnsupportedError
from perfcore.measure.model import Batch, Dlrm, build_model, make_batch, make_optimizers, numerics, train_step
from perfcore.measure.peak import MemoryWatch
from perfcore.measure.profiled import Profiled, profile_steps
from perfcore.measure.table_batched import uses_fbgemm
from perfcore.units import US_PER_MS, US_PER_S

Step = Callable[[Batch], Tensor]

WARM_UP_ITERATIONS = 3
WARM_UP_SHARE = 0.25
DISTINCT_BATCHES = 4


@dataclass(frozen=True, slots=True)
class IterationSample:
    """Measured iterations of one design.

    Attributes:
        iterations_us: spacing of consecutive iterations, warm-up dropped.
        warm_up: iterations that were dropped.
        peak_memory_bytes: largest device memory allocated (CUDA), or resident set of the process (CPU); of several
            ranks, the largest.
        final_loss: the last iteration's training loss.
        clock: `cuda_events`, `cpu_time` (one thread) or `wall`.
        notes: where what ran differs from what the design says.
        ranks: processes that trained together; an iteration ends when the last of them has ended.
        added_memory_bytes: what building and training added to the memory, likewise.
        op_us: time by class of op (`OpClass`) of rank 0, where it was profiled: of kernels on a GPU, of everything on
            a CPU.
        device_active_us: a GPU ran at least one kernel, where it was profiled.
    """

    iterations_us: tuple[float, ...]
    warm_up: int
    peak_memory_bytes: int
    final_loss: float
    clock: str
    notes: tuple[str, ...] = ()
    ranks: int = 1
    added_memory_bytes: int = 0
    op_us: dict[str, float] = field(default_factory=dict)
    device_active_us: float | None = None

    @property
    def median_us(self) -> float:
        """Median iteration time."""
        return statistics.median(self.iterations_us)

    @property
    def spread_pct(self) -> float:
        """Interquartile range as a share of the median."""
        low, high = np.quantile(self.iterations_us, [0.25, 0.75])
        return float(100 * (high - low) / self.median_us)


def check_device(device: str) -> None:
    """Refuse a device that this machine's torch does not have.

    Raises:
        UnsupportedError: neither `cpu` nor `cuda[:index]`, or no such CUDA device.
    """
    kind, _, index = device.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdecimal()) or device == "cpu:":
        raise UnsupportedError(f"`device` must be cpu, cuda or cuda:<index>, but got {device!r}.")
    count = torch.cuda.device_count()
    if kind == "cuda" and int(index or 0) >= count:
        why = _why_no_cuda()
        raise UnsupportedError(
            f"The device {device!r} needs a CUDA GPU, but torch {torch.__version__} sees {count}{why and f': {why}'}.",
            hint="Use --device cpu, or run on a machine with a GPU.",
        )


def indexed(device: str) -> str:
    """The device with its index: `cuda` alone is none that can be made the current one."""
    return "cuda:0" if device == "cuda" else device


def _why_no_cuda() -> str:
    """What CUDA says of itself; nothing where there is simply no further GPU."""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as err:
        return (str(err).strip().splitlines() or [""])[0].rstrip(".")
    return ""


def measure_iteration(
    design: Design,
    *,
    device: str = "cpu",
    min_iterations: int = 10,
    max_seconds: float = 10.0,
    seed: int = 0,
    profile: bool = False,
    keep: Path | None = None,
) -> IterationSample:
    """Train the design for real and time its iterations.

    Runs until `min_iterations` are measured and half of `max_seconds` is used, or `max_seconds` is over with
    at least two iterations measured; a quarter of the time at most goes to warm-up.

    Args:
        design: on one device.
        device: `cpu`, `cuda` or `cuda:<index>`.
        min_iterations: to measure at least, time permitting.
        max_seconds: for the iterations.
        seed: of weights and input.
        profile: run a few iterations more under the profiler, for times by class of op.
        keep: base name of the profiler's files, a Kineto trace and an execution trace of the same iterations.

    Raises:
        UnsupportedError: no such device, more than one rank, or a fusion that the device lacks.
    """
    check_device(device)
    device = indexed(device)
    if device.startswith("cuda"):
        torch.cuda.set_device(device)  # events and graphs belong to the current device
    notes = run_notes(design, device=device)
    rng = np.random.default_rng(seed)
    watch = MemoryWatch.begin(device)
    with numerics(design):
        model = build_model(design, device=device, seed=seed)
        batches = [make_batch(design, rng=rng, device=device) for _ in range(DISTINCT_BATCHES)]
        step = step_of(model, make_optimizers(model, design), design, batches[0], device=device)
        feed = cycle(batches)
        begin = time.perf_counter()
        warm_up = _warm_up(step, feed.__next__, device=device, seconds=max_seconds * WARM_UP_SHARE)
        left = max_seconds - (time.perf_counter() - begin)
        times, loss = _timed(
            step, feed.__next__, device=device, min_iterations=min_iterations, max_seconds=left
        )
        peak, added = watch.peak_bytes(), watch.added_bytes()
        middle = statistics.median(times)
        profiled = explained(
            lambda: step(next(feed)), design, device=device, median_us=middle, wanted=profile, keep=keep
        )
    clock = "cuda_events" if device.startswith("cuda") else host_clock()[0]
    return IterationSample(
        tuple(times),
        warm_up,
        peak,
        loss,
        clock,
        (*notes, *([profiled.note] if profiled.note else [])),
        added_memory_bytes=added,
        op_us=profiled.op_us,
        device_active_us=profiled.active_us,
    )


def explained(
    run: Callable[[], object],
    design: Design,
    *,
    device: str,
    median_us: float,
    wanted: bool,
    keep: Path | None,
) -> Profiled:
    """What the profiler says, if it was asked; a captured iteration does not tell its ops.

    Where it fails, the iterations that were timed before are still good.
    """
    if not wanted and keep is None:
        return Profiled({})
    try:
        found = profile_steps(run, device=device, median_us=median_us, keep=keep)
    except (RuntimeError, OSError) as err:
        return Profiled({}, note=f"not profiled: {(str(err).strip().splitlines() or [repr(err)])[0]}")
    captured = design.fusion.launches is Launches.CUDA_GRAPH and device.startswith("cuda")
    return replace(found, op_us={}) if captured else found


def run_notes(design: Design, *, device: str) -> tuple[str, ...]:
    """Where what runs differs from what the design says."""
    notes = []
    if design.fusion.embedding is EmbeddingFusion.TABLE_BATCHED and not uses_fbgemm(design):
        notes.append("tables in one bag with sparse gradients: no FBGEMM for them here")
    if device.startswith("cuda"):
        return tuple(notes)
    if design.fusion.launches is Launches.CUDA_GRAPH:
        notes.append("launched eagerly: a CPU has no CUDA graphs")
    if design.training.precision is Precision.TF32:
        notes.append("computed in fp32: a CPU has no TF32")
    return tuple(notes)


def step_of(
    model: Dlrm,
    optimizers: tuple[torch.optim.Optimizer, ...],
    design: Design,
    first: Batch,
    *,
    device: str,
) -> Step:
    """One iteration as the design launches it.

    Raises:
        UnsupportedError: it is to be captured and cannot be.
    """
    if design.fusion.launches is Launches.CUDA_GRAPH and device.startswith("cuda"):
        model.reads_loss = False  # a graph cannot wait for the host: the loss is read after it
        step = _captured(lambda batch: train_step(model, optimizers, batch), first, device=device)
        if design.training.read_loss:
            step = _read(step)
    else:
        step = partial(train_step, model, optimizers)
    waits = design.training.synchronize and device.startswith("cuda")
    return _waited(step, device=device) if waits else step


def _read(step: Step) -> Step:
    """The step, after which the host reads the loss."""

    def run(batch: Batch) -> Tensor:
        loss = step(batch)
        loss.item()
        return loss

    return run


def _waited(step: Step, *, device: str) -> Step:
    """The step, after which the host waits for the device."""

    def run(batch: Batch) -> Tensor:
        loss = step(batch)
        torch.cuda.synchronize(device)
        return loss

    return run


def _captured(step: Step, first: Batch, *, device: str) -> Step:
    """The step replayed from one CUDA graph; a batch is copied into the graph's input before."""
    static = first.to(device)
    before = torch.cuda.current_stream()
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP_ITERATIONS):
            step(static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            loss = step(static)
    except RuntimeError as err:
        torch.cuda.set_stream(before)  # a capture that fails does not give it back
        raise UnsupportedError(
            f"This design's iteration cannot be captured in a CUDA graph: {str(err).splitlines()[0]}",
            hint="Sparse gradients cannot be captured; use fusion.launches=eager.",
        ) from err

    def replay(batch: Batch) -> Tensor:
        for target, source in zip(_tensors(static), _tensors(batch), strict=True):
            target.copy_(source, non_blocking=batch.pinned)
        graph.replay()
        return loss

    return replay


def _tensors(batch: Batch) -> tuple[Tensor, ...]:
    return (batch.dense, *batch.indices, *batch.offsets, batch.labels)


def _warm_up(step: Step, feed: Callable[[], Batch], *, device: str, seconds: float) -> int:
    end = time.perf_counter() + seconds
    for done in range(1, WARM_UP_ITERATIONS + 1):
        step(feed())
        _synchronize(device)
        if time.perf_counter() > end:
            return done
    return WARM_UP_ITERATIONS


def _timed(
    step: Step, feed: Callable[[], Batch], *, device: str, min_iterations: int, max_seconds: float
) -> tuple[list[float], float]:
    """Spacings between the ends of iterations (µs) and the last loss; the host is never made to wait."""
    mark, spacings = marker(device)
    begin = time.perf_counter()
    mark()
    done = 0
    while True:
        loss = step(feed())
        mark()
        done += 1
        spent = time.perf_counter() - begin
        if (spent >= max_seconds and done >= 2) or (spent >= max_seconds / 2 and done >= min_iterations):
            return spacings(), float(loss)


def marker(device: str, *, wall: bool = False) -> tuple[Callable[[], None], Callable[[], list[float]]]:
    """How to mark an iteration's end, and how to read the spacings of all marks in µs.

    Args:
        device: what runs the iterations.
        wall: on a CPU, count also the time in which this process waits for others.
    """
    if device.startswith("cuda"):
        events: list[torch.cuda.Event] = []

        def record() -> None:
            events.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
            events[-1].record()

        def elapsed() -> list[float]:
            torch.cuda.synchronize(device)
            return [a.elapsed_time(b) * US_PER_MS for a, b in pairwise(events)]

        return record, elapsed
    clocks: list[float] = []
    clock = time.perf_counter if wall else host_clock()[1]
    return lambda: clocks.append(clock()), lambda: [(b - a) * US_PER_S for a, b in pairwise(clocks)]


def host_clock() -> tuple[str, Callable[[], float]]:
    """What times work on the CPU, in seconds: with one thread its CPU time, which other programs' load leaves alone."""
    return ("cpu_time", time.process_time) if torch.get_num_threads() == 1 else ("wall", time.perf_counter)


def _synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
