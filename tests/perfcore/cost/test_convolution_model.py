from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernel_conformance import PROPERTY, TOY, KernelModelConformance, faster_memory

from perfcore.cost.convolution import ConvolutionModel, ConvolutionParams, ProductShares, geometry_of
from perfcore.cost.gemm import GemmModel, GemmParams
from perfcore.cost.model import Calibration
from perfcore.cost.stacking import stack
from perfcore.errors import DesignError, ProfileError
from perfcore.graph.kernels import Convolution, DType, GemmLayout

PARAMS = ConvolutionParams(
    forward=0.7,
    grad_input=0.6,
    grad_input_strided=0.5,
    grad_weight=0.7,
    winograd_fused=0.6,
    winograd_products=0.8,
    bandwidth=0.75,
    weight_passes=1.5,
    floor_us=3.0,
    product_share=0.8,
)
MODEL = ConvolutionModel(TOY, PARAMS, Calibration.MEASURED, 0.3)


def convolution(batch=8.0, *, taps=3.0, stride=1.0, dtype=DType.FP32, layout=GemmLayout.FORWARD, **dims):
    sizes = {"channels": 64.0, "height": 28.0, "width": 28.0, "filters": 128.0} | dims
    pad = taps // 2
    return Convolution(
        batch=batch,
        kernel_height=taps,
        kernel_width=taps,
        dtype=dtype,
        stride=stride,
        padding_height=pad,
        padding_width=pad,
        layout=layout,
        **sizes,
    )


def us_of(kernel, model=MODEL) -> float:
    return float(model.predict_us([kernel])[0])


class _Convolution(KernelModelConformance):
    model = MODEL
    work_dims = ("batch", "channels", "filters", "height", "kernel_width")
    least_bytes = staticmethod(lambda s: s * 4 * 28 * 28 * (64 + 128))


class TestForward(_Convolution):
    kernel = staticmethod(lambda s: convolution(s))


class TestStridedGradientOfTheInput(_Convolution):
    kernel = staticmethod(lambda s: convolution(s, stride=2.0, layout=GemmLayout.GRAD_INPUT))
    least_bytes = staticmethod(lambda s: s * 4 * (28 * 28 * 64 + 14 * 14 * 128))


class TestGradientOfTheWeights(_Convolution):
    kernel = staticmethod(lambda s: convolution(s, layout=GemmLayout.GRAD_WEIGHT))


class TestHalfPrecision(_Convolution):
    kernel = staticmethod(lambda s: convolution(s, dtype=DType.BF16, taps=1.0))
    least_bytes = staticmethod(lambda s: s * 2 * 28 * 28 * (64 + 128))


class TestDepthwise(_Convolution):
    kernel = staticmethod(lambda s: convolution(s, filters=64.0, groups=64.0))
    least_bytes = staticmethod(lambda s: s * 4 * 28 * 28 * 128)


def multiplications(kernel: Convolution) -> int:
    """Of a direct convolution without padding, counted one by one."""
    n, c, h, w, k, r, s, stride = (
        int(getattr(kernel, d))
        for d in (
            "batch",
            "channels",
            "height",
            "width",
            "filters",
            "kernel_height",
            "kernel_width",
            "stride",
        )
    )
    rows, columns = ([i for i in range(0, e, stride) if i + t <= e] for e, t in ((h, r), (w, s)))
    return sum(n * c * k * r * s for _ in itertools.product(rows, columns)) // int(kernel.groups)


@PROPERTY
@given(
    extents=st.tuples(st.integers(3, 9), st.integers(3, 9)),
    taps=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stride=st.integers(1, 3),
    groups=st.sampled_from([1, 2]),
    layout=st.sampled_from(GemmLayout),
)
def test_all_three_products_multiply_as_often_as_the_loop(extents, taps, stride, groups, layout):
    kernel = Convolution(2, 4, *extents, 6, *taps, DType.FP32, stride, groups=groups, layout=layout)
    geometry, present = geometry_of(stack([kernel]))
    assert present.all()
    assert geometry.products(layout).flops == pytest.approx(2 * multiplications(kernel))


@pytest.mark.parametrize("layout", GemmLayout)
def test_winograd_is_taken_where_it_is_faster_and_only_there(layout):
    square = us_of(convolution(32, channels=256.0, filters=256.0, layout=layout))
    slow = replace(PARAMS, winograd_fused=0.1, winograd_products=0.1)
    plain = us_of(convolution(32, channels=256.0, filters=256.0, layout=layout), replace(MODEL, params=slow))
    assert square < 0.75 * plain
    for other in ({"stride": 2.0}, {"taps": 5.0}, {"dtype": DType.BF16}, {"groups": 2.0}):
        kernel = convolution(32, channels=256.0, filters=256.0, layout=layout, **other)
        assert us_of(kernel) == us_of(kernel, replace(MODEL, params=slow)), other


