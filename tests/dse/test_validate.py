from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer import Typer
from typer.testing import CliRunner

from dse.cli import _guard
from dse.cli.validate import command
from dse.config import dump_design
from dse.errors import DseError
from dse.validate import (
    Pricing,
    ValidationReport,
    chosen_designs,
    gmae_pct,
    kendall_tau,
    mape_pct,
    pricing_of,
    validate_run,
)
from perfcore.design import hardware
from perfcore.design.design import Design
from perfcore.design.hardware import System
from perfcore.design.model import EmbeddingTable, Interaction, Model
from perfcore.design.sharding import ShardingPlan
from perfcore.design.training import Fusion, Training
from perfcore.errors import UnsupportedError
from perfcore.measure.isolate import Settings

QUICK = Settings(min_iterations=3, max_seconds=0.1, time_limit_s=300, threads=1, max_batch=32, max_ranks=1)


def design(batch: int, *, world_size: int = 1, **changes: object) -> Design:
    tables = tuple(EmbeddingTable(name, rows) for name, rows in (("a", 50), ("b", 9)))
    model = replace(Model(4, tables, 8, (16,), (8,), cross_rank=2), **changes)
    system = System(hardware.device("a100-sxm4-80gb"), hardware.node("dgx-a100-80gb"), world_size)
    return Design(model, Training(batch), Fusion(), ShardingPlan.on_one_rank(model), system)


def write_run(folder: Path, designs: list[Design], *, knee: int | None = None) -> Path:
    (folder / "designs").mkdir(parents=True)
    rows = ["row,knee,design"]
    for row, one in enumerate(designs, 1):
        (folder / "designs" / f"{row:03d}.yaml").write_text(dump_design(one))
        rows.append(f"{row},{int(row == knee)},designs/{row:03d}.yaml")
    (folder / "pareto.csv").write_text("\n".join(rows) + "\n")
    return folder


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    wide = design(2**31 - 1, num_dense_features=1_000_000)
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    return write_run(folder, [design(16), design(64, world_size=8), wide])


@pytest.fixture(scope="module")
def report(run_dir: Path) -> ValidationReport:
    said: list[str] = []
    uncapped = replace(QUICK, max_batch=None)
    found = validate_run(
        run_dir,
        top=3,
        settings=uncapped,
        tolerance_pct=1e9,
        progress=said.append,
        pricing=Pricing(lambda d: 1000.0 * d.training.global_batch, "a rule of the test", {"gemm": 1.0}),
    )
    assert [s for s in said if "001" in s]
    return found


def test_one_failure_leaves_the_rest(report: ValidationReport) -> None:
    assert [(d.name, d.status) for d in report.designs] == [
        ("001", "ok"),
        ("002", "ok"),
        ("003", "out_of_memory"),
    ]
    assert report.designs[2].predicted_ms is None
    assert report.designs[2].detail


def test_what_was_measured_is_what_was_predicted(report: ValidationReport) -> None:
    first, second, _ = report.designs
    assert (first.predicted_ms, second.predicted_ms) == (16.0, 8.0)
    assert "one device with one rank's batch instead of 8, no collectives" in second.notes
    assert not any("one rank's batch" in note for note in first.notes)
    assert first.measured_ms is not None
    assert first.error_pct == pytest.approx(100 * (16.0 / first.measured_ms - 1))


def test_metrics_are_over_the_measured(report: ValidationReport) -> None:
    pairs = [(d.predicted_ms or 0, d.measured_ms or 0) for d in report.designs[:2]]
    predicted, measured = zip(*pairs, strict=True)
    assert report.mape_pct == pytest.approx(mape_pct(predicted, measured))
    assert report.gmae_pct == pytest.approx(gmae_pct(predicted, measured))


def test_the_report_is_written(report: ValidationReport, run_dir: Path) -> None:
    written = json.loads((run_dir / "validation.json").read_text())
    assert written == json.loads(json.dumps(report.to_dict()))
    assert {"designs", "mape_pct", "gmae_pct", "kendall_tau", "within_tolerance"} <= set(written)
    assert {"predicted_ms", "measured_ms", "spread_pct", "status"} <= set(written["designs"][0])
    assert written["held_out_errors_pct"] == {"gemm": 1.0}


