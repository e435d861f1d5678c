from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from placement_oracles import best_of_all, is_allowed, random_problem

from dse.errors import SpaceError
from dse.placement.solver.anytime import Search
from dse.placement.solver.dominance import reduced
from dse.placement.solver.problem import Assignment, Problem, Where, homogeneous, loads_of
from dse.placement.solver.search import search

SHAPES = [(1, 1), (2, 1), (3, 1), (4, 2), (4, 4)]  # ranks, machines


def drawn(seed: int, *, tight: float = 2.0, tables: int = 3) -> Problem:
    rng = np.random.default_rng(seed)
    ranks, hosts = SHAPES[seed % len(SHAPES)]
    events = int(rng.integers(1, 5))
    return random_problem(rng, tables=tables, ranks=ranks, hosts=hosts, events=events, tight=tight)


def solved(problem: Problem, **options: int) -> Assignment:
    return search(problem, work=options.pop("work", 60_000), **options)


@pytest.mark.parametrize("tight", [0.8, 1.2, 3.0])
def test_the_optimum_of_small_problems(tight: float) -> None:
    optima, missed = 0, 0
    for seed in range(50):
        problem = drawn(seed, tight=tight)
        optimum, found = best_of_all(problem), solved(problem, seed=seed)
        loads = loads_of(problem, found)
        assert is_allowed(problem, found)
        if np.isinf(optimum):
            assert loads.overflow_bytes(problem) > 0
            continue
        optima += 1
        assert loads.overflow_bytes(problem) == 0
        assert loads.objective >= optimum * (1 - 1e-9)
        missed += loads.objective > optimum * (1 + 1e-9)
    assert optima >= 10
    assert missed <= 1


@pytest.mark.parametrize("tight", [0.5, 3.0])
def test_what_is_dropped_never_changes_the_optimum(tight: float) -> None:
    dropped = merged = 0
    for seed in range(300):
        problem = drawn(seed, tight=tight, tables=2 if seed % 3 else 3)
        smaller = reduced(problem)
        dropped += problem.num_options - smaller.problem.num_options
        merged += problem.num_events - smaller.problem.num_events
        assert best_of_all(smaller.problem) == pytest.approx(best_of_all(problem), rel=1e-9)
    assert dropped > 50
    assert merged > 50


def typed(*, whole: list[float], split: list[float]) -> Problem:
    """Tables with a whole option, and one of the same cost in another event, and of half of it on two ranks."""
    tables = len(whole)
    rows = [
        r for w, s in zip(whole, split, strict=True) for r in ([1, w, 0], [1, 0, w], [0.5, 0, s], [0.5, 0, s])
    ]
    return homogeneous(
        first_option=np.arange(0, 3 * tables + 1, 3),
        first_shard=np.r_[0, np.tile([1, 1, 2], tables).cumsum()],
        where=np.zeros(3 * tables, dtype=np.int64),
        cost=np.array(rows, dtype=float),
        bytes_=np.ones(4 * tables),
        capacity_bytes=np.inf,
        num_ranks=2,
        ranks_per_host=2,
    )


def test_an_event_that_every_option_can_avoid_is_folded() -> None:
    problem = typed(whole=[2.0, 3.0], split=[1.5, 2.0])
    smaller = reduced(problem)
    assert smaller.option.tolist() == [1, 2, 4, 5]
    assert smaller.problem.num_events == 2
    assert best_of_all(smaller.problem) == best_of_all(problem)


def test_proportional_events_are_merged_and_idle_ones_left_out() -> None:
    problem = drawn(3)
    cost = problem.cost[:, :1]
    wide = replace(problem, cost=np.hstack([cost, 2 * cost, 0 * cost]))
    assert reduced(wide).problem.num_events == 1
    assert best_of_all(reduced(wide).problem) == pytest.approx(3 * best_of_all(replace(problem, cost=cost)))
    assert reduced(replace(problem, cost=0 * cost)).problem.num_events == 1


def test_assignments_translate_both_ways() -> None:
    for seed in range(40):
        problem = drawn(seed)
        smaller = reduced(problem)
        mine = solved(smaller.problem, work=1)
        back = smaller.original(mine)
        assert is_allowed(problem, back)
        assert loads_of(problem, back).objective == pytest.approx(loads_of(smaller.problem, mine).objective)
        again = smaller.translated(back)
        assert again is not None
        assert (again.option == mine.option).all()
        gone = np.setdiff1d(np.arange(problem.num_options), smaller.option)
        if len(gone):
            other = back.option.copy()
            other[problem.table_of_option[gone[0]]] = gone[0]
            assert smaller.translated(Assignment(other, back.ranks)) is None


@given(st.integers(0, 10**6), st.integers(4, 30))
@settings(deadline=None, max_examples=25)
def test_the_reported_objective_is_that_of_the_assignment(seed: int, tables: int) -> None:
    problem = drawn(seed, tables=tables)
    going = Search(problem, seed=seed)
    values = []
    for _ in range(3):
        loads = loads_of(problem, going.best)
        over = loads.overflow_bytes(problem)
        assert going.overflow_bytes == pytest.approx(over, rel=1e-9, abs=1e-6)
        assert going.objective == (pytest.approx(loads.objective) if over == 0 else np.inf)
        values.append((over, loads.objective))
        going.improve(30_000)
    assert all(b <= (a[0] + 1e-6, a[1] * (1 + 1e-9)) for a, b in itertools.pairwise(values))


