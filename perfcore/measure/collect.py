"""Measures a device within a time budget: training loops first, then the kernels that say most.

What is in the folder already is not measured again, so that a sweep can be ended and continued.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from perfcore.errors import DesignError, PerfcoreError, UnsupportedError
from perfcore.graph import kernels as k
from perfcore.graph.kernels import DType
from perfcore.measure.collective_sweep import measure_collectives, worlds
from perfcore.measure.device_state import busy_before, device_state
from perfcore.measure.failures import breaks_the_device, first_line, status_of
from perfcore.measure.files import cannot_write
from perfcore.measure.host import cache_bytes, measured_system
from perfcore.measure.iteration import check_device, indexed, measure_iteration
from perfcore.measure.kernel_cases import CPU_LIMITS, CUDA_LIMITS, Case, dense_cases
from perfcore.measure.kernels import Timing, time_case
from perfcore.measure.loops import host_bound, kernel_bound, record_trace
from perfcore.measure.model import tf32_products
from perfcore.measure.plan import Plan
from perfcore.measure.record import (
    DesignSample,
    NamedDesign,
    Status,
    environment,
    read_samples,
    write_samples,
)
from perfcore.measure.samples import KernelSample, SampleFolder
from perfcore.measure.source import Source
from perfcore.measure.table_cases import copy_cases, table_cases

LOOP_SHARE = 0.4
COLLECTIVE_SHARE = 0.06
SHORTEST_COLLECTIVES_S = 2.0  # of those that are measured again
SHORTEST_LOOP_S = 0.4  # of one that is measured again
FEWEST_LOOPS = 8  # below, a fit has too little to go by: measured also when the time is up
# What one kernel may take: a share of the budget, within bounds.
CASE_SHARE, SHORTEST_CASE_S, LONGEST_CASE_S = 1 / 2000, 0.03, 0.3
CUDA_BATCH_SCALE = 16
FORGET_EVERY = 20
NOISY = 0.2
_GO_ON = "What was measured so far is kept; run the same command again to go on."
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Collected:
    """What one call measured.

    Attributes:
        kernels: timed kernels, warm and cold apart.
        loops: training loops.
        noisy: kernels whose runs spread by more than a fifth.
        refused: kernels and loops that do not run here, with the reason.
        collectives: timed collectives.
        busy: what used the device before the first measurement, in a sentence; empty where nothing did.
        stopped: why the sweep ended before its time; empty where it did not.
    """

    kernels: int
    loops: int
    noisy: int
    refused: tuple[str, ...]
    collectives: int = 0
    busy: str = ""
    stopped: str = ""

    @property
    def remarks(self) -> tuple[str, ...]:
        """What a person should know of it, a sentence each."""
        said = [
            f"{self.kernels} timings of kernels, {self.collectives} of collectives, {self.loops} training loops."
        ]
        if self.busy:
            said.append(self.busy)
        if self.noisy:
            said.append(
                f"{self.noisy} timings spread by more than a fifth: another program was using the device. "
                "Run the command again on an idle one to add more."
            )
        if self.stopped:
            said.append(f"Stopped early: {self.stopped}. Run the same command again to go on.")
        return (*said, *(f"not measured: {line}" for line in self.refused))


def collect(out: Path, *, device: str, budget_s: float, say: Say = lambda _: None) -> Collected:
    """Measure for `budget_s` seconds into the folder `out`.

    Raises:
        DesignError: the budget is not positive, or the folder holds samples of another device.
        UnsupportedError: no such device, or one that this torch, driver or machine cannot use; the message says why.
        ProfileError: the folder cannot be written.
    """
    if not budget_s > 0:
        raise DesignError(f"`budget > 0` must hold, but got {budget_s:g} s.")
    check_device(device)
    device, begin = indexed(device), time.perf_counter()
    before = device_state(device)
    _check_runs(device)
    folder = SampleFolder(out)
    folder.create()
    here = environment(device)
    _check_same_device(folder, here)
    system = measured_system(device)
    folder.add_environment(here | {"system": system_to_dict(system)} | before)
    scale = CUDA_BATCH_SCALE if device.startswith("cuda") else 1
    designs = in_any_order(host_bound(system), kernel_bound(system, scale=scale))
    loops, refused = _loops(
        folder, designs, here, device=device, until=begin + LOOP_SHARE * budget_s, say=say
    )
    exchanged, alone = _collectives(folder, device=device, budget_s=budget_s, say=say)
    sweep = _sweep(folder, device=device, begin=begin, budget_s=budget_s, say=say)
    if not sweep.stopped:
        folder.add_environment(device_state(device))
    return replace(
        sweep,
        loops=loops,
        collectives=exchanged,
        refused=(*refused, *alone, *sweep.refused),
        busy=busy_before(before),
    )


def _check_runs(device: str) -> None:
    """Run one kernel: a GPU that is there may still be of no use to this torch."""
    try:
        if device.startswith("cuda"):
            torch.cuda.set_device(device)
        torch.ones(8, device=device).add_(1).sum().item()
    except (RuntimeError, AssertionError) as err:
        raise UnsupportedError(
            f"{device} cannot be measured: {status_of(err)[1]}.",
            hint="Nothing was measured; what an earlier call measured is kept.",
        ) from err


def _collectives(folder: SampleFolder, *, device: str, budget_s: float, say: Say) -> tuple[int, list[str]]:
    """Collectives of as many ranks as there is room for; those measured before again, where the time is worth it."""
    known = {int(k.dims(s.kernel)["world_size"]) for s in folder.collective_samples()}  # type: ignore[arg-type]
    seconds = COLLECTIVE_SHARE * budget_s
    sizes = [n for n in worlds(device) if n not in known or seconds >= SHORTEST_COLLECTIVES_S]
    done, refused = 0, list[str]()
    for size in sizes:
        say(f"collectives of {size} ranks")
        try:
            # All or none of a world: a part of one would pass for the whole.
            found = list(measure_collectives(size, device=device, seconds=seconds / len(sizes)))
        except UnsupportedError as err:
            refused.append(err.message)
            continue
        for sample in found:
            folder.add(sample)
        done += len(found)
    return done, refused


def _loops(
    folder: SampleFolder,
    designs: Sequence[NamedDesign],
    here: dict[str, Any],
    *,
    device: str,
    until: float,
    say: Say,
) -> tuple[int, list[str]]:
    """Measure loops that have no sample yet, then those with the fewest again: a machine is not the same at all times.

    Each gets an equal share of the time that is left.
    """
    samples = read_samples(folder.loops) if folder.loops.exists() else []
    before, refused = len(samples), []
    todo = _loops_to_measure(designs, samples, seconds=until - time.perf_counter())
    for number, named in enumerate(todo):
        left = until - time.perf_counter()
        if left <= 0 and len({s.name for s in samples}) >= FEWEST_LOOPS:
            break
        say(f"training loop {named.name}")
        sample = _loop(folder, named, device=device, seconds=max(left, 0.0) / (len(todo) - number))
        if sample.iteration is None:
            refused.append(f"{named.name}: {sample.detail}")
        samples.append(sample)
        write_samples(folder.loops, samples, environment=here)
    return len(samples) - before, refused


def _loops_to_measure(
    designs: Sequence[NamedDesign], samples: Sequence[DesignSample], *, seconds: float
) -> list[NamedDesign]:
    """All that are missing, and as many of the others as the time suffices for."""
    counts = Counter(s.name for s in samples)
    refused = {s.name for s in samples if s.iteration is None}
    missing = [d for d in designs if d.name not in counts]
    known = sorted(
        (d for d in designs if d.name in counts and d.name not in refused), key=lambda d: counts[d.name]
    )
    return [*missing, *known[: max(0, int(seconds / SHORTEST_LOOP_S) - len(missing))]]


def in_any_order(*lists: Sequence[NamedDesign]) -> list[NamedDesign]:
    """All designs in an order of which any beginning holds its share of each list, drawn from all along it."""
    placed = []
    for designs in lists:
        spread = [d for stride in range(3) for d in designs[stride::3]]
        placed += [((i + 0.5) / len(spread), d) for i, d in enumerate(spread)]
    return [d for _, d in sorted(placed, key=lambda pair: pair[0])]


def _loop(folder: SampleFolder, named: NamedDesign, *, device: str, seconds: float) -> DesignSample:
    design, notes = named.design, tuple[str, ...]()
    try:
        iteration = measure_iteration(design, device=device, min_iterations=20, max_seconds=seconds * 0.6)
    except (PerfcoreError, RuntimeError, MemoryError) as err:
        if breaks_the_device(err):
            raise UnsupportedError(f"The device failed: {first_line(err)}.", hint=_GO_ON) from err
        return DesignSample(named.name, design, Status.UNSUPPORTED, first_line(err))
    # On a CPU a trace cannot tell an op's host time from its kernels'.
    if device.startswith("cuda") and named.name.startswith("host"):
        notes = _traced(folder, named, device=device)
    return DesignSample(named.name, design, Status.OK, iteration=iteration, notes=(*iteration.notes, *notes))


def _traced(folder: SampleFolder, named: NamedDesign, *, device: str) -> tuple[str, ...]:
    """Keep the loop's trace; without it the loop's time is still good."""
    path = folder.traces / f"{named.name}.json.gz"
    try:
        record_trace(named.design, path, device=device)
    except RuntimeError as err:
        return (f"no trace: {first_line(err)}",)
    except OSError as err:
        path.unlink(missing_ok=True)
        raise cannot_write(path, err) from None
    return ()


def all_cases(device: str) -> list[Case]:
    """Every kernel that a sweep of this device may measure."""
    cuda = device.startswith("cuda")
    limits = CUDA_LIMITS if cuda else CPU_LIMITS
    tf32 = cuda and torch.cuda.get_device_capability(device)[0] >= 8  # Ampere brought it
    return [*dense_cases(limits, tf32=tf32), *table_cases(limits), *copy_cases(limits, on_cuda=cuda)]


def _sweep(folder: SampleFolder, *, device: str, begin: float, budget_s: float, say: Say) -> Collected:
    cases = all_cases(device)
    plan = Plan([c.kernel for c in cases])
    for known in folder.samples():
        plan.learn(known.kernel, known.timing.median_us)
    cache = cache_bytes(device)
    source = Source(device, cache_bytes=cache, seed=time.time_ns() % 2**32)
    case_s = min(LONGEST_CASE_S, max(SHORTEST_CASE_S, budget_s * CASE_SHARE))
    done, noisy, refused, uncaptured = 0, 0, list[str](), set[type]()
    while not (done and plan.has_every_kind) or time.perf_counter() - begin < budget_s - case_s:
        index = plan.next()
        if index is None:
            break
        try:
            timings, why = _timed(cases[index], source, cache=cache, seconds=case_s, uncaptured=uncaptured)
        except DeviceFailure as err:
            return Collected(done, 0, noisy, tuple(refused), stopped=str(err))
        for timing in timings:
            folder.add(KernelSample(cases[index].kernel, timing))
            done, noisy = done + 1, noisy + (timing.spread > NOISY)
        if why:
            refused.append(f"{type(cases[index].kernel).__name__}: {why}")
            plan.refuse(index)
        else:
            plan.learn(cases[index].kernel, timings[-1].median_us, index=index)
        if done % FORGET_EVERY < len(timings):
            source.forget()
            say(f"{done // 2} kernels, {time.perf_counter() - begin:.0f} of {budget_s:g} s")
    return Collected(done, 0, noisy, tuple(refused))


class DeviceFailure(Exception):  # noqa: N818 - it says what happened
    """After it, the process gets nothing but errors from its device."""


def _timed(
    case: Case, source: Source, *, cache: float, seconds: float, uncaptured: set[type]
) -> tuple[list[Timing], str]:
    """Warm and cold timings, and why there are none.

    Raises:
        DeviceFailure: nothing more can be measured by this process.
    """
    timings: list[Timing] = []
    try:
        with tf32_products(allowed=getattr(case.kernel, "dtype", None) is DType.TF32):
            timings += time_case(case, source, cache_bytes=cache, max_seconds=seconds, uncaptured=uncaptured)
    except (PerfcoreError, RuntimeError, MemoryError, AttributeError) as err:
        if breaks_the_device(err):
            raise DeviceFailure(f"{type(case.kernel).__name__}: {first_line(err)}") from err
        source.forget()
        if source.device.startswith("cuda"):
            torch.cuda.empty_cache()
        return timings, first_line(err)
    return timings, ""


def _check_same_device(folder: SampleFolder, here: dict[str, Any]) -> None:
    if not folder.kernels.exists():
        return
    for there in folder.environments():
        if "device" in there and (there["device"], there["threads"]) != (here["device"], here["threads"]):
            raise DesignError(
                f"{folder.path} holds samples of {there['device']} with {there['threads']} threads, "
                f"but this is {here['device']} with {here['threads']}.",
                hint="Name another folder with --out.",
            )


def system_to_dict(system: Any) -> dict[str, Any]:
    """Plain values of the measured device and its machine."""
    from dataclasses import asdict

    node = {k: v for k, v in asdict(system.node).items() if k != "input_samples_per_s"}
    return {"device": asdict(system.device), "node": node}
