"""What the worst prediction consists of."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from dse.config import load_design
from dse.placement import plan_for
from dse.validate import report_samples
from dse.validation.unseen import unseen_designs
from dse.validation.why import doubtful_shares, why
from dse.validation_pricing import Pricing
from perfcore.cost.work import work_of
from perfcore.design.hardware import System, default_node, device
from perfcore.graph.kernels import resolve
from perfcore.measure.iteration import IterationSample
from perfcore.measure.record import DesignSample, Status
from perfcore.predictor import Predictor
from perfcore.profile.profile import load_profile


def test_the_least_certain_kernels_come_first() -> None:
    design = load_design(Path("spaces/designs/dlrm_default.yaml"), place=plan_for)
    predictor = Predictor(load_profile("v100-sxm2-16gb"))
    prediction = predictor.predict(design)
    kernels = [resolve(x.kernel) for x in prediction.graph.launches()]
    durations = [float(np.sum(us)) for us in predictor.cost.predict_us(kernels)]
    total = sum(
        us for k, us in zip(kernels, durations, strict=True) if work_of(k).kind == "gemm_forward_fp32"
    )
    errors = {"gemm_forward_fp32": 10.0, "gemm_grad_weight_fp32": 0.001}
    shares = doubtful_shares(prediction, errors)
    assert list(shares) == ["gemm_forward_fp32", "gemm_grad_weight_fp32"]
    assert shares["gemm_forward_fp32"] == pytest.approx(total / prediction.iteration_time_us, rel=1e-6)
    text = why(prediction, errors)
    assert "least certain: gemm_forward_fp32" in text
    assert "host work" in text
    assert "least certain" not in why(prediction, {})


def test_the_worst_design_is_explained(tmp_path: Path) -> None:
    """Of two designs, the one whose error is larger."""
    sample = unseen_designs(System(device("t4"), default_node("t4"), 1))
    samples = [
        DesignSample(d.name, d.design, Status.OK, iteration=IterationSample((us,) * 3, 1, 1, 0.5, "wall"))
        for d, us in zip(sample[:2], (1000.0, 3000.0), strict=True)
    ]
    pricing = Pricing(lambda _: 1000.0, "a rule", why=lambda d: f"batch {d.training.global_batch}")
    found = report_samples(
        tmp_path, samples, device="cpu", tolerance_pct=1.0, pricing=pricing, environment={}
    )
    assert found.why == f"{sample[1].name}: batch {sample[1].design.training.global_batch}"
    assert json.loads((tmp_path / "validation.json").read_text())["why"] == found.why
    silent = Pricing(lambda _: 1000.0, "a rule")
    assert not report_samples(
        tmp_path, samples, device="cpu", tolerance_pct=1.0, pricing=silent, environment={}
    ).why


def test_collectives_are_among_the_doubts() -> None:
    from dse.validation.unseen import sharded_designs

    design = sharded_designs()[0].design
    prediction = Predictor(load_profile("v100-sxm2-16gb")).predict(design)
    shares = doubtful_shares(prediction, {"all_to_all of 2 ranks": 50.0, "all_reduce of 4 ranks": 99.0})
    assert list(shares) == ["all_to_all of 2 ranks"]
    assert 0 < shares["all_to_all of 2 ranks"] < 1.5