def test_same_seed_and_work_same_answer_however_it_is_cut() -> None:
    problem = drawn(8, tables=20)
    whole, pieces = Search(problem, seed=5), Search(problem, seed=5)
    whole.improve(120_000)
    while pieces.steps < whole.steps:
        pieces.improve(1)
    assert whole.best.ranks == pieces.best.ranks
    assert (whole.best.option == pieces.best.option).all()
    first, second = (search(problem, seed=2, work=50_000) for _ in range(2))
    assert first.ranks == second.ranks


def test_never_worse_than_its_start() -> None:
    for seed in range(20):
        problem = drawn(seed, tables=6)
        start = solved(problem, seed=1)
        found = search(problem, seed=2, work=1, start=start)
        assert _key(problem, found) <= _key(problem, start)


def test_options_to_begin_with_are_tried() -> None:
    problem = drawn(8, tables=12)
    wanted = solved(problem).option
    found = search(problem, work=1, options=wanted)
    open_ = search(problem, work=1, options=np.full(problem.num_tables, -1))
    assert is_allowed(problem, found)
    assert is_allowed(problem, open_)


def test_stops_at_an_objective_that_is_enough() -> None:
    problem = drawn(8, tables=12)
    going = Search(problem)
    found = search(problem, enough=going.objective, work=10**9)
    assert loads_of(problem, found).objective == pytest.approx(going.objective)


def test_a_tight_packing_is_found() -> None:
    """Sizes made by cutting each rank's memory into pieces: an exact packing exists."""
    rng = np.random.default_rng(0)
    ranks, pieces = 4, 5
    cuts = np.sort(rng.integers(1, 1000, (ranks, pieces - 1)), axis=1)
    sizes = np.diff(cuts, axis=1, prepend=0, append=1000).reshape(-1).astype(float)
    tables = len(sizes)
    problem = homogeneous(
        first_option=np.arange(tables + 1),
        first_shard=np.arange(tables + 1),
        where=np.zeros(tables, dtype=np.int64),
        cost=rng.random((tables, 2)),
        bytes_=sizes,
        capacity_bytes=1002.0,
        num_ranks=ranks,
        ranks_per_host=ranks,
    )
    found = search(problem, work=2_000_000)
    assert loads_of(problem, found).overflow_bytes(problem) == 0


def test_ranks_that_are_alike_share_a_balanced_load() -> None:
    tables, ranks = 200, 16
    rng = np.random.default_rng(0)
    problem = homogeneous(
        first_option=np.arange(tables + 1),
        first_shard=np.arange(tables + 1),
        where=np.full(tables, int(Where.ANY)),
        cost=rng.lognormal(0.0, 0.5, (tables, 2)),
        bytes_=np.ones(tables),
        capacity_bytes=np.inf,
        num_ranks=ranks,
        ranks_per_host=8,
    )
    found = search(problem, work=300_000)
    assert loads_of(problem, found).objective <= 1.01 * problem.cost.sum() / ranks


def test_bad_problems_and_starts() -> None:
    problem = drawn(8)
    nowhere = replace(problem, allowed=np.zeros((problem.num_tables, problem.num_ranks), dtype=bool))
    free = replace(nowhere, where=np.zeros_like(problem.where))
    with pytest.raises(SpaceError, match="table 0 may take no rank"):
        search(free, work=1)
    empty = replace(problem, first_option=np.zeros(1, dtype=np.int64))
    with pytest.raises(SpaceError, match="at least one table"):
        search(empty, work=1)
    with pytest.raises(SpaceError, match=r"finite and >= 0"):
        search(replace(problem, cost=problem.cost * np.nan), work=1)
    good = solved(problem)
    with pytest.raises(SpaceError, match=r"all 3 tables, but it places 2"):
        search(problem, work=1, start=Assignment(good.option[:2], good.ranks[:2]))
    with pytest.raises(SpaceError, match=r"table 0 has option"):
        search(problem, work=1, start=Assignment(good.option[::-1], good.ranks[::-1]))


def _key(problem: Problem, assignment: Assignment) -> tuple[float, float]:
    loads = loads_of(problem, assignment)
    return loads.overflow_bytes(problem), loads.objective


def test_an_offered_start_is_never_lost_nor_are_better_ones() -> None:
    """With the optimum's options and ranks offered the search is there at once; with bad ones it stays where it was."""
    for seed in range(10):
        problem = replace(drawn(seed, tables=5), allowed=None)
        going = Search(problem, seed=seed)
        going.improve(20_000)
        before = (going.overflow_bytes, going.objective)
        free = [problem.where[o] == Where.ANY for o in going.best.option]
        ranks = [tuple(0 for _ in r) if f else None for r, f in zip(going.best.ranks, free, strict=True)]
        going.offer(going.best.option, ranks)
        assert (going.overflow_bytes, going.objective) <= before
        going.improve(1)
        assert is_allowed(problem, going.best)
        other = Search(problem, seed=seed)
        kept = [r if f else None for r, f in zip(going.best.ranks, free, strict=True)]
        if all(free):
            other.offer(going.best.option, kept)
            assert (other.overflow_bytes, other.objective) <= (
                going.overflow_bytes,
                going.objective * (1 + 1e-9),
            )
