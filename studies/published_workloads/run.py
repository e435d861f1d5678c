"""Predicts the published DLRM workloads and compares with their measured iteration times.

python studies/published_workloads/run.py
"""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
DESIGNS = HERE.parent.parent / "spaces" / "designs"
sys.path.insert(0, str(HERE.parent))

TRACED = ("v100-sxm2-16gb", "2048")


def predict(name: str, device: str, global_batch: str) -> tuple[Any, Any]:
    """The prediction of one workload, and the predictor that made it."""
    from dse.config import load_design
    from dse.placement import plan_for
    from perfcore.predictor import Predictor
    from perfcore.profile.profile import profile_for

    overrides = [
        f"system.device={device}",
        f"training.global_batch={global_batch}",
        "training.program=dlrm_script",
    ]
    design = load_design(DESIGNS / f"{name}.yaml", overrides=overrides, place=plan_for)
    predictor = Predictor(profile_for(design.system.device, design.system.node))
    return predictor.predict(design), predictor


def predict_ops() -> list[dict[str, Any]]:
    """Kernel time and launches by op beside those of published traces: V100, batch 2048."""
    with (HERE / "traced_ops.csv").open(encoding="utf-8") as file:
        traced = list(csv.DictReader(file))
    found = {d: predict(d, *TRACED)[0].ops for d in dict.fromkeys(r["design"] for r in traced)}
    rows = []
    for row in traced:
        ours = [op for op in found[row["design"]] if op.name in row["ops"].split()]
        rows.append(
            {
                "design": row["design"],
                "ops": row["ops"],
                "traced_us": float(row["traced_us"]),
                "predicted_us": round(sum(op.device_us for op in ours), 1),
                "traced_kernels": float(row["traced_kernels"]),
                "predicted_kernels": sum(op.kernels for op in ours),
            }
        )
    return rows


def predict_rows() -> list[dict[str, Any]]:
    """One row per measured workload, with the predicted time and its error."""
    rows = []
    with (HERE / "measured.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            p, predictor = predict(row["design"], row["device"], row["global_batch"])
            low_us, high_us = predictor.interval_us(p)
            measured_ms = float(row["measured_ms"])
            rows.append(
                {
                    "device": row["device"],
                    "design": row["design"],
                    "global_batch": int(row["global_batch"]),
                    "measured_ms": measured_ms,
                    "predicted_ms": round(p.iteration_time_us / 1e3, 4),
                    "low_ms": round(low_us / 1e3, 4),
                    "high_ms": round(high_us / 1e3, 4),
                    "error_pct": round(100 * (p.iteration_time_us / 1e3 / measured_ms - 1), 2),
                    "published_error_pct": float(row["published_error_pct"]),
                    "active_ms": round(p.device_active_us / 1e3, 4),
                    "measured_active_ms": active_ms(row),
                    "traced_active_ms": float(row["traced_active_ms"]) if row["traced_active_ms"] else None,
                    "bound_by": p.bound_by,
                }
            )
    return rows


def active_ms(row: dict[str, str]) -> float:
    """Measured time in which a kernel ran: the published predictor's own, less its stated error.

    Its prediction without a host is that active time, and the figure has its error against the whole iteration.
    """
    predicted_ms = float(row["measured_ms"]) * (1 + float(row["published_kernels_only_error_pct"]) / 100)
    return round(predicted_ms / (1 + float(row["published_active_error_pct"]) / 100), 4)


def summary(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """GMAE and MAPE by device, ours beside the published predictor's."""
    from scores import gmae, mape

    out = {}
    for device in [*dict.fromkeys(r["device"] for r in rows), "all"]:
        chosen = [r for r in rows if device in (r["device"], "all")]
        out[device] = {
            "gmae_pct": gmae([r["error_pct"] for r in chosen]),
            "mape_pct": mape([r["error_pct"] for r in chosen]),
            "published_gmae_pct": gmae([r["published_error_pct"] for r in chosen]),
            "published_mape_pct": mape([r["published_error_pct"] for r in chosen]),
        }
    return out


def draw(rows: list[dict[str, Any]]) -> None:
    """Predicted against measured, one mark per device."""
    from figures import new_figure, save

    figure, axes = new_figure(width=5.0, height=4.5)
    axis = axes[0][0]
    for device, mark in zip(dict.fromkeys(r["device"] for r in rows), "os^", strict=True):
        chosen = [r for r in rows if r["device"] == device]
        axis.plot([r["measured_ms"] for r in chosen], [r["predicted_ms"] for r in chosen], mark, label=device)
    top = 1.1 * max(max(r["measured_ms"], r["predicted_ms"]) for r in rows)
    axis.plot([0, top], [0, top], color="grey", linewidth=0.8)
    axis.fill_between([0, top], [0, 0.9 * top], [0, 1.1 * top], color="grey", alpha=0.15, label="±10 %")
    axis.set(xlabel="measured iteration time, ms", ylabel="predicted, ms", xlim=(0, top), ylim=(0, top))
    axis.legend(frameon=False)
    save(figure, HERE / "figure.svg")


def main() -> None:
    """Print the table, write `results.json` and the figure."""
    rows = predict_rows()
    print(
        "device           design          batch  measured predicted  error % published"
        "    active predicted      idle predicted    traced"
    )
    for r in rows:
        traced = "" if r["traced_active_ms"] is None else f"{r['traced_active_ms']:.2f}"
        print(
            f"{r['device']:16s} {r['design']:14s} {r['global_batch']:6d} {r['measured_ms']:9.2f} "
            f"{r['predicted_ms']:9.2f} {r['error_pct']:8.1f} {r['published_error_pct']:9.1f} "
            f"{r['measured_active_ms']:9.2f} {r['active_ms']:9.2f} "
            f"{r['measured_ms'] - r['measured_active_ms']:9.2f} {r['predicted_ms'] - r['active_ms']:9.2f} "
            f"{traced:>9s}"
        )
    inside = sum(r["low_ms"] <= r["measured_ms"] <= r["high_ms"] for r in rows)
    print(f"{inside} of {len(rows)} measured times lie inside their interval")
    totals = summary(rows)
    for device, total in totals.items():
        print(
            f"{device:16s} GMAE {total['gmae_pct']:.1f} % MAPE {total['mape_pct']:.1f} %   "
            f"(published: {total['published_gmae_pct']:.1f} / {total['published_mape_pct']:.1f})"
        )
    ops = predict_ops()
    print("design          op                                         traced us predicted  kernels predicted")
    for r in ops:
        print(
            f"{r['design']:15s} {r['ops']:40s} {r['traced_us']:11.1f} {r['predicted_us']:9.1f} "
            f"{r['traced_kernels']:8.1f} {r['predicted_kernels']:9d}"
        )
    results = {"rows": rows, "summary": totals, "ops": ops}
    (HERE / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    draw(rows)


if __name__ == "__main__":
    main()