def test_gmae_by_hand() -> None:
    errors = [0.1 + 4e-4, 0.4 + 4e-4]
    assert gmae_pct([1.1, 0.6], [1, 1]) == pytest.approx(100 * math.sqrt(errors[0] * errors[1]))
    assert mape_pct([1.1, 0.6], [1, 1]) == pytest.approx(25)
    assert gmae_pct([3.0], [3.0]) == pytest.approx(0.04)


@given(st.lists(st.tuples(st.floats(0.01, 100), st.floats(0.01, 100)), min_size=1, max_size=20))
@settings(max_examples=50, deadline=None)
def test_gmae_is_the_smaller_but_for_its_floor(pairs: list[tuple[float, float]]) -> None:
    predicted, measured = zip(*pairs, strict=True)
    assert gmae_pct(predicted, measured) <= mape_pct(predicted, measured) + 100 * 4e-4 + 1e-9


def test_kendall_of_orders() -> None:
    assert kendall_tau([1, 2, 3], [10, 20, 30]) == pytest.approx(1)
    assert kendall_tau([1, 2, 3], [30, 20, 10]) == pytest.approx(-1)
    assert kendall_tau([1], [2]) is None
    assert kendall_tau([], []) is None
    assert kendall_tau([1, 1], [1, 2]) is None


def test_the_best_the_knee_and_random_ones_are_chosen(tmp_path: Path) -> None:
    run = write_run(tmp_path / "r", [design(8 * i) for i in range(1, 13)], knee=9)
    assert [d.name for d in chosen_designs(run, top=3, seed=0)] == ["001", "002", "009"]
    four = [{d.name for d in chosen_designs(run, top=4, seed=s)} for s in range(20)]
    assert all({"001", "002", "009"} < names for names in four)
    assert len(set(map(frozenset, four))) > 1
    assert len(chosen_designs(run, top=99, seed=0)) == 12


@pytest.mark.parametrize("make", [True, False])
def test_a_run_without_designs_is_refused(tmp_path: Path, make: bool) -> None:
    if make:
        (tmp_path / "r" / "designs").mkdir(parents=True)
    with pytest.raises(DseError, match=r"holds no `designs/\*\.yaml`"):
        chosen_designs(tmp_path / "r", top=1, seed=0)


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", None])
def test_a_corrupt_table_of_a_run_is_refused(tmp_path: Path, content: bytes | None) -> None:
    run = write_run(tmp_path / "r", [design(8)])
    (run / "pareto.csv").unlink()
    if content is None:
        (run / "pareto.csv").mkdir()
    else:
        (run / "pareto.csv").write_bytes(content)
    with pytest.raises(DseError, match=r"pareto\.csv cannot be read"):
        chosen_designs(run, top=1, seed=0)


@pytest.mark.parametrize(("top", "tolerance_pct"), [(0, 10.0), (1, 0.0), (1, math.nan)])
def test_impossible_requests_are_refused(tmp_path: Path, top: int, tolerance_pct: float) -> None:
    with pytest.raises(DseError, match="`top >= 1` and `tolerance_pct > 0`"):
        validate_run(tmp_path, top=top, settings=QUICK, tolerance_pct=tolerance_pct)


@pytest.mark.parametrize("device", ["tpu", "cuda:99"])
def test_devices_are_checked_before_anything_else(tmp_path: Path, device: str) -> None:
    with pytest.raises(UnsupportedError, match=device):
        validate_run(tmp_path, top=1, settings=replace(QUICK, device=device), tolerance_pct=10)


@pytest.mark.parametrize(
    ("measuring", "predicted", "warning"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb", ""),
        ("Tesla V100-SXM2-16GB", "v100-sxm2-16gb", "but the designs are for a100-sxm4-80gb"),
        ("Abacus 9", "a100-sxm4-80gb", "Abacus 9 measures, which the catalogue does not know"),
    ],
)
def test_a_gpu_is_predicted_from_the_profile_of_the_one_that_measures(
    monkeypatch: pytest.MonkeyPatch, measuring: str, predicted: str, warning: str
) -> None:
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: measuring)
    pricing = pricing_of(design(64), settings=replace(QUICK, device="cuda"), calibration_s=1)
    assert predicted in pricing.source
    assert pricing.facts["device"] == predicted
    assert len(pricing.facts["profile_hash"]) == 64
    assert bool(pricing.warnings) == bool(warning)
    assert warning in " ".join(pricing.warnings)
    small, large = pricing.iteration_us(design(64)), pricing.iteration_us(design(2**20))
    assert 0 < small < large


