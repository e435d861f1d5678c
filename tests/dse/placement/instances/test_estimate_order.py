"""The additive costs of an instance order whole plans as the predicted iteration time does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from design_cases import instance_of_design
from scipy.stats import kendalltau

from dse.config import load_design
from dse.placement.instances.instance import Instance, Objective
from dse.placement.solver.problem import Assignment, Problem, Where, loads_of
from perfcore.design.design import Design
from perfcore.design.sharding import ShardingPlan, ShardingType, TableSharding
from perfcore.predictor import Predictor
from perfcore.profile.profile import profile_for

FILE = Path(__file__).parents[4] / "spaces" / "designs" / "criteo_8gpu.yaml"


def random_plan(rng: np.random.Generator, instance: Instance, problem: Problem) -> Assignment:
    """A plan that leans towards some kinds of sharding; no replica of a large table."""
    kinds = sorted(set(instance.types))
    lean = dict(zip(kinds, rng.dirichlet(np.full(len(kinds), 0.5)) + 1e-6, strict=True))
    ranks, local = problem.num_ranks, problem.ranks_per_host
    option, placed = [], []
    for t in range(problem.num_tables):
        own = [
            o
            for o in range(problem.first_option[t], problem.first_option[t + 1])
            if instance.types[o] != "data_parallel" or problem.bytes[problem.first_shard[o]] < 2e9
        ]
        weights = np.array([lean[instance.types[o]] for o in own])
        o = int(rng.choice(own, p=weights / weights.sum()))
        count, where = int(problem.shard_counts[o]), int(problem.where[o])
        if where == Where.ALL:
            at = list(range(ranks))
        elif where == Where.HOST:
            at = [
                h * local + i for h in rng.integers(0, ranks // local, count // local) for i in range(local)
            ]
        else:
            at = rng.permutation(ranks)[:count].tolist()
        option.append(o)
        placed.append(tuple(int(r) for r in at))
    return Assignment(np.array(option), tuple(placed))


def plan_of(design: Design, instance: Instance, assignment: Assignment) -> Design:
    tables = tuple(
        TableSharding(name, ShardingType(instance.types[o]), ranks)
        for name, o, ranks in zip(instance.names, assignment.option, assignment.ranks, strict=True)
    )
    return replace(design, sharding=ShardingPlan(tables))


@pytest.mark.parametrize("ranks", [8, 16])
def test_plans_are_ordered_as_by_the_predictor(ranks: int) -> None:
    design = load_design(
        FILE,
        overrides=[f"system.world_size={ranks}"],
        place=lambda model, *_: ShardingPlan.on_one_rank(model),
    )
    predictor = Predictor(profile_for(design.system.device, design.system.node))
    instance = instance_of_design(design, predictor.cost)
    problem = instance.problem(Objective.CRITICAL_PATH)
    rng = np.random.default_rng(0)
    plans = [random_plan(rng, instance, problem) for _ in range(40)]
    costs = [loads_of(problem, p).objective for p in plans]
    times = [predictor.iteration_time_us(plan_of(design, instance, p)) for p in plans]
    assert kendalltau(costs, times).statistic > 0.7
    assert times[int(np.argmin(costs))] < 1.15 * min(times)
