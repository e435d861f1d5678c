"""`dse plan` as a person and as a machine use it."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dse.cli import app

DATA = Path(__file__).parents[2] / "data" / "sharding_instances"
ONE_HOT, MULTI_HOT = DATA / "criteo_onehot_26x8.json.gz", DATA / "criteo_v2_26x8.json.gz"
DESIGN = "spaces/designs/criteo_8gpu.yaml"
QUICK = ("--time-limit", "2")
KEYS = {"lower_bound_ms", "certified_gap_pct", "proven", "wall_s", "ranks", "tables"}


def call(*arguments: object, code: int = 0) -> Any:
    result = CliRunner().invoke(app, ["plan", *map(str, arguments)], env={"COLUMNS": "80"})
    assert result.exit_code == code, result.output
    return result


def planned(*arguments: object) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(call(*arguments, "--json").stdout)
    return answer


# --- instances ----------------------------------------------------------------------------------------


def test_an_instance_is_solved_and_proven() -> None:
    answer = planned("--instance", ONE_HOT, "--objective", "rating", "--time-limit", "5")
    assert set(answer) >= KEYS | {"objective_ms"}
    assert answer["objective_ms"] == pytest.approx(0.8532, abs=5e-5)
    assert answer["proven"] is True
    assert answer["certified_gap_pct"] == pytest.approx(0, abs=1e-2)
    assert max(r["load_ms"] for r in answer["ranks"]) == pytest.approx(answer["objective_ms"])


def test_the_critical_path_is_the_sum_of_the_slowest_ranks() -> None:
    answer = planned("--instance", MULTI_HOT, *QUICK)
    assert answer["objective_ms"] == pytest.approx(sum(e["slowest_ms"] for e in answer["events"]))
    assert answer["lower_bound_ms"] <= answer["objective_ms"]
    assert answer["objective_ms"] < 3.0344  # what TorchRec's planner reaches on these costs
    gap = 100 * (answer["objective_ms"] / answer["lower_bound_ms"] - 1)
    assert answer["certified_gap_pct"] == pytest.approx(gap, abs=1e-6)


def test_a_person_reads_it_at_eighty_columns() -> None:
    text = call("--instance", DATA / "synth_100x16_cw.json.gz", *QUICK).stdout
    assert max(map(len, text.splitlines())) <= 80
    for words in (
        "ms critical path, at most", "100 tables on 16 ranks of 2 machines", "Events: each ends with its slowest rank",
        "How tables are split", "Ranks: the 6 most loaded and the 2 least loaded of 16", "Tables: the 10 dearest of 100",
    ):  # fmt: skip
        assert words in text, words
    assert len(text.splitlines()) < 80


def test_the_same_seed_gives_the_same_plan() -> None:
    first, again = (
        planned("--instance", ONE_HOT, "--objective", "rating", "--seed", "3", "--time-limit", "10")
        for _ in range(2)
    )
    assert first["tables"] == again["tables"]


def test_a_report_is_written(tmp_path: Path) -> None:
    call("--instance", ONE_HOT, *QUICK, "-o", tmp_path / "plan")
    with (tmp_path / "plan" / "tables.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 26
    assert "What each rank does" in (tmp_path / "plan" / "report.html").read_text()
    assert json.loads((tmp_path / "plan" / "plan.json").read_text())["ranks"]


def test_limits_are_kept(tmp_path: Path) -> None:
    limits = tmp_path / "limits.yaml"
    limits.write_text(
        "pin: [{table: table_19, ranks: [5]}]\ntogether: [[table_1, table_2]]\nkinds: [{forbid: [data_parallel]}]\n"
    )
    answer = planned("--instance", MULTI_HOT, "--limits", limits, *QUICK)
    tables = {t["table"]: t for t in answer["tables"]}
    assert set(tables["table_19"]["ranks"]) == {5}
    assert tables["table_1"]["ranks"] == tables["table_2"]["ranks"]
    assert tables["table_1"]["together_with"] == ["table_2"]
    assert "data_parallel" not in {t["type"] for t in answer["tables"]}


def test_nothing_fits_under_limits(tmp_path: Path) -> None:
    limits = tmp_path / "limits.yaml"
    limits.write_text("hbm_gib: 8\npin: [{table: table_0, ranks: [0]}]\n")
    result = call("--instance", MULTI_HOT, "--limits", limits, *QUICK, code=3)
    assert "error: Table 'table_0' needs 19.1 GiB on a rank even as" in result.stderr
    assert "11.1 GiB are missing" in result.stderr
    assert "1. 1" in result.stderr  # so many GiB would do
    assert "GiB for tables on each rank instead of 8.0 GiB." in result.stderr
    assert "The limits without their section `hbm_gib`." in result.stderr


def test_mistakes_in_limits_are_told_with_their_place(tmp_path: Path) -> None:
    limits = tmp_path / "limits.yaml"
    limits.write_text("pin:\n  - {table: nobody, ranks: [0]}\n  - {table: table_0, ranks: [99]}\n")
    result = call("--instance", ONE_HOT, "--limits", limits, code=2)
    assert f"{limits}:2:6: pin.0.table: no table is called 'nobody'" in result.stderr
    assert f"{limits}:3:22: pin.1.ranks: there are 8 ranks" in result.stderr


# --- making instances -----------------------------------------------------------------------------------


def test_an_instance_is_made_and_can_be_solved(tmp_path: Path) -> None:
    file = tmp_path / "inst.json.gz"
    said = planned("--make-instance", "--tables", "criteo_terabyte", "--gpus", 8, "-o", file)
    assert (said["tables"], said["ranks"], said["estimator"]) == (26, 8, "ours")
    answer = planned("--instance", file, *QUICK)
    assert answer["objective_ms"] > 0
    assert len(answer["tables"]) == 26


def test_tables_of_ones_own(tmp_path: Path) -> None:
    tables = tmp_path / "tables.csv"
    tables.write_text("rows,dim,pooling\n1,64,2\n100000,30,1\n5000,64,0\n")
    result = call("--make-instance", "--tables", tables, "--gpus", 16, "-o", tmp_path / "inst.json")
    assert "3 tables on 16 ranks" in result.stdout
    assert "columns not divisible by 4" in result.stderr
    assert "no lookups at all in table_2" in result.stderr
    answer = planned("--instance", tmp_path / "inst.json", *QUICK)
    assert {t["table"]: len(t["ranks"]) for t in answer["tables"]}["table_0"] in (1, 2, 4, 8, 16)


def test_an_empty_table_set(tmp_path: Path) -> None:
    tables = tmp_path / "tables.csv"
    tables.write_text("rows,dim\n")
    result = call("--make-instance", "--tables", tables, "--gpus", 8, "-o", tmp_path / "x", code=2)
    assert "tables are needed, but got 0" in result.stderr


# --- misuse ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "takes one of DESIGN, --instance FILE and --make-instance, but got none of them"),
        ((DESIGN, "--instance", ONE_HOT), "but got DESIGN and --instance"),
        (("--instance", ONE_HOT, "--set", "a=b"), "--set belongs to DESIGN, but got --instance"),
        (("--instance", ONE_HOT, "--export", "torchrec", "--compare", "torchrec"), "--export and --compare belong to"),
        (("--instance", ONE_HOT, "--gpus", 8), "--gpus belongs to --make-instance, but got --instance"),
        (("--instance", ONE_HOT, "--profile", "h100-sxm"), "--profile belongs to DESIGN"),
        (("--instance", ONE_HOT, "--objective", "speed"), "must be one of rating, critical_path, but got 'speed'"),
        (("--instance", ONE_HOT, "--time-limit", "0"), "`0 < --time-limit < 1e6` must hold"),
        (("--instance", ONE_HOT, "--time-limit", "nan"), "`0 < --time-limit < 1e6` must hold"),
        (("--instance", ONE_HOT, "--seed", "-1"), "`0 <= --seed < 2**32` must hold"),
        (("--instance", "nowhere.json"), "nowhere.json"),
        (("--instance", DESIGN), "is no instance"),
        ((DESIGN, "--objective", "rating"), "--objective belongs to --instance, but got DESIGN"),
        ((DESIGN, "--export", "hugectr"), "`--export` must be torchrec, but got 'hugectr'"),
        ((DESIGN, "--export", "torchrec", "--compare", "torchrec"), "--export and --compare exclude one another"),
        ((DESIGN, "--compare", "torchrec", "-o", "x"), "--compare prints what it finds"),
        ((DESIGN, "--export", "torchrec", "--json"), "--export writes a program"),
        (("--make-instance", "--tables", "criteo_terabyte"), "`--make-instance` needs --tables, --gpus and -o FILE"),
        (("--make-instance", "--tables", "none", "--gpus", 8, "-o", "x"), "no bundled table set is called `none`"),
        (("--make-instance", "--tables", "criteo_terabyte", "--gpus", 12, "-o", "x"), "multiple of the node's 8 GPUs"),
        (("--make-instance", "--tables", "criteo_terabyte", "--gpus", 0, "-o", "x"), "`world_size` must be"),
        (("--make-instance", "--tables", "criteo_terabyte", "--gpus", 8, "-o", "x", "--limits", "y"), "--limits belongs"),
        (("--make-instance", "--tables", "criteo_terabyte", "--gpus", 8, "-o", "x", "--estimator", "z"), "must be one of ours, torchrec"),
        (("--make-instance", "--tables", "criteo_terabyte", "--gpus", 8, "-o", "x", "--system", "abacus"), "not in the catalogue"),
        (("--make-instance", "--tables", "criteo_terabyte", "--gpus", 8, "-o", "x", "--batch-per-gpu", "-3"), "at least 1"),
        (("--make-instance", "--tables", "criteo_terabyte", "--gpus", 8, "-o", "/nowhere/x"), "cannot be"),
        (("--make-instance", "--tables", "criteo_terabyte", "--gpus", 8, "-o", "x", "--cache-ratio", "2"), "shares between 0 and 1"),
        (("--make-instance", "--tables", "criteo_terabyte", "--gpus", 8, "-o", "x", "--cache-ratio", "a"), "shares between 0 and 1"),
    ],
)  # fmt: skip
def test_contradictions_are_a_sentence(arguments: tuple[object, ...], said: str) -> None:
    result = call(*arguments, code=2)
    assert said in result.stderr
    assert "Traceback" not in result.output


# --- designs --------------------------------------------------------------------------------------------


def test_a_design_is_planned_by_its_iteration_time(tmp_path: Path) -> None:
    answer = planned(DESIGN, *QUICK, "-o", tmp_path / "plan")
    assert set(answer) >= KEYS | {"iteration_time_ms"}
    assert 0 < answer["lower_bound_ms"] <= answer["iteration_time_ms"]
    assert len(answer["ranks"]) == 8
    assert len(answer["tables"]) == 26
    assert len({e["name"] for e in answer["events"]}) == len(answer["events"])
    assert any(t["alternatives"] for t in answer["tables"])
    kernels = {t["kernel"] for t in answer["tables"] if t["type"] != "data_parallel"}
    assert kernels == {"fused"}
    assert all(r["hbm_gib"] <= r["capacity_gib"] for r in answer["ranks"])
    assert "everything beside the tables" in (tmp_path / "plan" / "report.html").read_text()


def test_a_design_under_limits(tmp_path: Path) -> None:
    limits = tmp_path / "limits.yaml"
    limits.write_text(
        "pin: [{table: table_19, ranks: [0, 1]}]\nkinds: [{forbid: [data_parallel]}]\nhbm_gib: 40\n"
    )
    answer = planned(DESIGN, *QUICK, "--limits", limits)
    tables = {t["table"]: t for t in answer["tables"]}
    assert set(tables["table_19"]["ranks"]) <= {0, 1}
    assert "data_parallel" not in {t["type"] for t in tables.values()}
    assert {r["capacity_gib"] for r in answer["ranks"]} == {40}


def test_tables_that_stay_together_and_slower_ranks(tmp_path: Path) -> None:
    limits = tmp_path / "limits.yaml"
    limits.write_text("together: [[table_00, table_09]]\n")
    answer = planned(DESIGN, *QUICK, "--limits", limits)
    tables = {t["table"]: t for t in answer["tables"]}
    assert tables["table_00"]["ranks"] == tables["table_09"]["ranks"]
    assert tables["table_00"]["together_with"] == ["table_09"]
    assert 0 < answer["lower_bound_ms"] <= answer["iteration_time_ms"]
    limits.write_text("ranks: [{ranks: 4-7, slowness: 3}]\n")
    slower = planned(DESIGN, *QUICK, "--limits", limits)
    assert slower["facts"]["ranks that differ"] == "4-7 (3 times as long)"
    assert answer["iteration_time_ms"] < slower["lower_bound_ms"] <= slower["iteration_time_ms"]
    exported = call(DESIGN, *QUICK, "--limits", limits, "--export", "torchrec")
    assert "def sharding_plan" in exported.stdout


def test_dense_gradients_and_kernels_that_limits_forbid(tmp_path: Path) -> None:
    limits = tmp_path / "limits.yaml"
    limits.write_text("kinds: [{tables: [table_05], forbid_kernels: [fused], forbid: [data_parallel]}]\n")
    result = call(DESIGN, *QUICK, "--limits", limits, code=2)
    assert "the limits leave table 'table_05' no kind of sharding" in result.stderr
    answer = planned(DESIGN, *QUICK, "--dense", "--limits", limits)
    kernels = {t["table"]: t["kernel"] for t in answer["tables"] if t["type"] != "data_parallel"}
    assert kernels["table_05"] == "dense"
    assert set(kernels.values()) == {"fused", "dense"}


def test_columns_on_one_machine(tmp_path: Path) -> None:
    limits = tmp_path / "limits.yaml"
    limits.write_text("kinds: [{tables: [table_19], allow: [table_column_wise]}]\n")
    sixteen = ("--set", "system.world_size=16")
    tables = {t["table"]: t for t in planned(DESIGN, *sixteen, *QUICK, "--limits", limits)["tables"]}
    assert tables["table_19"]["type"] == "table_column_wise"
    assert len({rank // 8 for rank in tables["table_19"]["ranks"]}) == 1


def test_a_design_that_fits_nowhere() -> None:
    few = ("--set", "system.world_size=2", "--set", "training.table_optimizer=adagrad")
    result = call(DESIGN, *few, *QUICK, code=3)
    assert "All tables together need 195.3 GiB at least, but the 2 ranks have" in result.stderr
    for remedy in ("  1. 4 GPUs instead of 2", "bf16 tables: saves 48.9 GiB", "rowwise_adagrad for the tables: saves 96.6 GiB"):  # fmt: skip
        assert remedy in result.stderr


def test_one_rank_has_nothing_to_choose() -> None:
    small = ("--set", "model.tables=criteo_dlrm_mlperf", "--set", "system.world_size=1")
    answer = planned(DESIGN, *small, *QUICK)
    assert answer["proven"] is True
    assert answer["certified_gap_pct"] == 0
    assert sum(t["hbm_gib"] for t in answer["tables"]) == pytest.approx(29.1, abs=0.1)


def test_a_plan_goes_out_and_comes_back(tmp_path: Path) -> None:
    call(DESIGN, *QUICK, "--export", "torchrec", "-o", tmp_path / "plan.py")
    text = subprocess.run(
        [sys.executable, tmp_path / "plan.py"], check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    (tmp_path / "plan.json").write_text(text)
    answer = planned(DESIGN, *QUICK, "--import", tmp_path / "plan.json")
    assert "ms an iteration" in answer["facts"]["imported plan plan.json"]
    (tmp_path / "plan.json").write_text("{}")
    assert "needs the key `tables`" in call(DESIGN, *QUICK, "--import", tmp_path / "plan.json", code=2).stderr


def test_torchrec_is_needed_for_its_planner(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torchrec", None)
    result = call(DESIGN, *QUICK, "--compare", "torchrec", code=2)
    assert "TorchRec" in result.stderr
    assert "pip install" in result.stderr
    limits = tmp_path / "limits.yaml"
    limits.write_text("hbm_gib: 40\n")
    refused = call(DESIGN, "--compare", "torchrec", "--limits", limits, code=2)
    assert "--limits and --compare exclude one another" in refused.stderr


# --- odd instances --------------------------------------------------------------------------------------


def whole(ms: float, gib: float = 1.0) -> dict[str, Any]:
    return {"type": "table_wise", "part": "device", "sh": [[ms, 0, ms, 0, gib]]}


def by_rows(ms: float, gib: float, ranks: int) -> dict[str, Any]:
    return {"type": "row_wise", "part": "uniform", "sh": [[ms, 0, ms, 0, gib]], "n": [ranks]}


@pytest.mark.parametrize(
    ("ranks", "tables", "objective"),
    [
        (4, [[whole(0)], [whole(0), by_rows(0, 0.25, 4)]], 0.0),  # nothing is ever looked up
        (1, [[whole(1)], [whole(2)]], 6.0),
        (16, [[whole(1), by_rows(0.1, 0.1, 16)]], 0.2),  # more ranks than tables
        (2, [[whole(1, 0)]], 2.0),  # takes no memory
    ],
)
def test_odd_instances_are_solved(ranks: int, tables: list[Any], objective: float, tmp_path: Path) -> None:
    file = tmp_path / "odd.json"
    file.write_text(json.dumps({"ws": ranks, "lws": min(ranks, 8), "cap": 4, "tables": tables}))
    answer = planned("--instance", file, "--time-limit", "1", "-o", tmp_path / "plan")
    assert answer["objective_ms"] == pytest.approx(objective)
    assert answer["proven"] is True
    assert len(answer["ranks"]) == ranks


@pytest.mark.parametrize(
    ("cap", "tables", "said"),
    [
        (0, [[whole(1)]], "its ranks have none for tables: 1.0 GiB are missing"),
        (-3, [[whole(1)]], "its ranks have none for tables: 4.0 GiB are missing"),
        (1, [[whole(1, 0.6)]] * 3, "1. 1.2 GiB for tables on each rank instead of 1.0 GiB."),
    ],
)
def test_odd_instances_are_refused(cap: float, tables: list[Any], said: str, tmp_path: Path) -> None:
    file = tmp_path / "odd.json"
    file.write_text(json.dumps({"ws": 2, "lws": 2, "cap": cap, "tables": tables}))
    assert said in call("--instance", file, "--time-limit", "1", code=3).stderr


# --- limits that contradict, or that another way ignores ---------------------------------------------------

ALONE = (
    DESIGN,
    "--set",
    "model.tables=criteo_dlrm_mlperf",
    "--set",
    "system.world_size=1",
    "--time-limit",
    "1",
)


@pytest.mark.parametrize(
    ("limits", "code", "said"),
    [
        ("hbm_gib: 20\n", 3, "The limits without their section `hbm_gib`."),
        ("kinds: [{forbid: [table_wise]}]\n", 2, "no kind of sharding"),
        ("pin: [{table: table_00, ranks: [1]}]\n", 2, "there is rank 0 alone, but got 1"),
        ("hbm_gib: 40\n", 0, ""),
    ],
)
def test_limits_hold_on_one_rank_too(limits: str, code: int, said: str, tmp_path: Path) -> None:
    (tmp_path / "limits.yaml").write_text(limits)
    assert said in call(*ALONE, "--limits", tmp_path / "limits.yaml", code=code).output


@pytest.mark.parametrize("what", [(DESIGN,), ("--instance", MULTI_HOT)])
def test_pins_that_exclude_one_another(what: tuple[object, ...], tmp_path: Path) -> None:
    table = "table_00" if what[0] == DESIGN else "table_0"
    limits = tmp_path / "limits.yaml"
    limits.write_text(f"pin: [{{table: {table}, ranks: [0]}}, {{table: {table}, ranks: [1]}}]\n")
    result = call(*what, "--limits", limits, *QUICK, code=2)
    assert f"the limits leave table '{table}' no" in result.stderr
    assert "limits.yaml:1:" in result.stderr


def test_an_imported_plan_runs_on_the_slower_ranks(tmp_path: Path) -> None:
    limits = tmp_path / "limits.yaml"
    limits.write_text("ranks: [{ranks: 4-7, slowness: 3}]\n")
    call(DESIGN, *QUICK, "--export", "torchrec", "-o", tmp_path / "plan.py")
    text = subprocess.run(
        [sys.executable, tmp_path / "plan.py"], check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    (tmp_path / "plan.json").write_text(text)
    answer = planned(DESIGN, *QUICK, "--limits", limits, "--import", tmp_path / "plan.json")
    slower = re.search(r"([+-][\d.]+) % beside this plan", answer["facts"]["imported plan plan.json"])
    assert slower is not None  # it was made for ranks that are alike
    assert float(slower[1]) > 10


def test_too_little_host_memory(tmp_path: Path) -> None:
    hosted = whole(1) | {"kernel": "fused_uvm", "sh": [[1, 0, 1, 0, 0.1, 3]]}
    file, limits = tmp_path / "odd.json", tmp_path / "limits.yaml"
    file.write_text(json.dumps({"ws": 2, "lws": 2, "cap": 1, "tables": [[hosted], [hosted]]}))
    limits.write_text("host_gib: 5\nhbm_gib: 0.9\n")
    result = call("--instance", file, "--limits", limits, "--time-limit", "1", code=3)
    assert "machine 0 needs 6.0 GiB of its 5.0 GiB of host memory" in result.stderr
    assert "1. The limits without their section `host_gib`." in result.stderr
    assert "hbm_gib" not in result.stderr
