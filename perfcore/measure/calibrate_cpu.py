"""A quick calibration of this machine's CPU: a few shapes of each kind of kernel, and small training loops."""

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
from perfcore.measure.iteration import host_clock, measure_iteration
from perfcore.units import US_PER_S

FEWEST_GROUPS = 3
SHORTEST_S = 1e-4
SCALE_PRIOR = 0.1


def calibrate(
    system: System, graph_of: Callable[[Design], WorkloadGraph], *, seconds: float = 15.0
) -> CpuProfile:
    """Calibrate within about `seconds`, half of them on kernels, half on training loops.

    Args:
        system: any; a design must name one.
        graph_of: builds a design's graph.
        seconds: time to spend.
    """
    fits = calibrate_kernels(seconds=seconds / 2)
    designs = [*tiny_designs(system), *middle_designs(system)]
    graphs = [graph_of(d) for d in designs]
    measured = [
        measure_iteration(d, min_iterations=5, max_seconds=seconds / 2 / len(designs)).median_us
        for d in designs
    ]
    return fit_profile(graphs, measured, fits)


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
        designs.append(_design(system, model, Training(4, optimizer=optimizer), fusion))
    return designs


def middle_designs(system: System) -> list[Design]:
    """Designs whose iterations are kernel time, each of another kind."""
    return [
        _design(
            system,
            Model(
                16,
                tuple(EmbeddingTable(f"t{i}", rows, pooling) for i in range(count)),
                dim,
                hidden,
                hidden,
                kind,
            ),
            Training(batch),
        )
        for batch, count, rows, pooling, dim, hidden, kind in (
            (512, 4, 1_000, 1.0, 32, (384, 384), Interaction.DOT),
            (128, 4, 1_000, 1.0, 64, (640,), Interaction.CAT),
            (1024, 12, 30_000, 1.0, 16, (32,), Interaction.DOT),
            (256, 12, 100_000, 8.0, 48, (32,), Interaction.CAT),
            (384, 20, 5_000, 1.0, 48, (64,), Interaction.DOT),
            (256, 6, 10_000, 2.0, 32, (160,), Interaction.DCN_V2),
        )
    ]


def _design(
    system: System, model: Model, training: Training, optimizer: OptimizerFusion = OptimizerFusion.FOREACH
) -> Design:
    fusion = Fusion(EmbeddingFusion.PER_TABLE, optimizer=optimizer)
    return Design(model, training, fusion, ShardingPlan.on_one_rank(model), replace(system, world_size=1))


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


def fit_profile(
    graphs: Sequence[WorkloadGraph], measured_us: Sequence[float], fits: Mapping[str, Fit]
) -> CpuProfile:
    """Host time per op by phase, and the slow-down of kernels by group, from measured iterations.

    Relative errors are made small; each slow-down is drawn to 1 with the weight of `SCALE_PRIOR` iterations.
    """
    measured = np.asarray(measured_us, dtype=np.float64)
    kernels, counts = [kernels_us(g, fits) for g in graphs], [ops_by_phase(g) for g in graphs]
    groups, phases = list(kernels[0]), sorted({p for c in counts for p in c})
    in_kernels = np.array([[us[g] for g in groups] for us in kernels])
    in_ops = np.array([[c.get(p, 0) for p in phases] for c in counts], dtype=np.float64)
    prior = SCALE_PRIOR * np.eye(len(groups), len(groups) + len(phases))
    table = np.vstack([np.hstack([in_kernels, in_ops]) / measured[:, None], prior])
    weights = nonnegative_least_squares(table, np.append(np.ones(len(graphs)), [SCALE_PRIOR] * len(groups)))
    scales, overheads = weights[: len(groups)], weights[len(groups) :]
    return CpuProfile(
        fits,
        dict(zip(groups, scales.tolist(), strict=True)),
        dict(zip(phases, overheads.tolist(), strict=True)),
        default_overhead_us=float((in_ops @ overheads).sum() / in_ops.sum()),
    )


def _time_us(call: Callable[[], object], *, seconds: float) -> float:
    """Median time of one call; short calls are timed in groups that outlast the clock's grain, long ones once."""
    call()
    _, clock = host_clock()
    begin, start = time.perf_counter(), clock()
    call()
    once = clock() - start
    if once > seconds:
        return once * US_PER_S
    group = max(1, int(SHORTEST_S / max(once, 1e-7)))
    times: list[float] = []
    while len(times) < FEWEST_GROUPS or time.perf_counter() - begin < seconds:
        start = clock()
        for _ in range(group):
            call()
        times.append((clock() - start) / group)
    return statistics.median(times) * US_PER_S
