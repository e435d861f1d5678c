from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_problem import ToyEvaluator, ToySpace, brute_force

from dse.search.enumerate import enumerate_space, grid, grid_size
from dse.search.executor import InProcessExecutor
from dse.search.found import Found
from dse.search.protocol import Evaluation
from dse.search.refine import Expand, Goal, Refine, Sample, neighbours, repair

SPACE, EVALUATOR = ToySpace(), ToyEvaluator()


def goal(starts, rng):
    return Goal(rng.dirichlet(np.ones(2), size=starts), np.array([1.0, -9.0]), np.array([30.0, 8.0]))


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 2**32 - 1),
    starts=st.integers(1, 6),
    rounds=st.integers(0, 6),
    pairs=st.integers(0, 20),
)
def test_refining_never_makes_a_start_worse(seed, starts, rounds, pairs):
    rng = np.random.default_rng(seed)
    codes, aim = SPACE.sample(rng, starts), goal(starts, rng)
    refined = Refine(codes, aim, rounds, pairs, (seed,))(SPACE, EVALUATOR)
    rows = np.arange(starts)
    before = aim.score(EVALUATOR.evaluate(codes), rows)
    after = aim.score(EVALUATOR.evaluate(refined.codes), rows)
    assert (after <= before).all()
    assert SPACE.allowed(refined.codes).all()
    assert (SPACE.canonical(refined.codes) == refined.codes).all()
    np.testing.assert_array_equal(refined.evaluation.objectives, EVALUATOR.evaluate(refined.codes).objectives)


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**32 - 1))
def test_a_refined_start_is_a_local_optimum_over_single_moves(seed):
    rng = np.random.default_rng(seed)
    codes, aim = SPACE.sample(rng, 3), goal(3, rng)
    refined = Refine(codes, aim, 100, 0, (seed,))(SPACE, EVALUATOR)
    rows = np.arange(3)
    best = aim.score(EVALUATOR.evaluate(refined.codes), rows)
    for start in rows:
        near = neighbours(SPACE, refined.codes[start : start + 1], pairs=0, rng=rng)[0]
        near = near[SPACE.allowed(near)]
        scores = aim.score(EVALUATOR.evaluate(near), np.full(len(near), start))
        assert scores.min() >= best[start]


def test_any_feasible_candidate_beats_any_infeasible_one():
    evaluation = Evaluation(
        np.array([[1e12, 1e12], [-1e12, -1e12], [0.0, np.nan]]), np.array([[0.0], [1e-9], [-1.0]])
    )
    aim = Goal(np.full((1, 2), 0.5), np.zeros(2), np.ones(2))
    score = aim.score(evaluation, np.zeros(3, np.intp))
    assert score[0] < score[1] < score[2] == np.inf


def test_neighbours_are_all_other_values_of_each_axis():
    near = neighbours(SPACE, np.array([[2, 1, 2, 3, 4, 1]], np.int16), pairs=0, rng=np.random.default_rng(0))[
        0
    ]
    assert len(near) == sum(len(axis.values) - 1 for axis in SPACE.axes)
    kept = near[near[:, 0] == 2]
    assert ((kept != [2, 1, 2, 3, 4, 1]).sum(axis=1) == 1).all()
    assert len(np.unique(kept, axis=0)) == len(kept)


def test_repair_keeps_candidates_and_mends_others():
    codes = np.array([[2, 1, 2, 3, 0, 2], [0, 1, 3, 3, 1, 2]], np.int16)
    mended = repair(SPACE, codes, seed=(3,))
    assert SPACE.allowed(mended).all()
    np.testing.assert_array_equal(mended[1], [0, 1, 0, 0, 1, 2])


def test_found_adds_up_in_any_order():
    parts = [Sample((7, i), 40)(SPACE, EVALUATOR) for i in range(4)]
    forward = sum(parts, start=Found.nothing(axes=6, objectives=2))
    backward = sum(parts[::-1], start=Found.nothing(axes=6, objectives=2))
    for name in ("codes", "objectives", "worst", "nearest"):
        np.testing.assert_array_equal(getattr(forward, name), getattr(backward, name))
    assert forward.evaluated == backward.evaluated == 160
    assert forward.nearest_violation == backward.nearest_violation
    assert 0 < forward.feasible < 160


def test_of_equal_objectives_the_smallest_code_stays():
    codes = np.array([[1, 1], [0, 9], [2, 0]], np.int16)
    found = Found.among(codes, Evaluation(np.ones((3, 2)), np.zeros((3, 0))))
    np.testing.assert_array_equal(found.codes, [[0, 9]])


def test_the_nearest_infeasible_is_kept():
    codes = np.arange(3, dtype=np.int16)[:, None]
    found = Found.among(codes, Evaluation(np.ones((3, 1)), np.array([[0.3], [0.1], [0.2]])))
    assert found.nearest.tolist() == [[1]]
    assert found.nearest_violation == 0.1
    assert found.feasible == 0


def test_enumeration_equals_brute_force():
    with InProcessExecutor().start(SPACE, ToyEvaluator) as pool:
        found = sum(enumerate_space(SPACE, pool), start=Found.nothing(axes=6, objectives=2))
    front = brute_force(SPACE, EVALUATOR)
    assert {tuple(o): tuple(c) for o, c in zip(found.objectives, found.codes, strict=True)} == front
    assert found.evaluated == SPACE.size
    assert len(front) > 5


def test_the_grid_is_the_full_product():
    codes = grid(SPACE, 0, grid_size(SPACE))
    assert len(np.unique(codes, axis=0)) == grid_size(SPACE) == 3 * 5**3 * 6 * 3


def test_expanding_prices_a_whole_neighbourhood():
    start = np.array([[2, 1, 2, 3, 4, 1]], np.int16)
    found = Expand(start, 0, (0,))(SPACE, EVALUATOR)
    near = neighbours(SPACE, start, pairs=0, rng=np.random.default_rng(0))[0]
    assert found.evaluated == len(near[SPACE.allowed(near)])
