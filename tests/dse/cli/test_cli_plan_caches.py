"""`dse plan DESIGN` with tables in host memory behind a cache."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from dse.cli import app
from dse.config import load_design
from dse.placement.design.certify import plan_design
from dse.placement.design.options import Offer
from perfcore.design.design import Design
from perfcore.design.sharding import ON_HOST, ComputeKernel, ShardingPlan, ShardingType
from perfcore.predictor import Predictor
from perfcore.profile.profile import priced

DESIGN = Path("spaces/designs/criteo_8gpu.yaml")
QUICK = ("--time-limit", "2")
WIDE_GIB = 100_000_000 * 128 * 4 / 2**30


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """Four tables of 48 GiB and a small one for two GPUs of 80 GiB."""
    data: dict[str, Any] = yaml.safe_load(DESIGN.read_text())
    rows = [100_000_000] * 4 + [1000]
    data["model"]["tables"] = [
        {"name": f"t{i}", "num_embeddings": r, "pooling_factor": 1 + i, "skew": 1.05}
        for i, r in enumerate(rows)
    ]
    data["system"]["world_size"] = 2
    data["training"]["global_batch"] = 4096
    file = tmp_path / "large.yaml"
    file.write_text(yaml.safe_dump(data))
    return file


def call(*arguments: object, code: int = 0) -> Any:
    result = CliRunner().invoke(app, ["plan", *map(str, arguments)], env={"COLUMNS": "100"})
    assert result.exit_code == code, result.output
    return result


def planned(*arguments: object) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(call(*arguments, *QUICK, "--json").stdout)
    return answer


def loaded(file: Path) -> tuple[Design, Predictor]:
    design, profile = priced(load_design(file, place=lambda m, *_: ShardingPlan.on_one_rank(m)), None)
    return design, Predictor(profile)


def test_a_cache_is_a_remedy_that_holds(large: Path) -> None:
    refused = call(large, *QUICK, code=3)
    named = re.search(
        r"  \d\. Tables in host memory behind a cache: `--cache-ratio ([\d.]+)` fits, ([\d.]+) ms an iteration predicted\.",
        refused.stderr,
    )
    assert named is not None, refused.stderr
    assert named[1] == "0.3"
    answer = planned(large, "--cache-ratio", named[1])
    assert float(named[2]) == pytest.approx(answer["iteration_time_ms"], rel=0.05)


def test_a_plan_with_caches_is_certified(large: Path) -> None:
    answer = planned(large, "--cache-ratio", "0.1,0.3")
    assert answer["objective"] == "iteration time"
    assert 0 < answer["lower_bound_ms"] <= answer["iteration_time_ms"]
    assert answer["certified_gap_pct"] < 10
    cached = [t for t in answer["tables"] if t["cache_ratio"] is not None]
    assert cached
    assert {t["kernel"] for t in cached} == {"fused_uvm_caching"}
    assert {t["cache_ratio"] for t in cached} <= {0.1, 0.3}
    assert all(t["kernel"] in ("fused", "dense") for t in answer["tables"] if t not in cached)
    assert all(r["hbm_gib"] <= r["capacity_gib"] for r in answer["ranks"])
    on_host = f"{len(cached)} of 5, {len(cached) * WIDE_GIB:.1f} of 2048.0 GiB on the fullest machine"
    assert answer["facts"]["tables in host memory"] == on_host


def test_the_iteration_time_is_that_of_the_plan(large: Path) -> None:
    design, predictor = loaded(large)
    found = plan_design(design, predictor=predictor, time_limit_s=2.0, offer=Offer(cache_ratios=(0.0, 0.1)))
    seen = predictor.predict(found.design)
    assert seen.fits
    assert seen.iteration_time_us == pytest.approx(found.iteration_time_us, rel=1e-9)
    assert {t.kernel for t in found.plan.tables} & ON_HOST
    # Rows over the host's link take longer than rows on the device.
    on_device = tuple(replace(t, kernel=ComputeKernel.FUSED, cache_ratio=None) for t in found.plan.tables)
    without = replace(design, sharding=ShardingPlan(on_device))
    assert found.iteration_time_us >= predictor.iteration_time_us(without)


def test_no_more_tables_on_the_host_than_its_memory_holds(large: Path, tmp_path: Path) -> None:
    limits = tmp_path / "limits.yaml"
    limits.write_text("host_gib: 100\n")
    answer = planned(large, "--cache-ratio", "0.1", "--limits", limits)
    on_host = [t for t in answer["tables"] if t["cache_ratio"] is not None]
    assert 0 < len(on_host) <= 2
    limits.write_text("host_gib: 20\n")
    refused = call(large, *QUICK, "--cache-ratio", "0.1", "--limits", limits, code=3)
    assert "The limits without their section `host_gib`." in refused.stderr


@pytest.mark.parametrize("kernel", ["fused_uvm_caching", "fused_uvm_caching@0.1"])
def test_a_table_is_kept_on_the_device(kernel: str, large: Path, tmp_path: Path) -> None:
    free = planned(large, "--cache-ratio", "0.1")
    cached = [t["table"] for t in free["tables"] if t["cache_ratio"] is not None]
    limits = tmp_path / "limits.yaml"
    limits.write_text(f"kinds: [{{tables: [{cached[0]}], forbid_kernels: [{kernel}]}}]\n")
    tables = {t["table"]: t for t in planned(large, "--cache-ratio", "0.1", "--limits", limits)["tables"]}
    assert tables[cached[0]]["cache_ratio"] is None
    assert any(t["cache_ratio"] for t in tables.values())


def test_under_limits_a_cache_is_a_remedy_too(tmp_path: Path) -> None:
    limits = tmp_path / "limits.yaml"
    limits.write_text("hbm_gib: 7\n")
    refused = call(DESIGN, *QUICK, "--limits", limits, code=3)
    assert "1. The limits without their section `hbm_gib`." in refused.stderr
    named = re.search(
        r"2\. Tables in host memory behind a cache: `--cache-ratio ([\d.]+)` fits", refused.stderr
    )
    assert named is not None, refused.stderr
    answer = planned(DESIGN, "--limits", limits, "--cache-ratio", named[1])
    assert all(r["hbm_gib"] <= 7 for r in answer["ranks"])


def test_a_smaller_cache_is_the_remedy_for_one_too_large(large: Path) -> None:
    refused = call(large, *QUICK, "--cache-ratio", "0.9", code=3)
    assert "`--cache-ratio 0.3` fits" in refused.stderr
    assert "GPUs instead of 2" in refused.stderr


def test_where_no_table_needs_a_cache_it_says_so() -> None:
    answer = planned(DESIGN, "--cache-ratio", "0.1")
    assert {t["cache_ratio"] for t in answer["tables"]} == {None}
    assert answer["facts"]["tables in host memory"].startswith("none, this plan keeps all")


def test_one_gpu_and_a_cache(large: Path) -> None:
    answer = planned(large, "--set", "system.world_size=1", "--cache-ratio", "0.1")
    assert len(answer["ranks"]) == 1
    assert any(t["cache_ratio"] == 0.1 for t in answer["tables"])


def test_the_exported_plan_has_the_caches_and_comes_back(large: Path, tmp_path: Path) -> None:
    call(large, *QUICK, "--cache-ratio", "0.1", "--export", "torchrec", "-o", tmp_path / "plan.py")
    text = subprocess.run(
        [sys.executable, tmp_path / "plan.py"], check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    tables = json.loads(text)["tables"].values()
    cached = [t for t in tables if t["kernel"] == "fused_uvm_caching"]
    assert cached
    assert {t["cache_load_factor"] for t in cached} == {0.1}
    assert all(t["type"] != ShardingType.DATA_PARALLEL for t in cached)
    (tmp_path / "plan.json").write_text(text)
    answer = planned(large, "--cache-ratio", "0.1", "--import", tmp_path / "plan.json")
    assert "ms an iteration" in answer["facts"]["imported plan plan.json"]
    assert "does not fit" not in answer["facts"]["imported plan plan.json"]


def test_a_person_reads_of_caches(large: Path) -> None:
    text = call(large, *QUICK, "--cache-ratio", "0.1").stdout
    assert "ms iteration time" in text
    assert "UVM@0.1" in text
    assert "tables in host memory: " in text


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--set", "fusion.embedding=per_table"), "`--cache-ratio` needs `embedding: table_batched`"),
        (("--cache-ratio", "1"), "shares between 0 and 1, e.g. 0.1,0.3, but got '1'"),
        (("--compare", "torchrec"), "--cache-ratio and --compare exclude one another"),
    ],
)
def test_what_a_cache_does_not_go_with(large: Path, more: tuple[str, ...], said: str) -> None:
    assert said in call(large, "--cache-ratio", "0.1", *more, code=2).stderr


def test_an_instance_has_its_own_caches() -> None:
    file = Path("tests/data/sharding_instances/criteo_onehot_26x8.json.gz")
    result = call("--instance", file, "--cache-ratio", "0.1", code=2)
    assert "--cache-ratio belongs to DESIGN or --make-instance, but got --instance" in result.stderr
