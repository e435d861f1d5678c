from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_conformance import TOY, KernelModelConformance

from perfcore.cost.gemm import GemmModel, GemmParams, at_clock_share, features
from perfcore.cost.learned import Residual
from perfcore.cost.model import Calibration
from perfcore.cost.roofline import TILES, GemmShapes, gemm_roofline, peak_flops_per_s
from perfcore.errors import ProfileError
from perfcore.graph.kernels import DType, Gemm, GemmLayout

PARAMS = GemmParams(
    efficiency=0.8,
    floor_us=3.0,
    low=(1.0, 1.0, 32.0, 32.0),
    high=(1.0, 4096.0, 8192.0, 8192.0),
    basis=Calibration.MEASURED,
)
ANALYTIC = GemmModel(TOY, dict.fromkeys(DType, PARAMS), {})


def slower_when_wide(inputs: np.ndarray) -> np.ndarray:
    """A correction that grows with log2 n: 1 % a doubling."""
    return 0.01 * inputs[:, 2].astype(np.float64)


CORRECTED = GemmModel(TOY, dict.fromkeys(DType, PARAMS), {DType.BF16: slower_when_wide})


def shapes(batch, m, n, k) -> GemmShapes:
    values = np.broadcast_arrays(*(np.asarray(v, dtype=np.float64) for v in (batch, m, n, k)))
    return GemmShapes(*(v.ravel() for v in values))


class TestFp32(KernelModelConformance):
    model = ANALYTIC
    kernel = staticmethod(lambda s: Gemm(s * 8, 512.0, 13.0, DType.FP32))
    work_dims = ("m", "n", "k", "batch")
    least_bytes = staticmethod(lambda s: 4 * (s * 8 * (512 + 13) + 512 * 13))


class TestBf16Batched(KernelModelConformance):
    model = ANALYTIC
    kernel = staticmethod(lambda s: Gemm(27.0, 27.0, 128.0, DType.BF16, batch=s))
    work_dims = ("m", "n", "k", "batch")
    least_bytes = staticmethod(lambda s: 2 * s * (2 * 27 * 128 + 27 * 27))


class TestCorrected(KernelModelConformance):
    model = CORRECTED
    kernel = staticmethod(lambda s: Gemm(s, 1024.0, 479.0, DType.BF16))
    work_dims = ("m", "n", "k", "batch")

    def test_correction_multiplies(self):
        kernel = Gemm(512.0, 1024.0, 256.0, DType.BF16)
        [plain], [corrected] = ANALYTIC.predict_us([kernel]), self.model.predict_us([kernel])
        assert corrected == pytest.approx(plain * np.exp(0.1))

    def test_other_formats_are_left_alone(self):
        kernel = Gemm(512.0, 1024.0, 256.0, DType.TF32)
        assert self.model.predict_us([kernel])[0] == ANALYTIC.predict_us([kernel])[0]

    @pytest.mark.parametrize("n", [8192.0, 8193.0, 65536.0, 1e6])
    def test_correction_stands_still_outside_its_range(self, n):
        kernel = Gemm(512.0, n, 256.0, DType.BF16)
        [plain], [corrected] = ANALYTIC.predict_us([kernel]), self.model.predict_us([kernel])
        assert corrected / plain == pytest.approx(np.exp(0.01 * 13), rel=1e-6)


def test_a_dim_that_the_fit_did_not_vary_carries_no_correction():
    kernel = Gemm(512.0, 1024.0, 256.0, DType.BF16, batch=2.0)
    assert CORRECTED.predict_us([kernel])[0] == ANALYTIC.predict_us([kernel])[0]


def test_the_correction_fades_below_the_shortest_fitted_kernel():
    params = replace(PARAMS, correction_from_us=100.0)
    plain, faded = (
        GemmModel(TOY, {DType.BF16: params}, {}),
        GemmModel(TOY, {DType.BF16: params}, {DType.BF16: lambda inputs: np.ones(len(inputs))}),
    )
    sizes = np.array([1.0, 2048.0, 3072.0, 16384.0])
    kernel = Gemm(sizes, 2048.0, 2048.0, DType.BF16)
    weight = np.log(faded.predict_us([kernel])[0] / plain.predict_us([kernel])[0])
    assert weight[0] == pytest.approx(0.0, abs=1e-12)
    assert 0 < weight[1] < weight[3]
    assert weight[3] == pytest.approx(1.0)


def test_mixed_formats_in_one_call():
    kernels = [Gemm(256.0, np.array([64.0, 128.0])[:, None], 64.0, d) for d in DType]
    for us, kernel in zip(ANALYTIC.predict_us(kernels), kernels, strict=True):
        np.testing.assert_array_equal(us, ANALYTIC.predict_us([kernel])[0])


