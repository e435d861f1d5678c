from __future__ import annotations

import numpy as np
import pytest
from fp32_rows import FASTER, GAP_US, HOST_US, LAUNCH_US, fp32_rows

from perfcore.cost.roofline import gemm_roofline
from perfcore.cost.simt import SIMT_TILES
from perfcore.design import hardware
from perfcore.graph.kernels import DType
from perfcore.profile import fit_fp32
from perfcore.profile.fit_fp32 import Timing

DEVICE = hardware.device("v100-sxm2-16gb")
ROWS = fp32_rows(DEVICE)
TIMED = fit_fp32.timings(ROWS, DEVICE, launch_us=LAUNCH_US)


def test_host_time_and_gap_of_each_session_are_found() -> None:
    assert set(TIMED) == {"linear", "bmm", "bmm, batch > 64"}
    for session, timing in TIMED.items():
        speed = FASTER if session.endswith("64") else 1.0
        assert timing.host_us == pytest.approx(HOST_US * speed, abs=0.5)
        assert timing.gap_us == pytest.approx(GAP_US * speed, abs=1.5)


def test_tiles_are_found_with_their_shares_of_the_peak() -> None:
    samples = fit_fp32.fp32_samples(ROWS, DEVICE, TIMED, floor_us=5.0, memory_efficiency=0.9)
    assert samples.tiles is not None
    found = dict(zip(SIMT_TILES, samples.tiles.efficiency, strict=True))
    # Each round's start-up takes a little of the peak.
    assert found[64, 128, 1] == pytest.approx(0.9, abs=0.04)
    assert found[64, 64, 1] == pytest.approx(0.8, abs=0.1)
    assert found[32, 32, 4] == pytest.approx(0.6, abs=0.15)
    assert sum(share > 0 for share in found.values()) == 3
    assert [t for t, b in zip(SIMT_TILES, samples.tiles.batched, strict=True) if b] == [(64, 64, 1)]
    assert samples.tiles.memory_efficiency == 0.9


def test_rows_that_the_host_hides_are_left_out_by_their_roofline() -> None:
    samples = fit_fp32.fp32_samples(ROWS, DEVICE, TIMED, floor_us=5.0)
    line = gemm_roofline(samples.shapes, DEVICE, DType.FP32, samples.tiles)
    assert 0 < len(samples.us) < len(ROWS)
    assert samples.shortest_us == pytest.approx(HOST_US - GAP_US - 5.0, abs=2.0)
    single = samples.shapes.batch == 1
    assert np.all(line.us[single] >= samples.shortest_us - 1e-9)
    assert np.all(samples.device_share < 1)


def test_gaps_that_no_line_tells_take_the_share_of_other_gpus() -> None:
    timed = {
        "a": {"linear": Timing(60.0, 30.0)},
        "b": {"linear": Timing(50.0, 30.0)},
        "c": {"linear": Timing(100.0, None), "bmm": Timing(40.0, None)},
    }
    filled = fit_fp32.filled(timed)
    assert filled["a"] == timed["a"]
    assert filled["c"]["linear"] == Timing(100.0, pytest.approx(55.0))
    assert filled["c"]["bmm"] == Timing(40.0, 0.0)


def test_scattered_rows_tell_no_gap() -> None:
    rng = np.random.default_rng(1)
    noisy = ROWS.assign(latency_ms=ROWS["latency_ms"] * np.exp(rng.normal(0, 0.5, len(ROWS))))
    timed = fit_fp32.timings(noisy, DEVICE, launch_us=LAUNCH_US)
    assert timed["linear"].gap_us is None


def test_unknown_kernels_belong_to_no_tile() -> None:
    odd = ROWS.head(3).assign(kernel=["gemv2T_kernel", "sgemm_32x32x32", "volta_sgemm_256x64_nn"])
    work = fit_fp32.with_work(odd, DEVICE)
    assert work["tile"].tolist() == [-1, SIMT_TILES.index((32, 32, 4)), -1]


def test_a_line_through_outliers_is_found() -> None:
    x = np.linspace(1, 100, 60)
    us = 20.0 + 3.0 * x
    us[::7] *= 3.0
    found = fit_fp32.least_relative_deviations(np.stack([np.ones(60), x], axis=1), us)
    assert found == pytest.approx([20.0, 3.0], rel=0.01)
