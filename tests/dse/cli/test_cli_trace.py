"""`dse trace` as a person calls it: tables, JSON, what-if, timelines, profiles, and files that cannot be read."""

import gzip
import json
import math
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dse.cli import app
from perfcore.overheads import OpOverheads
from perfcore.profile.profile import load_profile

DATA = Path(__file__).parents[2] / "data"
RANKS = [str(p) for p in sorted((DATA / "dlrm_8xv100").glob("*.pt.trace.json.gz"))]
NODES = [str(p) for p in sorted((DATA / "dlrm_8xv100" / "execution_traces").glob("*.json.gz"))]
RANK7 = RANKS[7]
STEPS = str(DATA / "small_traces" / "toy_GP100_gpu_user_annotation.kineto.json.gz")


def call(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["trace", *arguments])


def answer(*arguments: str) -> Any:
    result = call(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_all_ranks_of_a_job_are_accounted_for_and_replayed_together() -> None:
    found = answer(*RANKS)
    assert [r["rank"] for r in found["ranks"]] == list(range(8))
    for rank in found["ranks"]:
        assert rank["measured_ms"] == pytest.approx(rank["account"]["sum_ms"], rel=0.005)
        assert abs(rank["replay"]["exact_error_pct"]) <= 0.5
        assert math.isfinite(rank["replay"]["mean_error_pct"])
        assert rank["account"]["waiting_for_other_ranks_ms"] <= rank["account"]["communication_ms"] + 0.01
    assert found["joint"]["leave_one_out"]["mean_abs_pct"] <= 2.5
    assert found["joint"]["leave_one_out"]["max_abs_pct"] <= 4.0
    assert found["ranks"][1]["unlaunched_kernels"] == 64


def test_many_steps_of_one_rank_are_left_out_one_by_one() -> None:
    rank = answer(STEPS)["ranks"][0]
    assert rank["steps"] == 5
    assert len(rank["leave_one_out"]["errors_pct"]) == 5
    assert 0 < rank["leave_one_out"]["mean_abs_pct"] <= rank["leave_one_out"]["max_abs_pct"]


def test_shared_overheads_come_with_counts_and_spread() -> None:
    linear = answer(RANK7)["overheads"]["by_op"]["aten::linear"]
    assert set(linear) == {"t1", "t2", "t3", "t4", "t5"} or set(linear) == {"t1", "t2", "t3", "t4"}
    assert linear["t2"]["count"] > 3
    assert linear["t2"]["std"] > 0


def test_the_critical_path_gives_a_reason_for_each_part_and_spans_the_step() -> None:
    rank = answer(RANK7)["ranks"][0]
    parts = rank["critical_path"]["parts"]
    assert {p["reason"] for p in parts} <= {
        "operator", "launch delay", "kernel-kernel", "wait", "collective", "blocking",
    }  # fmt: skip
    assert sum(p["us"] for p in parts) / 1e3 == pytest.approx(rank["measured_ms"], rel=0.02)


def test_what_if_answers_in_order_and_together() -> None:
    effects = answer(RANK7, "--what-if", "T1 / 2", "--what-if", "host * 1")["what_if"]
    halved, same, together = effects
    assert halved["change"] == "T1 / 2"
    t1_ms = answer(RANK7)["ranks"][0]["account"]["t1_ms"]
    assert halved["before_ms"] - halved["iteration_time_ms"] == pytest.approx(t1_ms / 2, rel=0.1)
    assert same["saved_pct"] == pytest.approx(0.0, abs=1e-9)
    assert together["iteration_time_ms"] == pytest.approx(halved["iteration_time_ms"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("T9 / 2", "A change is a target"),
        ("T1 / 0", "A factor must be positive"),
        ("kernel:*no such* / 2", "matches none of"),
        ("op:nothing / 2", "matches none of"),
        ("fuse:nothing", "finds no two consecutive ops"),
    ],
)
def test_changes_that_say_nothing_are_refused(change: str, message: str) -> None:
    result = call(STEPS, "--what-if", change)
    assert result.exit_code == 2
    assert message in result.output


def test_another_device_and_its_refusal() -> None:
    found = answer(RANK7, "--device", "h100-sxm")["device"]
    assert (found["source"], found["target"]) == ("v100-sxm2-32gb", "h100-sxm")
    assert 0 < found["iteration_time_ms"] <= found["before_ms"]
    assert found["predicted_share"] + found["bandwidth_share"] == pytest.approx(1.0)
    result = call(RANK7, "--device", "h1000")
    assert result.exit_code == 2


def test_execution_traces_are_matched_to_the_trace_of_their_process() -> None:
    links = answer(RANKS[2], RANKS[3], NODES[3], NODES[2])["links"]
    assert [(x["execution_trace"], x["trace"]) for x in links] == [
        ("rank3.et.json.gz", "rank3.pt.trace.json.gz"),
        ("rank2.et.json.gz", "rank2.pt.trace.json.gz"),
    ]
    assert all(x["linked_pct"] >= 99.5 for x in links)


def test_a_timeline_that_viewers_open(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    assert call(*RANKS[:2], "--timeline", str(path)).exit_code == 0
    events = json.loads(path.read_text())["traceEvents"]
    named = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert set(named.values()) == {f"rank {r} {what}" for r in (0, 1) for what in ("measured", "predicted")}
    complete = [e for e in events if e["ph"] == "X"]
    assert {e["pid"] for e in complete} == set(named)
    for event in complete:
        assert {"name", "cat", "pid", "tid", "ts", "dur"} <= event.keys()
        assert event["dur"] > 0
        assert math.isfinite(event["ts"])
    assert {(e["pid"], e["tid"]) for e in complete} <= {
        (e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"
    }


def test_a_timeline_that_cannot_be_written(tmp_path: Path) -> None:
    result = call(STEPS, "--timeline", str(tmp_path / "absent" / "out.json"))
    assert result.exit_code == 2
    assert "cannot be written" in result.output


def test_a_profile_that_predictions_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSE_PROFILE_DIR", str(tmp_path))
    assert call(*RANKS, "--write-profile", "my-v100").exit_code == 0
    profile = load_profile("my-v100")
    assert profile.device.name == "v100-sxm2-32gb"
    own = profile.overheads.of("aten::linear")
    bundled = load_profile("v100-sxm2-32gb").overheads.of("aten::linear")
    assert isinstance(own, OpOverheads)
    assert own != bundled
    assert own.count > 8
    design = Path(__file__).parents[3] / "spaces" / "designs" / "dlrm_ddp.yaml"
    result = CliRunner().invoke(app, ["predict", str(design), "--profile", "my-v100", "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["profile"] == "my-v100"


@pytest.mark.parametrize("name", ["a/b", "", ".hidden", "v100-sxm2-32gb"])
def test_names_that_no_profile_may_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("DSE_PROFILE_DIR", str(tmp_path))
    result = call(RANK7, "--write-profile", name)
    assert result.exit_code == 2
    assert not list(tmp_path.iterdir())


def test_the_tables_name_what_matters() -> None:
    text = call(*RANKS, "--what-if", "host / 2", "--device", "a100-sxm4-80gb").stdout
    for words in ("T1", "together", "Critical path", "no launch record", "What if", "On a100-sxm4-80gb"):
        assert words in text


def test_the_page_holds_the_tables_and_loads_nothing(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    assert call(STEPS, "--html", str(path), "--what-if", "T1 / 2").exit_code == 0
    page = path.read_text()
    for words in ("Critical path", "What if", "T1 / 2", "unexplained"):
        assert words in page
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert "<script" not in page


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    whole = gzip.decompress(Path(RANK7).read_bytes())
    (tmp_path / "cut.json").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "alien.json").write_text('{"hello": "world"}')
    for name, message in (
        ("cut.json", "truncated"),
        ("alien.json", "traceEvents"),
        ("absent.json", "cannot be read"),
    ):
        result = call(str(tmp_path / name))
        assert result.exit_code == 2
        assert message in result.output
    result = call(RANK7, str(tmp_path / "cut.json"), "--json")
    assert result.exit_code == 0
    assert len(json.loads(result.stdout)["unread"]) == 1
    assert call(NODES[0]).exit_code == 2


def test_sampled_files_are_unexplained_and_not_a_crash(tmp_path: Path) -> None:
    data = json.loads(gzip.decompress(Path(RANKS[1]).read_bytes()))
    kernels = [e for e in data["traceEvents"] if e.get("cat") == "kernel"]
    lost = {id(e) for i, e in enumerate(kernels) if "nccl" in e["name"] or i % 3}
    data["traceEvents"] = [e for e in data["traceEvents"] if id(e) not in lost]
    path = tmp_path / "sampled.json"
    path.write_text(json.dumps(data))
    rank = answer(str(path))["ranks"][0]
    assert rank["unexplained_ms"] > 5.0  # the collectives that the host waited for are gone
    assert rank["account"]["closes_within_pct"] <= 0.5
