"""Bounds by ranges of bytes: never above the best plan of a class, for any of the designs that share its steps."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from design_cases import DEVICE, NODE, every_plan, predictor, random_design, times_of
from hypothesis import given, settings
from hypothesis import strategies as st

from dse.placement.design.byte_tree import ByteTree, weights
from dse.placement.design.classes import class_bounds, refine
from dse.placement.design.gap import DesignBounds
from dse.placement.design.options import Options, options_of
from dse.placement.design.probing import shard_costs
from dse.placement.design.program import hull_of_multiples
from dse.placement.design.relaxed import Role, transfer_us
from perfcore.design.design import Design
from perfcore.design.hardware import System
from perfcore.design.model import EmbeddingTable, Interaction, Model
from perfcore.design.sharding import ShardingPlan, ShardingType, TableSharding
from perfcore.design.training import Fusion, Training
from perfcore.predictor import Predictor

ROUNDING = 1e-9


def best_by_kinds(options: Options, p: Predictor) -> dict[tuple[int, ...], float]:
    plans, best = every_plan(options), dict[tuple[int, ...], float]()
    for plan, us in zip(plans, times_of(options.design, plans, p).tolist(), strict=True):
        chosen = options.chosen(plan)
        assert chosen is not None
        kinds = tuple(sorted(set(options.flag[chosen].tolist())))
        best[kinds] = min(best.get(kinds, np.inf), us)
    return best


def closed_in(design: Design, p: Predictor, programs: int) -> Iterator[tuple[float, float, float]]:
    """For each class its bound before and after, and the least time of its plans."""
    options = options_of(design)
    best, costs = best_by_kinds(options, p), shard_costs(options, p.cost, p.profile.overheads)
    everything = np.full(design.system.world_size, 1e15)
    bounds = class_bounds(options, costs, p.cost, p.profile.overheads, capacity_bytes=everything)
    refine(bounds, upper_us=np.inf, seconds_left=lambda: 1.0)
    for bound in bounds:
        if bound.kinds in best:
            before = bound.lower_us
            bound.close_in(1.5 * best[bound.kinds], programs=programs, seconds_left=lambda: 1.0)
            yield before, bound.lower_us, best[bound.kinds]


@pytest.mark.parametrize(
    ("count", "ranks", "tables", "gpus"),
    [(8, 2, 2, 8), (1, 2, 3, 8), (1, 4, 2, 8), (3, 2, 2, 1), (1, 4, 2, 2)],
    ids=["2 ranks", "3 tables", "4 ranks", "2 machines", "2 machines of 2"],
)
def test_bounds_by_bytes_are_never_above_the_best_of_all_plans(
    count: int, ranks: int, tables: int, gpus: int
) -> None:
    p, gaps = predictor(gpus), []
    for seed in range(count):
        design = random_design(np.random.default_rng(100 + seed), ranks=ranks, tables=tables, gpus=gpus)
        for before, after, best in closed_in(design, p, 40):
            assert before <= after <= best * (1 + ROUNDING), seed
            gaps.append((best / after, best / before))
    after, before = np.median(gaps, axis=0)
    assert after <= before


def test_bounds_by_bytes_hold_on_slower_ranks() -> None:
    p = predictor()
    for seed in range(3):
        base = random_design(np.random.default_rng(seed), ranks=2, tables=2)
        slow = replace(base, system=replace(base.system, slowness=(1.0, 1.7)))
        for _, after, best in closed_in(slow, p, 20):
            assert after <= best * (1 + ROUNDING)


def group(seed: int, ranks: int, tables: int) -> list[Design]:
    """Designs that differ in the widths of layers alone."""
    rng = np.random.default_rng(seed)
    base = random_design(rng, ranks=ranks, tables=tables)
    widths = [(64, 64), *((int(2 ** rng.integers(4, 12)), int(2 ** rng.integers(4, 13))) for _ in range(3))]
    return [replace(base, model=replace(base.model, bottom_hidden=(a,), top_hidden=(b,))) for a, b in widths]


def group_gaps(seed: int, ranks: int, tables: int, p: Predictor) -> Iterator[float]:
    designs = group(seed, ranks, tables)
    best = np.array([float(times_of(d, every_plan(options_of(d)), p).min()) for d in designs])
    for factor in (1.0, 1.2):
        lower = DesignBounds(p).lower_us(designs, best * factor)
        assert (lower <= best * (1 + ROUNDING)).all(), seed
        yield from 100 * (best / lower - 1)


def test_one_tree_bounds_all_designs_with_the_same_steps() -> None:
    p = predictor()
    gaps = [g for seed in range(6) for g in group_gaps(seed, 2, 2, p)]
    assert np.median(gaps) < 1.0


def test_designs_on_ranks_of_unequal_pace_share_nothing() -> None:
    """What no plan changes is part of their programs' variables, which are of one design."""
    p = predictor()
    wide_first = sorted(group(3, 2, 2), key=lambda d: -sum(d.model.bottom_hidden + d.model.top_hidden))
    slow = [replace(d, system=replace(d.system, slowness=(1.0, 1.5))) for d in wide_first]
    best = np.array([float(times_of(d, every_plan(options_of(d)), p).min()) for d in slow])
    assert (DesignBounds(p).lower_us(slow, 1.2 * best) <= best * (1 + ROUNDING)).all()


