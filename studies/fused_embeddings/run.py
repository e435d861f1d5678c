"""Sweeps batch size for per-table and table-batched embeddings on V100 and A100.

python studies/fused_embeddings/run.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

DEVICES = ("v100-sxm2-16gb", "a100-sxm4-80gb")
FUSIONS = ("per_table", "table_batched")
BATCHES = tuple(2**power for power in range(8, 17))


def sweep() -> list[dict[str, Any]]:
    """Iteration time and what bounds it, one row per device, fusion and batch size."""
    from dse.config import load_design
    from dse.placement import plan_for
    from perfcore.predictor import Predictor
    from perfcore.profile.profile import profile_for

    rows = []
    for device in DEVICES:
        for fusion in FUSIONS:
            for batch in BATCHES:
                overrides = [
                    f"system.device={device}",
                    f"fusion.embedding={fusion}",
                    f"training.global_batch={batch}",
                ]
                design = load_design(HERE / "design.yaml", overrides=overrides, place=plan_for)
                p = Predictor(profile_for(design.system.device, design.system.node)).predict(design)
                rows.append(
                    {
                        "device": device,
                        "fusion": fusion,
                        "global_batch": batch,
                        "iteration_time_ms": round(p.iteration_time_us / 1e3, 4),
                        "host_ms": round(p.host.total_us / 1e3, 4),
                        "device_active_ms": round(p.device_active_us / 1e3, 4),
                        "bound_by": p.bound_by,
                        "fits": p.fits,
                    }
                )
    return rows


def answers(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Speed-up of table-batched over per-table, by device and batch size."""
    times = {(r["device"], r["fusion"], r["global_batch"]): r["iteration_time_ms"] for r in rows}
    return [
        {
            "device": device,
            "global_batch": batch,
            "speedup": round(times[device, "per_table", batch] / times[device, "table_batched", batch], 3),
        }
        for device in DEVICES
        for batch in BATCHES
    ]


def draw(rows: list[dict[str, Any]]) -> None:
    """Iteration time over batch size, one panel a device."""
    from figures import new_figure, save

    figure, axes = new_figure(len(DEVICES), width=4.5, height=3.5)
    for axis, device in zip(axes[0], DEVICES, strict=True):
        for fusion, colour in zip(FUSIONS, ("tab:orange", "tab:blue"), strict=True):
            chosen = [r for r in rows if r["device"] == device and r["fusion"] == fusion]
            batches = [r["global_batch"] for r in chosen]
            axis.plot(batches, [r["iteration_time_ms"] for r in chosen], "o-", color=colour, label=fusion)
            active = [r["device_active_ms"] for r in chosen]
            axis.plot(batches, active, ":", color=colour, label=f"{fusion}, device active")
        axis.set(title=device, xlabel="batch size", xscale="log", yscale="log")
        axis.set_xscale("log", base=2)
    axes[0][0].set_ylabel("ms an iteration")
    axes[0][0].legend(frameon=False, fontsize=7)
    save(figure, HERE / "figure.svg")


def main() -> None:
    """Print the speed-ups, write `results.json` and the figure."""
    rows = sweep()
    speedups = answers(rows)
    print(f"{'device':16s} {'batch':>6s} {'per_table ms':>13s} {'batched ms':>11s} {'speed-up':>9s}")
    times = {(r["device"], r["fusion"], r["global_batch"]): r["iteration_time_ms"] for r in rows}
    for s in speedups:
        key = s["device"], s["global_batch"]
        print(
            f"{s['device']:16s} {s['global_batch']:6d} {times[key[0], FUSIONS[0], key[1]]:13.2f} "
            f"{times[key[0], FUSIONS[1], key[1]]:11.2f} {s['speedup']:9.2f}"
        )
    (HERE / "results.json").write_text(json.dumps({"rows": rows, "speedups": speedups}, indent=1) + "\n")
    draw(rows)


if __name__ == "__main__":
    main()
