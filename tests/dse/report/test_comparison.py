from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from dse.cli import app
from dse.errors import StudyError
from dse.manifest import Manifest, write_manifest
from dse.report.comparison import compare_runs, matched_shares
from dse.report.comparison_page import comparison_page
from dse.report.data import read_run

AXES = ("training.global_batch", "model.top_hidden.depth", "model.top_hidden.1")
Rows = list[tuple[float, float]]
EIGHT: Rows = [(1.0, 0.08), (2.0, 0.04), (4.0, 0.02)]


def a_run(folder: Path, points: Rows, *, gpu: str = "a100", second: str = "minimize", **extra: Any) -> Path:
    folder.mkdir(parents=True)
    manifest = Manifest(
        name=folder.name,
        space_hash="0" * 64,
        space="name: toy\n",
        overrides=[],
        resolved=[
            *(f"axis {a}: [1, 2]" for a in AXES),
            "training.precision: fp32",
            "objective time_per_sample_us: minimize",
            f"objective quality_loss: {second}",
            f"Device(name='{gpu}', description='x')",
            "Circumstances()",
        ],
        profile=gpu,
        profile_hash="1" * 64,
        seed=7,
        sampler="nsga2",
        effort={},
        command=[],
        started="2026-01-01T00:00:00+00:00",
    )
    write_manifest(replace(manifest, **extra), folder)
    rows = [
        {
            "row": i + 1,
            "knee": int(i == 0),
            "design": f"designs/{i + 1:03d}.yaml",
            "iteration_time_ms": x,
            "time_per_sample_us": x,
            "quality_loss": y,
            "hbm_gib": 1.0,
            AXES[0]: 512,
            AXES[1]: 1 + i % 2,
            AXES[2]: 64 if i % 2 else np.nan,
        }
        for i, (x, y) in enumerate(points)
    ]
    pd.DataFrame(rows).to_csv(folder / "pareto.csv", index=False)
    return folder


def test_the_joint_front_is_what_nothing_in_any_run_beats(tmp_path: Path) -> None:
    fast = a_run(tmp_path / "fast", [(0.5, 0.09), (1.0, 0.05)], gpu="h100")
    good = a_run(tmp_path / "good", [(0.9, 0.07), (1.1, 0.05), (3.0, 0.01)])
    found = compare_runs([read_run(fast), read_run(good)])
    points = found.front[["run", "row", "time_per_sample_us"]].to_numpy().tolist()
    assert points == [["fast", 1, 0.5], ["good", 1, 0.9], ["fast", 2, 1.0], ["good", 3, 3.0]]
    assert [(r.gpu, r.members, r.joint, r.best) for r in found.runs] == [
        ("h100", 2, 2, (0.5, 0.05)),
        ("a100", 3, 2, (0.9, 0.01)),
    ]
    assert [r.own for r in found.runs] == [("device h100",), ("device a100",)]
    assert all(0 < r.hypervolume_pct < 100 for r in found.runs)


def test_a_run_beside_another(tmp_path: Path) -> None:
    slow = a_run(tmp_path / "slow", [(2 * x, y) for x, y in EIGHT])
    same = a_run(tmp_path / "same", EIGHT)
    a, b = compare_runs([read_run(same), read_run(slow)]).ratios
    assert (a.a, a.b, a.median, a.matched, a.of) == ("same", "slow", 0.5, 3, 3)
    assert (b.a, b.b, b.median, b.matched, b.of) == ("slow", "same", 2.0, 3, 3)


def test_what_cannot_be_matched_is_not_counted(tmp_path: Path) -> None:
    short = a_run(tmp_path / "short", EIGHT[:1])
    whole = a_run(tmp_path / "whole", EIGHT)
    first, second = compare_runs([read_run(short), read_run(whole)]).ratios
    assert (first.median, first.matched, first.of) == (1.0, 1, 3)
    assert (second.median, second.matched, second.of) == (1.0, 1, 1)


POINTS = st.lists(st.tuples(st.floats(0.1, 9), st.floats(0.1, 9), st.floats(0.1, 9)), min_size=1, max_size=6)


