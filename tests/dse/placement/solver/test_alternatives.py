"""What another option would cost: the oracle moves the table and adds everything up anew."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from placement_oracle import every_assignment, every_place, random_problem

from dse.placement.solver.alternatives import alternatives
from dse.placement.solver.problem import Assignment, Where, loads_of


@given(seed=st.integers(0, 10**6))
@settings(max_examples=50, deadline=None)
def test_an_alternative_costs_what_the_changed_plan_costs(seed: int) -> None:
    problem = random_problem(seed, most_places=400)
    for assignment in itertools.islice(every_assignment(problem), 0, 200, 50):
        loads = loads_of(problem, assignment)
        for table in range(problem.num_tables):
            found = alternatives(problem, assignment, loads, table)
            options = set(range(problem.first_option[table], problem.first_option[table + 1]))
            assert {a.option for a in found} == options - {int(assignment.option[table])}
            for a in found:
                assert a.ranks in set(every_place(problem, a.option, table))
                option = assignment.option.copy()
                option[table] = a.option
                ranks = tuple(a.ranks if t == table else r for t, r in enumerate(assignment.ranks))
                changed = loads_of(problem, Assignment(option, ranks))
                assert a.objective == pytest.approx(changed.objective)
                assert a.missing_bytes == pytest.approx(changed.overflow_bytes(problem))


@given(seed=st.integers(0, 10**6))
@settings(max_examples=30, deadline=None)
def test_a_single_shard_takes_the_best_rank_that_has_room(seed: int) -> None:
    problem = random_problem(seed, most_places=200)
    assignment = next(every_assignment(problem))
    loads = loads_of(problem, assignment)
    for table in range(problem.num_tables):
        for a in alternatives(problem, assignment, loads, table):
            if problem.where[a.option] != Where.ANY or problem.shard_counts[a.option] != 1:
                continue
            others = []
            for place in every_place(problem, a.option, table):
                option = assignment.option.copy()
                option[table] = a.option
                ranks = tuple(place if t == table else r for t, r in enumerate(assignment.ranks))
                changed = loads_of(problem, Assignment(option, ranks))
                over = np.maximum(changed.bytes - problem.capacity_bytes, 0)
                others.append((float(over[place[0]]), changed.objective))
            best = min(others)
            mine = next(
                o for o, p in zip(others, every_place(problem, a.option, table), strict=True) if p == a.ranks
            )
            assert mine == pytest.approx(best)
