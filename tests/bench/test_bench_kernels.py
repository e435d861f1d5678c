"""Pricing 10^5 distinct kernels: products alone, the worst kind, and all kinds of a structure together."""

from __future__ import annotations

import time

import numpy as np
import pytest

from perfcore.graph import kernels as k
from perfcore.profile.profile import load_profile

COUNT = 100_000


def sizes(seed: int, low: float, high: float, count: int) -> np.ndarray:
    return np.round(2 ** np.random.default_rng(seed).uniform(low, high, count))


def products(count: int) -> k.Gemm:
    return k.Gemm(*(sizes(seed, 5, 13, count) for seed in range(3)), k.DType.BF16)


def structure(count: int) -> list[k.Kernel]:
    """A DLRM's kinds of kernels, most of them products."""
    batch, each = sizes(3, 9, 16, count // 10), count // 10
    bytes_ = sizes(4, 10, 28, each)
    rows = sizes(5, 4, 24, each)
    return [
        products(count // 2),
        k.Elementwise("relu", bytes_ / 4, bytes_, bytes_),
        k.Concat(bytes_, 27.0),
        k.EmbeddingForward(batch[:, None], rows[:, None], 10.0, 64.0, 1.05, 4.0),
        k.EmbeddingBackward(batch[:, None], rows[:, None], 10.0, 64.0, 1.05, 4.0, optimizer="sgd"),
        k.Collective(k.CollectiveKind.ALL_TO_ALL, bytes_, 8.0, 8.0),
    ]


@pytest.mark.benchmark(group="kernels", timer=time.process_time)
@pytest.mark.parametrize("what", ["products", "structure"])
def test_kernels_per_second(benchmark, figure, what):
    costs = load_profile("h100-sxm").cost_model()
    kernels = [products(COUNT)] if what == "products" else structure(COUNT)
    costs.predict_us(kernels[:1])  # compiles, loads
    priced = benchmark(costs.predict_us, kernels)
    assert sum(us.size for us in priced) == COUNT
    assert all(np.all(us > 0) for us in priced)
    if benchmark.stats:
        figure(f"100,000 distinct shapes, {what}", f"{benchmark.stats.stats.median:.2f} s")