@settings(deadline=None, max_examples=50)
@given(POINTS, POINTS)
def test_shares_are_those_of_the_best_design_that_is_no_worse(mine: Any, theirs: Any) -> None:
    got = matched_shares(np.array(mine), np.array(theirs))
    for share, (first, *rest) in zip(got, theirs, strict=True):
        matching = [m[0] for m in mine if all(x <= y for x, y in zip(m[1:], rest, strict=True))]
        assert share == pytest.approx(min(matching) / first) if matching else np.isnan(share)


def test_a_maximized_objective_keeps_its_sign(tmp_path: Path) -> None:
    runs = [a_run(tmp_path / n, points, second="maximize") for n, points in (("x", EIGHT), ("y", EIGHT[1:]))]
    found = compare_runs([read_run(r) for r in runs])
    assert [r.best for r in found.runs] == [(1.0, 0.08), (2.0, 0.04)]
    assert found.front["run"].tolist() == ["x"]


def test_settings_that_matter(tmp_path: Path) -> None:
    found = compare_runs([read_run(a_run(tmp_path / n, EIGHT)) for n in "ab"])
    assert len(found.front) == 6, "equal designs of two runs both stay"
    assert found.settings(0) == {"training.global_batch": 512, "model.top_hidden.depth": 1}
    assert found.settings(2)["model.top_hidden.1"] == 64
    assert found.shared_settings() == {"training.global_batch": 512}


def test_names_are_as_long_as_they_must_be(tmp_path: Path) -> None:
    runs = [a_run(tmp_path / "a" / "run", EIGHT), a_run(tmp_path / "b" / "run", EIGHT)]
    assert [r.name for r in compare_runs([read_run(r) for r in runs]).runs] == ["a/run", "b/run"]


def test_runs_that_cannot_be_compared(tmp_path: Path) -> None:
    one = read_run(a_run(tmp_path / "one", EIGHT))
    other = read_run(a_run(tmp_path / "other", EIGHT, second="maximize"))
    with pytest.raises(StudyError, match=r"At least two runs are compared, but got 1\."):
        compare_runs([one])
    with pytest.raises(StudyError, match="one is given twice"):
        compare_runs([one, one])
    with pytest.raises(
        StudyError, match=r"the same objectives, but .*one has .*quality_loss \(minimize\) and .*maximize"
    ):
        compare_runs([one, other])


def test_the_page_is_whole_and_the_same_each_time(tmp_path: Path) -> None:
    runs = [read_run(a_run(tmp_path / n, EIGHT)) for n in ("<b>", "c")]
    page = comparison_page(compare_runs(runs))
    assert page == comparison_page(compare_runs(runs))
    assert "&lt;b&gt;" in page
    assert "$" not in page.partition("</style>")[0]
    assert "6 designs of 2 runs; 6 are on the joint front" in page


def test_the_command_prints_tables_or_json_and_writes_files(tmp_path: Path) -> None:
    folders = [str(a_run(tmp_path / n, EIGHT, gpu=n)) for n in ("a100", "h100")]
    written = [str(tmp_path / name) for name in ("front.csv", "page.html")]
    done = CliRunner().invoke(app, ["compare", *folders, "--csv", written[0], "--html", written[1]])
    assert done.exit_code == 0, done.stderr
    assert "1 (3 of 3)" in done.stdout
    assert "All of them: batch 512" in done.stdout
    assert pd.read_csv(written[0])["run"].tolist() == ["a100", "h100"] * 3
    assert "Runs beside each other" in Path(written[1]).read_text(encoding="utf-8")
    done = CliRunner().invoke(app, ["compare", *folders, "--json"])
    told = json.loads(done.stdout)
    assert [r["on_joint_front"] for r in told["runs"]] == [3, 3]
    assert "model.top_hidden.1" not in told["joint_front"][0]
    done = CliRunner().invoke(app, ["compare", folders[0], str(tmp_path / "none")])
    assert done.exit_code == 2
