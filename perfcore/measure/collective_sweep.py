"""Times collectives among processes of this machine, from the moment at which the last rank has called.

The calls are those that training makes (`World`), outputs are new memory as they are there. On a CPU the ranks share
its cores and its memory; moments of different processes compare, since all read one monotonic clock.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from perfcore.errors import UnsupportedError
from perfcore.graph.kernels import Collective, CollectiveKind
from perfcore.measure.host import cores
from perfcore.measure.kernels import FEWEST_RUNS, MOST_RUNS, Timing
from perfcore.measure.processes import run_ranks
from perfcore.measure.samples import KernelSample
from perfcore.measure.world import Pending, World, joined
from perfcore.units import US_PER_MS, US_PER_S

MOST_RANKS = 8
SMALLEST_BYTES, STEP = 256, 4
LARGEST_BYTES = {"cpu": 2**26, "cuda": 2**30}
QUEUED_CALLS = 10  # on a GPU, between two events
START_S = 60.0  # for interpreters to start and to meet
FP32_BYTES = 4


def worlds(device: str) -> list[int]:
    """Numbers of ranks that this machine has room for: 2, 4, 8; of a GPU that was named apart from the others none."""
    if device.startswith("cuda") and device not in ("cuda", "cuda:0"):
        return []
    room = torch.cuda.device_count() if device.startswith("cuda") else cores() // torch.get_num_threads()
    return [n for n in (2, 4, 8) if n <= min(room, MOST_RANKS)]


def measure_collectives(size: int, *, device: str, seconds: float) -> Iterator[KernelSample]:
    """Every kind at every size among `size` ranks, in about `seconds`.

    Raises:
        UnsupportedError: the processes did not end well.
    """
    with tempfile.TemporaryDirectory() as folder:
        request = {
            "size": size,
            "device": "cuda" if device.startswith("cuda") else "cpu",
            "threads": torch.get_num_threads(),
            "seconds": seconds,
            "store": str(Path(folder) / "store"),
        }
        limit = START_S + 10 * seconds
        ended = run_ranks("collectives", [request | {"rank": r} for r in range(size)], time_limit_s=limit)
    if ended.timed_out or ended.crash:
        why = ended.crash or f"not done in {limit:.0f} s"
        raise UnsupportedError(f"Collectives of {size} ranks could not be measured: {why}.")
    for kind, size_bytes, runs in ended.answers[0]["timings"]:
        kernel = Collective(CollectiveKind(kind), float(size_bytes), float(size), float(size))
        method = "events" if request["device"] == "cuda" else "wall"
        yield KernelSample(kernel, Timing(tuple(runs), "cold", method))


def sweep_here(request: Mapping[str, Any]) -> dict[str, Any]:
    """Serve a request of `measure_collectives` in this process, which is one of its ranks."""
    torch.set_num_threads(request["threads"])
    largest = LARGEST_BYTES[request["device"]]
    sizes = [n for n in (SMALLEST_BYTES * STEP**i for i in range(20)) if n <= largest]
    points = list(product(CollectiveKind, sizes))
    with joined(
        rank=request["rank"],
        size=request["size"],
        device=request["device"],
        store=Path(request["store"]),
        patience_s=START_S,
    ) as world:
        timer = _device_us if world.overlaps else _host_us
        timings = []
        for kind, size_bytes in points:
            call = _call(kind, size_bytes, world)
            call().wait()
            runs = _runs(partial(timer, call, world), world, request["seconds"] / len(points))
            timings.append([kind.value, size_bytes, runs])
    return {"timings": timings}


def _runs(timed: Callable[[], float], world: World, seconds: float) -> list[float]:
    """Repeated until the time is up, on all ranks alike."""
    begin, runs = time.perf_counter(), list[float]()
    while len(runs) < MOST_RUNS:
        runs.append(timed())
        (spent,) = world.largest([time.perf_counter() - begin])
        if len(runs) >= FEWEST_RUNS and spent > seconds:
            break
    return runs


def _call(kind: CollectiveKind, size_bytes: int, world: World) -> Callable[[], Pending]:
    """The call of a collective of that size, in the convention of `Collective`."""
    whole = size_bytes // FP32_BYTES // world.size
    x = torch.zeros(whole * world.size, device=world.device)
    match kind:
        case CollectiveKind.ALL_TO_ALL:
            split = [whole] * world.size
            return lambda: world.all_to_all(x, split, split)
        case CollectiveKind.ALL_GATHER:
            return lambda: world.all_gather(x[:whole])
        case CollectiveKind.REDUCE_SCATTER:
            return lambda: world.reduce_scatter(x)
        case CollectiveKind.ALL_REDUCE:
            return lambda: world.all_reduce(x)


def _host_us(call: Callable[[], Pending], world: World) -> float:
    """From the last rank's call to the last rank's end."""
    world.barrier()
    start = time.perf_counter()
    call().wait()
    last_start, last_end = world.largest([start, time.perf_counter()])
    return (last_end - last_start) * US_PER_S


def _device_us(call: Callable[[], Pending], world: World) -> float:
    """One of several that follow each other on the device; the ranks' mean is the same but for noise."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    world.barrier()
    start.record()
    for _ in range(QUEUED_CALLS):
        call().wait()
    end.record()
    end.synchronize()
    (us,) = world.largest([start.elapsed_time(end) * US_PER_MS / QUEUED_CALLS])
    return us