def test_the_work_is_counted_and_bounds_are_remembered() -> None:
    p, designs = predictor(), group(2, 4, 2)
    times = p.iteration_times_us(designs)
    bounds = DesignBounds(p)
    first = bounds.lower_us(designs, times)
    np.testing.assert_array_equal(DesignBounds(p).lower_us(designs, times), first)
    np.testing.assert_array_equal(bounds.lower_us(designs[::-1], times[::-1]), first[::-1])
    assert np.isnan(bounds.lower_us(designs, first * 0.5)).all()  # such plans would refute the bounds


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=12), st.integers(0, 20), st.integers(1, 12))
def test_shards_that_fit_together_weigh_one_at_most(sizes: list[int], free: int, k: int) -> None:
    rank = sum(sizes) + free
    assert weights(np.array(sizes), rank, k).sum() <= 1 + ROUNDING


def test_five_equal_tables_on_four_ranks_put_two_on_one() -> None:
    """Averages know of five quarters of a table; that two lie side by side shows in what the ranks send."""
    p = predictor()
    tables = tuple(EmbeddingTable(f"t{i}", 5_000_000, 4.0) for i in range(5))
    plan = ShardingPlan(
        tuple(TableSharding(t.name, ShardingType.TABLE_WISE, (i % 4,)) for i, t in enumerate(tables))
    )
    model = Model(13, tables, 64, (64,), (64,), Interaction.DOT)
    design = Design(model, Training(65536), Fusion(), plan, System(DEVICE, NODE, 4))
    whole = options_of(design)
    whole = whole.restricted(np.array([o.type is ShardingType.TABLE_WISE for o in whole.options]))
    costs, everything = shard_costs(whole, p.cost, p.profile.overheads), np.full(4, 1e15)
    (bound,) = class_bounds(whole, costs, p.cost, p.profile.overheads, capacity_bytes=everything)
    refine([bound], upper_us=np.inf, seconds_left=lambda: 1.0)
    before, best = bound.lower_us, p.iteration_time_us(design)
    bound.close_in(best, seconds_left=lambda: 1.0)
    assert before < bound.lower_us <= best * (1 + ROUNDING)
    tree = ByteTree(bound, 1)
    tree.grow(np.array([best]), programs=20, seconds_left=lambda: 1.0, worth=1e-6)
    units = {v: load.unit * factor for load in tree.loads for v, factor in load.factors.items()}
    assert units
    for v, (least, _) in tree.within(np.array([best * (1 + ROUNDING)])).items():
        assert least >= 2 * units[v] > 0


def test_hulls_of_multiples_lie_under_them() -> None:
    p = predictor()
    design = random_design(np.random.default_rng(3), ranks=4, tables=4)
    options = options_of(design)
    costs, everything = shard_costs(options, p.cost, p.profile.overheads), np.full(4, 1e15)
    bounds = class_bounds(options, costs, p.cost, p.profile.overheads, capacity_bytes=everything)
    variables = [v for b in bounds for v in b.program.variables if v.role is not Role.RANK]
    assert variables
    for variable in variables[:20]:
        for low, unit, count in ((0.0, 4096.0, 9), (4096.0, 4096.0, 0), (1e6, 2e5, 100), (1e5, 1e3, 900)):
            x, y = hull_of_multiples(variable, low, low + unit * count, p.cost, unit=unit)
            sizes = low + unit * np.arange(count + 1.0)
            times = np.where(sizes > 0, transfer_us(variable, sizes, p.cost), 0.0)
            assert (np.interp(sizes, x, y) <= times * (1 + ROUNDING)).all()
            assert (np.diff(np.diff(y) / np.diff(x)) >= -ROUNDING).all()


if __name__ == "__main__":  # more of them: python tests/dse/placement/design/test_design_bytes.py FIRST COUNT
    first, wanted = int(sys.argv[1]), int(sys.argv[2])
    for ranks, tables in ((2, 2), (2, 3), (4, 2)):
        many = [g for s in range(first, first + wanted) for g in group_gaps(s, ranks, tables, predictor())]
        print(ranks, tables, len(many), f"gap: median {np.median(many):.3g} %, most {max(many):.3g} %")  # noqa: T201
    for shape in ((2, 2, 1), (4, 2, 2), (2, 3, 8)):
        p = predictor(shape[2])
        for s in range(first, first + wanted):
            design = random_design(np.random.default_rng(s), ranks=shape[0], tables=shape[1], gpus=shape[2])
            for before, after, best in closed_in(design, p, 60):
                assert before <= after <= best * (1 + ROUNDING), (s, shape)
        print(shape, "hold")  # noqa: T201