def test_what_warns_is_written_and_printed(
    cli: Typer, monkeypatch: pytest.MonkeyPatch, run_dir: Path
) -> None:
    said: list[str] = []
    facts = {"seconds": 3.0, "clock": "cpu_time"}
    pricing = Pricing(lambda d: 1000.0, "a rule of the test", {"gemm": 1.0}, facts, ("another device",))
    found = validate_run(
        run_dir, top=1, settings=QUICK, tolerance_pct=1e9, progress=said.append, pricing=pricing
    )
    assert "warning: another device" in said
    written = json.loads((run_dir / "validation.json").read_text())
    assert (written["warnings"][0], written["calibration"]) == ("another device", facts)
    assert written["designs"][0]["clock"] == "cpu_time"
    monkeypatch.setattr("dse.validate.validate_run", lambda *_, **__: found)
    result = CliRunner().invoke(cli, [str(run_dir)])
    printed = " ".join(result.stdout.split())
    for part in (
        "Warning: another device.",
        "(CPU time of one thread)",
        "held-out errors of its kernels 1.0 to 1.0 %",
        "the tolerance of 1e+09 % (--tolerance-pct)",
    ):
        assert part in printed


@pytest.mark.slow
def test_a_cpu_is_predicted_from_a_calibration() -> None:
    pricing = pricing_of(design(64), settings=QUICK, calibration_s=2)
    assert (pricing.facts["clock"], pricing.facts["threads"]) == ("cpu_time", 1)
    assert "iterations" in pricing.errors_pct
    small, large = pricing.iteration_us(design(64)), pricing.iteration_us(design(2**16))
    assert 0 < small < large


@pytest.fixture
def cli() -> Typer:
    app = Typer()
    app.command()(_guard.guarded(command))
    return app


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "cuda:99"], "needs a CUDA GPU"),
        (["--device", "abacus"], "must be cpu, cuda"),
        ([], "holds no `designs/*.yaml`"),
        (["--top", "0"], "`top >= 1`"),
        (["--max-seconds", "0"], "`max_seconds > 0`"),
        (["--max-batch", "0"], "`max_batch > 0`"),
        (["--max-rows", "-5"], "`max_rows > 0`"),
        (["--seed", "-1"], "`0 <= seed < 2**32`"),
        (["--emit", "a", "--collect", "b"], "--emit and --collect exclude one another"),
        (["--emit", "a", "--top", "0"], "`top >= 1`"),
        (["--collect", "a", "--tolerance-pct", "nan"], "`tolerance_pct > 0`"),
    ],
)
def test_the_command_refuses_in_a_sentence(
    cli: Typer, tmp_path: Path, arguments: list[str], message: str
) -> None:
    result = CliRunner().invoke(cli, [str(tmp_path), *arguments])
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("measured", "tolerance", "code"), [((1.0, 2.0), 10.0, 0), ((1.0, 4.0), 10.0, 4), ((), 10.0, 4)]
)
def test_the_exit_code_is_the_verdict(
    cli: Typer,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    measured: tuple[float, ...],
    tolerance: float,
    code: int,
) -> None:
    predicted = (1.0, 2.1)
    error = mape_pct(predicted, measured) if measured else None
    found = ValidationReport("r", "cpu", (), error, error, None, tolerance, "a rule", {"device": "x"}, {})
    monkeypatch.setattr("dse.validate.validate_run", lambda *_, **__: found)
    plain = CliRunner().invoke(cli, [str(tmp_path)])
    assert plain.exit_code == code
    machine = CliRunner().invoke(cli, [str(tmp_path), "--json"])
    assert machine.exit_code == code
    assert json.loads(machine.stdout)["within_tolerance"] is (code == 0)


def test_interactions_of_all_kinds_can_be_chosen(tmp_path: Path) -> None:
    run = write_run(tmp_path / "r", [design(8, interaction=i) for i in Interaction])
    assert [d.design.model.interaction for d in chosen_designs(run, top=3, seed=0)] == list(Interaction)
