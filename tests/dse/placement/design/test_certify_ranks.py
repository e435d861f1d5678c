"""Plans on ranks that differ: what launches take goes with a rank's pace, what collectives take does not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from design_cases import predictor

from dse.placement.design.certify import plan_design
from dse.placement.design.problem import DesignProblem
from perfcore.design import hardware
from perfcore.design.design import Design
from perfcore.design.model import EmbeddingTable, Model
from perfcore.design.rank_groups import RankGroup, system_of
from perfcore.design.sharding import ShardingPlan, ShardingType
from perfcore.design.training import Fusion, Launches, Training
from perfcore.memory import memory_of

NODE = hardware.node("dgx-a100-80gb")
MODEL = Model(
    13, tuple(EmbeddingTable(f"t{i}", 4_000_000, pooling_factor=20.0) for i in range(3)), 64, (64,), (64,)
)


def job(*groups: RankGroup) -> Design:
    system = system_of(hardware.device(NODE.device), NODE, 4, groups)
    plan = ShardingPlan.on_one_rank(MODEL)
    return Design(MODEL, Training(65_536), Fusion(launches=Launches.CUDA_GRAPH), plan, system)


def rows_alone(problem: DesignProblem) -> DesignProblem:
    return problem.keep(np.array([o.type is ShardingType.ROW_WISE for o in problem.options]))


def test_loads_of_launches_go_with_the_pace_and_those_of_collectives_do_not() -> None:
    found = plan_design(
        job(RankGroup((2, 3), 2.0)), predictor=predictor(), time_limit_s=1.0, limits=rows_alone, explain=False
    )
    ratios = found.load_us[3] / found.load_us[0]
    sent = np.array(["c10d" in name or "All2All" in name or "Reduce" in name for name in found.events])
    assert 0 < sent.sum() < len(sent)
    assert ratios[sent] == pytest.approx(1.0)
    assert ratios[~sent] == pytest.approx(2.0)


def test_each_rank_has_room_for_its_own_memory() -> None:
    p, small = predictor(), 3.2e9
    design = job(RankGroup((0,), hbm_bytes=small), RankGroup((3,), 3.0))
    found = plan_design(design, predictor=p, time_limit_s=1.0)
    assert (found.total_hbm_bytes <= design.system.rank_hbm_bytes).all()
    assert (found.total_hbm_bytes >= memory_of(found.design).total * (1 - 1e-6)).all()
    assert np.ptp(found.capacity_bytes[1:]) == 0
    assert found.capacity_bytes[1] - found.capacity_bytes[0] == pytest.approx(
        design.system.device.hbm_bytes - small
    )
    assert p.predict(found.design).fits
    roomy = replace(design, system=replace(design.system, hbm_bytes=()))
    assert plan_design(roomy, predictor=p, time_limit_s=1.0).total_hbm_bytes[0] > small
