"""Predicted beside measured: classes of ops, memory, the section of the page."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dse.config import load_design
from dse.placement import plan_for
from dse.report.measured import compute_classes, measured_section
from dse.validate import report_samples
from dse.validation.compare import (
    Compared,
    class_of_launch,
    compared_classes,
    largest_gap,
    predicted_classes_us,
    tensors_gib,
)
from dse.validation_pricing import Pricing
from perfcore.design.design import Design
from perfcore.measure.iteration import IterationSample
from perfcore.measure.op_classes import OpClass, class_of
from perfcore.measure.record import DesignSample, Status
from perfcore.predictor import Prediction, Predictor
from perfcore.profile.profile import load_profile

DESIGN = Path("spaces/designs/dlrm_default.yaml")
US = {OpClass.PRODUCTS.value: 4000.0, OpClass.UPDATES.value: 1000.0}


@pytest.fixture(scope="module")
def design() -> Design:
    return load_design(DESIGN, overrides=["training.program=pytorch"], place=plan_for)


@pytest.fixture(scope="module")
def predictor() -> Predictor:
    return Predictor(load_profile("v100-sxm2-16gb"))


@pytest.fixture(scope="module")
def prediction(design: Design, predictor: Predictor) -> Prediction:
    return predictor.predict(design)


@pytest.mark.parametrize(
    ("names", "first", "expected"),
    [
        (["aten::mm", "AddmmBackward0"], True, OpClass.PRODUCTS),
        (["aten::bmm", "_PairProducts", "ProfilerStep#1"], True, OpClass.REST),
        (["aten::_embedding_bag", "aten::embedding_bag"], True, OpClass.LOOKUPS),
        (["aten::empty", "aten::_embedding_bag_forward_only"], True, OpClass.LOOKUPS),
        (["aten::index_select", "EmbeddingBagBackward0"], True, OpClass.UPDATES),
        (
            ["fbgemm::x", "torch::autograd::CppNode<SplitLookupFunction_sgd_Op>"],
            True,
            OpClass.UPDATES,
        ),
        (["aten::add_", "Optimizer.step#SGD.step"], True, OpClass.DENSE_OPTIMIZER),
        (["aten::add_", "Optimizer.step#SGD.step"], False, OpClass.UPDATES),
        (["aten::to", "collective: all_reduce"], True, OpClass.COMMUNICATION),
        (["c10d::allreduce_"], True, OpClass.COMMUNICATION),
        (["aten::relu"], True, OpClass.REST),
    ],
)
def test_ops_have_one_class(names: list[str], first: bool, expected: OpClass) -> None:
    assert class_of(names, first_optimizer=first) is expected


def test_predicted_classes_add_up(prediction: Prediction) -> None:
    kernels = predicted_classes_us(prediction, with_host=False)
    assert sum(kernels.values()) == pytest.approx(sum(op.device_us for op in prediction.ops), rel=1e-6)
    everything = predicted_classes_us(prediction, with_host=True)
    added = sum(everything.values()) - sum(kernels.values())
    assert added == pytest.approx(prediction.host.total_us, rel=1e-6)
    products = sum(
        float(us)
        for (_, op), us in zip(
            [(x, op) for op in prediction.graph.ops() for x in op.launches],
            prediction.timeline.end_us[0, :, 0] - prediction.timeline.start_us[0, :, 0],
            strict=True,
        )
        if "Addmm" in op.name or op.name in ("aten::linear", "BmmBackward0", "aten::bmm")
    )
    assert 0 < kernels[OpClass.PRODUCTS] <= products
    classes = {class_of_launch(op, x.kernel) for op in prediction.graph.ops() for x in op.launches}
    assert classes >= {OpClass.PRODUCTS, OpClass.LOOKUPS, OpClass.UPDATES, OpClass.DENSE_OPTIMIZER}


def test_classes_stand_side_by_side(prediction: Prediction) -> None:
    found = compared_classes(prediction, US, on_cpu=False)
    assert found[OpClass.PRODUCTS].measured == 4.0
    assert found[OpClass.LOOKUPS].measured == 0.0
    assert all(pair.predicted or pair.measured for pair in found.values())
    assert compared_classes(prediction, {}, on_cpu=False) == {}


def test_the_largest_gap_is_named() -> None:
    pairs = {"a": Compared(1.0, 2.0), "b": Compared(5.0, 2.5)}
    assert largest_gap(pairs) == "b predicted 5.00 ms, measured 2.50 ms"
    assert largest_gap({}) == ""


def sample(name: str, design: Design, us: float, *, clock: str = "cuda_events") -> DesignSample:
    iteration = IterationSample(
        (us,) * 3, 1, 2**31, 0.5, clock, (), 2, 2**30, US, None if clock == "wall" else us * 0.8
    )
    return DesignSample(name, design, Status.OK, iteration=iteration, notes=("a note",))


@pytest.fixture(scope="module")
def written(
    tmp_path_factory: pytest.TempPathFactory, design: Design, predictor: Predictor
) -> dict[str, object]:
    folder = tmp_path_factory.mktemp("run")
    pricing = Pricing(
        predictor.iteration_time_us, "a rule", why=lambda _: "because", predict=predictor.predict
    )
    failed = DesignSample("c", design, Status.OUT_OF_MEMORY, "too <large>")
    small = replace(design, training=replace(design.training, global_batch=256))
    samples = [sample("a", design, 9000.0), sample("b", small, 5000.0), failed]
    report_samples(
        folder, samples, device="cuda", tolerance_pct=5.0, pricing=pricing, environment={"device": "Abacus 9"}
    )
    found: dict[str, object] = json.loads((folder / "validation.json").read_text())
    return found


def test_everything_is_in_the_file(written: dict[str, object], prediction: Prediction) -> None:
    first, _, failed = written["designs"]  # type: ignore[misc]
    assert first["active_ms"]["measured"] == pytest.approx(7.2)
    assert first["active_ms"]["predicted"] == pytest.approx(prediction.device_active_us / 1e3)
    assert first["memory_gib"] == {"predicted": pytest.approx(tensors_gib(prediction)), "measured": 1.0}
    assert first["op_classes_ms"][OpClass.PRODUCTS.value]["measured"] == 4.0
    assert first["ranks"] == 2
    assert failed["op_classes_ms"] == {}
    assert "largest difference: " in str(written["why"])


def test_the_page_says_it(written: dict[str, object]) -> None:
    page = measured_section(written)
    for part in (
        "Measured on Abacus 9",
        "Kendall's tau 1",
        "over the tolerance",
        "GPU active, predicted",
        "memory, predicted",
        "ranks",
        "out of memory: too &lt;large&gt;",
        "The worst prediction",
        "<li>a note: a, b</li>",
        "CUDA events",
    ):
        assert part in page, part
    stacks = compute_classes(written["designs"])  # type: ignore[arg-type]
    assert stacks.names == ("a predicted", "a measured", "b predicted", "b measured")
    assert stacks.series[OpClass.PRODUCTS.value][1] == pytest.approx(100 * 4.0 / 9.0)


def test_a_cpu_has_no_idle_device(design: Design, predictor: Predictor, tmp_path: Path) -> None:
    pricing = Pricing(predictor.iteration_time_us, "a rule", predict=predictor.predict)
    found = report_samples(
        tmp_path,
        [sample("a", design, 9000.0, clock="wall")],
        device="cpu",
        tolerance_pct=5.0,
        pricing=pricing,
        environment={},
    )
    assert found.designs[0].active_ms == Compared(None, None)
    page = measured_section(json.loads((tmp_path / "validation.json").read_text()))
    assert "GPU active" not in page


def test_a_file_of_before_is_still_shown() -> None:
    page = measured_section(
        {"designs": [{"name": "001", "predicted_ms": 1.0, "measured_ms": 2.0}], "mape_pct": 50.0}
    )
    assert "-50.0" in page
    assert "Where predicted" not in page
    nothing = measured_section({"designs": [{"name": "001", "status": "timed_out", "detail": "not done"}]})
    assert "Nothing could be measured" in nothing
    assert "timed out: not done" in nothing


def test_a_captured_iteration_counts_its_launch(design: Design, predictor: Predictor) -> None:
    from perfcore.design.training import EmbeddingFusion, Launches

    fusion = replace(design.fusion, launches=Launches.CUDA_GRAPH, embedding=EmbeddingFusion.TABLE_BATCHED)
    captured = replace(
        design,
        fusion=fusion,
        training=replace(design.training, pinned_input=True, read_loss=False, synchronize=False),
    )
    found = predictor.predict(captured)
    sums = predicted_classes_us(found, with_host=False)
    assert sum(sums.values()) == pytest.approx(sum(op.device_us for op in found.ops), rel=1e-6)


def test_a_large_spread_warns(design: Design, tmp_path: Path) -> None:
    steady = sample("a", design, 9000.0)
    assert steady.iteration is not None
    noisy = replace(
        steady, name="b", iteration=replace(steady.iteration, iterations_us=(5000.0, 9000.0, 15000.0))
    )
    found = report_samples(
        tmp_path,
        [steady, noisy],
        device="cpu",
        tolerance_pct=5.0,
        pricing=Pricing(lambda _: 9000.0, "a rule", warnings=("one of the pricing",)),
        environment={},
    )
    assert found.warnings[0] == "one of the pricing"
    assert found.warnings[1].startswith("iterations of b (56 %) spread by more than 20 %: another program")
