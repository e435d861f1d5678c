"""Distinct rows and hit rates against exact counts and an exact least-recently-used cache."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfcore.cost.access import distinct_rows, hit_rate


def zipf_indices(rows: int, skew: float, lookups: int, *, seed: int) -> np.ndarray:
    weight = np.arange(1, rows + 1, dtype=np.float64) ** -skew
    return np.random.default_rng(seed).choice(rows, size=lookups, p=weight / weight.sum())


def lru_hits(indices: np.ndarray, capacity: int) -> float:
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for i in indices.tolist():
        if i in cache:
            hits += 1
            cache.move_to_end(i)
        else:
            cache[i] = None
            if len(cache) > capacity:
                cache.popitem(last=False)
    return hits / len(indices)


def exact_distinct(rows: int, skew: float, lookups: float) -> float:
    weight = np.arange(1, rows + 1, dtype=np.float64) ** -skew
    return float(-np.expm1(-lookups * weight / weight.sum()).sum())


@pytest.mark.parametrize("skew", [0.0, 0.5, 1.0, 1.3, 2.0])
@pytest.mark.parametrize("rows", [1, 3, 16, 17, 40, 1000, 200_000])
@pytest.mark.parametrize("lookups", [1, 50, 5_000, 500_000])
def test_distinct_rows_match_the_sum_over_ranks(rows, skew, lookups):
    exact = min(exact_distinct(rows, skew, lookups), lookups, rows)
    assert distinct_rows(lookups, rows, skew).item() == pytest.approx(exact, rel=0.02)


@pytest.mark.parametrize("skew", [0.0, 0.6, 1.05, 1.5])
@pytest.mark.parametrize(("rows", "capacity"), [(200, 50), (5_000, 500), (5_000, 6_000), (100_000, 2_000)])
@pytest.mark.parametrize("lookups", [300, 20_000])
def test_hit_rate_matches_a_simulated_cache(rows, capacity, skew, lookups):
    simulated = np.mean([lru_hits(zipf_indices(rows, skew, lookups, seed=s), capacity) for s in (1, 2)])
    assert hit_rate(lookups, rows, skew, capacity).item() == pytest.approx(simulated, abs=0.03)


@settings(max_examples=50, deadline=None)
@given(
    rows=st.integers(1, 10**8),
    lookups=st.floats(1, 1e8),
    skew=st.floats(0, 3),
    cached=st.floats(1, 1e7),
)
def test_rates_are_shares_and_grow_with_the_cache(rows, lookups, skew, cached):
    small, large = hit_rate(lookups, rows, skew, np.array([cached, 2 * cached]))
    assert 0 <= small <= large + 1e-6 <= 1 + 1e-6


@settings(max_examples=50, deadline=None)
@given(rows=st.integers(1, 10**8), lookups=st.floats(1, 1e8), skew=st.floats(0, 3))
def test_distinct_rows_grow_and_stay_in_bounds(rows, lookups, skew):
    few, many = distinct_rows(np.array([lookups, 2 * lookups]), rows, skew)
    assert 0 < few <= many * (1 + 1e-9) <= min(2 * lookups, rows) * (1 + 1e-6)


def test_an_absent_table_has_no_rows_and_no_hits():
    assert distinct_rows(10.0, 0.0, 1.0).item() == 0
    assert hit_rate(10.0, 0.0, 1.0, 100.0).item() == 0
    assert hit_rate(0.0, 10.0, 1.0, 100.0).item() == 0
