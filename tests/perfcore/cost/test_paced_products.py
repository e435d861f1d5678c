"""The roofline at a library's pace: by hand for one block, floors and growth for all, and corrections between widths."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_conformance import TOY

from perfcore.cost.between import between, cell
from perfcore.cost.gemm import GemmModel, GemmParams
from perfcore.cost.model import Calibration
from perfcore.cost.paced import Pace, early, paced_roofline
from perfcore.cost.roofline import GemmShapes, peak_flops_per_s
from perfcore.graph.kernels import DType, Gemm

PACE = Pace(compute_share=0.8, hbm_share=0.75, fill_clocks=1000.0, step_clocks=200.0, reduction_us=2.5)
IDEAL = Pace(compute_share=1.0, hbm_share=1.0, fill_clocks=0.0, step_clocks=0.0, reduction_us=0.0)
NEW, OLD = replace(TOY, compute_capability=9.0), replace(TOY, compute_capability=8.0)
WIDTHS = (32.0, 64.0, 128.0, 512.0, 768.0, 1024.0)


def shapes(batch, m, n, k) -> GemmShapes:
    values = np.broadcast_arrays(*(np.asarray(v, dtype=np.float64) for v in (batch, m, n, k)))
    return GemmShapes(*(v.ravel() for v in values))


def test_one_block_by_hand():
    line = paced_roofline(shapes(1, 16, 16, 640), NEW, DType.BF16, PACE)
    latency_us = 10 * 200 / NEW.clock_hz * 1e6 + 1000 / NEW.clock_hz * 1e6
    assert line.tiled_us.item() == pytest.approx(latency_us)
    assert line.hbm_us.item() == pytest.approx(2 * (2 * 16 * 640 + 256) / (0.75 * NEW.hbm_bytes_per_s) * 1e6)
    assert line.us.item() == pytest.approx((line.tiled_us.item() ** 3 + line.hbm_us.item() ** 3) ** (1 / 3))


def test_early_devices_write_after_their_arithmetic_in_shorter_steps():
    at = shapes(1, 4096, 4096, 64)
    new, old = (paced_roofline(at, d, DType.BF16, IDEAL) for d in (NEW, OLD))
    store_us = 2 * 4096 * 4096 / OLD.hbm_bytes_per_s * 1e6
    assert old.us.item() == pytest.approx(
        (old.tiled_us**3 + (old.hbm_us - store_us) ** 3) ** (1 / 3) + store_us
    )
    assert old.us > new.us
    steps = [paced_roofline(shapes(1, 16, 16, 128), d, DType.BF16, PACE).tiled_us for d in (NEW, OLD)]
    assert steps[1] - steps[0] == pytest.approx(2 * 200 / TOY.clock_hz * 1e6)


@pytest.mark.parametrize(("capability", "expected"), [(0.0, False), (7.0, True), (8.9, True), (9.0, False)])
def test_which_devices_are_early(capability, expected):
    assert early(replace(TOY, compute_capability=capability)) is expected


@settings(max_examples=50, deadline=None)
@given(
    m=st.floats(1, 1e5),
    n=st.floats(1, 1e4),
    k=st.floats(1, 1e4),
    batch=st.floats(1, 64),
    by=st.floats(1, 4),
    device=st.sampled_from([NEW, OLD]),
)
def test_it_grows_with_every_dim_and_stays_above_the_peak(m, n, k, batch, by, device):
    at = shapes([batch] * 5, m, n, k)
    grow = np.diag([by] * 4).T + (1 - np.eye(4))
    grown = GemmShapes(*(v * np.append(1.0, grow[i]) for i, v in enumerate((at.batch, at.m, at.n, at.k))))
    us = paced_roofline(grown, device, DType.BF16, PACE).us
    assert np.all(us[1:] >= us[0] * (1 - 1e-9))
    assert us[0] >= at.flops[0] / peak_flops_per_s(device, DType.BF16) * 1e6 * (1 - 1e-9)


def test_no_products_have_no_time():
    assert paced_roofline(shapes([], [], [], []), NEW, DType.BF16, PACE).us.shape == (0,)


def test_cells_of_widths():
    found = cell(np.array([32.0, 48.0, 512.0, 1000.0]), np.array(WIDTHS))
    np.testing.assert_array_equal(found.low, [32, 32, 512, 768])
    np.testing.assert_array_equal(found.high, [32, 64, 512, 1024])
    assert found.part == pytest.approx([0, np.log2(1.5), 0, np.log(1000 / 768) / np.log(1024 / 768)])


@settings(max_examples=50, deadline=None)
@given(n=st.integers(32, 1024), k=st.integers(32, 1024))
def test_corrections_between_widths_follow_a_line(n, k):
    exponent, most = between(shapes(1, 8, [n], [k]), (32.0, 64.0, 128.0, 256.0, 512.0, 1024.0), _doubling)
    assert exponent.item() == pytest.approx(np.log2(n) + 2 * np.log2(k))
    up = 2 ** np.ceil(np.log2([n, k]))
    assert most.item() == (np.inf if np.array_equal(up, [n, k]) else pytest.approx(up.prod()))


def _doubling(at: GemmShapes) -> tuple[np.ndarray, np.ndarray]:
    assert np.all(np.log2(at.n) % 1 == 0)
    assert np.all(np.log2(at.k) % 1 == 0)
    return np.log2(at.n) + 2 * np.log2(at.k), at.n * at.k


def test_without_widths_the_correction_is_asked_itself():
    exponent, most = between(shapes(1, 8, [100.0], [77.0]), (), lambda at: (at.n + at.k, at.n))
    assert exponent.item() == 177.0
    assert most.item() == np.inf


def uneven(inputs: np.ndarray) -> np.ndarray:
    """A correction that jumps from width to width."""
    return np.sin(7.0 * inputs[:, 2].astype(np.float64)) + np.cos(5.0 * inputs[:, 3].astype(np.float64))


@settings(max_examples=50, deadline=None)
@given(m=st.integers(1, 4096), n=st.integers(32, 1023), k=st.integers(32, 1023))
def test_never_dearer_than_padded_to_the_next_widths(m, n, k):
    params = GemmParams(
        efficiency=1.0,
        floor_us=2.0,
        low=(1.0, 1.0, 32.0, 32.0),
        high=(1.0, 4096.0, 1024.0, 1024.0),
        basis=Calibration.MEASURED,
        pace=PACE,
        widths=WIDTHS,
    )
    model = GemmModel(NEW, {DType.BF16: params}, {DType.BF16: uneven})
    up = [min(w for w in WIDTHS if w >= v) for v in (n, k)]
    [us, padded] = model.predict_us([Gemm(float(m), *map(float, nk), DType.BF16) for nk in ((n, k), up)])
    assert us <= padded * (1 + 1e-12)


def test_the_correction_has_no_jump_at_a_width():
    params = GemmParams(
        1.0, 2.0, (1.0, 1.0, 32.0, 32.0), (1.0, 4096.0, 1024.0, 1024.0), pace=PACE, widths=WIDTHS
    )
    plain, model = (
        GemmModel(NEW, {DType.BF16: params}, c) for c in ({}, {DType.BF16: lambda x: 0.1 * uneven(x)})
    )
    near = Gemm(64.0, 300.0, 512.0 + np.array([-1e-3, 0.0, 1e-3]), DType.BF16)
    correction = np.log(model.predict_us([near])[0] / plain.predict_us([near])[0])
    assert np.ptp(correction) < 1e-4