@settings(max_examples=50, deadline=None)
@given(
    m=st.floats(1, 1e5), n=st.floats(1, 1e4), k=st.floats(1, 1e4), batch=st.floats(1, 64), by=st.floats(1, 4)
)
def test_the_roofline_grows_with_every_dim(m, n, k, batch, by):
    at = shapes([batch] * 5, m, n, k)
    grow = np.diag([by] * 4).T + (1 - np.eye(4))
    grown = GemmShapes(*(v * np.append(1.0, grow[i]) for i, v in enumerate((at.batch, at.m, at.n, at.k))))
    us = gemm_roofline(grown, TOY, DType.BF16).us
    assert np.all(us[1:] >= us[0] * (1 - 1e-12))


@settings(max_examples=50, deadline=None)
@given(m=st.floats(1, 1e5), n=st.floats(1, 1e4), k=st.floats(1, 1e4), dtype=st.sampled_from(list(DType)))
def test_never_above_the_peak(m, n, k, dtype):
    line = gemm_roofline(shapes(1, m, n, k), TOY, dtype)
    least_us = 2 * m * n * k / peak_flops_per_s(TOY, dtype) * 1e6
    assert line.us.item() >= least_us * (1 - 1e-12)


@pytest.mark.parametrize("dim", ["m", "n", "k"])
@pytest.mark.parametrize("edge", [13, 16, 32, 64, 128, 256, 479, 480])
def test_continuous_across_padding_edges(dim, edge):
    dims = {"m": 2048.0, "n": 1024.0, "k": 1024.0}
    before, after = (
        ANALYTIC.predict_us([Gemm(**dims | {dim: float(v)}, dtype=DType.BF16)])[0] for v in (edge, edge + 1)
    )
    assert before <= after <= 1.6 * before


def test_a_full_wave_of_tiles_reaches_the_peak():
    rows, cols = TILES[0]
    line = gemm_roofline(shapes(1, rows * 96, cols, 65536), TOY, DType.FP32)
    ideal_us = 2.0 * rows * 96 * cols * 65536 / TOY.fp32_flops_per_s * 1e6
    assert line.tiled_us.item() == pytest.approx(ideal_us, rel=0.01)


def test_narrow_and_thin_products_are_sane():
    thin, scalar = ANALYTIC.predict_us(
        [Gemm(65536.0, 1.0, 256.0, DType.FP32), Gemm(1.0, 1.0, 1.0, DType.FP32)]
    )
    assert thin < 200.0
    assert scalar == pytest.approx(3.0, abs=0.5)


def test_a_slower_clock_slows_arithmetic_alone():
    slow = at_clock_share(TOY, 0.5)
    bound_by_compute, bound_by_memory = shapes(1, 8192, 8192, 8192), shapes(1, 65536, 64, 16)
    for at, factor in ((bound_by_compute, 2.0), (bound_by_memory, 1.0)):
        ratio = gemm_roofline(at, slow, DType.FP32).us / gemm_roofline(at, TOY, DType.FP32).us
        assert ratio.item() == pytest.approx(factor)


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        (Gemm(1024.0, 1024.0, 512.0, DType.BF16), Calibration.MEASURED),
        (Gemm(65536.0, 1024.0, 512.0, DType.BF16), Calibration.EXTRAPOLATED),
        (Gemm(1024.0, 1.0, 512.0, DType.BF16), Calibration.EXTRAPOLATED),
        (Gemm(1024.0, 512.0, 13.0, DType.BF16), Calibration.EXTRAPOLATED),
        (Gemm(np.array([1.0, 8192.0]), 512.0, 64.0, DType.BF16), Calibration.EXTRAPOLATED),
        (Gemm(27.0, 64.0, 128.0, DType.BF16, batch=2048.0), Calibration.EXTRAPOLATED),
        (
            Gemm(1024.0, 1024.0, 512.0, DType.BF16, layout=GemmLayout.GRAD_WEIGHT),
            Calibration.EXTRAPOLATED,
        ),
    ],
)
def test_calibration_flags_what_was_not_measured(kernel, expected):
    assert ANALYTIC.calibration(kernel) is expected


def test_features_are_finite_for_odd_shapes():
    at = shapes([1, 2048], [1, 27], [1, 27], [1, 13])
    line = gemm_roofline(at, TOY, DType.FP32)
    assert np.all(np.isfinite(features(at, line, TOY, DType.FP32, PARAMS)))


def test_a_corrupt_correction_is_named(tmp_path):
    path = tmp_path / "gemm_bf16.npz"
    path.write_bytes(b"not a model")
    model = GemmModel(TOY, {DType.BF16: PARAMS}, {DType.BF16: Residual(path)})
    with pytest.raises(ProfileError, match=r"gemm_bf16\.npz: a file of trees is needed"):
        model.predict_us([Gemm(64.0, 64.0, 64.0, DType.BF16)])


def test_batched_products_take_constants_of_their_own():
    params = GemmParams(efficiency=0.9, floor_us=2.0, batched_efficiency=0.5, batched_floor_us=6.0)
    model = GemmModel(TOY, {DType.BF16: params}, {})
    [one, two] = model.predict_us([Gemm(1.0, 1.0, 1.0, DType.BF16, batch=b) for b in (1.0, 2.0)])
    assert one == pytest.approx(2.0, abs=0.5)
    assert two == pytest.approx(6.0, abs=0.5)
