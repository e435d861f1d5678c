"""Predicted beside measured: a run's best designs, trained for real."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dse.config import load_design
from dse.errors import DseError
from dse.validation.compare import Compared, compared_classes, largest_gap, tensors_gib
from dse.validation.report import ValidatedDesign, ValidationReport
from dse.validation_pricing import Pricing, pricing_of
from perfcore.design.hardware import System
from perfcore.design.model import Model
from perfcore.design.sharding import ShardingPlan, ShardingType, TableSharding
from perfcore.design.training import Fusion, Training
from perfcore.errors import MissingPackageError
from perfcore.units import BYTES_PER_GIB, US_PER_MS

if TYPE_CHECKING:
    from perfcore.measure.isolate import Settings
    from perfcore.measure.record import DesignSample, NamedDesign
    from perfcore.predictor import Prediction

# Keeps the logarithm of an exact prediction finite (GMAE of arXiv 2201.07821).
GMAE_FLOOR = 4e-4
PARETO = "pareto.csv"
NOISY_PCT = 20.0  # interquartile range of the iterations over their median


def validate_run(
    run_dir: Path,
    *,
    top: int,
    settings: Settings,
    tolerance_pct: float,
    calibration_s: float = 45.0,
    progress: Callable[[str], None] = lambda _: None,
    pricing: Pricing | None = None,
) -> ValidationReport:
    """Measure designs of a run, predict what was measured, and write `validation.json` into the run.

    Args:
        run_dir: a run's folder, with `designs/*.yaml` in order of rank.
        top: how many designs.
        settings: device, limits and caps of measuring.
        tolerance_pct: largest accepted mean absolute error.
        calibration_s: seconds for calibrating the CPU, where `settings.device` is `cpu`.
        progress: told a sentence per step.
        pricing: what predicts; the CPU's calibration, or the profile of the GPU that measures, by default.

    Raises:
        DseError: no designs, or an impossible request.
        UnsupportedError: the device is unknown or absent.
        MissingPackageError: torch is not installed.
    """
    check_request(top=top, tolerance_pct=tolerance_pct)
    check_device(settings.device)
    from perfcore.measure.isolate import measure_isolated
    from perfcore.measure.record import environment

    designs = chosen_designs(run_dir, top=top, seed=settings.seed)
    if pricing is None:
        progress(f"calibrating {settings.device} …")
        pricing = pricing_of(designs[0].design, settings=settings, calibration_s=calibration_s)
    for warning in pricing.warnings:
        progress(f"warning: {warning}")
    samples = []
    for named in designs:
        progress(f"measuring {named.name} on {settings.device} …")
        samples.append(measure_isolated(named, settings))
    return report_samples(
        run_dir,
        samples,
        device=settings.device,
        tolerance_pct=tolerance_pct,
        pricing=pricing,
        environment=environment(settings.device),
    )


def check_request(*, top: int, tolerance_pct: float) -> None:
    """Return when there is something to measure and a verdict to give.

    Raises:
        DseError: there is not.
    """
    if top < 1 or not tolerance_pct > 0:
        raise DseError(f"`top >= 1` and `tolerance_pct > 0` must hold, but got {top=}, {tolerance_pct=}.")


def report_samples(
    run_dir: Path,
    samples: Sequence[DesignSample],
    *,
    device: str,
    tolerance_pct: float,
    pricing: Pricing,
    environment: Mapping[str, Any],
) -> ValidationReport:
    """Predict what was measured, here or elsewhere, and write `validation.json` into the run.

    Raises:
        DseError: the file cannot be written.
    """
    validated = [_validated(sample, pricing) for sample in samples]
    report = replace(
        _report(run_dir.resolve().name, validated, device, tolerance_pct, pricing, dict(environment)),
        why=_why_worst(validated, samples, pricing),
    )
    _write(run_dir / "validation.json", report)
    return report


def chosen_designs(run_dir: Path, *, top: int, seed: int) -> list[NamedDesign]:
    """The best `top` designs, the knee among them; from four on, every fourth is a random one of the rest.

    Ranks alone would compare designs of nearly equal time, whose order is noise.

    Raises:
        DseError: the folder is no run, or holds no designs.
    """
    from perfcore.measure.record import NamedDesign

    files = sorted((run_dir / "designs").glob("*.yaml"))
    if not files:
        raise DseError(
            f"{run_dir} holds no `designs/*.yaml`, but validating needs at least one.",
            hint="Name the folder that `dse run` wrote, e.g. runs/dlrm_small.",
        )
    knee = knee_design(run_dir)
    ranked = sorted(files, key=lambda f: f.name != knee)
    spread = top // 4 if len(files) > top else 0
    best, rest = ranked[: top - spread], ranked[top - spread :]
    picked = np.random.default_rng(seed).choice(len(rest), size=spread, replace=False) if spread else ()
    chosen = sorted([*best, *(rest[i] for i in picked)])
    return [NamedDesign(f.stem, load_design(f, place=_any_plan)) for f in chosen]


def knee_design(run_dir: Path) -> str | None:
    """Name of the file of the front's knee, where the run has one.

    Raises:
        DseError: the run's table is corrupt.
    """
    table = run_dir / PARETO
    if not table.exists():
        return None
    try:
        with table.open(encoding="utf-8", newline="") as file:
            rows = [r for r in csv.DictReader(file) if r.get("knee") == "1" and r.get("design")]
    except (OSError, ValueError, csv.Error) as err:
        raise DseError(
            f"{table} cannot be read: {err}.", hint="`dse run --resume` on the run's space writes it anew."
        ) from None
    return Path(rows[0]["design"]).name if rows else None


def mape_pct(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Mean of |predicted / measured - 1|, in per cent."""
    return float(100 * np.mean(_errors(predicted, measured)))


