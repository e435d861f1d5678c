"""A folder of samples in, a profile folder out: `dse profiles fit`."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perfcore.cost.measured import MeasuredModel
from perfcore.errors import ProfileError
from perfcore.measure.record import DesignSample, middle_samples, read_samples
from perfcore.measure.samples import KernelSample, SampleFolder
from perfcore.overheads import OverheadTable, to_json
from perfcore.profile.build import MEASURED
from perfcore.profile.fit_collectives import FILE, collective_curves, collective_errors
from perfcore.profile.fit_kernels import Fitted, fit_kernels, with_scales
from perfcore.profile.fit_loops import fit_loops
from perfcore.profile.fit_traces import fit_traces
from perfcore.profile.profile import BUNDLED
from perfcore.profile.schema import SCHEMA_VERSION, KnownError

SIGNIFICANT = 7
LEFT_OUT = "fifths of the shapes left out of the fit"


@dataclass(frozen=True, slots=True)
class FittedProfile:
    """A profile that was written.

    Attributes:
        folder: where.
        errors: on samples that the fits had not seen.
        noisy: share of timings whose runs spread by more than a fifth.
    """

    folder: Path
    errors: tuple[KnownError, ...]
    noisy: float


def fit_profile(samples: Path, out: Path, *, name: str | None = None) -> FittedProfile:
    """Fit the samples of one device and write a profile.

    Args:
        samples: what `perfcore.measure collect` wrote.
        out: the profile's folder; an earlier fit is replaced, a bundled profile is not.
        name: the profile's; the folder's name by default.

    Raises:
        ProfileError: samples are missing or too few, or the folder cannot be written.
        DesignError: a training loop's file is corrupt.
    """
    check_output(out)
    folder = SampleFolder(samples)
    timed, environment = folder.samples(), _environment(folder)
    loops = middle_samples(read_samples(folder.loops)) if folder.loops.exists() else []
    cold = [s for s in timed if s.timing.cache == "cold"]
    fits = fit_kernels(cold)
    overheads, errors = _overheads(fits, loops, folder, environment)
    host_spread = 0.0
    if overheads.kernels_block_host:
        fitted = fit_loops(loops, _model(fits))
        host_spread = fitted.log_error_90
        fits = with_scales(fits, fitted.scales)
    source = _source(environment)
    exchanged = folder.collective_samples()
    curves = collective_curves(exchanged, source=source)
    known = (*_kernel_errors(fits, source), *collective_errors(exchanged, source=source), *errors)
    date = datetime.datetime.fromtimestamp(folder.kernels.stat().st_mtime, tz=datetime.UTC).date().isoformat()
    profile = {
        "schema_version": SCHEMA_VERSION,
        "name": name or out.resolve().name,
        "device": environment["system"]["device"],
        "node": environment["system"]["node"],
        "collectives": FILE if curves else None,
        "environment": {k: v for k, v in environment.items() if k != "system"},
        "kernels": {kind: _entry(f, source, date) for kind, f in fits.items()},
        "host_log_error_90": round(host_spread, 4),
        "known_errors": [_error_json(e) for e in known],
    }
    files = {"profile.json": profile, "overheads.json": to_json(overheads)}
    _write(out, files | ({FILE: curves} if curves else {}))
    return FittedProfile(out, known, _noisy(timed))


def check_output(out: Path) -> None:
    """Refuse to write over a bundled profile, or into a folder of something else.

    Raises:
        ProfileError: the folder is one of these.
    """
    if BUNDLED in (out.resolve(), *out.resolve().parents):
        raise ProfileError(
            f"{out} is a bundled profile, which is never overwritten.", hint="Name another folder with -o."
        )
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not (out / "profile.json").exists())):
        raise ProfileError(f"{out} exists and is no profile.", hint="Name another folder with -o.")


def _overheads(
    fits: Mapping[str, Fitted],
    loops: Sequence[DesignSample],
    folder: SampleFolder,
    environment: Mapping[str, Any],
) -> tuple[OverheadTable, tuple[KnownError, ...]]:
    """Host overheads with their provenance; of a CPU from whole iterations, of a GPU from traces."""
    from dataclasses import replace

    source = _source(environment)
    if environment["device_kind"] == "cuda":
        return fit_traces(loops, folder.traces, source=source), ()
    fitted = fit_loops(loops, _model(fits))
    zero = "0: a CPU runs its kernels itself"
    constants = ("launch_latency_us", "kernel_gap_us", "graph_gap_us", "graph_launch_us", "queue_depth")
    provenance = {
        "method": "host time per op by phase, and per launch of an optimizer, from whole training iterations",
        "sources": source,
        "loops": fitted.n,
        "constants": dict.fromkeys(constants, zero),
    }
    error = KnownError(
        "iterations",
        fitted.n,
        round(fitted.gmae_pct, 3),
        round(fitted.mape_pct, 3),
        "each training loop from the others",
        source,
    )
    return replace(fitted.overheads, provenance=provenance), (error,)


def _model(fits: Mapping[str, Fitted]) -> MeasuredModel:
    return MeasuredModel({kind: f.fit for kind, f in fits.items()})


def _environment(folder: SampleFolder) -> dict[str, Any]:
    found = [e for e in folder.environments() if "system" in e]
    if not found:
        raise ProfileError(f"{folder.kernels}: no line says what measured.")
    return found[-1]


def _source(environment: Mapping[str, Any]) -> str:
    threads = f", {environment['threads']} CPU threads" if environment["device_kind"] == "cpu" else ""
    return f"measured on {environment['device']}{threads}, torch {environment['torch']}"


def _entry(fitted: Fitted, source: str, date: str) -> dict[str, Any]:
    fit = fitted.fit
    return {
        "model": MEASURED,
        "parameters": {
            "weights_us": _rounded(fit.weights_us),
            "scale": round(fit.scale, 5),
            "log_work": _rounded(fit.log_work.reshape(-1)),
            "residuals": _rounded(fit.residuals),
        },
        "basis": "measured",
        "source": source,
        "date": date,
        "samples": fitted.n,
        "log_error_90": round(fit.log_error_90, 4),
    }


def _rounded(values: Any) -> list[float]:
    return [float(f"{v:.{SIGNIFICANT}g}") for v in values]


def _kernel_errors(fits: Mapping[str, Fitted], source: str) -> list[KnownError]:
    return [
        KnownError(kind, f.n, round(f.gmae_pct, 3), round(f.mape_pct, 3), LEFT_OUT, source)
        for kind, f in fits.items()
        if not math.isnan(f.mape_pct)
    ]


def _error_json(error: KnownError) -> dict[str, Any]:
    from dataclasses import asdict

    return {k: v for k, v in asdict(error).items() if v is not None}


def _noisy(timed: Sequence[KernelSample]) -> float:
    return sum(s.timing.spread > 0.2 for s in timed) / max(len(timed), 1)


def _write(out: Path, files: Mapping[str, Any]) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            (out / name).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    except OSError as err:
        raise ProfileError(f"{out}: cannot be written: {err.strerror}.") from None
