from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dse.errors import NoFeasibleCandidateError, SpaceError
from dse.placement import plan_for
from dse.placement.policy.cost import AnalyticCost, Pieces, distinct_rows
from dse.placement.policy.options import Instance, Policy, Where, instance_of
from dse.placement.policy.place import Solution, place, solve
from perfcore.design.design import Design
from perfcore.design.hardware import Device, Node, System
from perfcore.design.model import EmbeddingTable, Interaction, Model
from perfcore.design.sharding import ShardingPlan, ShardingType
from perfcore.design.training import Fusion, OptimizerFusion, Program, Training
from perfcore.errors import DesignError
from perfcore.graph.dims import dims_of, structure_of
from perfcore.memory import embedding_bytes, memory_of

DEVICE = Device("test", "a test device", 16e9, 1e12, 6e6, 3e12, 80, 1.5e9, 1e13, 1e13, 1e14, 1e10)
NODE = Node("test", "a test node", "test", 4, 1e11, 5.0, 1e10, 10.0, 1e12)


def model(rows: list[int], *, dim: int = 16, pooling: float = 3.0) -> Model:
    tables = tuple(EmbeddingTable(f"t{i}", r, pooling_factor=pooling) for i, r in enumerate(rows))
    return Model(13, tables, dim, (32,), (32,), Interaction.DOT)


def system(ranks: int, *, hbm_bytes: float = 16e9) -> System:
    return System(replace(DEVICE, hbm_bytes=hbm_bytes), NODE, ranks)


# --- the solver against brute force ---------------------------------------------------------------------


def random_instance(rng: np.random.Generator, *, tight: float) -> Instance:
    """2 to 5 tables with 1 to 3 options each on 2 to 3 ranks; `tight` scales the memory."""
    tables, ranks = int(rng.integers(2, 6)), int(rng.integers(2, 4))
    options = rng.integers(1, 4, tables)
    where = rng.integers(0, 2, options.sum())
    where[np.r_[0, options.cumsum()[:-1]]] = Where.ANY
    count = np.where(where == Where.ALL, ranks, rng.integers(1, 3, len(where)))
    size = np.repeat(rng.lognormal(0.0, 1.0, tables), options)
    uneven = rng.random() < 0.5
    share = rng.uniform(0.7, 1.3, ranks) if uneven else np.ones(ranks)
    held = np.repeat(rng.lognormal(0.0, 1.0, tables), options) / count * rng.uniform(1.0, 1.3, len(where))
    return Instance(
        kinds=tuple(ShardingType.ROW_WISE if w == Where.ALL else ShardingType.TABLE_WISE for w in where),
        first=np.r_[0, options.cumsum()].astype(np.int64),
        where=where.astype(np.int64),
        count=count.astype(np.int64),
        load_us=size / count * rng.uniform(1.0, 2.0, len(where)),
        bytes=held,
        capacity_bytes=share
        * float(tight * np.minimum.reduceat(held * count, np.r_[0, options.cumsum()[:-1]]).sum() / ranks),
        slowness=rng.uniform(0.5, 2.0, ranks) if uneven else np.ones(ranks),
        num_ranks=ranks,
        ranks_per_host=ranks,
    )


def choices(instance: Instance, table: int) -> np.ndarray:
    """`(choices, r, 2)` load and bytes that each way to place a table adds to each rank."""
    found = []
    for o in range(instance.first[table], instance.first[table + 1]):
        everywhere = range(instance.num_ranks)
        ways = itertools.combinations_with_replacement(everywhere, int(instance.count[o]))
        for ranks in [tuple(everywhere)] if instance.where[o] == Where.ALL else ways:
            shards = np.bincount(ranks, minlength=instance.num_ranks)[:, None]
            found.append(shards * np.array([instance.load_us[o], instance.bytes[o]]))
    return np.array(found)


def brute_force(instance: Instance) -> float:
    """The least maximum load within capacity over all placements, infinite when nothing fits."""
    sums = np.zeros((1, instance.num_ranks, 2))
    for table in range(instance.num_tables):
        sums = (sums[:, None] + choices(instance, table)[None]).reshape(-1, instance.num_ranks, 2)
    fits = (sums[..., 1] <= instance.capacity_bytes).all(axis=1)
    return float((sums[fits][..., 0] * instance.slowness).max(axis=1).min(initial=np.inf))