def gmae_pct(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Geometric mean of |predicted / measured - 1|, with a floor for exact predictions, in per cent."""
    return float(100 * np.exp(np.mean(np.log(_errors(predicted, measured) + GMAE_FLOOR))))


def kendall_tau(predicted: Sequence[float], measured: Sequence[float]) -> float | None:
    """Kendall's tau-b of the two orders; `None` with fewer than two values, or where all of one side are equal."""
    from scipy.stats import kendalltau

    if len(predicted) < 2 or min(len(set(predicted)), len(set(measured))) < 2:
        return None
    return float(kendalltau(predicted, measured).statistic)


def check_device(device: str) -> None:
    """Refuse a device that this machine lacks.

    Raises:
        UnsupportedError: unknown or absent.
        MissingPackageError: torch is not installed.
    """
    try:
        import torch  # noqa: F401
    except ImportError:
        raise MissingPackageError(
            "Validating needs torch, but it is not installed.", hint="pip install torch"
        ) from None
    from perfcore.measure import iteration

    iteration.check_device(device)


def _any_plan(model: Model, training: Training, system: System, policy: str, fusion: Fusion) -> ShardingPlan:
    """Tables whole, by turns: one device measures all of them wherever they were placed."""
    return ShardingPlan(
        tuple(
            TableSharding(t.name, ShardingType.TABLE_WISE, (i % system.world_size,))
            for i, t in enumerate(model.tables)
        )
    )


def _validated(sample: DesignSample, pricing: Pricing) -> ValidatedDesign:
    iteration = sample.iteration
    if iteration is None:
        return ValidatedDesign(sample.name, sample.status, detail=sample.detail, notes=sample.notes)
    known = ValidatedDesign(
        sample.name,
        sample.status,
        predicted_ms=pricing.iteration_us(sample.design) / US_PER_MS,
        measured_ms=iteration.median_us / US_PER_MS,
        spread_pct=iteration.spread_pct,
        notes=sample.notes,
        clock=iteration.clock,
        ranks=iteration.ranks,
    )
    return known if pricing.predict is None else _detailed(known, sample, pricing.predict(sample.design))


def _detailed(known: ValidatedDesign, sample: DesignSample, prediction: Prediction) -> ValidatedDesign:
    """With what else was measured, beside the prediction."""
    iteration = sample.iteration
    assert iteration is not None
    on_cpu, active = iteration.clock != "cuda_events", iteration.device_active_us
    added = iteration.added_memory_bytes / BYTES_PER_GIB
    return replace(
        known,
        active_ms=Compared(
            None if on_cpu else prediction.device_active_us / US_PER_MS,
            None if active is None else active / US_PER_MS,
        ),
        memory_gib=Compared(tensors_gib(prediction), added or None),
        op_classes_ms=compared_classes(prediction, iteration.op_us, on_cpu=on_cpu),
    )


def _why_worst(designs: Sequence[ValidatedDesign], samples: Sequence[DesignSample], pricing: Pricing) -> str:
    """What the worst prediction consists of; nothing where no design was measured, or the pricing cannot say."""
    off = [(abs(d.error_pct), d, s) for d, s in zip(designs, samples, strict=True) if d.error_pct is not None]
    if not off or pricing.why is None:
        return ""
    _, design, sample = max(off, key=lambda item: item[0])
    gap = largest_gap(design.op_classes_ms)
    return f"{design.name}: {pricing.why(sample.design)}" + (f"; largest difference: {gap}" if gap else "")


def _report(
    run: str,
    designs: Sequence[ValidatedDesign],
    device: str,
    tolerance_pct: float,
    pricing: Pricing,
    environment: dict[str, Any],
) -> ValidationReport:
    pairs = [(d.predicted_ms, d.measured_ms) for d in designs if d.predicted_ms and d.measured_ms]
    predicted, measured = [p for p, _ in pairs], [m for _, m in pairs]
    return ValidationReport(
        run=run,
        device=device,
        designs=tuple(designs),
        mape_pct=mape_pct(predicted, measured) if pairs else None,
        gmae_pct=gmae_pct(predicted, measured) if pairs else None,
        kendall_tau=kendall_tau(predicted, measured),
        tolerance_pct=tolerance_pct,
        prediction=pricing.source,
        environment=environment,
        held_out_errors_pct=pricing.errors_pct,
        calibration=dict(pricing.facts),
        warnings=(*pricing.warnings, *_noise(designs)),
    )


def _noise(designs: Sequence[ValidatedDesign]) -> list[str]:
    """Where the measurement itself is not to be relied on."""
    noisy = [d for d in designs if (d.spread_pct or 0.0) > NOISY_PCT]
    if not noisy:
        return []
    named = ", ".join(f"{d.name} ({d.spread_pct:.0f} %)" for d in noisy)
    return [f"iterations of {named} spread by more than {NOISY_PCT:g} %: another program was on the device"]


def _errors(predicted: Sequence[float], measured: Sequence[float]) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.abs(np.asarray(predicted, dtype=np.float64) / np.asarray(measured, dtype=np.float64) - 1)


def _write(path: Path, report: ValidationReport) -> None:
    try:
        path.write_text(json.dumps(report.to_dict(), indent=1) + "\n", encoding="utf-8")
    except OSError as err:
        raise DseError(f"{path}: cannot be written: {err.strerror}.") from None
