"""Bounds with ranks told apart: never above the best plan of a class, and above those that take averages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from design_cases import DEVICE, NODE, every_plan, predictor, random_design, times_of

from dse.placement.design.bound import ClassBound
from dse.placement.design.classes import class_bounds, refine
from dse.placement.design.options import Options, options_of
from dse.placement.design.packing import PackedProgram
from dse.placement.design.probing import shard_costs
from perfcore.design.design import Design
from perfcore.design.hardware import System
from perfcore.design.model import EmbeddingTable, Interaction, Model
from perfcore.design.sharding import ShardingPlan, ShardingType, TableSharding
from perfcore.design.training import Fusion, Training
from perfcore.predictor import Predictor

ROUNDING = 1e-9


def bounds_of(options: Options, p: Predictor) -> list[ClassBound]:
    overheads, ranks = p.profile.overheads, options.design.system.world_size
    costs, everything = shard_costs(options, p.cost, overheads), np.full(ranks, 1e15)
    bounds = class_bounds(options, costs, p.cost, overheads, capacity_bytes=everything)
    refine(bounds, upper_us=np.inf, seconds_left=lambda: 1.0)
    return bounds


def packed(design: Design, p: Predictor) -> Iterator[tuple[float, float, float]]:
    """For each class its bound by averages and with ranks told apart, and the least time of its plans."""
    options = options_of(design)
    plans, best = every_plan(options), dict[tuple[int, ...], float]()
    for plan, us in zip(plans, times_of(design, plans, p).tolist(), strict=True):
        chosen = options.chosen(plan)
        assert chosen is not None
        kinds = tuple(sorted(set(options.flag[chosen].tolist())))
        best[kinds] = min(best.get(kinds, np.inf), us)
    upper_us = 1.3 * min(best.values())
    for bound in bounds_of(options, p):
        if best.get(bound.kinds, np.inf) < upper_us:
            before = bound.lower_us
            while bound.pack(upper_us, time_limit_s=10.0):
                pass
            yield before, bound.lower_us, best[bound.kinds]


@pytest.mark.parametrize("single_places", [8, 1])
@pytest.mark.parametrize(
    ("count", "ranks", "tables", "gpus"),
    [(4, 2, 2, 8), (1, 2, 3, 8), (1, 4, 2, 8), (2, 2, 2, 1), (1, 4, 2, 2)],
    ids=["2 ranks", "3 tables", "4 ranks", "2 machines", "2 machines of 2"],
)
def test_packed_bounds_are_never_above_the_best_of_all_plans(
    count: int, ranks: int, tables: int, gpus: int, single_places: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dse.placement.design.packing.SINGLE_PLACES", single_places)
    p, seen = predictor(gpus), 0
    for seed in range(count):
        design = random_design(np.random.default_rng(seed), ranks=ranks, tables=tables, gpus=gpus)
        for before, after, best in packed(design, p):
            assert before <= after <= best * (1 + ROUNDING), seed
            seen += 1
    assert seen >= count


def test_packed_bounds_hold_on_slower_ranks() -> None:
    p = predictor()
    for seed in range(3):
        base = random_design(np.random.default_rng(seed), ranks=2, tables=2)
        for _, after, best in packed(replace(base, system=replace(base.system, slowness=(1.0, 1.7))), p):
            assert after <= best * (1 + ROUNDING)


def test_five_equal_tables_on_four_ranks_put_two_on_one() -> None:
    """Averages know of five quarters of a table, packing of two whole ones."""
    p = predictor()
    tables = tuple(EmbeddingTable(f"t{i}", 5_000_000, 40.0) for i in range(5))
    model = Model(13, tables, 64, (64,), (64,), Interaction.DOT)
    plan = ShardingPlan(
        tuple(TableSharding(t.name, ShardingType.TABLE_WISE, (i % 4,)) for i, t in enumerate(tables))
    )
    design = Design(model, Training(65536), Fusion(), plan, System(DEVICE, NODE, 4))
    options = options_of(design)
    whole = options.restricted(np.array([o.type is ShardingType.TABLE_WISE for o in options.options]))
    (bound,) = bounds_of(whole, p)
    before, best = bound.lower_us, p.iteration_time_us(design)
    while bound.pack(1.2 * best, time_limit_s=10.0):
        pass
    assert before < 0.9 * best
    assert 0.99 * best < bound.lower_us <= best * (1 + ROUNDING)


def test_a_program_too_large_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dse.placement.design.packing.MOST_COLUMNS", 3)
    design = random_design(np.random.default_rng(1), ranks=2, tables=2)
    bound = bounds_of(options_of(design), predictor())[0]
    assert PackedProgram(bound, bound.cuts).least(3, below_us=1e9, time_limit_s=1.0) is None
    assert bound.pack(1e9, time_limit_s=1.0) is False
