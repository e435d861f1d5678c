"""A design's tables as an instance with caches: memory as the predictor accounts for it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from design_cases import instance_of_design
from hypothesis import given, settings
from hypothesis import strategies as st

from dse.config import load_design
from dse.placement.capacity import tables_capacity_bytes
from dse.placement.instances.instance import Instance, Objective
from dse.placement.solver.problem import Assignment, Where, loads_of
from dse.placement.torchrec.assigned import plan_of_assignment
from perfcore.design.design import Design
from perfcore.design.sharding import ShardingPlan
from perfcore.memory import memory_of
from perfcore.profile.profile import priced

FILE = Path(__file__).parents[4] / "spaces" / "designs" / "criteo_8gpu.yaml"


@cache
def case(optimizer: str, communication: str) -> tuple[Design, Instance]:
    """Sixteen GPUs in two machines."""
    changes = [
        "system.world_size=16", f"training.table_optimizer={optimizer}", f"fusion.communication={communication}",
    ]  # fmt: skip
    design = load_design(FILE, overrides=changes, place=lambda m, *_: ShardingPlan.on_one_rank(m))
    design, profile = priced(design, None)
    return design, instance_of_design(design, profile.cost_model(), cache_ratios=(0.05, 0.4))


def anywhere(instance: Instance, seed: int) -> Assignment:
    """Any option for each table, its shards on any ranks that it may take; pieces of a table on ranks of their own."""
    rng = np.random.default_rng(seed)
    first, local = instance.first_option, instance.ranks_per_host
    option = rng.integers(first[:-1], first[1:])
    ranks = []
    for o in option:
        count = int(instance.first_shard[o + 1] - instance.first_shard[o])
        match Where(int(instance.where[o])):
            case Where.ALL:
                ranks.append(tuple(range(count)))
            case Where.HOST:
                hosts = rng.permutation(instance.num_ranks // local)[: count // local]
                ranks.append(tuple(int(h) * local + i for h in hosts for i in range(local)))
            case _:
                ranks.append(tuple(int(r) for r in rng.permutation(instance.num_ranks)[:count]))
    return Assignment(option, tuple(ranks))


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(["rowwise_adagrad", "adagrad"]),
    st.sampled_from(["overlapped", "pipelined", "prefetched"]),
)
def test_a_plan_that_fits_by_the_instance_fits(seed: int, optimizer: str, communication: str) -> None:
    design, instance = case(optimizer, communication)
    answer = anywhere(instance, seed)
    loads = loads_of(instance.problem(Objective.CRITICAL_PATH), answer)
    memory = memory_of(replace(design, sharding=plan_of_assignment(instance, answer)))
    rest = design.system.device.hbm_bytes - tables_capacity_bytes(design)
    # Where rows do not divide by ranks, an instance takes all shards as large as the largest.
    assert (memory.total <= (loads.bytes + rest) * (1 + 1e-9)).all()
    assert memory.total == pytest.approx(loads.bytes + rest, rel=1e-2)
    machines = np.add.reduceat(memory.host, np.arange(0, 16, 8))
    assert machines == pytest.approx(loads.host_bytes, rel=1e-2)


def test_without_caches_nothing_lies_on_the_host() -> None:
    design, _ = case("adagrad", "overlapped")
    _, profile = priced(design, None)
    instance = instance_of_design(design, profile.cost_model())
    assert instance.host_bytes is None
    assert not any("uvm" in kernel for kernel in instance.kernels)
