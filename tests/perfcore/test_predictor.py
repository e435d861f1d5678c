"""A prediction agrees with the plain traversal and with itself; what-if, timeline and calibration are sane."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from oracles import scalar_iteration_time

from dse.candidate import design_of
from dse.config import load_design
from dse.placement import plan_for
from dse.search.evaluator import pricing_of
from dse.search.placing import SpacePlanner
from dse.study_config import load_space
from perfcore.cost.model import Calibration
from perfcore.design.design import Design
from perfcore.design.hardware import System, default_node, device, node
from perfcore.graph.dlrm import graph_of
from perfcore.graph.kernels import resolve
from perfcore.perfetto import trace_events
from perfcore.predictor import Prediction, Predictor
from perfcore.profile.profile import profile_for
from perfcore.whatif import what_if

PLAIN = "training.program=pytorch"
EIGHT = (PLAIN, "system.node=dgx-a100-80gb", "system.world_size=8", "training.global_batch=16384")
CASES = {
    "eager": ("dlrm_default", (PLAIN,)),
    "script": ("dlrm_default", ()),
    "example": ("nvidia_dlrm_small", ()),
    "per_table": ("dlrm_ddp", (PLAIN, "fusion.embedding=per_table")),
    "captured": (
        "dlrm_mlperf",
        (PLAIN, "fusion.launches=cuda_graph", "training.read_loss=false", "training.synchronize=false"),
    ),
    "eight_serial": ("dlrm_mlperf", (*EIGHT, "fusion.communication=serial")),
    "eight_overlapped": ("dlrm_mlperf", (*EIGHT, "training.precision=bf16", "training.read_loss=false")),
}


def load(name: str, *overrides: str) -> Design:
    return load_design(Path(f"spaces/designs/{name}.yaml"), overrides=overrides, place=plan_for)


def predictor_of(design: Design) -> Predictor:
    return Predictor(profile_for(design.system.device, design.system.node))


@pytest.fixture(scope="module", params=CASES, ids=str)
def case(request: pytest.FixtureRequest) -> tuple[Design, Predictor, Prediction]:
    name, overrides = CASES[request.param]
    design = load(name, *overrides)
    predictor = predictor_of(design)
    return design, predictor, predictor.predict(design)


def test_equals_the_plain_traversal(case: tuple[Design, Predictor, Prediction]) -> None:
    design, predictor, prediction = case
    graph = graph_of(design)
    durations = predictor.cost.predict_us([resolve(x.kernel) for x in graph.launches()])
    expected = scalar_iteration_time(graph, durations, predictor.profile.overheads, warm_up=24, period=12)
    assert prediction.iteration_time_us == pytest.approx(expected, rel=1e-9)


def test_the_parts_fit_the_whole(case: tuple[Design, Predictor, Prediction]) -> None:
    _, _, p = case
    assert p.device_active_us + p.device_idle_us == pytest.approx(p.iteration_time_us)
    assert p.host.total_us <= p.iteration_time_us * (1 + 1e-9)
    assert 0 <= p.exposed_communication_us <= p.device_active_us
    assert sum(p.bound_share.values()) == pytest.approx(1)
    assert sum(p.calibration_share.values()) == pytest.approx(1)
    assert p.bound_by == max(p.bound_share, key=p.bound_share.__getitem__)
    assert p.samples_per_second == pytest.approx(p.global_batch / p.iteration_time_us * 1e6)
    pieces_us = sum(piece.us for piece in p.path_pieces)
    assert pieces_us == pytest.approx(sum(op.critical_us for op in p.ops) * p.critical_path.iterations)
    assert (
        0.5 * p.iteration_time_us < pieces_us / p.critical_path.iterations <= p.iteration_time_us * (1 + 1e-9)
    )


def test_faster_parts_never_lengthen_an_iteration(case: tuple[Design, Predictor, Prediction]) -> None:
    _, predictor, p = case
    effects = what_if(p.graph, p.timeline.steps, predictor.profile.overheads)
    assert [w.iteration_time_us for w in effects] == sorted(w.iteration_time_us for w in effects)
    for effect in effects:
        assert effect.iteration_time_us <= p.iteration_time_us * (1 + 1e-9)
        assert effect.saved_share == pytest.approx(
            1 - effect.iteration_time_us / p.iteration_time_us, abs=1e-9
        )


def test_halving_everything_on_the_path_halves_a_host_bound_iteration() -> None:
    design = load("dlrm_ddp", "training.global_batch=64", "training.read_loss=false")
    predictor = predictor_of(design)
    p = predictor.predict(design)
    whole = {w.change: w for w in what_if(p.graph, p.timeline.steps, predictor.profile.overheads)}
    assert whole["whole host / 2"].saved_share == pytest.approx(0.5, abs=0.01)


def test_a_timeline_holds_every_kernel_and_opens_as_json(case: tuple[Design, Predictor, Prediction]) -> None:
    design, _, p = case
    events = json.loads(json.dumps(trace_events(p, iterations=2)))["traceEvents"]
    kernels = [e for e in events if e["ph"] == "X"]
    assert {e["pid"] for e in kernels} == set(range(design.system.world_size))
    started = np.isfinite(p.timeline.start_us[0]) & (p.timeline.end_us[0] > p.timeline.start_us[0])
    assert len(kernels) == 2 * int(started.sum())
    assert all(e["dur"] > 0 for e in kernels)
    for rank in {e["pid"] for e in kernels}:
        for track in {e["tid"] for e in kernels}:
            spans = sorted((e["ts"], e["dur"]) for e in kernels if (e["pid"], e["tid"]) == (rank, track))
            for (start, duration), (after, _) in pairwise(spans):
                assert start + duration <= after + 1e-6  # a stream runs one kernel at a time


def test_a_data_loader_bounds_the_iteration() -> None:
    design = load("dlrm_mlperf")
    slow = replace(design.system.node, input_samples_per_s=1000.0)
    fed = replace(design, system=System(design.system.device, slow, 1))
    p = predictor_of(fed).predict(fed)
    assert p.bound_by == "input"
    assert p.iteration_time_us == pytest.approx(design.training.global_batch / 1000.0 * 1e6)


def test_what_does_not_fit_is_priced_all_the_same() -> None:
    p = predictor_of(load("dlrm_mlperf")).predict(load("dlrm_mlperf"))
    assert not p.fits
    assert p.shortfall_bytes == pytest.approx(float(p.memory.total.max()) - 16 * 2**30, rel=0.02)


def test_an_unmeasured_device_is_said_to_be_extrapolated() -> None:
    base = device("h100-sxm")
    twice = replace(base, name="half-dreamt", hbm_bytes_per_s=2 * base.hbm_bytes_per_s)
    design = load("dlrm_default", "system.node=dgx-h100", PLAIN, "training.precision=bf16")
    dreamt = replace(design, system=System(twice, default_node("h100-sxm"), 1))
    slow, fast = (predictor_of(d).predict(d) for d in (design, dreamt))
    assert fast.calibrated is Calibration.EXTRAPOLATED
    assert fast.calibration_share["measured"] == 0
    assert 0 < fast.iteration_time_us <= 1.1 * slow.iteration_time_us


def test_every_op_of_the_published_workloads_has_overheads_of_its_own() -> None:
    for name in ("dlrm_default", "dlrm_mlperf", "dlrm_ddp"):
        assert predictor_of(load(name)).predict(load(name)).fallback_ops == {}


# Every value of these axes is placed anew and enters as a number alone: their ends will do.
ENDS = ("model.embedding_dim.choices=[16, 128]", "training.global_batch={choices: [2048, 131072]}")


@pytest.mark.parametrize(("space", "overrides"), [("dlrm_small", ()), ("dlrm_terabyte", ENDS)])
def test_the_bulk_path_equals_single_predictions(space: str, overrides: tuple[str, ...]) -> None:
    config = load_space(Path(f"spaces/{space}.yaml"), overrides=overrides)
    evaluator = pricing_of(config, None).factory()
    codes = config.space.sample(np.random.default_rng(5), 40)
    metrics = evaluator.evaluate(codes).metrics
    profile = profile_for(device(config.space.device.name), node(config.space.node.name))
    predictor, place = Predictor(profile), SpacePlanner(config.space, profile)
    for row, ms, gib in zip(codes, metrics["iteration_time_ms"], metrics["hbm_gib"], strict=True):
        p = predictor.predict(design_of(config.space, row, place))
        # Absent layers count among a multi-tensor kernel's tensors on a grid: the difference that is left.
        assert ms == pytest.approx(p.iteration_time_us / 1e3, rel=1e-3)
        assert gib == pytest.approx(float(p.memory.total.max()) / 2**30, rel=1e-6)
