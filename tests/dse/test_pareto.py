"""Fronts, hypervolume and knee, against definitions written as loops."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from dse.pareto import hypervolume, knee_point, pareto_mask

# Few distinct numbers, so that ties abound.
numbers = st.integers(0, 6).map(float) | st.sampled_from([np.nan, np.inf, -np.inf])


def points(m: int, elements: st.SearchStrategy[float] = numbers) -> st.SearchStrategy[np.ndarray]:
    return st.integers(0, 30).flatmap(lambda n: arrays(np.float64, (n, m), elements=elements))


def mask_by_definition(values: np.ndarray) -> list[bool]:
    def beats(a: np.ndarray, b: np.ndarray) -> bool:
        return bool((a <= b).all() and (a < b).any())

    return [not np.isnan(row).any() and not any(beats(other, row) for other in values) for row in values]


@pytest.mark.parametrize("m", [1, 2, 3, 4])
def test_the_front_is_that_of_the_definition(m: int) -> None:
    @given(points(m))
    @settings(deadline=None, max_examples=50)
    def check(values: np.ndarray) -> None:
        assert pareto_mask(values).tolist() == mask_by_definition(values)

    check()


@pytest.mark.parametrize("m", [2, 3])
def test_blocks_change_nothing(m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(0).integers(0, 40, (3000, m)).astype(float)
    whole = pareto_mask(values)
    monkeypatch.setattr("dse.pareto.MAX_BLOCK", 7)
    assert (pareto_mask(values) == whole).all()


def test_a_million_rows_are_no_matter() -> None:
    values = np.random.default_rng(0).random((10**6, 2))
    front = values[pareto_mask(values)]
    assert (np.diff(front[np.argsort(front[:, 0]), 1]) < 0).all()
    assert (values.min(axis=0) == front.min(axis=0)).all()


def volume_by_cells(values: np.ndarray, reference: np.ndarray) -> int:
    """Unit cells below the reference that some integer point dominates."""
    cells = itertools.product(*(range(int(r)) for r in reference))
    return sum(any((row <= np.array(cell)).all() for row in values) for cell in cells)


@pytest.mark.parametrize("m", [1, 2, 3])
def test_the_hypervolume_is_the_number_of_cells(m: int) -> None:
    @given(points(m, st.integers(0, 6).map(float)))
    @settings(deadline=None, max_examples=30)
    def check(values: np.ndarray) -> None:
        reference = np.full(m, 5.0)
        assert hypervolume(values, reference) == pytest.approx(volume_by_cells(values, reference))

    check()


def test_rows_beyond_the_reference_or_unknown_add_nothing() -> None:
    reference = np.array([2.0, 2.0])
    assert hypervolume(np.array([[1.0, 1.0], [3.0, 0.0], [np.nan, 0.0]]), reference) == 1.0
    assert hypervolume(np.empty((0, 2)), reference) == 0.0


def test_more_than_three_objectives_have_no_exact_volume() -> None:
    with pytest.raises(ValueError, match="`1 <= m <= 3` must hold for the hypervolume, but got m=4"):
        hypervolume(np.zeros((1, 4)), np.ones(4))


def test_the_knee_is_the_bend() -> None:
    values = np.array([[0.0, 10.0], [1.0, 2.0], [5.0, 1.0], [10.0, 0.0], [9.0, 9.0], [np.nan, 0.0]])
    assert knee_point(values) == 1
    assert knee_point(values * np.array([1e-6, 1e6])) == 1


def test_the_knee_of_few_rows() -> None:
    assert knee_point(np.empty((0, 2))) is None
    assert knee_point(np.array([[np.inf, 1.0]])) is None
    assert knee_point(np.array([[3.0, 1.0]])) == 0


@given(points(2))
@settings(deadline=None, max_examples=50)
def test_the_knee_is_on_the_finite_front(values: np.ndarray) -> None:
    knee = knee_point(values)
    finite = np.where(np.isfinite(values).all(axis=1, keepdims=True), values, np.nan)
    assert knee is None or pareto_mask(finite)[knee]
