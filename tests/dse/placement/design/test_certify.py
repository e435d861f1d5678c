from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from design_cases import DEVICE, NODE, every_plan, predictor, random_design, times_of

from dse.errors import NoFeasibleCandidateError
from dse.placement import Planner
from dse.placement.design.certify import plan_design
from dse.placement.design.gap import DesignBounds
from dse.placement.design.options import options_of
from dse.placement.design.plan_time import PlanTimes, spacing_us
from dse.placement.design.probing import shard_costs
from dse.placement.design.problem import DesignProblem
from dse.placement.policy.options import Policy
from dse.table_csv import bundled_tables
from perfcore.design.design import Design
from perfcore.design.hardware import System
from perfcore.design.model import EmbeddingTable, Interaction, Model
from perfcore.design.sharding import ShardingPlan, ShardingType
from perfcore.design.training import EmbeddingFusion, Fusion, Training
from perfcore.graph.dlrm import graph_of
from perfcore.graph.kernels import resolve
from perfcore.memory import memory_of
from perfcore.predictor import Predictor
from perfcore.schedule import compile_steps

ROUNDING = 1e-9


@pytest.fixture(scope="module")
def p() -> Predictor:
    return predictor()


def criteo(ranks: int, *, fusion: Fusion | None = None) -> Design:
    tables = bundled_tables("criteo_terabyte_multihot")
    model = Model(13, tables, 64, (512, 256), (1024, 512), Interaction.DOT)
    on_one = ShardingPlan.on_one_rank(model)
    return Design(model, Training(16384), fusion or Fusion(), on_one, System(DEVICE, NODE, ranks))


@pytest.mark.parametrize("seed", range(8))
def test_small_designs_get_the_best_of_all_plans(p: Predictor, seed: int) -> None:
    design = random_design(np.random.default_rng(seed), ranks=2, tables=2)
    best = float(times_of(design, every_plan(options_of(design)), p).min())
    found = plan_design(design, predictor=p, time_limit_s=5.0)
    assert found.lower_bound_us <= best * (1 + ROUNDING)
    assert best * (1 - ROUNDING) <= found.iteration_time_us <= best * 1.005
    assert found.certified_gap_pct == pytest.approx(
        100 * (found.iteration_time_us / found.lower_bound_us - 1), abs=1e-9
    )
    own = replace(design, sharding=found.plan)
    assert found.iteration_time_us == pytest.approx(p.iteration_time_us(own), rel=ROUNDING)


@pytest.mark.parametrize("embedding", EmbeddingFusion)
def test_a_plan_beats_every_policy_and_says_how_good_it_is(p: Predictor, embedding: EmbeddingFusion) -> None:
    design = criteo(8, fusion=Fusion(embedding=embedding))
    found = plan_design(design, predictor=p, time_limit_s=6.0)
    planner = Planner(p.profile)
    for policy in Policy:
        placed = planner.place(design.model, design.training, design.system, policy, design.fusion)
        own = replace(design, sharding=placed.plan)
        if placed.feasible and not memory_of(own).shortfall_bytes(design.system):
            assert found.iteration_time_us <= p.iteration_time_us(own) * (1 + ROUNDING)
    assert 0 <= found.certified_gap_pct < 12
    assert found.load_us.shape == (8, len(found.events))
    assert (found.hbm_bytes <= found.capacity_bytes).all()
    memory = memory_of(replace(design, sharding=found.plan))
    assert found.total_hbm_bytes == pytest.approx(memory.total, rel=1e-6)


def test_alternatives_are_priced_and_sorted(p: Predictor) -> None:
    design = random_design(np.random.default_rng(4), ranks=4, tables=4)
    found = plan_design(design, predictor=p, time_limit_s=5.0)
    for table, choice in enumerate(found.tables):
        times = [a.iteration_time_us for a in choice.alternatives]
        assert times == sorted(times)
        for other in choice.alternatives:
            assert other.effect_us == pytest.approx(other.iteration_time_us - found.iteration_time_us)
            placed = list(found.plan.tables)
            placed[table] = replace(placed[table], type=other.type, ranks=other.ranks)
            own = replace(design, sharding=ShardingPlan(tuple(placed)))
            if other.priced:
                assert other.iteration_time_us == pytest.approx(p.iteration_time_us(own), rel=ROUNDING)


def test_the_same_seed_gives_the_same_plan(p: Predictor) -> None:
    design = random_design(np.random.default_rng(6), ranks=4, tables=4)
    plans = {plan_design(design, predictor=p, seed=3, time_limit_s=60.0).plan for _ in range(2)}
    assert len(plans) == 1


