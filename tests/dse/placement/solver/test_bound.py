from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from placement_oracle import best_objective, random_problem

from dse.placement.solver.bound import bound_of_averages, lower_bound, options_of, steps_of
from dse.placement.solver.dominance import reduced
from dse.placement.solver.exact import solve_exactly
from dse.placement.solver.linear import Rows, solve_relaxed, solve_whole
from dse.placement.solver.problem import homogeneous, loads_of

ROUNDING = 1e-9


@pytest.mark.parametrize("block", range(4))
def test_no_bound_is_above_the_optimum_of_thousands(block: int) -> None:
    for seed in range(500 * block, 500 * (block + 1)):
        problem = random_problem(seed, most_places=100)
        best = best_objective(problem)
        for smaller in (problem, reduced(problem).problem):
            fast = lower_bound(smaller).value
            assert fast <= best * (1 + ROUNDING), seed
            assert bound_of_averages(smaller, options_of(smaller)) <= fast * (1 + ROUNDING) + ROUNDING, seed
            if seed % 5 == 0:
                tight = lower_bound(smaller, time_limit_s=5).value
                assert fast - ROUNDING <= tight <= best * (1 + ROUNDING), seed


@pytest.mark.parametrize("block", range(4))
def test_branch_and_bound_finds_the_optimum(block: int) -> None:
    for seed in range(40 * block, 40 * (block + 1)):
        problem = reduced(random_problem(seed, most_places=1000)).problem
        best = best_objective(problem)
        found = solve_exactly(problem, below=np.inf, bound=0.0, time_limit_s=10)
        assert found.finished, seed
        if np.isinf(best):
            assert found.assignment is None, seed
            assert np.isinf(found.bound), seed
            continue
        assert found.assignment is not None, seed
        loads = loads_of(problem, found.assignment)
        assert loads.overflow_bytes(problem) <= 1e-6
        assert loads.objective == pytest.approx(best, rel=1e-5, abs=1e-9), seed
        assert found.bound <= best * (1 + ROUNDING), seed


@pytest.mark.parametrize("seed", range(20))
def test_nothing_is_found_below_the_optimum(seed: int) -> None:
    problem = reduced(random_problem(seed)).problem
    best = best_objective(problem)
    if np.isinf(best) or best == 0:
        return
    found = solve_exactly(problem, below=best, bound=0.0, time_limit_s=10)
    assert found.assignment is None
    assert found.finished
    assert best * (1 - 1e-5) <= found.bound <= best


def test_the_bound_knows_that_equal_widths_come_in_whole_steps() -> None:
    """Five shards of 2 on three ranks: spread evenly 10 / 3, but 4 in truth."""
    problem = homogeneous(
        first_option=np.arange(6),
        first_shard=np.arange(6),
        where=np.zeros(5, dtype=np.int64),
        cost=np.full((5, 1), 2.0),
        bytes_=np.zeros(5),
        capacity_bytes=1.0,
        num_ranks=3,
        ranks_per_host=3,
    )
    assert lower_bound(problem).value == pytest.approx(10 / 3)
    assert lower_bound(problem, time_limit_s=5).value == pytest.approx(4.0, rel=1e-5)
    assert steps_of(problem, 10 / 3) == pytest.approx([2.0])


def test_the_bound_of_what_fits_nowhere_is_infinite() -> None:
    problem = homogeneous(
        first_option=np.arange(2),
        first_shard=np.arange(2),
        where=np.zeros(1, dtype=np.int64),
        cost=np.ones((1, 1)),
        bytes_=np.full(1, 5.0),
        capacity_bytes=4.0,
        num_ranks=3,
        ranks_per_host=3,
    )
    assert lower_bound(problem).value == np.inf


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10_000))
def test_any_multipliers_bound_a_linear_program(seed: int) -> None:
    rng = np.random.default_rng(seed)
    i, j = int(rng.integers(1, 6)), int(rng.integers(1, 6))
    rows = Rows()
    rows.add(np.repeat(np.arange(i), j), np.tile(np.arange(j), i), rng.normal(size=i * j), count=i, high=1.0)
    high = rng.random(j) * 3
    program = rows.program(
        objective=rng.normal(size=j), low=np.zeros(j), high=high, whole=np.zeros(j, dtype=bool)
    )
    solved = solve_relaxed(program)
    assert solved.x is not None
    best = float(program.objective @ solved.x)
    assert solved.bound == pytest.approx(best, abs=1e-6)
    for _ in range(5):
        assert program.dual_bound(rng.normal(size=i)) <= best + 1e-6
    whole = solve_whole(program, time_limit_s=5)
    assert whole.bound <= best + 1e-6
