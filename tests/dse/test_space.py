"""Spaces: counting, coding, sampling, neighbours, against loops over every code."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dse.errors import SpaceError
from dse.space import Axis, Condition, Exclusion, SearchSpace, contains, unique
from perfcore.design.hardware import device, node
from perfcore.design.model import EmbeddingTable

A100, DGX = device("a100-sxm4-80gb"), node("dgx-a100-80gb")


def space_of(*axes: Axis, exclusions: tuple[Exclusion, ...] = ()) -> SearchSpace:
    return SearchSpace("s", axes, {}, (EmbeddingTable("t", 10),), A100, DGX, exclusions)


@st.composite
def spaces(draw: st.DrawFn) -> SearchSpace:
    """Two or three parents, children that depend on them, and perhaps an exclusion between parents."""
    parents = [
        Axis(f"p{i}", tuple(draw(st.sampled_from([(1, 2), (1, 2, 3), ("a", "b", "c")]))))
        for i in range(draw(st.integers(2, 3)))
    ]
    children = []
    for i in range(draw(st.integers(0, 3))):
        parent = draw(st.sampled_from(parents))
        codes = draw(st.sets(st.integers(0, len(parent.values) - 1)))
        condition = Condition(parent.name, tuple(sorted(codes)))
        children.append(Axis(f"c{i}", tuple(range(draw(st.integers(2, 4)))), condition))
    exclusions: tuple[Exclusion, ...] = ()
    if draw(st.booleans()):
        first, second = len(parents[0].values), len(parents[1].values)
        rows = [set(draw(st.sets(st.integers(0, second - 1), min_size=1))) for _ in range(first)]
        for code in range(second):  # every value of the second axis stays possible
            rows[code % first].add(code)
        allowed = tuple(tuple(sorted(r)) for r in rows)
        exclusions = (Exclusion((parents[0].name, parents[1].name), allowed, "a rule"),)
    return space_of(*draw(st.permutations([*parents, *children])), exclusions=exclusions)


def every_design(space: SearchSpace) -> set[tuple[int, ...]]:
    """Codes of all designs, by a loop over the grid of codes."""
    names = [a.name for a in space.axes]
    found = set()
    for row in itertools.product(*(range(len(a.values)) for a in space.axes)):
        code = dict(zip(names, row, strict=True))
        ok = all(code[e.axes[1]] in e.allowed[code[e.axes[0]]] for e in space.exclusions)
        active = [a.condition is None or code[a.condition.axis] in a.condition.codes for a in space.axes]
        if ok:
            found.add(tuple(c if on else 0 for c, on in zip(row, active, strict=True)))
    return found


def rows(codes: np.ndarray) -> list[tuple[int, ...]]:
    return [tuple(int(c) for c in row) for row in codes]


@given(spaces())
@settings(deadline=None, max_examples=50)
def test_size_and_enumeration_are_those_of_a_loop(space: SearchSpace) -> None:
    expected = every_design(space)
    listed = rows(space.enumerate())
    assert space.size == len(expected) == len(listed)
    assert set(listed) == expected


@given(spaces(), st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=50)
def test_samples_are_canonical_designs_and_the_seed_decides(space: SearchSpace, seed: int) -> None:
    codes = space.sample(np.random.default_rng(seed), 40)
    assert codes.dtype == np.int16
    assert codes.shape == (40, len(space.axes))
    assert set(rows(codes)) <= every_design(space)
    assert (codes == space.sample(np.random.default_rng(seed), 40)).all()
    assert (space.canonical(codes) == codes).all()


@given(spaces(), st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=50)
def test_neighbours_are_one_step_away(space: SearchSpace, seed: int) -> None:
    start = space.sample(np.random.default_rng(seed), 1)
    expected = set()
    for i, axis in enumerate(space.axes):
        if not space.active(start)[0, i]:
            continue
        for code in range(len(axis.values)):
            if code == start[0, i] or (axis.ordered and abs(code - start[0, i]) != 1):
                continue
            moved = start.copy()
            moved[0, i] = code
            if space.allowed(moved)[0]:
                expected.add(rows(space.canonical(moved))[0])
    expected -= set(rows(start))
    found = rows(space.neighbours(start))
    assert len(found) == len(set(found))
    assert set(found) == expected


def test_neighbours_of_many_leave_all_of_them_out() -> None:
    space = space_of(Axis("a", (1, 2, 3)), Axis("b", ("x", "y", "z")))
    start = np.array([[0, 0], [1, 0]], dtype=np.int16)
    assert set(rows(space.neighbours(start))) == {(0, 1), (0, 2), (1, 1), (1, 2), (2, 0)}


def test_every_value_of_an_axis_is_sampled_equally_often() -> None:
    space = space_of(Axis("a", tuple(range(8))), Axis("b", (1, 2)))
    counts = np.bincount(space.sample(np.random.default_rng(0), 80_000)[:, 0], minlength=8)
    assert np.abs(counts / 10_000 - 1).max() < 0.05


def test_a_layer_counts_only_where_it_exists() -> None:
    depth = Axis("d", (1, 2, 3))
    layers = [Axis(f"w{k}", (64, 128, 256, 512), Condition("d", tuple(range(k - 1, 3)))) for k in (2, 3)]
    assert space_of(depth, Axis("w1", (64, 128, 256, 512)), *layers).size == 4 + 4**2 + 4**3


def test_a_huge_space_is_counted_exactly() -> None:
    space = space_of(*(Axis(f"a{i}", tuple(range(100))) for i in range(40)), Axis("b", (1, 2)))
    assert space.size == 2 * 100**40


def test_a_space_without_axes_is_one_design() -> None:
    space = space_of()
    assert space.size == 1
    assert space.enumerate().shape == (1, 0)
    assert space.sample(np.random.default_rng(0), 3).shape == (3, 0)
    assert len(space.neighbours(space.enumerate())) == 0


def test_too_many_axes_that_others_depend_on_are_refused() -> None:
    parents = [Axis(f"p{i}", tuple(range(101))) for i in range(3)]
    children = [Axis(f"c{i}", (1, 2), Condition(f"p{i}", (0,))) for i in range(3)]
    with pytest.raises(
        SpaceError, match="Axes that others depend on have 1030301 combinations, 1000000 at most"
    ):
        space_of(*parents, *children)


def test_numbers_are_ordered_and_words_are_not() -> None:
    assert Axis("a", (1, 2.5)).ordered
    assert not Axis("a", (False, True)).ordered
    assert not Axis("a", ("1", "2")).ordered


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ((Axis("a", (1,)),), "Axis 'a' needs distinct values, two at least"),
        ((Axis("a", (1, 1)),), "Axis 'a' needs distinct values"),
        ((Axis("a", (1, 2)), Axis("a", (1, 2))), "Axis names must be unique"),
        (
            (Axis("a", (1, 2), Condition("b", (0,))),),
            "Axis 'a' depends on 'b', which is no unconditional axis",
        ),
    ],
)
def test_axes_that_make_no_space(axes: tuple[Axis, ...], message: str) -> None:
    with pytest.raises(SpaceError, match=message):
        space_of(*axes)


@pytest.mark.parametrize(
    ("allowed", "message"),
    [
        (((0, 1), ()), "Axis 'a': its value 20 fits no design: a rule"),
        (((0,), (0,)), "Axis 'b': its value 2 fits no"),
    ],
)
def test_a_value_that_fits_no_design_is_named(allowed: tuple[tuple[int, ...], ...], message: str) -> None:
    with pytest.raises(SpaceError, match=message):
        space_of(
            Axis("a", (10, 20)), Axis("b", (1, 2)), exclusions=(Exclusion(("a", "b"), allowed, "a rule"),)
        )


def test_an_unknown_axis_is_refused_by_name() -> None:
    space = space_of(Axis("a", (1, 2)))
    assert "a" in space
    assert "z" not in space
    with pytest.raises(SpaceError, match="The space has no axis 'z'; its axes are a"):
        space.position("z")


def test_rows_are_compared_as_a_whole() -> None:
    codes = np.array([[1, 2], [0, 3], [1, 2]], dtype=np.int16)
    assert rows(unique(codes)) == [(0, 3), (1, 2)]
    assert contains(codes, codes[1:2]).tolist() == [False, True, False]
