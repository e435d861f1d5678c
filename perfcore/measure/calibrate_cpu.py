"""A quick calibration of this machine's CPU: a few shapes of each kind of kernel, and the host time per op."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import torch

from perfcore.design.design import Design
from perfcore.design.hardware import System
from perfcore.design.model import EmbeddingTable, Interaction, Model
from perfcore.design.sharding import ShardingPlan
from perfcore.design.training import EmbeddingFusion, Fusion, Optimizer, OptimizerFusion, Training
from perfcore.graph.ops import WorkloadGraph
from perfcore.measure.cpu import CpuProfile, Fit, fit, kernels_us, nonnegative_least_squares, ops_by_phase
from perfcore.measure.cpu_benches import benches
from perfcore.measure.cpu_work import work_of
from perfcore.measure.iteration import measure_iteration
from perfcore.units import US_PER_S

FEWEST_CALLS = 3


def calibrate(
    system: System, graph_of: Callable[[Design], WorkloadGraph], *, seconds: float = 15.0
) -> CpuProfile:
    """Calibrate within about `seconds`, two thirds of them on kernels.

    Args:
        system: any; a design must name one.
        graph_of: builds a design's graph.
        seconds: time to spend.
    """
    fits = calibrate_kernels(seconds=seconds * 2 / 3)
    designs = tiny_designs(system)
    graphs = [graph_of(d) for d in designs]
    measured = [
        measure_iteration(d, min_iterations=20, max_seconds=seconds / 3 / len(designs)).median_us
        for d in designs
    ]
    overheads, default = fit_overheads(graphs, measured, fits)
    return CpuProfile(fits, overheads, default)


def tiny_designs(system: System) -> list[Design]:
    """Designs so small that their iterations are host time: every interaction, depths and optimizers mixed."""
    designs = []
    for position, (interaction, optimizer, fusion) in enumerate(
        product(
            Interaction,
            (Optimizer.SGD, Optimizer.ADAGRAD),
            (OptimizerFusion.FOR_LOOP, OptimizerFusion.FOREACH),
        )
    ):
        tables = tuple(EmbeddingTable(f"t{i}", 100) for i in range(2 + 5 * (position % 3)))
        hidden = (8,) * (1 + position % 4)
        model = Model(4, tables, 8, hidden, hidden, interaction, cross_layers=2, cross_rank=4)
        designs.append(
            Design(
                model,
                Training(4, optimizer=optimizer),
                Fusion(EmbeddingFusion.PER_TABLE, optimizer=fusion),
                ShardingPlan.on_one_rank(model),
                replace(system, world_size=1),
            )
        )
    return designs


def calibrate_kernels(*, seconds: float) -> dict[str, Fit]:
    """Time a grid of shapes of every kind and fit each; every shape gets an equal share of the time."""
    timed = list(benches(torch.Generator().manual_seed(0)))
    samples: dict[str, list[tuple[np.ndarray, float]]] = {}
    for bench in timed:
        work = work_of(bench.kernel)
        us = _time_us(bench.call, seconds=seconds / len(timed))
        samples.setdefault(work.kind, []).append((work.amounts.reshape(-1), us))
    return {
        kind: fit(np.stack([w for w, _ in rows]), np.array([us for _, us in rows]))
        for kind, rows in samples.items()
    }


def fit_overheads(
    graphs: Sequence[WorkloadGraph], measured_us: Sequence[float], fits: Mapping[str, Fit]
) -> tuple[dict[str, float], float]:
    """Host time per op by phase, and over all phases, from what iterations take beside their kernels."""
    counts = [ops_by_phase(g) for g in graphs]
    beside = np.array([us - kernels_us(g, fits) for g, us in zip(graphs, measured_us, strict=True)])
    phases = sorted({p for c in counts for p in c})
    table = np.array([[c.get(p, 0) for p in phases] for c in counts], dtype=np.float64)
    weights = nonnegative_least_squares(table / np.array(measured_us)[:, None], beside / measured_us)
    mean = max(0.0, float(beside.sum() / table.sum()))
    return dict(zip(phases, weights.tolist(), strict=True)), mean


def _time_us(call: Callable[[], object], *, seconds: float) -> float:
    """Median time of one call; short calls are timed in groups that outlast the clock's grain."""
    call()
    begin = time.perf_counter()
    call()
    once = time.perf_counter() - begin
    group = max(1, int(1e-4 / max(once, 1e-7)))
    times: list[float] = []
    end = begin + seconds
    while len(times) < FEWEST_CALLS or time.perf_counter() < end:
        start = time.perf_counter()
        for _ in range(group):
            call()
        times.append((time.perf_counter() - start) / group)
    return statistics.median(times) * US_PER_S
