from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dse.config import dump_design
from dse.errors import StorageError
from dse.manifest import Manifest, write_manifest
from dse.report import write_report
from dse.report.breakdown import COMMUNICATION, IDLE, Breakdown, breakdown_of
from dse.report.data import read_run
from dse.report.figures import compute_memory, compute_pareto, compute_stacks, draw_pareto, shown_rows
from dse.report.importance import explained_share, importance_of
from dse.report.words import axis_label, compact, limit, name_and_value, number
from perfcore.design.design import Design
from perfcore.design.hardware import System, device, node
from perfcore.design.model import EmbeddingTable, Model
from perfcore.design.sharding import ShardingPlan
from perfcore.design.training import Fusion, Training
from perfcore.predictor import Predictor
from perfcore.profile.profile import profile_for

AXES = ("training.global_batch", "model.top_hidden.depth", "model.top_hidden.1", "model.top_hidden.2")


def small_design(batch: int) -> Design:
    model = Model(13, (EmbeddingTable("a", 1000), EmbeddingTable("b", 500)), 16, (32,), (64,))
    system = System(device("v100-sxm2-16gb"), node("dgx-1-v100-16gb"))
    return Design(model, Training(batch), Fusion(), ShardingPlan.on_one_rank(model), system)


def row(index: int, batch: int, us: float, loss: float, **extra: Any) -> dict[str, Any]:
    design = f"designs/{index:03d}.yaml"
    metrics = {"time_per_sample_us": us, "quality_loss": loss, "quality_std": 0.01, "hbm_gib": 1.5}
    times = {"iteration_time_ms": us * batch / 1e3, "samples_per_second": 1e6 / us}
    axes = {AXES[0]: batch, AXES[1]: 1, AXES[2]: 64, AXES[3]: math.nan}
    return {"row": index, "knee": 0, "design": design} | metrics | times | axes | extra


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A finished run: three designs, 64 candidates, one of eight infeasible."""
    folder = tmp_path / "toy"
    (folder / "designs").mkdir(parents=True)
    manifest = Manifest(
        name="toy <run>",
        space_hash="0" * 64,
        space="name: toy  # <b>not bold</b>\n",
        overrides=[],
        resolved=[
            *(f"axis {a}: [1, 2]" for a in AXES),
            "training.precision: fp32",
            "objective time_per_sample_us: minimize",
            "objective quality_loss: minimize",
            "constraint hbm_gib <= 15.78125",
        ],
        profile="v100-sxm2-16gb",
        profile_hash="1" * 64,
        seed=7,
        sampler="nsga2",
        effort={},
        command=["dse", "run", "toy.yaml"],
        started="2026-01-01T00:00:00+00:00",
        method="exact",
        counts={"candidates_evaluated": 64, "space_size": 64},
    )
    write_manifest(manifest, folder)
    rows = [row(1, 512, 1.0, 0.04), row(2, 256, 2.0, 0.012, knee=1), row(3, 128, 4.0, 0.01)]
    pd.DataFrame(rows).to_csv(folder / "pareto.csv", index=False)
    for entry in rows:
        text = dump_design(small_design(entry[AXES[0]]))
        (folder / entry["design"]).write_text(text, encoding="utf-8")
    table = [
        {
            "feasible": int(i % 8 != 0),
            "time_per_sample_us": 2.0 ** (i % 4),
            "quality_loss": 0.01 * (1 + i // 32),
        }
        | {AXES[0]: 2 ** (i % 4), AXES[1]: 1 + i // 32, AXES[2]: 64, AXES[3]: 64 if i >= 32 else math.nan}
        for i in range(64)
    ]
    pd.DataFrame(table).to_csv(folder / "candidates.csv", index=False)
    return folder


def test_the_page_is_whole_offline_and_the_same_again(run_dir: Path) -> None:
    path = write_report(run_dir)
    page = path.read_text(encoding="utf-8")
    assert path == run_dir / "report.html"
    own = page.replace(re.search(r"<script>.*?</script>", page, re.DOTALL)[0], "")  # type: ignore[index]
    assert not re.findall(r'(?:src|href)="https?:', own)
    assert "$" not in re.sub(r"<script.*?</script>", "", own, flags=re.DOTALL)
    for div in ("pareto", "device", "host", "memory", "importance"):
        assert own.count(f'id="{div}"') == 1
    assert "toy &lt;run&gt;" in own
    assert "<b>not bold</b>" not in own
    assert 'href="designs/002.yaml">2</a> ★' in own
    assert "<b>3 of 3</b> designs overlap" not in own
    assert "<b>2 of 3</b> designs overlap" in own
    assert write_report(run_dir).read_text(encoding="utf-8") == page


def test_points_of_the_front(run_dir: Path) -> None:
    points = compute_pareto(read_run(run_dir))
    assert points.x.tolist() == [1.0, 2.0, 4.0]
    assert points.y.tolist() == [0.04, 0.012, 0.01]
    assert points.band is not None
    assert points.band.tolist() == [0.01] * 3
    assert points.knee == 1
    assert (len(points.feasible.x), len(points.infeasible.x)) == (56, 8)
    assert points.x_label == "time per sample (µs)"
    assert "batch: 256" in points.texts[1]
    assert "top MLP: 64" in points.texts[1]
    assert draw_pareto(points) == draw_pareto(points)


def test_importance_names_what_decides(run_dir: Path) -> None:
    found = importance_of(read_run(run_dir))
    assert found is not None
    assert found.uniform
    shares = {m: dict(zip(found.axes, v, strict=True)) for m, v in found.shares.items()}
    assert shares["time_per_sample_us"][AXES[0]] == pytest.approx(1.0)
    assert shares["time_per_sample_us"][AXES[1]] == pytest.approx(0.0, abs=0.05)
    assert shares["quality_loss"][AXES[1]] == pytest.approx(1.0)
    assert shares["quality_loss"][AXES[2]] == 0.0


def test_share_of_pure_chance_is_small_and_of_half_is_half() -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 10, 4000)
    assert explained_share(rng.normal(size=4000), codes) < 0.01
    group = rng.normal(size=10)[codes]
    mixed = group / group.std() + rng.normal(size=4000)
    assert explained_share(mixed, codes) == pytest.approx(0.5, abs=0.04)


@given(st.lists(st.tuples(st.floats(-1e6, 1e6), st.integers(0, 3)), min_size=1, max_size=40))
@settings(deadline=None, max_examples=50)
def test_share_lies_between_0_and_1(rows: list[tuple[float, int]]) -> None:
    values, codes = (np.array(v) for v in zip(*rows, strict=True))
    assert 0 <= explained_share(values.astype(float), codes) <= 1


def test_times_and_memory_add_up() -> None:
    design = small_design(256)
    prediction = Predictor(profile_for(design.system.device)).predict(design)
    found = breakdown_of("001", prediction, system=design.system)
    assert sum(found.device_ms.values()) == pytest.approx(found.iteration_ms)
    assert sum(found.host_ms.values()) == pytest.approx(found.iteration_ms)
    assert sum(found.memory_gib.values()) * 2**30 == pytest.approx(prediction.memory.total.max())
    assert found.device_ms[IDLE] == pytest.approx(prediction.device_idle_us / 1e3)
    assert found.device_ms[COMMUNICATION] == 0
    stacks = compute_stacks([found], ["row 1"], host=False)
    assert sum(v[0] for v in stacks.series.values()) == pytest.approx(found.iteration_ms * 1e6 / 256)
    assert compute_memory([found], ["row 1"]).series["framework"][0] == found.memory_gib["framework"]


def test_a_part_that_one_design_lacks_is_zero_there() -> None:
    first = fake_breakdown(device_ms={"top mlp": 1.0, COMMUNICATION: 0.0, IDLE: 1.0})
    second = replace(first, device_ms={"cross": 2.0, COMMUNICATION: 0.5, IDLE: 0.0})
    stacks = compute_stacks([first, second], ["a", "b"], host=False)
    assert stacks.series == {"top mlp": (1e4, 0), "cross": (0, 2e4), COMMUNICATION: (0, 5e3), IDLE: (1e4, 0)}


def fake_breakdown(**given_: Any) -> Breakdown:
    values: dict[str, Any] = {
        "name": "001",
        "iteration_ms": 2.0,
        "samples_per_second": 5e4,
        "device_ms": {},
        "host_ms": {},
        "memory_gib": {},
        "capacity_gib": 16.0,
        "device": "a device",
        "ranks": "",
        "gpus": 1,
        "global_batch": 100,
        "bound_by": "compute",
        "bound_share": {},
        "calibration_share": {},
        "fallback_ops": 0,
    }
    return Breakdown(**values | given_)


def test_a_design_that_cannot_be_read_is_named(run_dir: Path) -> None:
    (run_dir / "designs" / "002.yaml").write_text("model: [", encoding="utf-8")
    page = write_report(run_dir).read_text(encoding="utf-8")
    assert re.search(r'class="warn">002\.yaml: ', page)
    assert 'id="device"' in page


def test_validation_stands_beside_the_predictions(run_dir: Path) -> None:
    entry = {"name": "001", "status": "ok", "predicted_ms": 1.1, "measured_ms": 1.0}
    report = {"device": "cpu", "designs": [entry], "mape_pct": 10.0, "gmae_pct": 9.9, "kendall_tau": None}
    (run_dir / "validation.json").write_text(json.dumps(report), encoding="utf-8")
    page = write_report(run_dir).read_text(encoding="utf-8")
    assert "Measured on cpu" in page
    assert "+10.0" in page
    assert "MAPE 10 %, GMAE 9.9 %." in page


def test_without_candidates_there_is_no_cloud_and_no_importance(run_dir: Path) -> None:
    (run_dir / "candidates.csv").unlink()
    page = write_report(run_dir).read_text(encoding="utf-8")
    assert "What matters" not in page
    assert len(compute_pareto(read_run(run_dir)).feasible.x) == 0


def test_one_objective_is_drawn_against_memory(run_dir: Path) -> None:
    manifest = json.loads((run_dir / "manifest.json").read_text(encoding="utf-8"))
    manifest["resolved"] = [r for r in manifest["resolved"] if "quality_loss" not in r]
    (run_dir / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    points = compute_pareto(read_run(run_dir))
    assert points.band is None
    assert points.y.tolist() == [1.5] * 3
    write_report(run_dir)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("manifest.json", None, "holds no run"),
        ("manifest.json", "{", "corrupt"),
        ("pareto.csv", None, "pareto.csv is missing"),
        ("pareto.csv", "", "pareto.csv cannot be read"),
        ("pareto.csv", "row,knee,design\n", "needs the column 'time_per_sample_us'"),
        ("validation.json", "[", "validation.json cannot be read"),
        ("candidates.csv", "a,b\n1,2\n", "needs the column 'feasible'"),
    ],
)
def test_bad_files_are_named(run_dir: Path, name: str, text: str | None, message: str) -> None:
    if text is None:
        (run_dir / name).unlink()
    else:
        (run_dir / name).write_text(text, encoding="utf-8")
    with pytest.raises(StorageError, match=message):
        write_report(run_dir)


def test_rows_to_show_hold_both_ends_and_the_knee() -> None:
    front = pd.DataFrame({"design": [f"designs/{i}.yaml" if i % 2 == 0 else math.nan for i in range(40)]})
    rows = shown_rows(front, 6, most=5)
    assert rows[0] == 0
    assert rows[-1] == 38
    assert 6 in rows
    assert len(rows) <= 5
    assert all(r % 2 == 0 for r in rows)


def test_words() -> None:
    assert [number(v) for v in (0, 1234567.8, 0.00123456, 12.0, 1e-9, math.nan)] == [
        *("0", "1,234,568", "0.001235", "12", "1.000e-09", "–"),
    ]
    assert name_and_value("iteration_time_ms", 1.5) == ("iteration time", "1.5 ms")
    assert name_and_value("world_size", 8) == ("GPUs", "8")
    assert limit("hbm_gib <= 79.15") == "memory of the fullest GPU (GiB) ≤ 79.15"
    assert axis_label("model.bottom_hidden.2") == "bottom width 2"
    axes = ("system.world_size", "model.top_hidden.depth", "model.top_hidden.1", "model.top_hidden.2")
    settings_ = {axes[0]: 8, axes[1]: 2, axes[2]: 1024, axes[3]: 128}
    assert compact(settings_, axes) == {"GPUs": "8", "top MLP": "1024-128"}
    assert compact({axes[1]: 3}, axes[1:2]) == {"top MLP": "3 layers"}
