"""An iteration's interval: exact where one kind decides, quadrature where several do, nothing for what hides."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dse.config import load_design
from dse.placement import plan_for
from perfcore.cost.model import Calibration, CostModel
from perfcore.graph.kernels import DType, Gemm, MeasuredKernel, Memset
from perfcore.graph.ops import Launch, Op, Region, WorkloadGraph
from perfcore.interval import iteration_interval_us
from perfcore.overheads import OpOverheads, OverheadTable
from perfcore.predictor import Predictor
from perfcore.profile.profile import load_profile, profile_for


class Fixed:
    """100 µs a kernel, known within a factor `exp(error)`."""

    def __init__(self, error: float) -> None:
        self.error = error

    def predict_us(self, kernels: Any) -> list[np.ndarray]:
        return [np.full((1, 1), 100.0) for _ in kernels]

    def calibration(self, kernel: Any) -> Calibration:
        return Calibration.MEASURED

    def log_error_90(self, kernel: Any) -> float:
        return self.error


class Silent:
    """A model that does not say how far off it is."""

    predict_us, calibration = Fixed(0.0).predict_us, Fixed(0.0).calibration


def table(host_us: float = 0.0) -> OverheadTable:
    table = load_profile("v100-sxm2-16gb").overheads
    op = OpOverheads(t1_us=host_us, t2_us=0.0, t3_us=0.0, t4_us=0.0, t5_us=0.0, alone_us=0.0)
    return replace(table, by_op={}, default=op, kernel_gap_us=0.0, launch_latency_us=0.0)


def interval(kernels: list[Any], models: dict[type, Any], *, host_us: float = 0.0, host: float = 0.0):
    costs = CostModel(models)
    graph = WorkloadGraph((Region("r", tuple(Op("op", (Launch(k),)) for k in kernels)),), num_ranks=1)
    return iteration_interval_us(
        graph, kernels, costs.predict_us(kernels), costs, table(host_us), host_log_error_90=host
    )


def test_kernels_of_one_kind_err_together() -> None:
    low, high = interval([Memset(1.0), Memset(2.0)], {Memset: Fixed(math.log(1.5))})
    assert (low, high) == (pytest.approx(200 / 1.5), pytest.approx(300.0))


def test_kinds_add_in_quadrature() -> None:
    models = {Memset: Fixed(math.log(1.3)), MeasuredKernel: Fixed(math.log(1.4))}
    _, high = interval([Memset(1.0), MeasuredKernel("x", 1.0)], models)
    assert high == pytest.approx(200 + math.hypot(30, 40))


def test_kernels_that_hide_behind_the_host_count_for_nothing() -> None:
    low, high = interval([Memset(1.0)], {Memset: Fixed(math.log(1.5))}, host_us=1000.0)
    assert (low, high) == (pytest.approx(1000.0), pytest.approx(1000.0))
    low, high = interval([Memset(1.0)], {Memset: Fixed(0.5)}, host_us=1000.0, host=math.log(1.2))
    assert (low, high) == (pytest.approx(1000 / 1.2), pytest.approx(1200.0))


def test_a_model_that_says_nothing_widens_nothing() -> None:
    assert interval([Memset(1.0)], {Memset: Silent()}) == (pytest.approx(100.0), pytest.approx(100.0))


@pytest.mark.parametrize("device", ["v100-sxm2-16gb", "h100-sxm", "l40s"])
def test_the_interval_holds_the_prediction_and_is_wider_for_devices_without_data(device: str) -> None:
    design = load_design(
        Path("spaces/designs/dlrm_default.yaml"),
        overrides=[f"system.device={device}", "training.global_batch=16384"],
        place=plan_for,
    )
    predictor = Predictor(profile_for(design.system.device, design.system.node))
    prediction = predictor.predict(design)
    low, high = predictor.interval_us(prediction)
    assert 0 < low < prediction.iteration_time_us < high < 2 * prediction.iteration_time_us


def test_products_outside_the_fitted_shapes_have_wider_intervals() -> None:
    costs = load_profile("h100-sxm").cost_model()
    inside, outside = (costs.log_error_90(Gemm(4096.0, n, 1024.0, DType.BF16)) for n in (1024.0, 1.0))
    assert 0 < inside < outside
