"""Tables of neighbours: interpolation by hand, files, and what a fit puts into them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfcore.cost.learned import Trees, load_trees
from perfcore.cost.neighbours import Neighbours
from perfcore.cost.roofline import GemmShapes
from perfcore.profile.fit_neighbours import fit_neighbours

AXES = tuple(np.array(a, dtype=np.float32) for a in ([0, 1, 3], [5, 6], [5, 7, 8, 9]))


def features(*log_dims: float) -> np.ndarray:
    return np.array([[0.0, *log_dims, 7.0]], dtype=np.float32)


def linear_table() -> Neighbours:
    """`m + 2 n + 3 k`, and its negative."""
    m, n, k = np.meshgrid(*AXES, indexing="ij")
    value = m + 2 * n + 3 * k
    return Neighbours(AXES, np.stack([value, -value], axis=-1).astype(np.float32))


@settings(deadline=None, max_examples=30)
@given(m=st.floats(0, 3), n=st.floats(5, 6), k=st.floats(5, 9))
def test_a_linear_table_is_read_exactly(m: float, n: float, k: float) -> None:
    [found] = linear_table().columns(features(m, n, k))
    assert found == pytest.approx([m + 2 * n + 3 * k, -(m + 2 * n + 3 * k)], rel=1e-5)


def test_beyond_the_grid_its_edge_holds() -> None:
    table = linear_table()
    outside, edge = (table.columns(features(*x)) for x in ((-2, 9, 5), (0, 6, 5)))
    np.testing.assert_array_equal(outside, edge)


def test_columns_follow_the_features_and_survive_a_file(tmp_path: Path) -> None:
    table = linear_table()
    row = features(1, 5, 7)
    np.testing.assert_array_equal(table.beside(row)[0], [*row[0], 32, -32])
    trees = Trees(
        borders=np.array([31.0], dtype=np.float32),
        starts=np.array([0, 0, 0, 0, 0, 0, 1, 1]),
        features=np.array([[5]], dtype=np.uint8),
        numbers=np.array([[0]], dtype=np.uint8),
        leaves=np.array([[1.0, 2.0]], dtype=np.float32),
        bias=0.5,
        neighbours=table,
    )
    trees.save(tmp_path / "a.npz")
    for asked in (trees, load_trees(tmp_path / "a.npz")):
        assert asked(np.concatenate([row, features(0, 5, 5)])) == pytest.approx([2.5, 1.5])


def grid(values: list[float]) -> GemmShapes:
    m, n, k = (x.ravel() for x in np.meshgrid([1.0, 64.0], values, values, indexing="ij"))
    return GemmShapes(np.ones(len(m)), m, n, k)


def test_a_fit_tells_a_point_by_others_and_leaves_out_its_own() -> None:
    shapes = grid([32.0, 64.0, 128.0, 256.0, 512.0])
    smooth = 0.1 * np.log2(shapes.k)
    odd = np.flatnonzero((shapes.n == 128) & (shapes.k == 128))
    spiked = smooth.copy()
    spiked[odd] += 5.0
    table = fit_neighbours(shapes, spiked)
    assert table is not None
    told = table.values[:, 2, 2, 0]
    assert told == pytest.approx(smooth[odd], abs=0.1)


def test_a_pair_that_was_not_measured_is_told_too() -> None:
    shapes = grid([32.0, 64.0, 128.0, 256.0, 512.0])
    smooth = 0.1 * np.log2(shapes.k)
    known = ~((shapes.n == 128) & (shapes.k == 128))
    table = fit_neighbours(shapes.take(known), smooth[known])
    assert table is not None
    assert table.values[:, 2, 2, 0] == pytest.approx([0.7, 0.7], abs=0.1)


def test_products_on_no_grid_have_no_table() -> None:
    rng = np.random.default_rng(0)
    dims = (2 ** rng.uniform(5, 12, 300) for _ in range(3))
    assert fit_neighbours(GemmShapes(np.ones(300), *dims), np.zeros(300)) is None
