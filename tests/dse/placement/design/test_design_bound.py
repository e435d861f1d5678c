from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from design_cases import every_plan, predictor, random_design, times_of

from dse.placement.design.bound import ClassBound
from dse.placement.design.classes import class_bounds, refine
from dse.placement.design.gap import DesignBounds
from dse.placement.design.options import options_of
from dse.placement.design.probing import shard_costs
from dse.placement.design.problem import rank_loads, values_us
from dse.placement.design.program import under_hull
from dse.placement.design.relaxed import Role, transfer_us
from dse.placement.solver.problem import Assignment
from perfcore.design.design import Design
from perfcore.design.training import Communication, EmbeddingFusion, Fusion
from perfcore.predictor import Predictor

ROUNDING = 1e-9


def bounds_of(design: Design, p: Predictor) -> list[ClassBound]:
    options = options_of(design)
    overheads = p.profile.overheads
    costs = shard_costs(options, p.cost, overheads)
    everything = np.full(design.system.world_size, 1e15)
    return class_bounds(options, costs, p.cost, overheads, capacity_bytes=everything)


def gap_of(design: Design, p: Predictor) -> float:
    """By how much the best of all plans exceeds the bound, in percent; negative where the bound is wrong."""
    best = float(times_of(design, every_plan(options_of(design)), p).min())
    bounds = bounds_of(design, p)
    refine(bounds, upper_us=np.inf, seconds_left=lambda: 1.0)
    return 100.0 * (best / min(b.lower_us for b in bounds) - 1.0)


def gaps(first: int, count: int, *, ranks: int, tables: int, gpus: int) -> Iterator[float]:
    p = predictor(gpus)
    for seed in range(first, first + count):
        design = random_design(np.random.default_rng(seed), ranks=ranks, tables=tables, gpus=gpus)
        gap = gap_of(design, p)
        assert gap >= -100 * ROUNDING, f"seed {seed}, {ranks} ranks, {tables} tables, {gpus} in a machine"
        yield gap


@pytest.mark.parametrize(
    ("count", "ranks", "tables", "gpus"),
    [(25, 2, 2, 8), (2, 2, 3, 8), (2, 4, 2, 8), (10, 2, 2, 1), (2, 4, 2, 2)],
    ids=["2 ranks", "3 tables", "4 ranks", "2 machines", "2 machines of 2"],
)
def test_the_bound_is_never_above_the_best_of_all_plans(
    count: int, ranks: int, tables: int, gpus: int
) -> None:
    found = list(gaps(0, count, ranks=ranks, tables=tables, gpus=gpus))
    assert np.median(found) < 2.0  # and it is no idle bound


@pytest.mark.parametrize("communication", Communication)
@pytest.mark.parametrize("embedding", EmbeddingFusion)
def test_every_cut_of_every_class_holds_for_every_plan(
    communication: Communication, embedding: EmbeddingFusion
) -> None:
    """Not the least time alone: each plan's own time is at least what the cuts of its class say of its loads."""
    p = predictor()
    base = random_design(np.random.default_rng(7), ranks=2, tables=2)
    fusion = Fusion(embedding=embedding, communication=communication)
    design = replace(base, fusion=fusion)
    options = options_of(design)
    plans = every_plan(options)
    times_us = times_of(design, plans, p)
    checked = 0
    for bound in bounds_of(design, p):
        refine([bound], upper_us=np.inf, seconds_left=lambda: 1.0)
        for plan, time_us in zip(plans, times_us, strict=True):
            chosen = bound.options.chosen(plan)
            if chosen is None or set(bound.options.flag[chosen]) != set(bound.kinds):
                continue
            if any(len(set(t.ranks)) < len(t.ranks) for t in plan.tables):
                continue  # pieces that share a rank cost less than their sum
            loads = rank_loads(bound, Assignment(chosen, tuple(t.ranks for t in plan.tables)))
            for cut in bound.cuts:
                said = cut.constant_us + sum(
                    w * (loads.each[:, list(key)].sum(axis=1) + loads.everywhere[list(key)].sum()).max()
                    for w, key in cut.segments
                )
                values, _ = values_us(bound, loads)
                said += sum(w * values[v] for w, v in cut.transfers)
                assert time_us >= said * (1 - ROUNDING)
                checked += 1
    assert checked > 20


def test_hulls_lie_under_their_collectives_and_bend_upwards() -> None:
    p = predictor()
    design = random_design(np.random.default_rng(3), ranks=4, tables=4)
    variables = [v for b in bounds_of(design, p) for v in b.program.variables if v.role is not Role.RANK]
    assert variables
    for variable in variables:
        for low, high in ((0.0, 1e9), (1e4, 1e6), (5e6, 8e9)):
            x, y = under_hull(variable, low, high, p.cost)
            at = np.geomspace(max(low, 1.0), high, 997)
            assert (np.interp(at, x, y) <= transfer_us(variable, at, p.cost) * (1 + ROUNDING)).all()
            assert (np.diff(np.diff(y) / np.diff(x)) >= -ROUNDING).all()


def test_too_little_memory_leaves_no_class() -> None:
    p = predictor()
    design = random_design(np.random.default_rng(1), ranks=2, tables=2)
    options = options_of(design)
    costs = shard_costs(options, p.cost, p.profile.overheads)
    assert class_bounds(options, costs, p.cost, p.profile.overheads, capacity_bytes=np.full(2, -1.0)) == []


def test_designs_whose_gradients_fill_other_buckets_do_not_raise_each_others_bounds() -> None:
    p = predictor()
    base = random_design(np.random.default_rng(5), ranks=4, tables=4)
    fusion = Fusion(embedding=EmbeddingFusion.TABLE_BATCHED, communication=Communication.OVERLAPPED)
    base = replace(base, fusion=fusion)
    wide, narrow = (
        replace(base, model=replace(base.model, bottom_hidden=(512,), top_hidden=(w,))) for w in (4096, 128)
    )
    unknown_us = np.full(2, 1e9)
    (alone_us,) = DesignBounds(p).lower_us([narrow], unknown_us[:1])
    for together in ([wide, narrow], [narrow, wide]):
        found = DesignBounds(p).lower_us(together, unknown_us)[together.index(narrow)]
        assert found <= alone_us * (1 + ROUNDING)


def test_the_bound_is_the_same_every_time() -> None:
    p = predictor()
    design = random_design(np.random.default_rng(5), ranks=4, tables=6)
    assert len({tuple(b.lower_us for b in bounds_of(design, p)) for _ in range(2)}) == 1


if __name__ == "__main__":  # more of them: python tests/dse/placement/design/test_design_bound.py COUNT
    wanted = int(sys.argv[1])
    for shape in ((2, 2, 8), (2, 3, 8), (2, 2, 1)):
        ranks, tables, gpus = shape
        many = np.array(list(gaps(1000, wanted, ranks=ranks, tables=tables, gpus=gpus)))
        print(shape, len(many), f"gap: median {np.median(many):.3g} %, most {many.max():.3g} %")  # noqa: T201
