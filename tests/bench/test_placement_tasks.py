"""The benchmark's own judge: its mixed-integer program agrees with trying every placement."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from placement import CASES, Figure, Target, put_table, reached, table_of
from placement_oracle import every_assignment, random_problem
from placement_tasks import any_fits, tasks

from dse.placement.solver.problem import Problem, loads_of


def with_equal_shards(problem: Problem) -> Problem:
    """The problem with the shards of each option alike."""
    counts = problem.shard_counts
    size = np.maximum.reduceat(problem.bytes, problem.first_shard[:-1])
    machines = problem.num_ranks // problem.ranks_per_host
    return replace(
        problem, bytes=np.repeat(size, counts), allowed=None, host_capacity_bytes=np.full(machines, np.inf)
    )


@pytest.mark.parametrize("seed", range(25))
def test_what_fits_by_milp_fits_by_trial(seed: int) -> None:
    problem = with_equal_shards(random_problem(seed, most_places=300))
    if (problem.where == 3).any():  # `WITHIN` has no part in the suite
        return
    total = float(problem.bytes.sum())
    for share in (0.1, 0.25, 0.4):
        tight = replace(problem, capacity_bytes=np.full(problem.num_ranks, share * total + 1e-9))
        over = min(loads_of(tight, a).overflow_bytes(tight) for a in every_assignment(tight))
        assert any_fits(tight, time_limit_s=10) is (over <= 1e-6)


def test_tasks_are_the_same_every_time() -> None:
    first, again = ([t.name for t in tasks(3)] for _ in range(2))
    assert first == again
    assert len({t.rating.num_tables for t in tasks(3)}) > 1


def test_a_target_is_met_or_not(tmp_path) -> None:
    case = CASES[1]
    met = Figure(2.39081, 2.3908, 0.0, True, True, 1.9, 0.5)
    assert reached(case, met)
    for worse in ({"objective": 2.40}, {"proven": False}, {"wall_s": 2.1}, {"feasible": False}):
        assert not reached(case, replace(met, **worse))
    assert Target(20, 2.42, 1.5).text() == "≤ 2.42, gap ≤ 1.5 %, ≤ 20 s"
    table = table_of([(case, replace(met, proven=False))], None, 1.0)
    assert "**no**" in table
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- begin: make bench-placement -->\nold\n<!-- end: make bench-placement -->\nb\n")
    put_table(page, table)
    assert page.read_text().startswith("a\n<!-- begin: make bench-placement -->\n| instance")
    assert "old" not in page.read_text()
    assert page.read_text().endswith("<!-- end: make bench-placement -->\nb\n")
