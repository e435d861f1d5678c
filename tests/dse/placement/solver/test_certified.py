from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from placement_oracle import best_objective, random_problem

from dse.placement.instances.instance import Objective, read_instance
from dse.placement.solver.certified import certify
from dse.placement.solver.problem import Assignment, loads_of

INSTANCES = Path(__file__).parents[3] / "data" / "sharding_instances"


@pytest.mark.parametrize("block", range(3))
def test_small_problems_are_proven_optimal(block: int) -> None:
    for seed in range(25 * block, 25 * (block + 1)):
        problem = random_problem(1000 + seed, most_places=500)
        best = best_objective(problem)
        found = certify(problem, time_limit_s=10)
        assert found.proven, seed
        assert found.feasible == np.isfinite(best), seed
        if found.feasible:
            assert found.objective == pytest.approx(best, rel=2e-5, abs=1e-9), seed
            assert found.lower_bound <= best * (1 + 1e-9), seed
        else:
            assert found.lower_bound == np.inf, seed


@pytest.mark.parametrize(
    ("name", "objective", "optimum"),
    [
        ("criteo_onehot_26x8", Objective.RATING, 0.853206),
        ("criteo_onehot_26x8", Objective.CRITICAL_PATH, 0.853206),
        ("criteo_v2_26x8", Objective.RATING, 2.390774),
        ("criteo_v2_26x8", Objective.CRITICAL_PATH, 2.575176),
    ],
)
def test_criteo_is_solved_to_the_end(name: str, objective: Objective, optimum: float) -> None:
    problem = read_instance(INSTANCES / f"{name}.json.gz").problem(objective)
    found = certify(problem, time_limit_s=60)
    assert found.proven
    assert found.objective == pytest.approx(optimum, rel=1e-5)
    assert found.gap_pct <= 1e-3
    loads = loads_of(problem, found.assignment)
    assert loads.overflow_bytes(problem) == 0.0
    assert loads.objective == found.objective


def test_a_start_is_never_made_worse() -> None:
    problem = read_instance(INSTANCES / "criteo_v2_26x8.json.gz").problem(Objective.CRITICAL_PATH)
    whole = problem.first_option[:-1] + 1  # table_wise
    start = Assignment(whole, tuple((t % 8,) for t in range(problem.num_tables)))
    given = loads_of(problem, start)
    found = certify(problem, time_limit_s=0.05, start=start)
    assert found.objective <= given.objective or given.overflow_bytes(problem) > 0


def test_the_same_seed_gives_the_same_answer() -> None:
    problem = read_instance(INSTANCES / "criteo_v2_26x8.json.gz").problem(Objective.RATING)
    first, second = (certify(problem, time_limit_s=30, seed=3) for _ in range(2))
    assert first.assignment.ranks == second.assignment.ranks
    assert first.lower_bound == second.lower_bound


def test_what_fits_nowhere_is_proven_to_fit_nowhere() -> None:
    problem = read_instance(INSTANCES / "criteo_onehot_26x8.json.gz").problem(Objective.RATING)
    tight = replace(problem, capacity_bytes=np.full(problem.num_ranks, 1e6))
    found = certify(tight, time_limit_s=10)
    assert not found.feasible
    assert found.proven
    assert found.gap_pct == np.inf
