from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from design_cases import DEVICE, NODE, predictor, random_design
from oracles import scalar_iteration_time

from perfcore.design.hardware import System
from perfcore.design.sharding import ShardingPlan, ShardingType, TableSharding
from perfcore.errors import DesignError, HardwareError
from perfcore.graph.dlrm import graph_of
from perfcore.graph.kernels import Collective, resolve


@pytest.mark.parametrize("seed", range(3))
def test_slower_ranks_are_those_of_a_scalar_walk(seed: int) -> None:
    p, rng = predictor(), np.random.default_rng(seed)
    base = random_design(rng, ranks=3, tables=2)
    both = (ShardingType.TABLE_WISE, ShardingType.DATA_PARALLEL)
    kinds = [both[i] for i in rng.integers(2, size=2)]
    plan = ShardingPlan(
        tuple(
            TableSharding(t.name, kind, (i,) if kind is ShardingType.TABLE_WISE else (0, 1, 2))
            for i, (t, kind) in enumerate(zip(base.model.tables, kinds, strict=True))
        )
    )
    slowness = tuple(rng.choice([0.5, 1.0, 1.7, 3.0], 3).tolist())
    slow = replace(base, sharding=plan, system=replace(base.system, slowness=slowness))
    graph = graph_of(slow)
    kernels = [resolve(x.kernel) for x in graph.launches()]
    durations = [
        np.broadcast_to(us, (1, 3)) * (1.0 if isinstance(kernel, Collective) else np.array([slowness]))
        for kernel, us in zip(kernels, p.cost.predict_us(kernels), strict=True)
    ]
    expected = scalar_iteration_time(graph, durations, p.profile.overheads, warm_up=24, period=12)
    assert p.iteration_time_us(slow) == pytest.approx(expected, rel=1e-6)
    assert p.iteration_times_us([slow])[0] == pytest.approx(p.iteration_time_us(slow), rel=1e-9)


def test_a_slower_rank_never_speeds_an_iteration_up() -> None:
    p = predictor()
    for seed in range(12):
        base = random_design(np.random.default_rng(seed), ranks=2, tables=2)
        slow = replace(base, system=replace(base.system, slowness=(1.0, 2.0)))
        alike = replace(base, system=replace(base.system, slowness=(1.0, 1.0)))
        assert (
            p.iteration_time_us(alike) == p.iteration_time_us(base) <= p.iteration_time_us(slow) * (1 + 1e-9)
        )


def test_designs_of_other_paces_are_not_predicted_together() -> None:
    base = random_design(np.random.default_rng(0), ranks=2, tables=2)
    slow = replace(base, system=replace(base.system, slowness=(1.0, 2.0)))
    with pytest.raises(DesignError, match="world_size and slowness"):
        predictor().iteration_times_us([base, slow])


@pytest.mark.parametrize(
    ("slowness", "said"),
    [
        ((1.0,), "`slowness` must name every rank or none, but got 1 for world_size=2"),
        ((1.0, 0.0), "`0 < slowness < inf` must hold, but got 0.0 to 1.0"),
        ((1.0, float("inf")), "`0 < slowness < inf` must hold"),
        ((1.0, float("nan")), "`0 < slowness < inf` must hold"),
    ],
)
def test_impossible_paces_are_refused(slowness: tuple[float, ...], said: str) -> None:
    with pytest.raises(HardwareError, match=said):
        System(DEVICE, NODE, 2, slowness)
