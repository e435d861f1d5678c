"""`dse predict` and `dse explain`: one design's time, and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from perfcore.design.design import Design
    from perfcore.predictor import Prediction, Predictor

DesignPath = Annotated[Path, typer.Argument(help="A design file.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", help="section.key=value; may be repeated, e.g. system.device=h100-sxm."),
]
ProfileName = Annotated[
    str | None, typer.Option("--profile", help="Name or folder of a profile; the device's own by default.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable on stdout.")]


def predict(
    design: DesignPath,
    overrides: Overrides = None,
    profile: ProfileName = None,
    as_json: AsJson = False,  # noqa: FBT002 - typer reads flags so
) -> None:
    """Predict one design: iteration time, breakdown, what bounds it, memory, whether it fits."""
    loaded, predictor = _load(design, overrides, profile)
    prediction = predictor.predict(loaded)
    interval_us = predictor.interval_us(prediction)
    if as_json:
        typer.echo(json.dumps(to_json(loaded, prediction) | interval_json(interval_us), indent=2))
    else:
        from dse.cli.predict_text import print_prediction

        print_prediction(loaded, prediction, interval_us)


def explain(
    design: DesignPath,
    overrides: Overrides = None,
    profile: ProfileName = None,
    timeline: Annotated[
        Path | None, typer.Option(help="Write a timeline that Perfetto (ui.perfetto.dev) opens.")
    ] = None,
    as_json: AsJson = False,  # noqa: FBT002 - typer reads flags so
) -> None:
    """Explain one design: its critical path, and what making parts of it faster would save."""
    from perfcore.perfetto import trace_events
    from perfcore.whatif import what_if

    loaded, predictor = _load(design, overrides, profile)
    prediction = predictor.predict(loaded)
    effects = what_if(prediction.graph, prediction.timeline.steps, predictor.profile.overheads)
    if timeline is not None:
        _write(timeline, json.dumps(trace_events(prediction)))
    if as_json:
        entry = to_json(loaded, prediction)
        entry["what_if"] = [
            {
                "change": w.change,
                "iteration_time_ms": w.iteration_time_us / 1e3,
                "saved_pct": 100 * w.saved_share,
            }
            for w in effects
        ]
        entry["critical_path"] = path_json(prediction)
        typer.echo(json.dumps(entry, indent=2))
    else:
        from dse.cli.predict_text import print_explanation

        print_explanation(loaded, prediction, effects, timeline)


def to_json(design: Design, prediction: Prediction) -> dict[str, Any]:
    """The prediction in milliseconds and GiB."""
    from dse.ranks import entries_of

    p, host = prediction, prediction.host
    rank, _ = p.memory.fullest(design.system)
    return {
        "iteration_time_ms": p.iteration_time_us / 1e3,
        "samples_per_second": p.samples_per_second,
        "device_active_ms": p.device_active_us / 1e3,
        "device_idle_ms": p.device_idle_us / 1e3,
        "host_ms": {
            "t1": host.t1_us / 1e3,
            "t2": host.t2_us / 1e3,
            "t3": host.t3_us / 1e3,
            "t4": host.t4_us / 1e3,
            "t5": host.t5_us / 1e3,
            "launchless_ops": host.alone_us / 1e3,
            "total": host.total_us / 1e3,
        },
        "exposed_communication_ms": p.exposed_communication_us / 1e3,
        "bound_by": p.bound_by,
        "bound_share": p.bound_share,
        "hbm_gib": float(p.memory.total[rank]) / 2**30,
        "hbm_by_kind_gib": {k: v / 2**30 for k, v in p.memory.by_kind(rank).items()},
        "device_hbm_gib": design.system.rank_hbm_bytes[rank] / 2**30,
        "fullest_rank": rank,
        "fits": p.fits,
        "shortfall_gib": p.shortfall_bytes / 2**30,
        "host_shortfall_gib": p.host_shortfall_bytes / 2**30,
        "calibrated": p.calibrated.value,
        "calibration_share": p.calibration_share,
        "profile": p.profile,
        "device": design.system.device.name,
        "world_size": design.system.world_size,
        "ranks": entries_of(design.system),
        "global_batch": p.global_batch,
        "described_rank": p.rank,
        "fallback_ops": p.fallback_ops,
        "known_errors": [
            {"kernel": e.kernel, "n": e.n, "gmae_pct": e.gmae_pct, "mape_pct": e.mape_pct, "source": e.source}
            for e in p.known_errors
        ],
        "ops": [
            {
                "name": op.name,
                "module": op.module,
                "phase": op.phase,
                "count": op.count,
                "kernels": op.kernels,
                "device_ms": op.device_us / 1e3,
                "critical_ms": op.critical_us / 1e3,
            }
            for op in p.ops
        ],
    }


def interval_json(interval_us: tuple[float, float]) -> dict[str, float]:
    """The interval in milliseconds."""
    low, high = interval_us
    return {"low": low / 1e3, "high": high / 1e3}


def path_json(prediction: Prediction) -> list[dict[str, Any]]:
    """The critical path in order of time."""
    return [
        {"resource": piece.resource, "part": piece.part, "ops": list(piece.ops), "ms": piece.us / 1e3}
        for piece in prediction.path_pieces
    ]


def _write(path: Path, text: str) -> None:
    from dse.errors import StorageError

    try:
        path.write_text(text, encoding="utf-8")
    except OSError as err:
        raise StorageError(f"{path} cannot be written: {err.strerror or err}.") from err


def _load(path: Path, overrides: list[str] | None, profile: str | None) -> tuple[Design, Predictor]:
    from dse.config import load_design
    from dse.placement import plan_for
    from perfcore.predictor import Predictor
    from perfcore.profile.profile import priced

    design, found = priced(load_design(path, overrides=overrides or [], place=plan_for), profile)
    return design, Predictor(found)
