"""Instances by the project's own kernel and collective models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dse.errors import SpaceError
from dse.placement.instances.estimate import estimated_instance
from dse.placement.instances.instance import Instance, Objective, read_instance, write_instance
from dse.placement.instances.splits import column_counts
from dse.placement.solver.problem import Where
from dse.resolve import system_named
from perfcore.design.model import EmbeddingTable
from perfcore.design.training import Training
from perfcore.graph.kernels import Collective, CollectiveKind, EmbeddingForward
from perfcore.profile.profile import profile_for

TABLES = [
    EmbeddingTable(f"t{i}", 10 ** (3 + i), pooling_factor=1 + 4 * i, embedding_dim=64) for i in range(4)
]


def estimated(tables: list[EmbeddingTable] = TABLES, ranks: int = 16, batch: int = 1024) -> Instance:
    system = system_named("dgx-a100-80gb", world_size=ranks)
    cost = profile_for(system.device, system.node).cost_model()
    return estimated_instance(tables, Training(global_batch=batch * ranks), system, cost)


def shard(instance: Instance, table: int, kind: str, count: int | None = None) -> tuple[np.ndarray, float]:
    counts = np.diff(instance.first_shard)
    options = range(instance.first_option[table], instance.first_option[table + 1])
    for o in options:
        if instance.types[o] == kind and count in (None, counts[o]):
            at = instance.first_shard[o]
            return instance.cost_ms[at], float(instance.bytes[at])
    raise LookupError(kind)


def test_every_kind_is_offered_with_its_shards() -> None:
    instance = estimated()
    counts = np.diff(instance.first_shard)
    assert len(counts) == len(instance.types)
    for kind, where, shards in (
        ("table_wise", Where.ANY, {1}),
        ("column_wise", Where.ANY, {2, 4, 8}),
        ("row_wise", Where.ALL, {16}),
        ("table_row_wise", Where.HOST, {8}),
        ("grid_shard", Where.HOST, {16}),
        ("data_parallel", Where.ALL, {16}),
    ):
        of = np.array(instance.types) == kind
        assert set(instance.where[of]) == {where}
        assert set(counts[of]) == shards


def test_a_rank_of_equal_whole_tables_takes_what_the_whole_kernel_takes() -> None:
    table = EmbeddingTable("t", 1_000_000, pooling_factor=20.0, embedding_dim=128)
    tables = [replace(table, name=f"t{i}") for i in range(16)]
    instance = estimated(tables, ranks=8)
    system = system_named("dgx-a100-80gb", world_size=8)
    cost = profile_for(system.device, system.node).cost_model()
    one = np.ones((1, 2))
    kernel = EmbeddingForward(8192 * one, 1e6 * one, 20 * one, 128 * one, 0 * one, 4.0, batched=True)
    lookup_us = float(cost.predict_us([kernel])[0].sum())
    mine = 2 * shard(instance, 0, "table_wise")[0][0] * 1e3
    assert lookup_us < mine < 1.3 * lookup_us  # with the bounds check and a tiny launch
    exchange = Collective(CollectiveKind.ALL_TO_ALL, 8192 * 128 * 4.0 * 2, 8.0, 8.0)
    back = 2 * shard(instance, 0, "table_wise")[0][3] * 1e3
    assert back == pytest.approx(float(cost.predict_us([exchange])[0]))


def test_what_is_split_costs_a_rank_less() -> None:
    instance = estimated()
    whole, memory = shard(instance, 3, "table_wise")
    for kind in ("column_wise", "row_wise", "table_row_wise"):
        part, held = shard(instance, 3, kind)
        assert held < memory
        assert part.sum() < whole.sum()
    replica, copied = shard(instance, 3, "data_parallel")
    assert copied > memory * 0.9
    assert replica[1] == 0
    assert (instance.cost_ms >= 0).all()
    assert np.isfinite(instance.cost_ms).all()


def test_tables_that_are_odd() -> None:
    odd = [
        EmbeddingTable("one_row", 1, embedding_dim=64),
        EmbeddingTable("idle", 1000, pooling_factor=0.0, embedding_dim=64),
        EmbeddingTable("thirty", 10**6, embedding_dim=30),
        EmbeddingTable("narrow", 10**6, embedding_dim=4),
    ]
    instance = estimated(odd)
    kinds = [
        set(instance.types[a:b])
        for a, b in zip(instance.first_option, instance.first_option[1:], strict=False)
    ]
    assert kinds[0] == {"table_wise", "column_wise", "data_parallel"}
    assert "column_wise" not in kinds[2] | kinds[3]
    cost, memory = shard(instance, 1, "table_wise")
    assert cost[[0, 2]].tolist() == [0, 0]
    assert cost[1] > 0
    assert memory > 0


def test_one_rank_has_one_option_and_no_exchange() -> None:
    instance = estimated(ranks=1)
    assert set(instance.types) == {"table_wise"}
    assert not instance.cost_ms[:, [1, 3]].any()


def test_more_ranks_than_tables() -> None:
    instance = estimated(TABLES[:1], ranks=128)
    assert instance.num_ranks == 128
    assert (instance.cost_ms[:, :3] > 0).any()


@pytest.mark.parametrize(
    ("dim", "size", "most", "counts"),
    [(128, 4.0, 8, [2, 4, 8]), (96, 4.0, 100, [2, 3, 4, 6, 8, 12]), (96, 2.0, 100, [2, 3, 4, 6]), (30, 4.0, 8, []), (8, 4.0, 8, [])],
)  # fmt: skip
def test_columns_are_split_in_fours_of_a_sector_at_least(
    dim: int, size: float, most: int, counts: list[int]
) -> None:
    assert column_counts(dim, size, most) == counts


def test_what_cannot_be_priced() -> None:
    with pytest.raises(SpaceError, match="needs the columns of every table, but 't' names none"):
        estimated([EmbeddingTable("t", 10)])
    system = system_named("dgx-a100-80gb", world_size=8)
    cost = profile_for(system.device, system.node).cost_model()
    with pytest.raises(SpaceError, match="global_batch % world_size == 0"):
        estimated_instance(TABLES, Training(global_batch=100), system, cost)


def test_large_tables_may_lie_in_host_memory_behind_a_cache(tmp_path: Path) -> None:
    tables = [
        EmbeddingTable("large", 40_000_000, 3.0, 1.0, 128),
        EmbeddingTable("small", 1000, 3.0, 1.0, 128),
    ]
    system = system_named("dgx-a100-80gb", world_size=8)
    cost = profile_for(system.device, system.node).cost_model()
    training = Training(global_batch=8192)
    instance = estimated_instance(tables, training, system, cost, cache_ratios=(0.1, 0.5))
    assert instance.host_bytes is not None
    by_kernel = {}
    for o in range(instance.first_option[1]):
        if instance.types[o] == "table_wise":
            at = instance.first_shard[o]
            by_kernel[instance.kernels[o]] = (
                instance.cost_ms[at].sum(), instance.bytes[at] / 2**30, instance.host_bytes[at] / 2**30,
            )  # fmt: skip
    whole, half, tenth = (by_kernel[k] for k in ("fused", "fused_uvm_caching@0.5", "fused_uvm_caching@0.1"))
    assert whole[0] < half[0] < tenth[0]
    assert whole[1] > half[1] > tenth[1]
    assert (whole[2], half[2], tenth[2]) == (
        0,
        pytest.approx(19.07, abs=0.01),
        pytest.approx(19.07, abs=0.01),
    )
    assert not any(
        "uvm" in k for k in instance.kernels[instance.first_option[1] :]
    )  # too small to be worth it
    write_instance(instance, tmp_path / "x.json.gz")
    back = read_instance(tmp_path / "x.json.gz")
    assert back.host_bytes == pytest.approx(instance.host_bytes)
    assert back.host_capacity_bytes == pytest.approx(system.node.host_memory_bytes)
    problem = back.problem(Objective.CRITICAL_PATH)
    assert problem.host_capacity_bytes.tolist() == [pytest.approx(system.node.host_memory_bytes)]
    assert problem.host_bytes.sum() == pytest.approx(instance.host_bytes.sum())
