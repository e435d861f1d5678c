from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from placement_oracle import best_objective, random_problem

from dse.placement.solver import tails
from dse.placement.solver.bound import Bound, lower_bound
from dse.placement.solver.certified import certify
from dse.placement.solver.problem import Problem, Where, loads_of
from dse.placement.solver.problem_check import check_assignment
from dse.placement.solver.tails import CHUNK, TailSearch, suits


def alike(seed: int) -> Problem:
    """A random problem of alike ranks without pinned tables."""
    problem = random_problem(seed, most_places=300)
    return replace(problem, allowed=None, slowness=np.ones(problem.num_ranks))


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small problems count as large ones."""
    monkeypatch.setattr(tails, "MOST_WORK", 0)


def test_it_finds_the_optimum_of_small_problems() -> None:
    found = missed = 0
    for seed in range(60):
        problem = alike(seed)
        best, relaxed = best_objective(problem), lower_bound(problem)
        if np.isinf(best) or relaxed.weights is None or not suits(problem):
            continue
        search = TailSearch(problem, relaxed, seed=seed)
        search.run(time_limit_s=np.inf, work=20 * CHUNK, enough=best * (1 + 1e-9))
        check_assignment(problem, search.best)
        loads = loads_of(problem, search.best)
        assert loads.objective >= best * (1 - 1e-9) or loads.overflow_bytes(problem) > 0
        hit = loads.overflow_bytes(problem) <= 0 and loads.objective <= best * (1 + 1e-6)
        found, missed = found + hit, missed + (not hit)
    assert found > 15
    assert missed <= found // 4


def test_what_it_notes_is_what_the_assignment_costs() -> None:
    checked = 0
    for seed in range(30):
        problem = replace(alike(seed), slowness=np.full(alike(seed).num_ranks, 1.5))
        relaxed = lower_bound(problem)
        if relaxed.weights is None or not suits(problem):
            continue
        search = TailSearch(problem, relaxed, seed=seed)
        search.run(time_limit_s=np.inf, work=3 * CHUNK)
        loads = loads_of(problem, search.best)
        assert search.overflow_bytes == pytest.approx(loads.overflow_bytes(problem), abs=1e-6)
        assert search.objective == pytest.approx(loads.objective)
        checked += 1
    assert checked > 8


def test_the_same_seed_and_work_give_the_same_plan() -> None:
    problem = next(p for p in map(alike, range(100)) if p.num_tables > 2 and suits(p) and _has_point(p))

    def plan(pieces: int) -> tuple[list[int], tuple[tuple[int, ...], ...]]:
        search = TailSearch(problem, lower_bound(problem), seed=5)
        for piece in range(pieces):
            search.run(time_limit_s=np.inf, work=(piece + 1) * 12 // pieces * CHUNK)
        return search.best.option.tolist(), search.best.ranks

    assert plan(1) == plan(4)


def test_ranks_that_differ_and_machines_that_hold_tables_together_are_not_for_it() -> None:
    problem = next(p for p in map(alike, range(100)) if suits(p) and p.num_ranks > 1)
    pace = np.linspace(1, 2, problem.num_ranks)
    pinned = np.ones((problem.num_tables, problem.num_ranks), dtype=np.bool_)
    within = np.full(problem.num_options, Where.WITHIN)
    assert not suits(replace(problem, slowness=pace))
    assert not suits(replace(problem, allowed=pinned))
    assert suits(replace(problem, where=within)) == bool(
        np.logical_or.reduceat(problem.shard_counts == 1, problem.first_option[:-1]).all()
    )


def test_small_problems_are_not_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert not suits(alike(0))


def test_it_begins_with_cheap_options_where_the_relaxation_has_no_point() -> None:
    placed = 0
    for problem in filter(suits, map(alike, range(40))):
        if np.isinf(best := best_objective(problem)):
            continue
        search = TailSearch(problem, Bound(0.0, None, None))
        search.run(time_limit_s=np.inf, work=20 * CHUNK, enough=best * (1 + 1e-9))
        check_assignment(problem, search.best)
        placed += search.overflow_bytes == 0
    assert placed > 10


def test_certified_placements_may_come_from_it() -> None:
    certain = 0
    for seed in range(40):
        problem = alike(seed)
        best = best_objective(problem)
        found = certify(problem, time_limit_s=2.0, seed=seed)
        assert found.lower_bound <= best * (1 + 1e-9), seed
        if np.isfinite(best):
            assert found.feasible, seed
            assert found.objective >= best * (1 - 1e-9), seed
            certain += found.objective <= best * (1 + 1e-5)
    assert certain > 20


def _has_point(problem: Problem) -> bool:
    return lower_bound(problem).weights is not None
