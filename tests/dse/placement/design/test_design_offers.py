"""Host memory, dense gradients, slower ranks, tables that stay together: bounds against all plans, times against the predictor."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from design_cases import every_plan, predictor, random_design, times_of

from dse.placement.design.certify import plan_design
from dse.placement.design.classes import class_bounds, refine
from dse.placement.design.conditions import Conditions
from dse.placement.design.options import Offer, Options, options_of
from dse.placement.design.plan_time import PlanTimes
from dse.placement.design.probing import shard_costs
from dse.placement.design.problem import DesignProblem
from perfcore.design.design import Design
from perfcore.design.sharding import ON_HOST, ComputeKernel, ShardingPlan, ShardingType
from perfcore.design.training import Communication, EmbeddingFusion
from perfcore.memory import memory_of
from perfcore.predictor import Predictor

ROUNDING = 1e-9
MOST_PLANS = 700  # of a design; of more, so many at random


@dataclass(frozen=True)
class Case:
    """A small design, what is offered, and what placements must keep to."""

    design: Design
    offer: Offer
    conditions: Conditions

    @property
    def options(self) -> Options:
        return options_of(self.design, self.offer)


@pytest.fixture(autouse=True)
def small_tables_may_lie_on_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dse.placement.design.options.WORTH_A_HOST", 0.0)


def case(what: str, seed: int, *, ranks: int, gpus: int) -> Case:
    rng = np.random.default_rng(seed)
    design, offer = random_design(rng, ranks=ranks, tables=2, gpus=gpus), Offer()
    match what:
        case "caches" | "prefetched":
            batched = replace(design.fusion, embedding=EmbeddingFusion.TABLE_BATCHED)
            if what == "prefetched":
                batched = replace(batched, communication=Communication.PREFETCHED)
            design = replace(design, fusion=batched)
            offer = Offer(cache_ratios=(0.0, 0.1) if seed % 2 else (0.3,))
        case "dense":
            offer = Offer(dense=True)
        case "one machine":
            offer = Offer(one_machine=True)
        case "slower":
            slowness = tuple(rng.choice([1.0, 1.0, 1.5, 3.0, 0.5], ranks).tolist())
            design = replace(design, system=replace(design.system, slowness=slowness))
    conditions = Conditions.of(design)
    if what == "together":
        conditions = replace(conditions, groups=((0, 1),))
    return Case(design, offer, conditions)


def plans_of(one: Case, rng: np.random.Generator) -> list[ShardingPlan]:
    plans = every_plan(one.options)
    if len(one.conditions.groups) < len(one.design.model.tables):
        plans = [p for p in plans if len({(t.type, t.ranks, t.kernel) for t in p.tables}) == 1]
    if len(plans) <= MOST_PLANS:
        return plans
    return [plans[i] for i in rng.choice(len(plans), MOST_PLANS, replace=False)]


def best_by_class(one: Case, p: Predictor) -> dict[tuple[int, ...], float]:
    """The least time of all plans, by the kinds of sharding that occur."""
    options, rng = one.options, np.random.default_rng(0)
    plans, best = plans_of(one, rng), {}
    for plan, us in zip(plans, times_of(one.design, plans, p).tolist(), strict=True):
        chosen = options.chosen(plan)
        assert chosen is not None
        kinds = tuple(sorted(set(options.flag[chosen].tolist())))
        best[kinds] = min(best.get(kinds, np.inf), us)
    return best


@pytest.mark.parametrize("what", ["caches", "prefetched", "dense", "one machine", "slower", "together"])
@pytest.mark.parametrize(("count", "ranks", "gpus"), [(5, 2, 8), (3, 2, 1), (1, 4, 2), (2, 1, 8)])
def test_no_plan_of_a_class_is_below_its_bound(what: str, count: int, ranks: int, gpus: int) -> None:
    p, compared, close = predictor(gpus), 0, []
    for seed in range(count):
        one = case(what, seed, ranks=ranks, gpus=gpus)
        costs = shard_costs(one.options, p.cost, p.profile.overheads)
        bounds = class_bounds(
            one.options,
            costs,
            p.cost,
            p.profile.overheads,
            capacity_bytes=np.full(ranks, 1e15),
            conditions=one.conditions,
        )
        refine(bounds, upper_us=np.inf, seconds_left=lambda: 1.0)
        best = best_by_class(one, p)
        for bound in bounds:
            if bound.kinds in best:
                compared += 1
                assert bound.lower_us <= best[bound.kinds] * (1 + ROUNDING), (seed, bound.kinds)
        close.append(min(best.values()) / min(b.lower_us for b in bounds))
    assert compared >= count
    if ranks < 4:  # there, all plans are looked at
        assert np.median(close) < 1.1  # and it is no idle bound


@pytest.mark.parametrize("what", ["caches", "prefetched", "dense", "slower"])
@pytest.mark.parametrize(("gpus", "ranks"), [(8, 4), (2, 4)])
def test_sums_of_shards_give_the_predicted_time(
    what: str, gpus: int, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What prices plans on thousands of ranks, on few of them, where the predictor can."""
    monkeypatch.setattr("dse.placement.design.plan_time.SHOWN", 1)
    p, checked = predictor(gpus), 0
    for seed in range(8):
        one, rng = case(what, seed, ranks=ranks, gpus=gpus), np.random.default_rng(seed)
        options = one.options
        times = PlanTimes(p, one.design, options, shard_costs(options, p.cost, p.profile.overheads))
        if times.walks:
            plans = every_plan(options)
            some = [plans[i] for i in rng.choice(len(plans), 6)]
            assert times(some) == pytest.approx(times_of(one.design, some, p), rel=1e-7)
            checked += len(some)
    assert checked >= 12


