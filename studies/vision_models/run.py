"""Predicts training steps of ResNet-50 and Inception-V3 and compares with published measurements.

python studies/vision_models/run.py
"""

from __future__ import annotations

import csv
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perfcore.overheads import OverheadTable
    from perfcore.profile.profile import Profile

HERE = Path(__file__).parent
TRACE = HERE.parent.parent / "tests" / "data" / "resnet50_v100" / "workers0.pt.trace.json.gz"
sys.path[:0] = [str(HERE), str(HERE.parent)]

# Ops that no DLRM has, and so no bundled host has times of: their names in the trace, which is of 2021.
TRACED_OPS = {
    "aten::conv2d": "aten::conv2d",
    "aten::batch_norm": "aten::batch_norm",
    "ConvolutionBackward0": "CudnnConvolutionBackward",
    "CudnnBatchNormBackward0": "CudnnBatchNormBackward",
}
HOSTS = ("profile", "traced")


def predict_rows() -> list[dict[str, Any]]:
    """One row a measured step, with predictions by both tables of host times."""
    from perfcore.profile.profile import load_profile

    with (HERE / "measured.csv").open(encoding="utf-8") as file:
        measured = list(csv.DictReader(file))
    rows = []
    for device in dict.fromkeys(r["device"] for r in measured):
        profile = load_profile(device)
        hosts = {"profile": profile.overheads, "traced": with_traced_ops(profile.overheads)}
        rows += [_row(r, profile, hosts) for r in measured if r["device"] == device]
    return rows


def with_traced_ops(table: OverheadTable) -> OverheadTable:
    """Host times of convolutions and batch normalisations from a trace of ResNet-50 on another V100 machine."""
    from perfcore.trace.kineto import read_kineto
    from perfcore.trace.write_profile import overheads_of

    traced = overheads_of([read_kineto(TRACE)], table, skip_steps=1).by_op
    return replace(table, by_op={**table.by_op, **{op: traced[old] for op, old in TRACED_OPS.items()}})


def _row(row: dict[str, str], profile: Profile, hosts: dict[str, OverheadTable]) -> dict[str, Any]:
    import numpy as np
    from networks import NETWORKS, training_step

    from perfcore.schedule import schedule
    from perfcore.steps import compile_steps

    graph = training_step(NETWORKS[row["network"]](int(row["batch"])))
    priced = profile.cost_model().predict_us([launch.kernel for launch in graph.launches()])
    durations_us = [np.reshape(us, (1, 1)) for us in priced]
    measured_ms = float(row["measured_ms"])
    out: dict[str, Any] = {
        "device": row["device"],
        "network": row["network"],
        "batch": int(row["batch"]),
        "measured_ms": measured_ms,
    }
    for host in HOSTS:
        timeline = schedule(compile_steps(graph, durations_us, hosts[host]))
        predicted_ms = float(timeline.iteration_time_us.reshape(-1)[0]) / 1e3
        out[f"{host}_ms"] = round(predicted_ms, 3)
        out[f"{host}_error_pct"] = round(100 * (predicted_ms / measured_ms - 1), 2)
    share = row["measured_active_share"]
    return out | {
        "published_abs_error_pct": float(row["published_abs_error_pct"]),
        "habitat_abs_error_pct": float(row["habitat_abs_error_pct"]),
        "active_ms": round(float(sum(us.sum() for us in durations_us)) / 1e3, 3),
        "measured_active_ms": round(measured_ms * float(share), 3) if share else None,
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """GMAE and MAPE by device, ours beside the published predictors'."""
    from scores import gmae, mape

    out = {}
    for device in [*dict.fromkeys(r["device"] for r in rows), "all"]:
        chosen = [r for r in rows if device in (r["device"], "all")]
        columns = {h: f"{h}_error_pct" for h in HOSTS} | {
            n: f"{n}_abs_error_pct" for n in ("published", "habitat")
        }
        out[device] = {
            f"{name}_{kind}_pct": how([r[column] for r in chosen])
            for name, column in columns.items()
            for kind, how in (("gmae", gmae), ("mape", mape))
        }
    return out


def draw(rows: list[dict[str, Any]]) -> None:
    """Predicted against measured: a mark a device, filled for ResNet-50; lines reach to the other host's prediction."""
    from figures import new_figure, save

    figure, axes = new_figure(width=5.0, height=4.5)
    axis = axes[0][0]
    for device, mark in zip(dict.fromkeys(r["device"] for r in rows), "os^", strict=True):
        for network, fill in (("resnet50", "full"), ("inception_v3", "none")):
            chosen = [r for r in rows if (r["device"], r["network"]) == (device, network)]
            measured = [r["measured_ms"] for r in chosen]
            [line] = axis.plot(
                measured,
                [r["traced_ms"] for r in chosen],
                mark,
                fillstyle=fill,
                label=f"{device}, {network}",
            )
            axis.vlines(
                measured,
                [r["profile_ms"] for r in chosen],
                [r["traced_ms"] for r in chosen],
                color=line.get_color(),
            )
    ends = [50, 600]
    axis.plot(ends, ends, color="grey", linewidth=0.8)
    axis.fill_between(ends, [0.8 * e for e in ends], [1.2 * e for e in ends], color="grey", alpha=0.15)
    axis.set(xscale="log", yscale="log", xlabel="measured step, ms", ylabel="predicted, ms")
    axis.legend(frameon=False)
    save(figure, HERE / "figure.svg")


def main() -> None:
    """Print the table, write `results.json` and the figure."""
    rows = predict_rows()
    print(
        "device           network      batch  measured   profile error %    traced error % published  active measured"
    )
    for r in rows:
        active = "" if r["measured_active_ms"] is None else f"{r['measured_active_ms']:.1f}"
        print(
            f"{r['device']:16s} {r['network']:12s} {r['batch']:5d} {r['measured_ms']:9.1f} {r['profile_ms']:9.1f} "
            f"{r['profile_error_pct']:7.1f} {r['traced_ms']:9.1f} {r['traced_error_pct']:7.1f} "
            f"{r['published_abs_error_pct']:9.1f} {r['active_ms']:7.1f} {active:>8s}"
        )
    totals = summary(rows)
    for device, t in totals.items():
        cells = "   ".join(
            f"{n} {t[f'{n}_gmae_pct']:.1f} / {t[f'{n}_mape_pct']:.1f}"
            for n in (*HOSTS, "published", "habitat")
        )
        print(f"{device:16s} GMAE / MAPE, %: {cells}")
    (HERE / "results.json").write_text(json.dumps({"rows": rows, "summary": totals}, indent=1) + "\n")
    draw(rows)


if __name__ == "__main__":
    main()
