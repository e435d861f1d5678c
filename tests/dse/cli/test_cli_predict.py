"""`dse predict` and `dse explain` as a person and as a machine use them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dse.cli import app

DESIGN = "spaces/designs/dlrm_mlperf.yaml"
KEYS = {
    "iteration_time_ms",
    "samples_per_second",
    "device_active_ms",
    "device_idle_ms",
    "host_ms",
    "exposed_communication_ms",
    "bound_by",
    "hbm_gib",
    "calibrated",
    "low",
    "high",
}


def predicted(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["predict", DESIGN, "--json", *arguments])
    assert result.exit_code == 0, result.output
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


def test_a_machine_reads_every_promised_key() -> None:
    answer = predicted()
    assert set(answer) >= KEYS
    assert set(answer["host_ms"]) >= {"t1", "t2", "t3", "t4", "t5"}
    assert answer["low"] < answer["iteration_time_ms"] < answer["high"]
    assert answer["fits"] is False
    assert answer["shortfall_gib"] > 10
    assert answer["device"] == "v100-sxm2-16gb"


def test_keys_are_set_and_a_device_brings_its_node() -> None:
    larger = predicted("--set", "training.global_batch=4096", "--set", "system.device=h100-sxm")
    assert larger["global_batch"] == 4096
    assert larger["device"] == "h100-sxm"
    assert larger["fits"] is True


def test_a_person_reads_tables() -> None:
    result = CliRunner().invoke(app, ["predict", DESIGN])
    assert result.exit_code == 0
    for words in (
        "ms an iteration",
        "bound by",
        "Nine in ten",
        "Does not fit",
        "top_mlp backward",
        "Kernel time rests on",
    ):
        assert words in result.stdout


def test_explain_shows_the_path_and_what_would_help(tmp_path: Path) -> None:
    timeline = tmp_path / "timeline.json"
    result = CliRunner().invoke(app, ["explain", DESIGN, "--timeline", str(timeline)])
    assert result.exit_code == 0, result.output
    for words in ("Critical path", "whole host / 2", "Timeline for Perfetto"):
        assert words in result.stdout
    assert json.loads(timeline.read_text())["traceEvents"]
    machine = CliRunner().invoke(app, ["explain", DESIGN, "--json"])
    answer = json.loads(machine.stdout)
    assert answer["what_if"][0]["saved_pct"] > 0
    assert {piece["resource"] for piece in answer["critical_path"]} >= {"host", "compute"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["predict", "nowhere.yaml"], "nowhere.yaml"),
        (["predict", DESIGN, "--set", "training.global_batsh=1"], "did you mean `global_batch`"),
        (["predict", DESIGN, "--set", "training.global_batch=-1"], "greater than or equal to 1"),
        (["predict", DESIGN, "--profile", "v100-sxm2-16bg"], "Did you mean 'v100-sxm2-16gb'"),
        (
            ["predict", DESIGN, "--set", "fusion.embedding=per_table", "--set", "fusion.launches=cuda_graph"],
            "table_batched",
        ),
        (["explain", DESIGN, "--timeline", "/nowhere/at/all.json"], "/nowhere/at/all.json"),
    ],
)
def test_wrong_requests_end_with_2_and_a_sentence(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert message in result.stderr.replace("\n", " ")
    assert "Traceback" not in result.output


def test_an_interrupt_while_packages_load_ends_quietly(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    import dse.cli
    from dse.__main__ import main

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(dse.cli, "main", interrupted)
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 130
    assert capsys.readouterr().err == "interrupted\n"
