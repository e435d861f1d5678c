"""Times one kernel: warm and cold cache, repeated until the spread is small or the time is up.

On CUDA the calls are replayed from a CUDA graph between two events, so that no launch gap is measured; what
cannot be captured is timed eagerly, behind work that keeps the queue full. On a CPU the calls are timed in
groups that outlast the clock's grain.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from perfcore.errors import UnsupportedError
from perfcore.measure.failures import breaks_the_device
from perfcore.measure.iteration import host_clock
from perfcore.measure.kernel_cases import Call, Case
from perfcore.measure.source import Source
from perfcore.units import US_PER_MS, US_PER_S

FEWEST_RUNS = 5
MOST_RUNS = 40
MOST_COPIES = 64
SMALL_SPREAD = 0.03
GROUP_S = 1e-4
COPIES_SHARE = 3.0  # of the cache that all copies together fill
GRAPH_CALLS = 20
QUEUE_CYCLES = 3_000_000  # one to two milliseconds on any GPU
Timer = Callable[[Sequence[Call], float], tuple[tuple[float, ...], str]]


@dataclass(frozen=True, slots=True)
class Timing:
    """One kernel, timed.

    Attributes:
        runs_us: time of one call, by run.
        cache: `warm` (the same data each time) or `cold` (more copies of it than the cache holds).
        method: `graph_replay`, `events`, `cpu_time` or `wall`.
    """

    runs_us: tuple[float, ...]
    cache: str
    method: str

    @property
    def median_us(self) -> float:
        """Median over the runs."""
        return statistics.median(self.runs_us)

    @property
    def spread(self) -> float:
        """Interquartile range over the median."""
        low, high = np.quantile(self.runs_us, [0.25, 0.75])
        return float((high - low) / self.median_us)


def time_case(
    case: Case,
    source: Source,
    *,
    cache_bytes: float,
    max_seconds: float,
    uncaptured: set[type] | None = None,
) -> Iterator[Timing]:
    """The kernel with a warm cache, then with a cold one; each takes half of `max_seconds` at most.

    Args:
        case: what to measure.
        source: its data.
        cache_bytes: of the device.
        max_seconds: for both.
        uncaptured: classes of kernels that turned out not to be captured, added to: a capture that fails costs a
            process memory, so that none is tried twice.

    Raises:
        UnsupportedError: the call leaves part of its result unwritten.
    """
    source.start_copy()
    first = case.build(source)
    copy_bytes = max(source.bytes, 1.0)
    check_written(first)
    timer: Timer = host_runs_us
    if source.device.startswith("cuda"):
        failed = set() if uncaptured is None else uncaptured
        timer = partial(cuda_runs_us, kind=type(case.kernel) if case.captured else None, uncaptured=failed)
    half = max_seconds / 2
    runs, method = timer([first], half)
    yield Timing(runs, "warm", method)
    copies = int(min(MOST_COPIES, COPIES_SHARE * cache_bytes // copy_bytes))
    # Building copies takes longer than running them: few where one is large already.
    begin, calls = time.perf_counter(), [first]
    while len(calls) < copies and time.perf_counter() - begin < half:
        calls.append(case.build(source))
    if len(calls) > 1:
        runs, method = timer(calls, half)
    yield Timing(runs, "cold", method)


def check_written(call: Call) -> None:
    """Run the call once where its result's memory holds NaN, and refuse it if any is left.

    Raises:
        UnsupportedError: the call wrote only part of its result.
    """
    sample = call()
    if (
        not isinstance(sample, torch.Tensor)
        or not sample.is_floating_point()
        or sample.layout != torch.strided
    ):
        return
    poison = torch.full_like(sample, torch.nan)
    del sample, poison  # the allocator hands the poisoned memory out next
    out = call()
    if isinstance(out, torch.Tensor) and bool(torch.isnan(out).any()):
        raise UnsupportedError("A kernel left part of its result unwritten: its time would mean nothing.")


def host_runs_us(calls: Sequence[Call], max_seconds: float) -> tuple[tuple[float, ...], str]:
    """Times of one call, one a run of at least `GROUP_S`, and the clock."""
    method, clock = host_clock()
    begin, start = time.perf_counter(), clock()
    for call in calls:
        call()
    once = max((clock() - start) / len(calls), 1e-7)
    # A group is whole rounds over the copies, so that every run sees the same data.
    rounds = max(1, int(GROUP_S / (once * len(calls))))
    runs: list[float] = []
    while not _enough(runs, begin, max_seconds):
        start = clock()
        for _ in range(rounds):
            for call in calls:
                call()
        runs.append((clock() - start) / (rounds * len(calls)) * US_PER_S)
    return tuple(runs), method


def cuda_runs_us(
    calls: Sequence[Call], max_seconds: float, *, kind: type | None, uncaptured: set[type]
) -> tuple[tuple[float, ...], str]:
    """Device times of one call, one a run.

    Args:
        calls: one a copy of the data.
        max_seconds: for the runs.
        kind: class of the kernel, where it may be captured.
        uncaptured: classes that are not, added to.
    """
    for call in calls:
        call()
    torch.cuda.synchronize()
    rounds = max(1, GRAPH_CALLS // len(calls))
    replay = None
    if kind is not None and kind not in uncaptured:
        replay = _captured(calls, rounds)
        if replay is None:
            uncaptured.add(kind)
    method = "events" if replay is None else "graph_replay"
    run = replay or _queued(calls, rounds)
    begin = time.perf_counter()
    runs: list[float] = []
    while not _enough(runs, begin, max_seconds):
        runs.append(_between_events(run, queued=replay is None) * US_PER_MS / (rounds * len(calls)))
    return tuple(runs), method


def _captured(calls: Sequence[Call], rounds: int) -> Call | None:
    """All calls as one CUDA graph; `None` where they wait for the device, as sorts by value may."""
    before = torch.cuda.current_stream()
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        calls[0]()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for _ in range(rounds):
                for call in calls:
                    call()
    except RuntimeError as err:
        torch.cuda.set_stream(before)  # a capture that fails does not give it back
        if isinstance(err, torch.OutOfMemoryError) or breaks_the_device(err):
            raise
        torch.cuda.synchronize()
        return None
    graph.replay()
    return graph.replay


def _queued(calls: Sequence[Call], rounds: int) -> Call:
    def run() -> None:
        for _ in range(rounds):
            for call in calls:
                call()

    return run


def _between_events(run: Call, *, queued: bool) -> float:
    """Milliseconds on the device between the events around a run."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    if queued:  # the host gets ahead while the device sleeps
        torch.cuda._sleep(QUEUE_CYCLES)  # type: ignore[no-untyped-call]
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def _enough(runs: Sequence[float], begin: float, max_seconds: float) -> bool:
    """Stop at a small spread, at many runs, or when the time is up with at least one run."""
    if len(runs) >= MOST_RUNS or (runs and time.perf_counter() - begin > max_seconds):
        return True
    if len(runs) < FEWEST_RUNS:
        return False
    low, middle, high = np.quantile(runs, [0.25, 0.5, 0.75])
    return bool(high - low < SMALL_SPREAD * middle)
