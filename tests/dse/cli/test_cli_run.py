from __future__ import annotations

import csv
import errno
import json
import os
import types

import numpy as np
import pytest
from formula_pricing import SPACE, FormulaEvaluator, formula_pricing
from typer.testing import CliRunner

from dse.cli import app
from dse.search import checkpoint as checkpoints
from dse.study_config import load_space


@pytest.fixture
def space_file(tmp_path):
    path = tmp_path / "toy.yaml"
    path.write_text(SPACE, encoding="utf-8")
    return path


@pytest.fixture
def dse(monkeypatch, tmp_path):
    """Calls `dse run` with the formula's prices, in a folder of its own."""
    import sys

    module = types.ModuleType("dse.search.evaluator")
    module.pricing_of = formula_pricing
    monkeypatch.setitem(sys.modules, "dse.search.evaluator", module)
    monkeypatch.setattr("dse.cli.run._write_report", lambda run_dir: None)
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        return CliRunner().invoke(app, [str(a) for a in arguments])

    return call


def test_a_run_prints_its_result_for_a_machine_and_leaves_its_files(dse, space_file, tmp_path):
    result = dse("run", space_file, "--json")
    assert result.exit_code == 0, result.stderr
    summary = json.loads(result.stdout)
    assert summary["method"] == "exact"
    assert summary["name"] == "toy"
    assert summary["candidates_evaluated"] == summary["space_size"] == 3 * (3 + 9) * 4 * 2
    assert 0 < summary["feasible"] < summary["space_size"]
    assert {"candidates_per_s", "wall_s", "hypervolume"} <= summary.keys()
    assert summary["best"]["fusion.launches"] == "cuda_graph"
    assert summary["best"]["samples_per_second"] > 0
    run = tmp_path / summary["run_dir"]
    rows = list(csv.DictReader((run / "pareto.csv").read_text().splitlines()))
    assert len(rows) == summary["front_size"] == len(summary["front"])
    assert all(float(r["certified_gap_pct"]) == 0 for r in rows)
    assert all(member["certified_gap_pct"] == 0 for member in summary["front"])
    assert (run / rows[0]["design"]).read_text().startswith("# certified_gap_pct: 0\n")
    assert [r["knee"] for r in rows].count("1") == 1
    times = [float(r["iteration_time_ms"]) for r in rows]
    assert times == sorted(times)
    assert times[0] == pytest.approx(summary["best"]["iteration_time_ms"])
    assert all((run / r["design"]).is_file() for r in rows if r["design"])
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["method"] == "exact"
    assert manifest["counts"]["front_size"] == len(rows)
    assert (run / "study.journal").stat().st_size > 0


def test_the_front_is_that_of_a_plain_loop(dse, space_file):
    summary = json.loads(dse("run", space_file, "--json").stdout)
    config = load_space(space_file)
    codes = config.space.enumerate()
    price = FormulaEvaluator(config).evaluate(codes)
    points = {tuple(o) for o, m in zip(price.objectives, price.margins, strict=True) if (m <= 0).all()}
    front = {p for p in points if not any(q[0] <= p[0] and q[1] <= p[1] and q != p for q in points)}
    assert summary["front_size"] == len(front)


def test_a_run_prints_a_table_for_people(dse, space_file):
    result = dse("run", space_file)
    assert result.exit_code == 0
    assert "exact: every design was priced" in result.stdout
    assert "knee" in result.stdout
    assert "Files in runs/toy" in result.stdout


SEARCH = ("--set", "search.method=nsga2", "--json")


def test_a_run_there_is_not_overwritten_unasked(dse, space_file):
    assert dse("run", space_file, *SEARCH).exit_code == 0
    again = dse("run", space_file, *SEARCH)
    assert again.exit_code == 2
    assert "holds a run already" in again.stderr
    assert "--resume" in again.stderr
    assert dse("run", space_file, *SEARCH, "--overwrite").exit_code == 0
    assert dse("run", space_file, *SEARCH, "--resume").exit_code == 0
    assert dse("run", space_file, *SEARCH, "--resume", "--overwrite").exit_code == 2