def test_a_convolution_of_one_tap_is_a_product():
    pixels = us_of(convolution(8, taps=1.0, height=32.0, width=32.0))
    row = us_of(convolution(8 * 32, taps=1.0, height=1.0, width=32.0))
    assert pixels == pytest.approx(row)


def test_padding_makes_more_results():
    kernel = convolution(8, taps=5.0)
    bare = replace(kernel, padding_height=0.0, padding_width=0.0)
    [padded] = geometry_of(stack([kernel]))[0].outputs
    assert padded == 28 * 28
    assert geometry_of(stack([bare]))[0].outputs == 24 * 24
    assert us_of(bare) < us_of(kernel)


def test_depthwise_convolutions_are_bound_by_memory():
    kernel = convolution(64, filters=64.0, groups=64.0)
    quick = replace(MODEL, device=faster_memory(TOY, 2.0))
    assert us_of(kernel, quick) - 3.0 == pytest.approx((us_of(kernel) - 3.0) / 2)


def products(*, efficiency: float, clock_share: float = 1.0) -> ProductShares:
    """Of a device whose products reach just this share of the roofline."""
    params = GemmParams(efficiency=efficiency, floor_us=0.0, clock_share=clock_share)
    return ProductShares(GemmModel(TOY, {DType.FP32: params}, {}))


def test_the_share_of_products_is_that_of_their_model():
    assert products(efficiency=0.55)(DType.FP32) == pytest.approx(0.55)
    assert products(efficiency=0.55, clock_share=0.7)(DType.FP32) == pytest.approx(0.55)


def test_where_products_are_slow_convolutions_are():
    kernel = convolution(64, taps=1.0, channels=1024.0, filters=1024.0)
    half = replace(MODEL, products=products(efficiency=0.4))
    assert us_of(kernel, half) - 3.0 == pytest.approx(2 * (us_of(kernel) - 3.0))
    assert us_of(kernel, replace(MODEL, products=products(efficiency=0.8))) == pytest.approx(us_of(kernel))
    assert PARAMS.scaled(5.0).forward == 1.0


def test_clocks_slow_arithmetic_down():
    slow = replace(MODEL, products=products(efficiency=0.8, clock_share=0.5))
    kernel = convolution(64, taps=1.0, channels=1024.0, filters=1024.0)
    assert us_of(kernel, slow) - 3.0 == pytest.approx(2 * (us_of(kernel) - 3.0))


def test_only_plain_single_precision_was_measured():
    assert MODEL.calibration(convolution()) is Calibration.MEASURED
    assert MODEL.calibration(convolution(groups=2.0)) is Calibration.EXTRAPOLATED
    assert MODEL.calibration(convolution(dtype=DType.BF16)) is Calibration.ANALYTIC
    assert MODEL.log_error_90(convolution()) == 0.3


def test_bad_geometry_is_refused():
    with pytest.raises(DesignError, match="must not be larger than its padded input"):
        us_of(_unpadded(2.0))
    with pytest.raises(DesignError, match=r"`stride >= 1` must hold for a Convolution, but got 0\.5"):
        us_of(convolution(stride=0.5))
    with pytest.raises(DesignError, match="`groups >= 1` must hold"):
        us_of(convolution(groups=0.0))


def _unpadded(extent: float) -> Convolution:
    return Convolution(1.0, 8.0, extent, extent, 8.0, 3.0, 3.0, DType.FP32)


@pytest.mark.parametrize("name", ["forward", "winograd_fused", "bandwidth"])
def test_shares_that_no_kernel_reaches_are_refused(name):
    for bad in (0.0, 1.2):
        with pytest.raises(ProfileError, match=f"`0 < {name} <= 1` must hold for convolutions"):
            replace(PARAMS, **{name: bad})


def test_negative_constants_are_refused():
    with pytest.raises(ProfileError, match="`weight_passes >= 0`"):
        replace(PARAMS, weight_passes=-1.0)


def test_many_shapes_are_priced_together():
    batch = np.array([[1.0], [8.0], [64.0]])
    us = MODEL.predict_us([convolution(batch)])[0]
    assert us.shape == (3, 1)
    assert np.all(np.diff(us[:, 0]) > 0)
