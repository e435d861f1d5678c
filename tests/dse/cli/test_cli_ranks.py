"""Designs whose ranks differ, on the command line: predicted, explained, planned, exported, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dse.cli import app

DESIGN = """
model:
  num_dense_features: 13
  tables:
    - {name: a, num_embeddings: 4000000, pooling_factor: 20, skew: 1.05}
    - {name: b, num_embeddings: 2000000, pooling_factor: 20}
    - {name: c, num_embeddings: 1000000, pooling_factor: 10}
    - {name: d, num_embeddings: 1000}
  embedding_dim: 64
  bottom_hidden: [256]
  top_hidden: [256]
training: {global_batch: 32768, precision: tf32}
fusion: {launches: cuda_graph}
sharding: {policy: table_wise}
system: {node: dgx-a100-80gb, world_size: 4}
"""
RANKS = "{ranks: 2-3, slowness: 1.6, hbm_gib: 40}"
OWN = ("--set", f"system.ranks=[{RANKS}]")
QUICK = ("--time-limit", "1")


@pytest.fixture
def design(tmp_path: Path) -> Path:
    path = tmp_path / "design.yaml"
    path.write_text(DESIGN, encoding="utf-8")
    return path


def call(*arguments: object, code: int = 0) -> Any:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == code, result.output
    return result


def answer(*arguments: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(call(*arguments, "--json").stdout)
    return found


def test_a_prediction_says_which_ranks_differ(design: Path) -> None:
    alike, unlike = answer("predict", design), answer("predict", design, *OWN)
    assert alike["ranks"] == []
    assert unlike["ranks"] == [{"ranks": "2-3", "slowness": 1.6, "hbm_gib": 40.0}]
    assert unlike["iteration_time_ms"] > 1.1 * alike["iteration_time_ms"]
    assert unlike["low"] < unlike["iteration_time_ms"] < unlike["high"]
    assert unlike["fullest_rank"] in (2, 3)
    assert unlike["device_hbm_gib"] == 40
    assert unlike["fits"]
    text = call("predict", design, *OWN).stdout
    assert "Ranks that differ: 2-3 (1.6 times as long, 40 GiB instead of 79.15)." in " ".join(text.split())
    small = ("--set", "system.ranks=[{ranks: 3, hbm_gib: 2.2}]")
    lacking = answer("predict", design, *small)
    assert not lacking["fits"]
    assert lacking["shortfall_gib"] == pytest.approx(lacking["hbm_gib"] - 2.2)
    assert "rank 3 lacks" in call("predict", design, *small).stdout


def test_kernels_of_slow_ranks_are_longer_in_the_timeline(design: Path, tmp_path: Path) -> None:
    timeline = tmp_path / "timeline.json"
    found = answer(
        "explain", design, "--set", "system.ranks=[{ranks: 3, slowness: 2}]", "--timeline", timeline
    )
    assert found["what_if"][0]["iteration_time_ms"] < found["iteration_time_ms"]
    by_rank: dict[int, list[float]] = {}
    for event in json.loads(timeline.read_text())["traceEvents"]:
        if event["name"] == "Gemm":
            by_rank.setdefault(event["pid"], []).append(event["dur"])
    assert len(by_rank[0]) > 3
    assert by_rank[1] == pytest.approx(by_rank[0])
    assert by_rank[3] == pytest.approx([2 * us for us in by_rank[0]])


def test_a_plan_takes_the_designs_own_ranks(design: Path, tmp_path: Path) -> None:
    own = answer("plan", design, *OWN, *QUICK)
    assert own["facts"]["ranks that differ"] == "2-3 (1.6 times as long, 40 GiB instead of 79.15)"
    assert own["lower_bound_ms"] <= own["iteration_time_ms"]
    rooms = [rank["capacity_gib"] for rank in own["ranks"]]
    assert rooms[0] - rooms[2] == pytest.approx(80 * 1e9 / 2**30 + 79.15 - 74.5 - 40, abs=0.1)
    assert rooms == [rooms[0], rooms[0], rooms[2], rooms[2]]


def test_limits_take_the_place_of_what_a_design_says(design: Path, tmp_path: Path) -> None:
    limits = tmp_path / "limits.yaml"
    limits.write_text("ranks: [{ranks: 2-3, slowness: 1.6}]\n")
    said = answer("plan", design, *QUICK, "--limits", limits)
    assert said["facts"]["ranks that differ"] == "2-3 (1.6 times as long)"
    limits.write_text("ranks: [{ranks: 3, slowness: 3}, {ranks: 0, hbm_gib: 9}]\nhbm_gib: 30\n")
    both = answer("plan", design, *OWN, *QUICK, "--limits", limits)
    assert both["facts"]["ranks that differ"] == (
        "2 (1.6 times as long, 40 GiB instead of 79.15); 3 (3 times as long, 40 GiB instead of 79.15)"
    )
    assert [rank["capacity_gib"] for rank in both["ranks"]] == [9, 30, 30, 30]
    limits.write_text("ranks: [{ranks: 0-1, slowness: 2}, {ranks: 1, hbm_gib: 9}]\n")
    refused = call("plan", design, "--limits", limits, code=2)
    assert f"{limits}:1:37: ranks.1.ranks: each rank may be named once, but rank 1 is named already" in (
        refused.stderr
    )


def test_torchrec_knows_equal_gpus_alone(design: Path) -> None:
    refused = call("plan", design, *OWN, "--compare", "torchrec", code=2)
    assert "TorchRec's planner knows equal GPUs alone, but these ranks differ: 2-3" in refused.stderr
    assert "--set system.ranks=[]" in refused.stderr
    assert "def sharding_plan" in call("plan", design, *OWN, *QUICK, "--export", "torchrec").stdout


def test_remedies_keep_the_ranks(design: Path) -> None:
    small = ("--set", "system.ranks=[{ranks: 0-3, hbm_gib: 4.5}]", "--set", "model.embedding_dim=512")
    refused = call("plan", design, *small, *QUICK, code=3)
    assert "the 4 ranks have 7.9 GiB for them" in refused.stderr
    assert "1. 8 GPUs instead of 4 (--set system.world_size=8)." in refused.stderr
    assert "GPUs with more memory" not in refused.stderr  # the small ones would stay
    larger = answer("plan", design, *small, *QUICK, "--set", "system.world_size=8")
    assert all(rank["hbm_gib"] <= rank["capacity_gib"] for rank in larger["ranks"])


def test_a_rank_too_small_for_the_rest_of_a_job_is_named(design: Path) -> None:
    refused = call("plan", design, "--set", "system.ranks=[{ranks: 2, hbm_gib: 1}]", *QUICK, code=3)
    assert "Rank 2 has no memory for tables, and lacks 1.4 GiB for the rest of the job." in refused.stderr
