"""Predicts published end-to-end DLRM runs on one GPU and on one node, and compares with their iteration times.

python studies/published_end_to_end/run.py
"""

from __future__ import annotations

import csv
import json
import math
import statistics
import sys
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from perfcore.design.model import Model
from perfcore.design.sharding import ShardingPlan, ShardingType, TableSharding

HERE = Path(__file__).parent
DESIGNS = HERE.parent.parent / "spaces" / "designs"
sys.path.insert(0, str(HERE.parent))

KINDS = {
    "fused": "PyTorch with fused kernels",
    "loader": "TorchRec, the loader may be the limit",
    "tuned": "MLPerf, tuned",
}
SETTINGS = ("design", "device", "world_size", "global_batch", "placement", "overrides")


def predict_rows(kinds: Collection[str] = tuple(KINDS)) -> list[dict[str, Any]]:
    """One row per published run of these kinds, with the predicted time; equal designs are predicted once."""
    seen: dict[tuple[str, ...], dict[str, Any]] = {}
    rows = []
    with (HERE / "measured.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["kind"] not in kinds:
                continue
            key = tuple(row[c] for c in SETTINGS)
            if key not in seen:
                seen[key] = _predict(row)
            predicted, measured_ms = seen[key], float(row["measured_ms"])
            rows.append(
                {
                    "kind": row["kind"],
                    "design": row["design"],
                    "gpus": f"{row['world_size']} x {row['gpu']}",
                    "global_batch": int(row["global_batch"]),
                    "overrides": row["overrides"],
                    "measured_ms": measured_ms,
                    "error_pct": round(100 * (predicted["predicted_ms"] / measured_ms - 1), 2),
                    **predicted,
                }
            )
    return rows


def _predict(row: dict[str, str]) -> dict[str, Any]:
    """Predicted ms with its interval, least possible ms, and what binds."""
    from dse.config import load_design
    from dse.placement import plan_for
    from perfcore.predictor import Predictor
    from perfcore.profile.profile import profile_for

    overrides = [
        f"system.device={row['device']}",
        f"system.world_size={row['world_size']}",
        f"training.global_batch={row['global_batch']}",
        *row["overrides"].split(),
    ]
    design = load_design(DESIGNS / f"{row['design']}.yaml", overrides=overrides, place=plan_for)
    if row["placement"] == "nvidia":
        design = replace(design, sharding=nvidia_plan(design.model, design.system.world_size))
    predictor = Predictor(profile_for(design.system.device, design.system.node))
    prediction = predictor.predict(design)
    low_us, high_us = predictor.interval_us(prediction)
    return {
        "predicted_ms": round(prediction.iteration_time_us / 1e3, 4),
        "low_ms": round(low_us / 1e3, 4),
        "high_ms": round(high_us / 1e3, 4),
        "floor_ms": round(floor_ms(prediction, design.system.device), 4),
        "bound_by": prediction.bound_by,
    }


def nvidia_plan(model: Model, world_size: int) -> ShardingPlan:
    """Where NVIDIA's program puts tables: whole, the largest first, each on the rank with the fewest rows so far.

    No rank gets more than its share of tables, rounded up; of more than four ranks the first gets none, as the
    bottom MLP runs there (`dlrm/utils/distributed.py` of the same repository).
    """
    spared = 1 if world_size > 4 else 0
    rows = dict.fromkeys(range(spared, world_size), 0)
    tables = dict.fromkeys(rows, 0)
    most, placed = math.ceil(len(model.tables) / len(rows)), {}
    for table in sorted(model.tables, key=lambda t: -t.num_embeddings):
        rank = min((r for r in rows if tables[r] < most), key=lambda r: rows[r])
        rows[rank] += table.num_embeddings
        tables[rank] += 1
        placed[table.name] = TableSharding(table.name, ShardingType.TABLE_WISE, (rank,))
    return ShardingPlan(tuple(placed[t.name] for t in model.tables))


def floor_ms(prediction: Any, device: Any) -> float:
    """Arithmetic of the products at the device's peak: no implementation of the dense part can be faster."""
    import numpy as np

    from perfcore.cost.roofline import peak_flops_per_s
    from perfcore.graph.kernels import Gemm, resolve

    seconds = 0.0
    for launch in prediction.graph.launches():
        kernel = resolve(launch.kernel)
        if isinstance(kernel, Gemm):
            flops = 2.0 * np.asarray(kernel.m) * kernel.n * kernel.k * kernel.batch
            seconds += float(np.max(flops)) / peak_flops_per_s(device, kernel.dtype)
    return 1e3 * seconds


def summary(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """By kind: rows, median |error| and bias; for the tuned rows the rank correlation too."""
    out: dict[str, dict[str, float]] = {}
    for kind in KINDS:
        chosen = [r for r in rows if r["kind"] == kind]
        out[kind] = {
            "n": len(chosen),
            "median_abs_error_pct": round(statistics.median(abs(r["error_pct"]) for r in chosen), 2),
            "median_error_pct": round(statistics.median(r["error_pct"] for r in chosen), 2),
            "rank_correlation": round(
                rank_correlation([r["measured_ms"] for r in chosen], [r["predicted_ms"] for r in chosen]), 3
            ),
            "inside_interval": sum(r["low_ms"] <= r["measured_ms"] <= r["high_ms"] for r in chosen),
            "below_floor": sum(r["measured_ms"] < r["floor_ms"] for r in chosen),
        }
    return out


def rank_correlation(x: list[float], y: list[float]) -> float:
    """Spearman's; equal values share the mean of their ranks."""
    return statistics.correlation(_ranks(x), _ranks(y))


def _ranks(values: list[float]) -> list[float]:
    return [sum(v < x for v in values) + (sum(v == x for v in values) - 1) / 2 for x in values]


def draw(rows: list[dict[str, Any]]) -> None:
    """Predicted against measured, one mark per kind."""
    from figures import new_figure, save

    figure, axes = new_figure(width=5.0, height=4.5)
    axis = axes[0][0]
    for (kind, name), mark in zip(KINDS.items(), "os^", strict=True):
        chosen = [r for r in rows if r["kind"] == kind]
        axis.plot([r["measured_ms"] for r in chosen], [r["predicted_ms"] for r in chosen], mark, label=name)
    ends = [1.0, 1.3 * max(max(r["measured_ms"], r["predicted_ms"]) for r in rows)]
    axis.plot(ends, ends, color="grey", linewidth=0.8)
    axis.set(xlabel="measured iteration time, ms", ylabel="predicted, ms", xscale="log", yscale="log")
    axis.legend(frameon=False)
    save(figure, HERE / "figure.svg")


def main() -> None:
    """Print the table, write `results.json` and the figure."""
    rows = predict_rows()
    print("design              batch  measured predicted  error %     floor  gpus; overrides")
    for r in rows:
        print(
            f"{r['design']:18s} {r['global_batch']:6d} {r['measured_ms']:9.2f} {r['predicted_ms']:9.2f} "
            f"{r['error_pct']:8.1f} {r['floor_ms']:9.2f}  {r['gpus']}; {r['overrides']}"
        )
    totals = summary(rows)
    for kind, total in totals.items():
        print(kind, total)
    (HERE / "results.json").write_text(json.dumps({"rows": rows, "summary": totals}, indent=1) + "\n")
    draw(rows)


if __name__ == "__main__":
    main()
