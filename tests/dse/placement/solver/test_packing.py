from __future__ import annotations

import numpy as np
import pytest
from placement_oracle import best_objective, random_problem

from dse.placement.solver.bound import lower_bound
from dse.placement.solver.dominance import reduced
from dse.placement.solver.packing import packed_bound
from dse.placement.solver.problem import Assignment, Problem, homogeneous, loads_of

ROUNDING = 1e-9


@pytest.mark.parametrize("block", range(4))
def test_no_packed_bound_is_above_the_optimum_of_thousands(block: int) -> None:
    """All kinds of options, machines, unequal ranks and pinned tables; with and without a known objective."""
    rose = 0
    for seed in range(250 * block, 250 * (block + 1)):
        problem = random_problem(seed, most_places=100)
        if seed % 2:
            problem = reduced(problem).problem
        relaxed = lower_bound(problem)
        if relaxed.weights is None:
            continue
        best = best_objective(problem)
        rng = np.random.default_rng(seed)
        size = {"single_places": int(rng.integers(1, 5)), "most_nodes": int(rng.choice([1, 3, 10, 1000]))}
        below = best * float(rng.choice([1.0, 1.5])) if seed % 3 and np.isfinite(best) else np.inf
        found = packed_bound(problem, relaxed, below=below, time_limit_s=5, **size)
        assert found is not None
        assert found.nodes <= size["most_nodes"]
        assert relaxed.value - ROUNDING <= found.value or found.value == below, seed
        assert found.value <= best * (1 + ROUNDING), seed
        rose += found.value > relaxed.value * (1 + 1e-6)
    assert rose > 15


def packed_pair(*, ranks: int) -> Problem:
    """One table that fills a rank with one event's work, and three that have another event's besides."""
    return homogeneous(
        first_option=np.arange(5),
        first_shard=np.arange(5),
        where=np.zeros(4, dtype=np.int64),
        cost=np.array([[6.0, 0.0], [1.0, 4.0], [1.0, 4.0], [1.0, 4.0]]),
        bytes_=np.ones(4),
        capacity_bytes=4.0,
        num_ranks=ranks,
        ranks_per_host=ranks,
    )


def test_the_ranks_of_tables_show_in_the_bound() -> None:
    """On two ranks, evenly spread: 4.5 and 6. In whole tables 7 and 8, or worse."""
    problem = packed_pair(ranks=2)
    relaxed = lower_bound(problem)
    assert relaxed.value == pytest.approx(12.0)
    assert best_objective(problem) == 15.0
    values = [
        packed_bound(problem, relaxed, below=np.inf, time_limit_s=5, most_nodes=n).value
        for n in (1, 2, 9, 99)
    ]
    assert values == sorted(values)
    assert values[0] == pytest.approx(12.0)
    assert values[-1] == pytest.approx(15.0)


def test_what_cannot_be_below_a_known_objective_gives_that_objective() -> None:
    problem = packed_pair(ranks=2)
    found = packed_bound(problem, lower_bound(problem), below=15.0, time_limit_s=5)
    assert found.value == 15.0
    assert found.finished


def test_a_point_says_where_whole_tables_are() -> None:
    problem = packed_pair(ranks=2)
    found = packed_bound(problem, lower_bound(problem), below=np.inf, time_limit_s=5)
    assert found.option.tolist() == [0, 1, 2, 3]
    best = Assignment(found.option, found.ranks)
    assert loads_of(problem, best).objective == pytest.approx(15.0)


def test_a_program_of_many_ranks_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dse.placement.solver.packing.MOST_COLUMNS", 3)
    problem = packed_pair(ranks=4)
    assert packed_bound(problem, lower_bound(problem), below=np.inf, time_limit_s=5) is None


def test_nothing_is_known_without_time() -> None:
    problem = packed_pair(ranks=2)
    relaxed = lower_bound(problem)
    found = packed_bound(problem, relaxed, below=np.inf, time_limit_s=0.0)
    assert (found.value, found.finished, found.nodes) == (relaxed.value, False, 0)
