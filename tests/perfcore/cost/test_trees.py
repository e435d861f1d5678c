"""Sums of oblivious trees: answers by hand, and files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfcore.cost.learned import NEVER, Residual, Trees, load_trees
from perfcore.errors import ProfileError


def random_trees(seed: int, *, trees: int = 5, depth: int = 3, columns: int = 4) -> Trees:
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, 9, columns)
    borders = [np.sort(rng.normal(size=n)).astype(np.float32) for n in counts]
    features = rng.integers(0, columns, (trees, depth)).astype(np.uint8)
    numbers = (rng.integers(0, 100, (trees, depth)) % counts[features]).astype(np.uint8)
    numbers[0, 0] = NEVER
    leaves = rng.normal(size=(trees, 2**depth)).astype(np.float16).astype(np.float32)
    starts = np.cumsum([0, *counts])
    return Trees(
        borders=np.concatenate(borders),
        starts=starts,
        features=features,
        numbers=numbers,
        leaves=leaves,
        bias=0.25,
    )


def by_hand(trees: Trees, row: np.ndarray) -> float:
    total = trees.bias
    for features, numbers, leaves in zip(trees.features, trees.numbers, trees.leaves, strict=True):
        leaf = 0
        for level, (feature, number) in enumerate(zip(features, numbers, strict=True)):
            border = np.inf if number == NEVER else trees.borders[trees.starts[feature] + number]
            leaf |= int(row[feature] > border) << level
        total += float(leaves[leaf])
    return total


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 10_000), rows=st.integers(0, 40))
def test_a_row_gets_the_leaves_that_its_answers_lead_to(seed: int, rows: int) -> None:
    trees = random_trees(seed)
    values = np.random.default_rng(seed + 1).normal(size=(rows, 4)).astype(np.float32)
    np.testing.assert_allclose(trees(values), [by_hand(trees, row) for row in values], rtol=1e-12)


def test_a_value_on_a_border_is_not_beyond_it() -> None:
    trees = random_trees(3)
    values = np.tile(trees.borders[:1], (1, 4)).astype(np.float32)
    assert trees(values) == pytest.approx([by_hand(trees, values[0])])


def test_more_rows_than_a_block_equal_one_by_one() -> None:
    trees = random_trees(7)
    values = np.random.default_rng(0).normal(size=(5000, 4)).astype(np.float32)
    np.testing.assert_array_equal(trees(values)[[0, 2047, 2048, 4999]], trees(values[[0, 2047, 2048, 4999]]))


def test_equal_trees_give_equal_files_and_come_back(tmp_path: Path) -> None:
    trees = random_trees(11)
    for name in ("a.npz", "b.npz"):
        trees.save(tmp_path / name)
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()
    values = np.random.default_rng(0).normal(size=(9, 4)).astype(np.float32)
    np.testing.assert_array_equal(Residual(tmp_path / "a.npz")(values), trees(values))


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.npz").write_bytes(b"not trees")
    with pytest.raises(ProfileError, match=r"x\.npz: a file of trees is needed, but it cannot be read"):
        load_trees(tmp_path / "x.npz")
    with pytest.raises(ProfileError, match=r"y\.npz: a file of trees is needed"):
        load_trees(tmp_path / "y.npz")
