from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from dse.errors import SpaceError
from dse.placement import Placement, Planner, place, plan_for
from dse.placement.policy.options import Policy
from dse.table_csv import bundled_tables
from perfcore.design import hardware
from perfcore.design.design import Design
from perfcore.design.hardware import System
from perfcore.design.model import Interaction, Model
from perfcore.design.sharding import ShardingType
from perfcore.design.training import Fusion, Training
from perfcore.errors import DesignError
from perfcore.predictor import Predictor
from perfcore.profile.profile import profile_for

NODE = hardware.node("dgx-a100-80gb")
DEVICE = hardware.device(NODE.device)


@pytest.fixture(scope="module")
def predictor() -> Predictor:
    return Predictor(profile_for(DEVICE, NODE))


def model(tables: str, dim: int) -> Model:
    return Model(13, bundled_tables(tables), dim, (512, 256), (512, 512, 256), Interaction.DOT)


def design(m: Model, training: Training, system: System, placed: Placement) -> Design:
    return Design(m, training, Fusion(), placed.plan, system)


GRID = [
    *itertools.product(["criteo_terabyte"], [32], [2048, 8192, 131072], [2, 8]),
    *itertools.product(["criteo_terabyte_multihot"], [128], [2048, 32768, 131072], [4]),
]


@pytest.mark.parametrize(("tables", "dim", "batch", "ranks"), GRID)
def test_auto_is_predicted_no_slower_than_any_policy(
    predictor: Predictor, tables: str, dim: int, batch: int, ranks: int
) -> None:
    m, training, system = model(tables, dim), Training(batch), System(DEVICE, NODE, ranks)
    chosen = Planner(predictor.profile).place(m, training, system, "auto")
    assert chosen.feasible
    plain = [place(m, training, system, policy=p) for p in Policy]
    times_us = [predictor.iteration_time_us(design(m, training, system, p)) for p in plain if p.feasible]
    assert predictor.iteration_time_us(design(m, training, system, chosen)) <= 1.01 * min(times_us)


def test_auto_sees_the_fixed_cost_of_mixed_kinds(predictor: Predictor) -> None:
    """By load alone replicas pay; their second group of kernels and their all-reduce cost more than that."""
    m, training, system = model("criteo_terabyte", 32), Training(8192), System(DEVICE, NODE, 8)
    by_load = place(m, training, system, policy="auto")
    chosen = Planner(predictor.profile).place(m, training, system, "auto")
    slow, fast = (predictor.iteration_time_us(design(m, training, system, p)) for p in (by_load, chosen))
    assert fast < 0.95 * slow
    kinds = [{t.type for t in p.plan.tables} for p in (by_load, chosen)]
    assert [ShardingType.DATA_PARALLEL in k for k in kinds] == [True, False]


def test_plans_repeat_and_a_planner_takes_the_devices_own_profile(predictor: Predictor) -> None:
    arguments = model("criteo_terabyte_multihot", 64), Training(16384), System(DEVICE, NODE, 4)
    plans = {Planner(predictor.profile)(*arguments, "auto") for _ in range(3)}
    assert plans == {plan_for(*arguments, "auto")}


def test_where_nothing_fits_the_least_overflow_is_kept(predictor: Predictor) -> None:
    small = System(replace(DEVICE, hbm_bytes=1e9), NODE, 4)
    placed = Planner(predictor.profile).place(model("criteo_terabyte", 64), Training(4096), small, "auto")
    assert not placed.feasible


@pytest.mark.parametrize("ranks", [1, 128])
def test_one_rank_and_very_many_ranks(ranks: int) -> None:
    m = Model(13, bundled_tables("criteo_terabyte")[:4], 16, (32,), (32,), Interaction.DOT)
    plan = plan_for(m, Training(8192), System(DEVICE, NODE, ranks), "auto")
    assert [t.table for t in plan.tables] == [t.name for t in m.tables]


def test_an_unknown_policy() -> None:
    with pytest.raises(SpaceError, match=r"A sharding policy is one of table_wise.*but got 'best'"):
        plan_for(model("criteo_terabyte", 16), Training(64), System(DEVICE, NODE, 2), "best")


def test_designs_predicted_together_equal_those_predicted_alone(predictor: Predictor) -> None:
    m, system = model("criteo_terabyte", 32), System(DEVICE, NODE, 4)
    designs = [
        design(m, Training(batch), system, place(m, Training(batch), system, policy=policy))
        for batch, policy in itertools.product(
            [4096, 65536], ["table_wise", "row_wise", "data_parallel_small"]
        )
    ]
    alone = [predictor.iteration_time_us(d) for d in designs]
    assert predictor.iteration_times_us(designs) == pytest.approx(alone, rel=1e-9)


def test_designs_of_another_kind_cannot_be_predicted_together(predictor: Predictor) -> None:
    m, training = model("criteo_terabyte", 32), Training(4096)
    systems = [System(DEVICE, NODE, ranks) for ranks in (2, 4)]
    designs = [design(m, training, s, place(m, training, s, policy="table_wise")) for s in systems]
    with pytest.raises(DesignError, match="must agree in structure, tables"):
        predictor.iteration_times_us(designs)


@pytest.mark.parametrize(("batch", "slow"), [(65536, 1.9), (8192, 3.0)])
def test_ranks_of_two_paces_take_no_longer_than_with_plans_for_equal_ones(
    predictor: Predictor, batch: int, slow: float
) -> None:
    m, training = model("criteo_terabyte_multihot", 64), Training(batch)
    alike = System(DEVICE, NODE, 8)
    unlike = System(DEVICE, NODE, 8, (1.0,) * 4 + (slow,) * 4)
    known = predictor.iteration_time_us(
        design(m, training, unlike, plan_for.place(m, training, unlike, "auto"))
    )
    for policy in Policy:
        placed = plan_for.place(m, training, alike, policy)
        if placed.feasible:
            assert known <= predictor.iteration_time_us(design(m, training, unlike, placed)) * 1.001
