from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_conformance import TOY, KernelModelConformance

from perfcore.cost.gemm import GemmModel, GemmParams, vector_us
from perfcore.cost.roofline import MOST_OCTAVES, GemmShapes, gemm_roofline
from perfcore.cost.simt import SIMT_SPLITS, SIMT_STEP, SIMT_TILES, SimtTiles, median_tiles
from perfcore.errors import ProfileError
from perfcore.graph.kernels import DType, Gemm

COUNT = len(SIMT_TILES)
EFFICIENCY = (0.94, 0.9, 0.0, 0.8, 0.8, 0.83, 0.8, 0.77, 0.0, 0.6)
BATCHED = tuple(t in ((64, 64, 1), (32, 128, 1)) for t in SIMT_TILES)
TILES = SimtTiles(EFFICIENCY, BATCHED, 0.9)
PARAMS = GemmParams(efficiency=0.95, floor_us=5.0, tiles=TILES, vector_floor_us=4.0, vector_efficiency=0.6)
MODEL = GemmModel(TOY, dict.fromkeys(DType, PARAMS), {})


def shapes(batch, m, n, k) -> GemmShapes:
    return GemmShapes(*(np.array([float(v)]) for v in (batch, m, n, k)))


class TestTiled(KernelModelConformance):
    model = MODEL
    kernel = staticmethod(lambda s: Gemm(s * 8, 512.0, 13.0, DType.FP32))
    work_dims = ("m", "n", "k")
    least_bytes = staticmethod(lambda s: 4 * (s * 8 * (512 + 13) + 512 * 13))


class TestBatches(KernelModelConformance):
    model = MODEL
    kernel = staticmethod(lambda s: Gemm(27.0, 27.0, 128.0, DType.FP32, batch=s + 1))
    work_dims = ("m", "n", "k")
    least_bytes = staticmethod(lambda s: 4 * (s + 1) * (2 * 27 * 128 + 27 * 27))


def slowly(batch, m, n, k) -> float:
    """Blocks of every tile there is, counted one by one, in µs."""
    best = math.inf
    for (rows, cols, slices), share, serves in zip(SIMT_TILES, EFFICIENCY, BATCHED, strict=True):
        for split in SIMT_SPLITS:
            if share == 0 or (batch > 1 and (split > 1 or slices > 1 or not serves)):
                continue
            steps = math.ceil(k / (split * slices * SIMT_STEP))
            blocks = batch * math.ceil(m / rows) * math.ceil(n / cols) * split
            lanes = TOY.fp32_flops_per_s / 2 / TOY.sm_count
            block_s = rows * cols * steps * slices * SIMT_STEP / lanes / share
            sums_s = 8.0 * split * batch * m * n / TOY.l2_bytes_per_s if split > 1 else 0.0
            best = min(best, math.ceil(blocks / TOY.sm_count) * block_s + sums_s)
    return best * 1e6


sizes = st.integers(1, 5000)


@settings(max_examples=50, deadline=None)
@given(batch=st.sampled_from([1, 2, 500]), m=sizes, n=sizes, k=sizes)
def test_the_fastest_tile_is_found(batch, m, n, k):
    line = gemm_roofline(shapes(batch, m, n, k), TOY, DType.FP32, TILES)
    assert line.tiled_us.item() == pytest.approx(slowly(batch, m, n, k), rel=1e-9)
    memory_s = 4 * batch * (m * k + k * n + m * n) / (0.9 * TOY.hbm_bytes_per_s)
    assert line.hbm_us.item() == pytest.approx(memory_s * 1e6, rel=1e-9)
    assert line.tile_octaves.shape == (1, COUNT)
    assert line.tile_octaves.min() == 0
    assert line.tile_octaves.max() <= MOST_OCTAVES


def test_batches_waste_the_lanes_of_tiles_that_are_too_large():
    line = gemm_roofline(shapes(2048, 9, 9, 64), TOY, DType.FP32, TILES)
    useful_us = 2 * 2048 * 9 * 9 * 64 / TOY.fp32_flops_per_s * 1e6
    assert line.tiled_us.item() > 40 * useful_us


def test_without_tiles_nothing_changes():
    at = shapes(1, 640, 96, 480)
    assert gemm_roofline(at, TOY, DType.FP32, None).us == gemm_roofline(at, TOY, DType.FP32).us


@pytest.mark.parametrize(("m", "n", "k"), [(2048.0, 1.0, 256.0), (1.0, 256.0, 2048.0), (2048.0, 256.0, 1.0)])
def test_products_by_vectors_move_memory(m, n, k):
    [us, wide] = MODEL.predict_us(
        [Gemm(m, n, k, DType.FP32), Gemm(*(max(v, 2.0) for v in (m, n, k)), DType.FP32)]
    )
    assert 4.0 < us <= wide
    at = shapes(1, m, n, k)
    cold, warm = 4 * k * n, 4 * m * (k + n)
    assert warm < TOY.l2_bytes / 2
    expected = 4.0 + (cold / (0.6 * TOY.hbm_bytes_per_s) + warm / TOY.l2_bytes_per_s) * 1e6
    assert vector_us(at, TOY, DType.FP32, PARAMS).item() == pytest.approx(expected)


def test_a_vector_product_beyond_the_cache_comes_from_memory():
    m = 2 * TOY.l2_bytes / 4
    us = vector_us(shapes(1, m, 1, 1), TOY, DType.FP32, PARAMS).item()
    assert us == pytest.approx(4.0 + 4 * (2 * m + 1) / (0.6 * TOY.hbm_bytes_per_s) * 1e6)


@settings(max_examples=50, deadline=None)
@given(m=sizes, n=sizes, k=sizes, by=st.floats(1, 8), dim=st.sampled_from("mnk"))
def test_a_larger_vector_product_takes_no_less(m, n, k, by, dim):
    less = {"m": float(m), "n": float(n), "k": float(k)}
    one, more = (shapes(1, **d).take(slice(0, 1)) for d in (less, less | {dim: less[dim] * by}))
    before, after = (vector_us(at, TOY, DType.FP32, PARAMS).item() for at in (one, more))
    assert after >= before * (1 - 1e-12)


def test_tiles_of_several_devices_are_pooled():
    other = SimtTiles((0.9, *([0.0] * (COUNT - 1))), (True, *([False] * (COUNT - 1))), 0.7)
    pooled = median_tiles([TILES, other])
    assert pooled is not None
    assert pooled.efficiency[:3] == pytest.approx((0.92, 0.9, 0.0))
    plain = [t for t, e in zip(SIMT_TILES, EFFICIENCY, strict=True) if e > 0 and t[2] == 1]
    assert [t for t, b in zip(SIMT_TILES, pooled.batched, strict=True) if b] == plain
    assert pooled.memory_efficiency == pytest.approx(0.8)
    assert median_tiles([]) is None


@pytest.mark.parametrize(
    ("tiles", "message"),
    [
        (lambda: SimtTiles((0.9,), (True,)), "Efficiencies of 10 tiles are needed"),
        (lambda: SimtTiles((1.2, *EFFICIENCY[1:]), BATCHED), r"must lie in \[0, 1\]"),
        (lambda: SimtTiles(EFFICIENCY, (False,) * COUNT), "must serve batched products"),
        (lambda: SimtTiles(EFFICIENCY, BATCHED, 0.0), "must serve batched products, at some bandwidth"),
    ],
)
def test_tiles_that_price_nothing_are_refused(tiles, message):
    with pytest.raises(ProfileError, match=message):
        tiles()