@pytest.mark.parametrize("tight", [1.3, 2.0, 100.0])
def test_close_to_the_optimum_of_small_instances(tight: float) -> None:
    ratios, missed, solvable = [], 0, 0
    for seed in range(40):
        instance = random_instance(np.random.default_rng(seed), tight=tight)
        optimum, found = brute_force(instance), solve(instance, seed=seed)
        if np.isinf(optimum):
            assert (found.bytes > instance.capacity_bytes).any()
            continue
        solvable += 1
        fits = (found.bytes <= instance.capacity_bytes * (1 + 1e-9)).all()
        missed += not fits
        if fits:
            ratios.append(found.load_us.max() / optimum)
    assert solvable >= 20
    assert missed == 0
    assert min(ratios) >= 1 - 1e-9
    assert np.mean(np.array(ratios) <= 1.05) >= 0.95


def check(instance: Instance, solution: Solution) -> None:
    """The loads are those of the named shards, and the shards are where their options allow."""
    load, held = np.zeros(instance.num_ranks), np.zeros(instance.num_ranks)
    for t, (o, ranks) in enumerate(zip(solution.option, solution.ranks, strict=True)):
        assert instance.first[t] <= o < instance.first[t + 1]
        assert len(ranks) == instance.count[o]
        if instance.where[o] == Where.ALL:
            assert ranks == tuple(range(instance.num_ranks))
        if instance.where[o] == Where.HOST:
            assert len({r // instance.ranks_per_host for r in ranks}) == 1
            assert len(set(ranks)) == len(ranks)
        for r in ranks:
            load[r] += instance.load_us[o]
            held[r] += instance.bytes[o]
    np.testing.assert_allclose(solution.load_us, load)
    np.testing.assert_allclose(solution.bytes, held)


# --- placements of models --------------------------------------------------------------------------------

rows_lists = st.lists(st.integers(1, 10**6), min_size=1, max_size=12)


@given(rows_lists, st.sampled_from(list(Policy)), st.sampled_from([1, 2, 3, 4, 8]), st.integers(0, 3))
@settings(deadline=None, max_examples=50)
def test_every_table_is_placed_once_and_the_memory_is_that_of_perfcore(
    rows: list[int], policy: Policy, ranks: int, seed: int
) -> None:
    m, training = model(rows), Training(1920)
    placed = place(m, training, system(ranks), policy=policy, seed=seed)
    assert [t.table for t in placed.plan.tables] == [t.name for t in m.tables]
    design = Design(m, training, Fusion(), placed.plan, system(ranks))
    exact = embedding_bytes(dims_of([design]), structure_of(design))[0]
    assert placed.load_us.shape == placed.hbm_bytes.shape == (ranks,)
    # Shards are priced by their largest piece; a rank's pieces of one table are priced one by one.
    assert (placed.hbm_bytes >= exact * (1 - 1e-9)).all()
    assert (placed.hbm_bytes <= exact * 1.2 + 64 * 1920 * len(rows) * ranks).all()
    if placed.feasible:
        assert memory_of(design).shortfall_bytes(system(ranks)) == 0
    instance = instance_of(design, policy, AnalyticCost(training, system(ranks)))
    check(instance, solve(instance, seed=seed))


@given(rows_lists, st.sampled_from([2, 4, 8]), st.sampled_from([1.0, 40.0]))
@settings(deadline=None, max_examples=20)
def test_auto_loads_no_more_than_any_single_policy(rows: list[int], ranks: int, pooling: float) -> None:
    m = model(rows, dim=64, pooling=pooling)
    loads = {
        policy: place(m, Training(1920), system(ranks), policy=policy).load_us.max() for policy in Policy
    }
    assert loads[Policy.AUTO] <= min(loads.values()) * 1.05


def test_same_seed_same_plan() -> None:
    rows = [10 ** (i % 6) + i for i in range(26)]
    first, second = (place(model(rows), Training(4096), system(8), policy="auto", seed=3) for _ in range(2))
    assert first.plan == second.plan


@pytest.mark.parametrize("policy", list(Policy))
def test_one_rank_holds_everything(policy: Policy) -> None:
    m = model([10, 20])
    assert place(m, Training(64), system(1), policy=policy).plan == ShardingPlan.on_one_rank(m)


@pytest.mark.parametrize(
    ("policy", "kind"),
    [
        (Policy.TABLE_WISE, ShardingType.TABLE_WISE),
        (Policy.COLUMN_WISE, ShardingType.COLUMN_WISE),
        (Policy.ROW_WISE, ShardingType.ROW_WISE),
        (Policy.TABLE_ROW_WISE, ShardingType.TABLE_ROW_WISE),
        (Policy.DATA_PARALLEL, ShardingType.DATA_PARALLEL),
    ],
)
def test_a_policy_uses_its_type(policy: Policy, kind: ShardingType) -> None:
    plan = place(model([1000, 2000]), Training(64), system(4), policy=policy).plan
    assert {t.type for t in plan.tables} == {kind}


def test_small_tables_are_replicated_and_large_ones_are_not() -> None:
    plan = place(model([10, 10**6]), Training(65536), system(4), policy="data_parallel_small").plan
    assert [t.type for t in plan.tables] == [ShardingType.DATA_PARALLEL, ShardingType.TABLE_WISE]


@pytest.mark.parametrize("policy", list(Policy))
def test_odd_tables(policy: Policy) -> None:
    """One row, no lookup, one column, fewer tables than ranks."""
    placed = place(model([1], dim=1, pooling=0.0), Training(8), system(8), policy=policy)
    assert placed.feasible
    assert np.isfinite(placed.load_us).all()


def test_table_row_wise_stays_on_one_machine() -> None:
    plan = place(model([1000] * 6), Training(64), system(8), policy="table_row_wise").plan
    assert {t.ranks for t in plan.tables} == {(0, 1, 2, 3), (4, 5, 6, 7)}


def test_a_table_too_large_is_named() -> None:
    m = model([100, 10**9, 50])
    placed = place(m, Training(64), system(4), policy="table_wise")
    assert not placed.feasible
    with pytest.raises(NoFeasibleCandidateError, match=r"rank \d needs 59\.6 GiB, and table 't1'") as caught:
        placed.check()
    assert "row_wise" in (caught.value.hint or "")
    split = place(m, Training(64), system(4, hbm_bytes=32e9), policy="auto")
    assert split.feasible
    split.check()


def test_no_memory_left_for_tables() -> None:
    placed = place(model([100]), Training(64), system(2, hbm_bytes=1e6), policy="auto")
    assert not placed.feasible
    with pytest.raises(NoFeasibleCandidateError, match=r"at most 0\.0 GiB"):
        placed.check()


def test_plan_for_gives_a_plan_even_where_nothing_fits() -> None:
    m = model([100, 10**9])
    assert [t.table for t in plan_for(m, Training(64), system(4), "table_wise").tables] == ["t0", "t1"]


def test_the_program_of_an_iteration_does_not_matter_for_where_its_tables_are() -> None:
    for fusion in (Fusion(), Fusion(optimizer=OptimizerFusion.FOR_LOOP)):
        plans = [
            plan_for(model([9, 5]), Training(8, program=p), system(1), policy="auto", fusion=fusion)
            for p in (Program.PYTORCH, Program.DLRM_SCRIPT)
        ]
        assert plans[0] == plans[1]


def test_unknown_policy_and_uneven_batch() -> None:
    with pytest.raises(SpaceError, match=r"table_wise, column_wise.*but got 'best'"):
        place(model([10]), Training(64), system(2), policy="best")
    with pytest.raises(DesignError, match="global_batch % world_size == 0"):
        place(model([10]), Training(63), system(2), policy="auto")


# --- costs -------------------------------------------------------------------------------------------------


def pieces(**values: float) -> Pieces:
    given = {"rows": 1e6, "dim": 64.0, "pooling": 2.0, "skew": 0.0, "parts": 1.0} | values
    return Pieces(**{k: np.array([v]) for k, v in given.items()})


@pytest.mark.parametrize("what", ["dim", "pooling", "rows"])
@pytest.mark.parametrize("kind", list(ShardingType))
def test_more_costs_more(what: str, kind: ShardingType) -> None:
    cost = AnalyticCost(Training(4096), system(8))
    small = cost.load_us(kind, pieces())
    assert cost.load_us(kind, pieces(**{what: 2 * getattr(pieces(), what)[0]})) > small > 0


def test_distinct_rows_equal_a_simulation() -> None:
    rng = np.random.default_rng(0)
    for rows, skew, lookups in [(1000, 0.0, 500), (1000, 1.05, 2000), (50, 0.8, 1000), (10, 0.0, 3)]:
        p = np.arange(1, rows + 1) ** -skew
        drawn = [len(np.unique(rng.choice(rows, lookups, p=p / p.sum()))) for _ in range(30)]
        expected = distinct_rows(np.array([lookups]), np.array([float(rows)]), np.array([skew]))
        assert expected == pytest.approx(np.mean(drawn), rel=0.06)


def test_a_skewed_table_is_cheaper_than_a_uniform_one() -> None:
    cost = AnalyticCost(Training(65536), system(1))
    uniform, skewed = (cost.load_us(ShardingType.TABLE_WISE, pieces(skew=s)) for s in (0.0, 1.2))
    assert skewed < uniform