def test_one_rank_has_one_plan(p: Predictor) -> None:
    design = random_design(np.random.default_rng(2), ranks=1, tables=3)
    found = plan_design(design, predictor=p)
    assert (found.certified_gap_pct, found.proven) == (0.0, True)
    assert found.iteration_time_us == found.lower_bound_us == p.iteration_time_us(design)
    assert sum(t.bytes for t in found.tables) == pytest.approx(float(found.hbm_bytes[0]), rel=1e-6)


def huge(ranks: int) -> Design:
    tables = (EmbeddingTable("small", 100), EmbeddingTable("huge", 10**12))
    model = Model(13, tables, 128, (64,), (64,), Interaction.DOT)
    on_one = ShardingPlan.on_one_rank(model)
    return Design(model, Training(1024), Fusion(), on_one, System(DEVICE, NODE, ranks))


@pytest.mark.parametrize("ranks", [1, 8])
def test_tables_that_fit_nowhere_are_refused(p: Predictor, ranks: int) -> None:
    with pytest.raises(NoFeasibleCandidateError, match=r"Table .huge. needs"):
        plan_design(huge(ranks), predictor=p)


def test_limits_take_options_and_ranks_away(p: Predictor) -> None:
    design = random_design(np.random.default_rng(9), ranks=4, tables=4)

    def whole_and_pinned(problem: DesignProblem) -> DesignProblem:
        whole = problem.keep(np.array([o.type is ShardingType.TABLE_WISE for o in problem.options]))
        allowed = np.ones((4, 4), dtype=bool)
        allowed[0] = [False, False, True, False]
        return replace(whole, allowed=allowed)

    found = plan_design(design, predictor=p, time_limit_s=3.0, limits=whole_and_pinned)
    assert {t.type for t in found.plan.tables} == {ShardingType.TABLE_WISE}
    assert found.plan.tables[0].ranks == (2,)
    free = plan_design(design, predictor=p, time_limit_s=3.0)
    assert free.lower_bound_us <= found.iteration_time_us


@pytest.mark.parametrize(("gpus", "ranks"), [(8, 4), (2, 4), (1, 2)])
def test_sums_of_shards_give_the_predicted_time(
    monkeypatch: pytest.MonkeyPatch, gpus: int, ranks: int
) -> None:
    """What prices plans on thousands of ranks, on few of them, where the predictor can."""
    monkeypatch.setattr("dse.placement.design.plan_time.SHOWN", 1)
    p, checked = predictor(gpus), 0
    for seed in range(12):
        rng = np.random.default_rng(seed)
        design = random_design(rng, ranks=ranks, tables=2, gpus=gpus)
        options = options_of(design)
        times = PlanTimes(p, design, options, shard_costs(options, p.cost, p.profile.overheads))
        if times.walks:
            plans = every_plan(options)
            some = [plans[i] for i in rng.choice(len(plans), 6)]
            assert times(some) == pytest.approx(times_of(design, some, p), rel=1e-7)
            checked += len(some)
    assert checked >= 18


def test_walking_bounds_the_spacing_from_above(p: Predictor) -> None:
    for seed in range(20):
        design = random_design(np.random.default_rng(seed), ranks=2, tables=2)
        graph = graph_of(design)
        durations = p.cost.predict_us([resolve(x.kernel) for x in graph.launches()])
        steps = compile_steps(graph, durations, p.profile.overheads)
        exact = p.iteration_time_us(design)
        assert exact * (1 - ROUNDING) <= spacing_us(steps) <= exact * (1 + 1e-6)


def test_bounds_of_many_designs_hold_for_each(p: Predictor) -> None:
    """Designs that differ in widths share cuts; each bound is still below the best of the design's own plans."""
    base = random_design(np.random.default_rng(11), ranks=2, tables=2)
    designs = [
        replace(base, model=replace(base.model, bottom_hidden=(a,), top_hidden=(b,)))
        for a in (16, 512)
        for b in (16, 256, 4096)
    ] + [random_design(np.random.default_rng(12), ranks=1, tables=2)]
    several = [d for d in designs if d.system.world_size > 1]
    best = [float(times_of(d, every_plan(options_of(d)), p).min()) for d in several]
    best.append(p.iteration_time_us(designs[-1]))
    lower = DesignBounds(p).lower_us(designs, np.array(best) * 1.5)
    assert (lower[:-1] <= np.array(best[:-1]) * (1 + ROUNDING)).all()
    assert (lower[:-1] >= np.array(best[:-1]) * 0.8).all()
    assert lower[-1] == best[-1] * 1.5  # one rank has one plan, whatever is said of its time
