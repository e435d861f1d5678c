from __future__ import annotations

import numpy as np
import pytest
from placement_oracle import best_objective, every_assignment, random_problem

from dse.placement.solver.bound import lower_bound
from dse.placement.solver.boxes import Boxes, boxed_bound
from dse.placement.solver.dominance import reduced
from dse.placement.solver.problem import Problem, homogeneous, loads_of

ROUNDING = 1e-9


@pytest.mark.parametrize("block", range(4))
def test_no_bound_over_boxes_is_above_the_optimum(block: int) -> None:
    """Wherever it ends, and whatever objective is known."""
    raised = 0
    for seed in range(100 * block, 100 * (block + 1)):
        problem = random_problem(seed, most_places=100)
        best = best_objective(problem)
        problem = reduced(problem).problem if seed % 2 else problem
        relaxed = lower_bound(problem).value
        if np.isinf(relaxed):
            continue
        for below, most in ((np.inf, 3), (np.inf, 200), (best * 1.02, 200)):
            found = boxed_bound(Boxes(problem), relaxed, below=below, time_limit_s=np.inf, most_boxes=most)
            assert found <= min(best, below) * (1 + ROUNDING), seed
            assert found >= relaxed * (1 - ROUNDING), seed
            raised += found > relaxed * (1 + 1e-6)
    assert raised > 10


@pytest.mark.parametrize("seed", range(12))
def test_every_assignment_in_a_box_is_above_its_value(seed: int) -> None:
    problem = random_problem(seed, most_places=50)
    rng = np.random.default_rng(seed)
    events = np.array([loads_of(problem, a).cost.max(axis=0) for a in every_assignment(problem)])
    fits = np.array([loads_of(problem, a).overflow_bytes(problem) <= 0 for a in every_assignment(problem)])
    boxes = Boxes(problem)
    for _ in range(10):
        low, high = np.sort(events[rng.integers(len(events), size=2)], axis=0) * [[0.95], [1.05]]
        inside = fits & (events >= low).all(axis=1) & (events <= high).all(axis=1)
        least = events[inside].sum(axis=1).min(initial=np.inf)
        assert boxes.within(low, high).value <= least * (1 + ROUNDING)


def one_large_table() -> Problem:
    """Whole tables of 16, 8 and 8 in one event, or 6 on every rank in another."""
    return homogeneous(
        first_option=np.array([0, 2, 4, 6]),
        first_shard=np.array([0, 1, 5, 6, 10, 11, 15]),
        where=np.array([0, 1, 0, 1, 0, 1]),
        cost=np.array(
            [[c, 0.0] if c else [0.0, 6.0] for c in (16, 0, 0, 0, 0, 8, 0, 0, 0, 0, 8, 0, 0, 0, 0)]
        ),
        bytes_=np.zeros(15),
        capacity_bytes=1.0,
        num_ranks=4,
        ranks_per_host=4,
    )


def test_half_an_option_does_not_make_half_an_event() -> None:
    """Half of the largest table seems to cost 8 and half of 6, but whole or not it is 14 at least."""
    problem = one_large_table()
    assert lower_bound(problem).value == pytest.approx(11.0)
    assert best_objective(problem) == 14.0
    assert boxed_bound(Boxes(problem), 11.0, below=np.inf, time_limit_s=np.inf) == pytest.approx(14.0)


def test_nothing_lies_in_a_box_without_an_option() -> None:
    boxes = Boxes(one_large_table())
    assert np.isinf(boxes.within(np.zeros(2), np.array([7.0, 5.0])).value)
    assert np.isinf(boxes.within(np.array([0.0, 73.0]), np.full(2, np.inf)).value)


def test_a_relaxation_without_time_leaves_averages() -> None:
    problem = one_large_table()
    found = Boxes(problem).widest(time_limit_s=-np.inf)
    assert 8.0 <= found.value <= 11.0 + ROUNDING
