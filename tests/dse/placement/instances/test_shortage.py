"""Why nothing fits: which table or rank, how much is missing, and how much would do."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from placement_oracle import every_assignment, random_problem

from dse.placement.instances.instance import Objective, instance_of_json
from dse.placement.instances.labels import Labels, labels_of
from dse.placement.instances.shortage import capacity_remedy, fullest_share, refusal, shortage_of
from dse.placement.solver.problem import Assignment, Problem, loads_of


def best_of_all(problem: Problem) -> Assignment:
    """The assignment of least overflow, then least objective, by trying all."""

    def key(assignment: Assignment) -> tuple[float, float]:
        loads = loads_of(problem, assignment)
        return loads.overflow_bytes(problem), loads.objective

    return min(every_assignment(problem), key=key)


def problem_of(*gib: float, cap: float = 1.0, ranks: int = 2) -> tuple[Problem, Labels]:
    tables = [[{"type": "table_wise", "part": "device", "sh": [[1, 0, 1, 0, size]]}] for size in gib]
    names = [f"t{i}" for i in range(len(gib))]
    instance = instance_of_json({"ws": ranks, "lws": ranks, "cap": cap, "names": names, "tables": tables})
    return instance.problem(Objective.RATING), labels_of(instance, Objective.RATING)


def test_a_table_that_no_rank_can_hold_is_named() -> None:
    problem, labels = problem_of(0.5, 3.25)
    found = shortage_of(problem, labels, best_of_all(problem))
    assert found.message == (
        "Table 't1' needs 3.2 GiB on a rank even as table_wise, its best way to be split, but its ranks have 1.0 GiB for "
        "tables: 2.2 GiB are missing."
    )
    assert found.missing_bytes == 2.25 * 2**30


def test_a_pinned_table_counts_the_ranks_that_it_may_take() -> None:
    problem, labels = problem_of(2.0, cap=3.0)
    allowed = np.array([[True, False]])
    pinned = replace(problem, allowed=allowed, capacity_bytes=np.array([1.0, 3.0]) * 2**30)
    assert "'t0' needs 2.0 GiB" in shortage_of(pinned, labels, Assignment(np.array([0]), ((0,),))).message


def test_all_tables_together_need_more_than_there_is() -> None:
    problem, labels = problem_of(0.9, 0.9, 0.9)
    found = shortage_of(problem, labels, best_of_all(problem))
    assert "All tables together need 2.7 GiB at least, but the 2 ranks have 2.0 GiB" in found.message
    assert found.missing_bytes == pytest.approx(0.7 * 2**30)


def test_tables_that_do_not_fit_side_by_side_name_a_rank() -> None:
    problem, labels = problem_of(0.6, 0.6, 0.6)
    found = shortage_of(problem, labels, best_of_all(problem))
    assert "rank" in found.message
    assert "needs 1.2 GiB of 1.0 GiB, 0.2 GiB more than there are" in found.message


@given(seed=st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_the_remedy_is_enough_and_less_is_not(seed: int) -> None:
    problem = random_problem(seed, most_places=300)
    machines = problem.num_ranks // problem.ranks_per_host
    problem = replace(problem, host_capacity_bytes=np.full(machines, np.inf))
    if problem.capacity_bytes.min() <= 0:
        return
    share = fullest_share(problem, best_of_all)
    enough = replace(problem, capacity_bytes=problem.capacity_bytes * share * (1 + 1e-9))
    less = replace(problem, capacity_bytes=problem.capacity_bytes * share * (1 - 1e-6))
    assert loads_of(enough, best_of_all(enough)).overflow_bytes(enough) == 0
    if share > 0:
        assert loads_of(less, best_of_all(less)).overflow_bytes(less) > 0


def test_the_remedy_in_words() -> None:
    problem, _ = problem_of(0.6, 0.6, 0.6)
    assert capacity_remedy(problem, best_of_all) == "1.2 GiB for tables on each rank instead of 1.0 GiB."
    fits, _ = problem_of(0.5, 0.5)
    assert capacity_remedy(fits, best_of_all) is None
    nothing = replace(problem, capacity_bytes=np.array([-1.0, -1.0]))
    assert capacity_remedy(nothing, best_of_all) is None


def test_the_refusal_numbers_what_would_do() -> None:
    problem, labels = problem_of(3.0)
    shortage = shortage_of(problem, labels, best_of_all(problem))
    err = refusal(shortage, ["More memory.", "Fewer limits."])
    assert err.exit_code == 3
    assert err.hint is not None
    assert err.hint.endswith("  1. More memory.\n  2. Fewer limits.")
    assert refusal(shortage, []).hint is None


def hosted(*gib: float, hcap: float) -> tuple[Problem, Labels]:
    tables = [[{"type": "table_wise", "part": "device", "sh": [[1, 0, 1, 0, 0.1, size]]}] for size in gib]
    instance = instance_of_json({"ws": 2, "lws": 2, "cap": 1, "hcap": hcap, "tables": tables})
    return instance.problem(Objective.RATING), labels_of(instance, Objective.RATING)


def test_tables_that_do_not_fit_the_host_name_the_machine() -> None:
    problem, labels = hosted(3, 5, hcap=6)
    found = shortage_of(problem, labels, best_of_all(problem))
    assert "machine 0 needs 8.0 GiB of its 6.0 GiB of host memory for tables, 2.0 GiB more" in found.message
    assert "table 'table_1' has the most" in found.message
    assert found.missing_bytes == 2 * 2**30


def test_device_memory_is_no_remedy_for_the_host() -> None:
    problem, _ = hosted(3, 5, hcap=6)
    assert fullest_share(problem, best_of_all) == np.inf
    assert capacity_remedy(problem, best_of_all) is None
    assert fullest_share(hosted(3, 5, hcap=8)[0], best_of_all) <= 1


def test_what_fits_is_said_to_lack_nothing() -> None:
    problem, labels = hosted(3, 5, hcap=8)
    found = shortage_of(problem, labels, best_of_all(problem))
    assert found.missing_bytes == 0
    assert "there may be one" in found.message
