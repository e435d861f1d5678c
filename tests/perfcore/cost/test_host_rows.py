"""Rows that a warm cache lacks, against a simulated least-recently-used cache."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest

from perfcore.cost.access import distinct_rows, hit_rate, new_rows
from perfcore.cost.host_rows import HostRows
from perfcore.cost.stacking import FormulaModel
from perfcore.design.hardware import device
from perfcore.graph.kernels import CachePopulate

DEVICE = device("a100-sxm4-80gb")


def simulated(rows: int, skew: float, cached: int, lookups: int, batches: int = 300) -> float:
    """Mean distinct rows of a batch that were not in the cache before it, after a warm-up."""
    rng = np.random.default_rng(1)
    p = np.arange(1, rows + 1) ** -skew
    p /= p.sum()
    cache: OrderedDict[int, None] = OrderedDict()
    missing = []
    for _ in range(batches):
        batch = rng.choice(rows, lookups, p=p).tolist()
        missing.append(len(set(batch) - cache.keys()))
        for row in batch:
            cache[row] = None
            cache.move_to_end(row)
        while len(cache) > cached:
            cache.popitem(last=False)
    return float(np.mean(missing[batches // 2 :]))


@pytest.mark.parametrize(
    ("rows", "skew", "cached", "lookups"),
    [
        (2000, 0.0, 500, 300),
        (2000, 1.05, 400, 500),
        (5000, 0.8, 2500, 400),
        (1000, 1.2, 50, 400),
        (800, 0.5, 790, 200),
    ],
)
def test_misses_equal_a_simulation(rows: int, skew: float, cached: int, lookups: int) -> None:
    expected = simulated(rows, skew, cached, lookups)
    got = float(new_rows(np.array(lookups), np.array(rows), np.array(skew), np.array(cached)))
    assert got == pytest.approx(expected, rel=0.06, abs=0.5)


def test_a_cache_of_all_rows_misses_none_and_of_no_rows_all() -> None:
    x, e, s = np.array([300.0, 300.0]), np.array([1000.0, 1000.0]), np.array([0.0, 1.0])
    np.testing.assert_array_equal(new_rows(x, e, s, e), 0.0)
    np.testing.assert_allclose(new_rows(x, e, s, 0.0 * e), distinct_rows(x, e, s))
    sizes = np.linspace(0, 1000, 21)
    misses = new_rows(np.full(21, 300.0), np.full(21, 1000.0), np.ones(21), sizes)
    assert (np.diff(misses) <= 1e-9).all()


def test_loading_and_writing_back_take_turns_on_the_link() -> None:
    model: FormulaModel[CachePopulate] = FormulaModel(HostRows(DEVICE).populate, sum_tables=True)
    rows = np.array([[1e6, 0.0], [1e6, 1e6]])
    [us] = model.predict_us([CachePopulate(4096.0, rows, 10.0, 64.0, 0.0, 0.1, 4.0)])
    lacking = float(new_rows(np.array(40960.0), np.array(1e6), np.array(0.0), np.array(1e5)))
    assert us[0] == pytest.approx(2 * lacking * 256 / DEVICE.h2d_bytes_per_s * 1e6)
    assert us[1] == pytest.approx(2 * us[0])


def test_repeated_cases_are_priced_alike() -> None:
    rng = np.random.default_rng(0)
    cases = [
        rng.choice(values, 9000) for values in ([10.0, 300.0, 0.0], [100.0, 1e4], [0.0, 1.1], [5.0, 80.0])
    ]
    for price, count in ((new_rows, 4), (hit_rate, 4), (distinct_rows, 3)):
        together = price(*cases[:count])
        apart = np.concatenate(
            [price(*(c[i : i + 1000] for c in cases[:count])) for i in range(0, 9000, 1000)]
        )
        np.testing.assert_allclose(together, apart, rtol=1e-12)
