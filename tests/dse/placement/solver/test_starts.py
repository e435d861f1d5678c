from __future__ import annotations

import itertools

import numpy as np
import pytest
from placement_oracles import random_problem

from dse.placement.solver.local_search_data import data_of
from dse.placement.solver.problem import Problem, homogeneous
from dse.placement.solver.starts import by_memory, by_size, least, start_options


def drawn(seed: int) -> Problem:
    return random_problem(np.random.default_rng(seed), tables=9, ranks=4, hosts=2, events=3)


def test_the_least_option_of_each_table_is_the_first_of_the_cheapest() -> None:
    for seed in range(30):
        problem = drawn(seed)
        cost = np.random.default_rng(seed).integers(0, 3, problem.num_options).astype(float)
        first = problem.first_option
        naive = [a + int(np.argmin(cost[a:b])) for a, b in itertools.pairwise(first)]
        assert least(data_of(problem), cost).tolist() == naive


@pytest.mark.parametrize(("tight", "fine"), [(False, True), (True, True), (False, False)])
def test_starts_are_distinct_and_give_each_table_an_option_of_its_own(tight: bool, fine: bool) -> None:
    for seed in range(30):
        problem = drawn(seed)
        choices = start_options(problem, data_of(problem), tight=tight, fine=fine)
        assert len({c.tobytes() for c in choices}) == len(choices) >= 1
        for choice in choices:
            assert (problem.table_of_option[choice] == np.arange(problem.num_tables)).all()


def test_tables_in_falling_order_of_work_and_of_memory() -> None:
    problem = drawn(1)
    data = data_of(problem)
    totals = [
        data.total[a:b].min() for a, b in zip(data.first_option[:-1], data.first_option[1:], strict=True)
    ]
    assert (np.diff(np.array(totals)[by_size(data)]) <= 0).all()
    assert sorted(by_memory(problem, data).tolist()) == list(range(problem.num_tables))


def test_a_large_shard_is_split_where_an_event_would_wait_for_it() -> None:
    """Whole: 12 on one rank. Split over all four: 4 each, more work but a third of the time."""
    problem = homogeneous(
        first_option=np.array([0, 2]),
        first_shard=np.array([0, 1, 5]),
        where=np.array([0, 0]),
        cost=np.array([[12.0, 0.0], *[[4.0, 0.0]] * 4]),
        bytes_=np.ones(5),
        capacity_bytes=np.inf,
        num_ranks=4,
        ranks_per_host=4,
    )
    assert [1] in [c.tolist() for c in start_options(problem, data_of(problem), tight=False)]


def test_without_a_choice_there_is_one_start() -> None:
    problem = homogeneous(
        first_option=np.arange(4),
        first_shard=np.arange(4),
        where=np.zeros(3, dtype=np.int64),
        cost=np.ones((3, 2)),
        bytes_=np.ones(3),
        capacity_bytes=1.0,
        num_ranks=2,
        ranks_per_host=2,
    )
    starts = [start_options(problem, data_of(problem), tight=tight) for tight in (False, True)]
    assert [[c.tolist() for c in s] for s in starts] == [[[0, 1, 2]]] * 2
