"""Iteration times of a training loop on several ranks: an iteration ends when the last rank has ended it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from itertools import accumulate, cycle, pairwise
from pathlib import Path

import numpy as np
import torch

from perfcore.design.design import Design
from perfcore.design.training import Communication, Launches
from perfcore.errors import UnsupportedError
from perfcore.measure.batch import Batch
from perfcore.measure.iteration import (
    DISTINCT_BATCHES,
    WARM_UP_ITERATIONS,
    IterationSample,
    Step,
    explained,
    marker,
    run_notes,
    step_of,
)
from perfcore.measure.model import make_batch, numerics
from perfcore.measure.peak import MemoryWatch
from perfcore.measure.sharded import build_sharded, sharded_optimizers
from perfcore.measure.world import World

FEWEST_ITERATIONS = 2


def measure_rank(
    design: Design,
    world: World,
    *,
    min_iterations: int = 10,
    max_seconds: float = 10.0,
    seed: int = 0,
    profile: bool = False,
    keep: Path | None = None,
) -> IterationSample:
    """Train a rank's part of the design and time its iterations; all ranks call it, and find the same.

    The number of iterations is settled after the warm-up: at least `min_iterations` and half of `max_seconds`, as
    long as that is within `max_seconds`.

    Raises:
        UnsupportedError: another number of ranks, a placement that is not run, or a captured iteration.
    """
    device = world.device
    if design.fusion.launches is Launches.CUDA_GRAPH and world.overlaps:
        raise UnsupportedError(
            "An iteration of several ranks is not captured in a CUDA graph.",
            hint="Use fusion.launches=eager.",
        )
    watch = MemoryWatch.begin(device)
    with numerics(design):
        model = build_sharded(design, world, seed=seed)
        rng = np.random.default_rng([seed, world.rank])
        batches = [make_batch(design, rng=rng, device=device) for _ in range(DISTINCT_BATCHES)]
        step = step_of(model, sharded_optimizers(model, design), design, batches[0], device=device)
        feed = cycle(batches)
        count = _iterations(
            lambda: step(next(feed)), world, min_iterations=min_iterations, max_seconds=max_seconds
        )
        spacings, loss = _timed(step, feed, world, count)
        peak, added = world.largest([watch.peak_bytes(), watch.added_bytes()])
        profiled = explained(
            lambda: step(next(feed)),
            design,
            device=device,
            median_us=statistics.median(spacings),
            wanted=profile,
            keep=None if keep is None else keep.with_name(f"{keep.name}-rank{world.rank}"),
        )
    return IterationSample(
        tuple(spacings),
        WARM_UP_ITERATIONS,
        int(peak),
        loss,
        "cuda_events" if world.overlaps else "wall",
        (
            *run_notes(design, device=device),
            *_rank_notes(design, world),
            *([profiled.note] if profiled.note else []),
        ),
        ranks=world.size,
        added_memory_bytes=int(added),
        op_us=profiled.op_us,
        device_active_us=profiled.active_us,
    )


def _rank_notes(design: Design, world: World) -> list[str]:
    notes = [f"{world.size} processes that share this machine's cores"] if not world.overlaps else []
    if design.fusion.communication.exchanges_ahead:
        notes.append(
            "every batch exchanged in its own iteration: the pipeline over batches is predicted only"
        )
    if design.fusion.communication is not Communication.SERIAL and not world.overlaps:
        notes.append("every collective waited for at once: on a CPU nothing runs beside the host")
    return notes


def _iterations(step: Callable[[], object], world: World, *, min_iterations: int, max_seconds: float) -> int:
    """Warm up, and settle with all ranks how many iterations are measured."""
    for _ in range(WARM_UP_ITERATIONS - 1):
        step()
    _synchronize(world)
    begin = time.perf_counter()
    step()
    _synchronize(world)
    (seconds,) = world.largest([time.perf_counter() - begin])
    wanted = max(min_iterations, int(max_seconds / 2 / seconds))
    return max(FEWEST_ITERATIONS, min(wanted, int(max_seconds / seconds)))


def _timed(step: Step, feed: Iterator[Batch], world: World, count: int) -> tuple[list[float], float]:
    """Spacings of the moments at which all ranks had ended an iteration (µs), and the mean of the last losses."""
    mark, spacings = marker(world.device, wall=True)
    world.barrier()
    mark()
    loss = torch.zeros(())
    for _ in range(count):
        loss = step(next(feed))
        mark()
    ends = world.largest(list(accumulate(spacings())))
    mean = world.all_reduce(loss.reshape(1).clone()).wait() / world.size
    return [b - a for a, b in pairwise([0.0, *ends])], float(mean)


def _synchronize(world: World) -> None:
    if world.overlaps:
        torch.cuda.synchronize(world.device)