def test_resuming_something_else_is_refused_with_the_difference(dse, space_file):
    dse("run", space_file, *SEARCH)
    for change, text in (
        (("--seed", "9"), "seed: 3 then, 9 now"),
        (("--profile", "h100-sxm"), "profile: 'formula' then, 'h100-sxm' now"),
        (("--set", "model.embedding_dim=32"), "axis model.embedding_dim"),
        (("--set", "search.method=tpe"), "sampler: 'nsga2' then, 'tpe' now"),
    ):
        result = dse("run", space_file, *SEARCH, *change, "--resume")
        assert result.exit_code == 2
        assert text in result.stderr
    unknown = dse("run", space_file, *SEARCH, "--profile", "other", "--resume")
    assert unknown.exit_code == 2
    assert "Profile 'other' is not known" in unknown.stderr
    assert "There is no run in" in dse("run", space_file, "--resume", "--name", "else").stderr


def test_an_exact_run_is_resumed_too(dse, space_file):
    once = json.loads(dse("run", space_file, "--json").stdout)
    again = json.loads(dse("run", space_file, "--json", "--resume").stdout)
    assert again["front_size"] == once["front_size"]
    assert again["best"] == once["best"]


def test_more_trials_may_be_asked_of_a_finished_run(dse, space_file):
    dse("run", space_file, *SEARCH, "-n", "10")
    more = dse("run", space_file, *SEARCH, "-n", "20", "--resume")
    assert json.loads(more.stdout)["trials"] == 20


def test_an_interrupted_run_says_how_to_go_on_and_ends_as_if_it_had_not_been(dse, space_file, monkeypatch):
    whole = json.loads(dse("run", space_file, *SEARCH, "--name", "whole").stdout)
    saved = []

    def interrupt(checkpoint, path, real=checkpoints.save):
        real(checkpoint, path)
        saved.append(checkpoint)
        if checkpoint.batch == 1:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "save", interrupt)
        result = dse("run", space_file, *SEARCH)
    assert result.exit_code == 130
    assert "--resume" in result.stderr
    assert saved[-1].batch == 1
    resumed = json.loads(dse("run", space_file, *SEARCH, "--resume").stdout)
    same = ("candidates_evaluated", "feasible", "front_size", "hypervolume", "knee")
    assert [resumed[k] for k in same] == [whole[k] for k in same]


def test_without_a_feasible_design_the_nearest_is_named(dse, space_file):
    result = dse("run", space_file, "--set", "constraints.0.max=0.001")
    assert result.exit_code == 3
    assert "None of 288 designs meets the limits" in result.stderr
    assert "`hbm_gib <= 0.001`" in result.stderr
    assert "hint: Relax that limit" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (("-n", "0"), "`trials >= 1` must hold, but got 0"),
        (("--seed", "-1"), "`seed >= 0` must hold"),
        (("--seed", "4294967296"), "`seed < 4294967296` must hold"),
        (("--name", ".."), "A run's name is the name of its folder: letters, digits and `._-`, but got '..'"),
        (("--name", "a/b"), "but got 'a/b'"),
        (("--name", ""), "but got ''"),
        (("--workers", "0"), "`workers >= 1` must hold"),
        (
            (
                "--set",
                "search.method=exact",
                "--set",
                "model.top_hidden.widths={range: {low: 1, high: 999, step: 1}}",
                "--set",
                "model.embedding_dim={range: {low: 4, high: 999, step: 1}}",
            ),
            "prices 1e+09 designs at most, but the space has",
        ),
        (("--set", "model.embeding_dim=3"), "embeding_dim"),
        (("--storage", "sqlite:////nowhere/x.db"), "cannot be opened"),
        (("--set", "search.method=cmaes"), "The cmaes sampler serves one objective, but the space has"),
    ],
)
def test_wrong_requests_end_with_2_and_a_sentence(dse, space_file, arguments, match):
    result = dse("run", space_file, *arguments)
    assert result.exit_code == 2
    assert match in result.stderr
    assert "Traceback" not in result.stderr