@pytest.mark.parametrize("what", ["caches", "dense", "one machine", "slower", "together"])
def test_the_plan_found_is_the_best_of_all(what: str) -> None:
    p = predictor()
    for seed in range(2):
        one = case(what, seed, ranks=2, gpus=8)

        def under(problem: DesignProblem, one: Case = one) -> DesignProblem:
            return replace(problem, conditions=one.conditions)

        found = plan_design(one.design, predictor=p, time_limit_s=20.0, offer=one.offer, limits=under)
        plans = plans_of(one, np.random.default_rng(0))
        best = float(times_of(one.design, plans, p).min())
        assert found.lower_bound_us <= best * (1 + ROUNDING)
        assert found.iteration_time_us <= best * 1.005
        assert found.iteration_time_us == pytest.approx(p.iteration_time_us(found.design), rel=ROUNDING)
        if what == "together":
            assert found.plan.tables[0].ranks == found.plan.tables[1].ranks
            assert found.tables[0].together == (one.design.model.tables[1].name,)


def test_memory_of_devices_and_hosts_is_the_predictors() -> None:
    p = predictor()
    for seed in range(6):
        one = case("caches", seed, ranks=2, gpus=8)
        costs, rng = shard_costs(one.options, p.cost, p.profile.overheads), np.random.default_rng(seed)
        plans = every_plan(one.options)
        plan = plans[int(rng.integers(len(plans)))]
        chosen = one.options.chosen(plan)
        assert chosen is not None
        on_host = 0.0
        for o, placed in zip(chosen, plan.tables, strict=True):
            own = one.options.shard_probe[one.options.first_shard[o] : one.options.first_shard[o + 1]]
            assert (costs.host_bytes[own] > 0).all() == (placed.kernel in ON_HOST)
            on_host += float(costs.host_bytes[own].sum())
        assert memory_of(replace(one.design, sharding=plan)).host.sum() == pytest.approx(on_host)


def test_kernels_are_named_as_plans_name_them() -> None:
    one = case("caches", 1, ranks=2, gpus=8)
    labels = {(o.kernel_label, o.kernel, o.share) for o in one.options.options}
    assert labels == {
        ("fused", ComputeKernel.FUSED, 1.0),
        ("dense", ComputeKernel.FUSED, 1.0),  # replicas, whatever a plan says
        ("fused_uvm", ComputeKernel.FUSED_UVM, 0.0),
        ("fused_uvm_caching@0.1", ComputeKernel.FUSED_UVM_CACHING, 0.1),
    }
    said = replace(every_plan(one.options)[0].tables[0], type=ShardingType.DATA_PARALLEL, ranks=(0, 1))
    for kernel in (ComputeKernel.FUSED, ComputeKernel.DENSE):
        replica = replace(said, kernel=kernel, cache_ratio=None)
        plan = ShardingPlan((replica, replace(replica, table="t1")))
        chosen = one.options.chosen(plan)
        assert chosen is not None
        assert {one.options.options[o].type for o in chosen} == {ShardingType.DATA_PARALLEL}
