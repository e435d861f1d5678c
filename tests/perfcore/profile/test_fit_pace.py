"""The fit of a pace finds the constants that synthetic times were made with."""

from __future__ import annotations

from dataclasses import astuple

import numpy as np
import pytest

from perfcore.cost.paced import Pace, paced_roofline
from perfcore.cost.roofline import GemmShapes
from perfcore.design import hardware
from perfcore.graph.kernels import DType
from perfcore.profile.fit_gemm import Samples
from perfcore.profile.fit_pace import fit_pace

TRUE = Pace(compute_share=0.7, hbm_share=0.85, fill_clocks=1500.0, step_clocks=150.0, reduction_us=3.0)
WIDTHS = [32.0, 128.0, 512.0, 2048.0, 8192.0]


def samples(name: str, *, noise: float = 0.0) -> Samples:
    m, n, k = (a.ravel() for a in np.meshgrid([1.0, 64.0, 1024.0, 16384.0], WIDTHS, WIDTHS, indexing="ij"))
    shapes = GemmShapes(np.ones(len(m)), m, n, k)
    device = hardware.device(name)
    us = paced_roofline(shapes, device, DType.BF16, TRUE).us + 2.0
    return Samples(device, DType.BF16, shapes, us * (1 + noise * (n == 512)), np.ones(len(m)))


def test_the_constants_are_found_from_one_device_or_two():
    for sets in ([samples("h100-sxm")], [samples("a100-sxm4-80gb"), samples("b200-sxm")]):
        found = fit_pace(sets, floor_us=2.0, seed=0)
        assert astuple(found) == pytest.approx(astuple(TRUE), rel=0.02)
        assert fit_pace(sets, floor_us=2.0, seed=0) == found


def test_outliers_hardly_count():
    found = fit_pace([samples("h100-sxm", noise=1.0)], floor_us=2.0, seed=0)
    assert found.compute_share == pytest.approx(TRUE.compute_share, rel=0.1)