def test_a_file_that_is_not_there(dse):
    result = dse("run", "absent.yaml")
    assert result.exit_code == 2
    assert "absent.yaml:1:1: cannot be read: No such file" in result.stderr


def test_a_place_that_cannot_be_written(dse, space_file, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("pathlib.Path.mkdir", refuse)
    result = dse("run", space_file)
    assert result.exit_code == 2
    assert "cannot be written: Read-only file system" in result.stderr


@pytest.mark.parametrize(
    ("error", "match"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "error: The output cannot be used: No space left"),
        (
            PermissionError(errno.EACCES, "Permission denied", "x.bin"),
            "error: x.bin cannot be used: Permission",
        ),
    ],
)
def test_a_machine_that_refuses_is_no_bug(dse, space_file, monkeypatch, error, match):
    def refuse(*_, **__):
        raise error

    monkeypatch.setattr("dse.search.run.run_space", refuse)
    result = dse("run", space_file)
    assert result.exit_code == 2
    assert match in result.stderr
    assert "bug" not in result.stderr


def test_a_bug_ends_with_1_and_a_log(dse, space_file, monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(FormulaEvaluator, "evaluate", lambda self, codes: 1 / 0)
    result = dse("run", space_file)
    assert result.exit_code == 1
    assert "This is a bug in dse: ZeroDivisionError" in result.stderr
    (log,) = tmp_path.glob("dse-*.log")
    assert "ZeroDivisionError" in log.read_text()


def test_sqlite_by_url(dse, space_file, tmp_path):
    url = f"sqlite:///{tmp_path / 's.db'}"
    assert dse("run", space_file, *SEARCH, "-n", "10", "--storage", url).exit_code == 0
    assert (
        "holds a study 'toy' already"
        in dse("run", space_file, *SEARCH, "-n", "10", "--storage", url, "--runs-dir", "elsewhere").stderr
    )


def test_init_writes_a_file_that_loads(dse, tmp_path):
    (tmp_path / "mine.csv").write_text("name,num_embeddings\nuser,1000\nitem,50\n")
    result = dse("init", "--tables", "mine.csv", "--system", "v100-sxm2-16gb", "-o", "sub.yaml")
    assert result.exit_code == 0, result.stderr
    assert load_space(tmp_path / "sub.yaml").space.device.name == "v100-sxm2-16gb"
    result = dse("init", "--tables", "mine.csv", "-o", "my space.yaml")
    assert result.exit_code == 0, result.stderr
    config = load_space(tmp_path / "my space.yaml")
    assert [t.name for t in config.space.tables] == ["user", "item"]
    assert config.name == "my_space"
    assert dse("init", "-o", "my space.yaml").exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (("--tables", "absent.csv"), "absent.csv"),
        (("--system", "dgx-a10"), "is not in the catalogue"),
        (("-o", "no/such/folder/x.yaml"), "cannot be written: No such file"),
    ],
)
def test_init_refuses_what_no_run_could_use(dse, arguments, match, tmp_path):
    result = dse("init", *arguments)
    assert result.exit_code == 2
    assert match in result.stderr
    assert "--runs-dir" not in result.stderr
    assert not list(tmp_path.glob("*.yaml"))


def test_profiles_are_listed_and_shown(dse):
    listed = json.loads(dse("profiles", "--json").stdout)
    assert "v100-sxm2-16gb" in [entry["name"] for entry in listed]
    shown = dse("profiles", "v100-sxm2-16gb")
    assert shown.exit_code == 0
    assert "Errors on data that the models have not seen" in shown.stdout
    assert dse("profiles", "nosuch").exit_code == 2


def test_help_lists_the_commands_and_loads_nothing_heavy(dse):
    import subprocess
    import sys

    assert "run" in dse("--help").stdout
    code = "import sys, dse.cli; print([m for m in ('optuna','ray','torch','pandas','catboost','numba','numpy') if m in sys.modules])"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    assert found.stdout.strip() == "[]"


def test_objectives_reach_people_with_their_own_sign(dse, space_file):
    summary = json.loads(dse("run", space_file, "--json").stdout)
    assert summary["hypervolume_reference"][1] > 0
    assert np.isfinite(summary["hypervolume"])
