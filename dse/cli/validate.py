"""`dse validate`: a run's best designs on a real device, predicted beside measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from dse.validation.report import ValidatedDesign, ValidationReport
    from perfcore.measure.isolate import Settings

Run = Annotated[Path, typer.Argument(help="A run's folder, e.g. runs/dlrm_small.", show_default=False)]
Top = Annotated[int, typer.Option("--top", help="How many designs, the best first.")]
DeviceName = Annotated[str, typer.Option("--device", help="What measures: cpu, cuda or cuda:<index>.")]
Tolerance = Annotated[float, typer.Option(help="Largest accepted MAPE in %; above it, the exit code is 4.")]
MaxBatch = Annotated[int, typer.Option(help="Cap on the samples of an iteration.")]
MaxRows = Annotated[int, typer.Option(help="Cap on the rows of a table.")]
MaxSeconds = Annotated[float, typer.Option(help="Time for the iterations of one design.")]
TimeLimit = Annotated[float, typer.Option(help="Seconds after which a design is given up.")]
Calibration = Annotated[float, typer.Option(help="Seconds for calibrating the CPU.")]
Threads = Annotated[
    int, typer.Option(help="CPU threads; one is the steadiest, since threads wait for each other.")
]
ProfileName = Annotated[
    str | None,
    typer.Option("--profile", help="What predicts, by name or folder, e.g. one of `dse calibrate`."),
]
Emit = Annotated[
    Path | None, typer.Option(help="Measure nothing; write a folder to carry to the machine that measures.")
]
Collect = Annotated[Path | None, typer.Option(help="Measure nothing; read such a folder back.")]
Recalibrate = Annotated[
    Path | None,
    typer.Option(
        help="Folder for the profile corrected by what was measured; --profile names the one corrected."
    ),
]
MaxRanks = Annotated[
    int | None,
    typer.Option(
        help="Designs of at most so many ranks are trained by as many processes; as many as there are GPUs, or cores "
        "for the threads of each, by default. Larger designs are reduced to one rank."
    ),
]
Traces = Annotated[
    Path | None,
    typer.Option(
        help="Folder for a Kineto trace and an execution trace of each design, of the same iterations."
    ),
]
Seed = Annotated[int, typer.Option(help="Of weights, input and the random designs.")]
AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable on stdout.")]


def validate(
    run: Run,
    top: Top = 3,
    device: DeviceName = "cpu",
    tolerance_pct: Tolerance = 50.0,
    max_batch: MaxBatch = 2048,
    max_rows: MaxRows = 1_000_000,
    max_seconds: MaxSeconds = 10.0,
    time_limit_s: TimeLimit = 120.0,
    calibration_s: Calibration = 45.0,
    threads: Threads = 1,
    max_ranks: MaxRanks = None,
    traces: Traces = None,
    seed: Seed = 0,
    profile: ProfileName = None,
    emit: Emit = None,
    collect: Collect = None,
    recalibrate: Recalibrate = None,
    as_json: AsJson = False,  # noqa: FBT002 - typer reads flags so
) -> None:
    """Train the best designs of a run for real, and report measured beside predicted iteration times."""
    from dse.errors import DseError, ValidationToleranceError
    from dse.validate import check_device, check_request, validate_run
    from dse.validation_pricing import profile_pricing

    if recalibrate is not None and profile is None:
        raise DseError("`--recalibrate` needs `--profile`: the profile that is corrected.")
    check_request(top=top, tolerance_pct=tolerance_pct)
    if emit is not None and collect is not None:
        raise DseError("--emit and --collect exclude one another: the folder is measured in between.")
    if emit is None and collect is None:
        check_device(device)
    from perfcore.measure.isolate import Settings

    settings = Settings(
        device=device,
        max_batch=max_batch,
        max_rows=max_rows,
        max_seconds=max_seconds,
        time_limit_s=time_limit_s,
        threads=threads,
        seed=seed,
        max_ranks=max_ranks,
        traces=None if traces is None else str(traces.resolve()),
    )
    if emit is not None:
        return _emit(run, emit, settings, top=top)
    if collect is not None:
        report = _collected(run, collect, profile, tolerance_pct=tolerance_pct)
    else:
        report = validate_run(
            run,
            top=top,
            settings=settings,
            tolerance_pct=tolerance_pct,
            calibration_s=calibration_s,
            progress=lambda text: typer.echo(text, err=True),
            pricing=None if profile is None else profile_pricing(profile),
        )
    if recalibrate is not None and profile is not None:
        _recalibrate(report, profile, recalibrate)
    if as_json:
        typer.echo(json.dumps(report.to_dict(), indent=2))
    else:
        _print(report)
    if not report.within_tolerance:
        raise ValidationToleranceError(_verdict(report), hint=f"See {run}/validation.json.")
    return None


def _emit(run: Path, folder: Path, settings: Settings, *, top: int) -> None:
    from dse.validate import chosen_designs
    from dse.validation.remote import SCRIPT, emit

    emit(chosen_designs(run, top=top, seed=settings.seed), folder, settings)
    typer.echo(
        f"Carry {folder} to the machine that measures, run `python3 {SCRIPT} --device cuda` in it, carry it back, "
        f"then: dse validate {run} --collect {folder}"
    )


def _collected(run: Path, folder: Path, profile: str | None, *, tolerance_pct: float) -> ValidationReport:
    from dse.validate import report_samples
    from dse.validation.remote import pricing_of_box, read_back

    samples, here, kernels = read_back(folder)
    return report_samples(
        run,
        samples,
        device=here["device_kind"],
        tolerance_pct=tolerance_pct,
        pricing=pricing_of_box(folder, here, kernels, samples, profile=profile),
        environment=here,
    )


def _recalibrate(report: ValidationReport, profile: str, out: Path) -> None:
    from dse.validation.recalibrate import recalibrated, write_recalibrated

    pairs = [(d.predicted_ms, d.measured_ms) for d in report.designs if d.predicted_ms and d.measured_ms]
    found = recalibrated([p for p, _ in pairs], [m for _, m in pairs])
    typer.echo(
        f"One factor of {found.factor:.3f} on all times: MAPE {found.before_mape_pct:.1f} % before, "
        f"{found.after_mape_pct:.1f} % after, each design corrected by the others.",
        err=True,
    )
    write_recalibrated(
        profile, out, found, source=f"validation of {report.run} on {report.environment['device']}"
    )
    typer.echo(f"{out}: use it with --profile {out}", err=True)


command = validate

# What timed the iterations; load of other programs lengthens wall time alone.
CLOCKS = {"cpu_time": "CPU time of one thread", "wall": "wall time", "cuda_events": "CUDA events"}


def _print(report: ValidationReport) -> None:
    from rich.table import Table

    from dse.cli._console import new_console

    clocks = dict.fromkeys(CLOCKS.get(d.clock, d.clock) for d in report.designs if d.clock)
    title = f"{report.run} on {report.environment['device']}"
    table = Table(title=f"{title} ({', '.join(clocks)})" if clocks else title, title_justify="left")
    table.add_column("design")
    for column in ("ranks", "predicted ms", "measured ms", "spread %", "error %"):
        table.add_column(column, justify="right")
    table.add_column("status")
    for d in report.designs:
        numbers = [_number(v) for v in (d.predicted_ms, d.measured_ms, d.spread_pct, d.error_pct)]
        table.add_row(d.name, str(d.ranks), *numbers, d.status)
    console = new_console()
    console.print(table)
    worst = _worst(report)
    if worst is not None and worst.op_classes_ms:
        console.print(_classes(worst))
    for warning in report.warnings:
        console.print(f"Warning: {warning}.", highlight=False, markup=False)
    for note, names in _remarks(report).items():
        console.print(f"{', '.join(names)}: {note}.", highlight=False, markup=False)
    console.print(
        f"MAPE {_number(report.mape_pct)} %, GMAE {_number(report.gmae_pct)} %, "
        f"Kendall's tau {_number(report.kendall_tau)}. Predicted from {report.prediction}"
        f"{_held_out(report)}.",
        highlight=False,
    )
    if report.why:
        console.print(f"The worst, {report.why}.", highlight=False, markup=False)
    console.print(
        "Memory and the ops of every design: `dse report` on the run, or its validation.json.",
        highlight=False,
        markup=False,
    )
    if report.within_tolerance:
        console.print(_verdict(report), highlight=False)


def _worst(report: ValidationReport) -> ValidatedDesign | None:
    """The design whose prediction is off the most."""
    known = [d for d in report.designs if d.error_pct is not None]
    return max(known, key=lambda d: abs(d.error_pct or 0.0), default=None)


def _classes(design: ValidatedDesign) -> Table:
    from rich.table import Table

    table = Table(title=f"{design.name}, the worst, by class of op", title_justify="left")
    table.add_column("op")
    for column in ("predicted ms", "measured ms"):
        table.add_column(column, justify="right")
    for name, pair in design.op_classes_ms.items():
        table.add_row(name, _number(pair.predicted), _number(pair.measured))
    return table


def _remarks(report: ValidationReport) -> dict[str, list[str]]:
    """What is to be said of designs, each once, with the designs of which it holds."""
    remarks: dict[str, list[str]] = {}
    for d in report.designs:
        for note in (*d.notes, *([d.detail] if d.detail else [])):
            remarks.setdefault(note.rstrip("."), []).append(d.name)
    return remarks


def _held_out(report: ValidationReport) -> str:
    """The range of the pricing's held-out errors."""
    errors = report.held_out_errors_pct.values()
    if not errors:
        return ""
    return f"; held-out errors of its kernels {min(errors):.1f} to {max(errors):.1f} % (MAPE)"


def _verdict(report: ValidationReport) -> str:
    if report.mape_pct is None:
        return "No design could be measured."
    within = "within" if report.within_tolerance else "over"
    return f"MAPE {report.mape_pct:.1f} % is {within} the tolerance of {report.tolerance_pct:g} % (--tolerance-pct)."


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
