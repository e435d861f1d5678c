"""The studies' stored results are what the engine gives today."""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from perfcore.graph.kernels import Convolution, GemmLayout

STUDIES = Path("studies")


def load(study: str) -> tuple[ModuleType, dict[str, Any]]:
    path = STUDIES / study / "run.py"
    spec = importlib.util.spec_from_file_location(f"study_{study}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module, json.loads((path.parent / "results.json").read_text())


def assert_same(got: list[dict[str, Any]], want: list[dict[str, Any]]) -> None:
    assert len(got) == len(want)
    for row, stored in zip(got, want, strict=True):
        for key, value in stored.items():
            expected = pytest.approx(value, rel=0.01, abs=0.2) if isinstance(value, float) else value
            assert row[key] == expected, (row, key)


def test_published_workloads() -> None:
    module, stored = load("published_workloads")
    rows = module.predict_rows()
    assert_same(rows, stored["rows"])
    assert_same(list(module.summary(rows).values()), list(stored["summary"].values()))
    assert_same(module.predict_ops(), stored["ops"])
    # Every launch but those of libraries (memsets, split products) is one of the trace's.
    assert all(op["predicted_kernels"] <= op["traced_kernels"] + 0.1 for op in stored["ops"])


def test_fused_embeddings() -> None:
    module, stored = load("fused_embeddings")
    rows = module.sweep()
    assert_same(rows, stored["rows"])
    assert_same(module.answers(rows), stored["speedups"])


def test_gpu_levers() -> None:
    module, stored = load("gpu_levers")
    asked = (("b200-sxm",), ("nvidia_dlrm_small", "dlrm_default"))
    rows = module.sweep(*asked)
    kept = [r for r in stored["rows"] if r["gpu"] in asked[0] and r["workload"] in asked[1]]
    assert_same(rows, kept)
    assert_same(module.answers(stored["rows"]), stored["gains"])


def test_two_kinds_of_gpus() -> None:
    module, stored = load("two_kinds_of_gpus")
    module.PAIRS = module.PAIRS[:1]
    module.SETTINGS = dict(list(module.SETTINGS.items())[:2])
    assert_same(module.sweep(), stored["rows"][:2])


def test_which_gpu() -> None:
    module, stored = load("which_gpu")
    one = [r for r in stored["rows"] if r["gpus"] == 1 and r["gpu"] in ("a100-sxm4-80gb", "b200-sxm")]
    assert len(one) >= 4
    for row in one[:2] + one[-2:]:
        assert module.hours_again(row) == pytest.approx(row["hours"], rel=0.01), row


def test_published_end_to_end() -> None:
    module, stored = load("published_end_to_end")
    rows = module.predict_rows(("fused",))
    assert_same(rows, [r for r in stored["rows"] if r["kind"] == "fused"])
    for kind, numbers in module.summary(stored["rows"]).items():
        assert numbers == pytest.approx(stored["summary"][kind], rel=0.01), kind
    assert all(r["measured_ms"] > r["floor_ms"] for r in stored["rows"])
    assert module.rank_correlation([1.0, 2.0, 3.0], [1.0, 4.0, 9.0]) == pytest.approx(1.0)


def test_vision_models() -> None:
    module, stored = load("vision_models")
    rows = module.predict_rows()
    assert_same(rows, stored["rows"])
    assert_same(list(module.summary(rows).values()), list(stored["summary"].values()))


@pytest.mark.parametrize(
    ("network", "parameters", "convolutions"),
    [("resnet50", 25_557_032, 53), ("inception_v3", 23_834_568, 94)],
)
def test_vision_models_have_the_parameters_of_torchvisions(
    network: str, parameters: int, convolutions: int
) -> None:
    load("vision_models")
    networks = importlib.import_module("networks")
    step = networks.training_step(networks.NETWORKS[network](1))
    net = networks.NETWORKS[network](1)
    assert sum(size for layer in net.layers for size in layer.parameters) == parameters
    found = Counter(x.kernel.layout for x in step.launches() if isinstance(x.kernel, Convolution))
    assert found[GemmLayout.FORWARD] == found[GemmLayout.GRAD_WEIGHT] == convolutions
    assert found[GemmLayout.GRAD_INPUT] == convolutions - 1


def test_errors_are_those_of_the_method() -> None:
    load("published_workloads")  # whose folder brings the module of scores
    scores = importlib.import_module("scores")
    assert scores.mape([10.0, -20.0]) == 15.0
    assert scores.gmae([10.0, -40.0]) == pytest.approx(20.0, abs=0.2)
    assert scores.gmae([0.0]) == pytest.approx(0.04)


@pytest.mark.parametrize("study", sorted(p.parent.name for p in STUDIES.glob("*/run.py")))
def test_a_study_says_what_it_asks_and_how_to_repeat_it(study: str) -> None:
    text = (STUDIES / study / "README.md").read_text()
    assert f"python studies/{study}/run.py" in text
    assert "figure.svg" in text
    assert (STUDIES / study / "figure.svg").is_file()
