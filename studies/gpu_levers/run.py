"""Doubles one number of a GPU, its links or its host at a time, places the tables anew, and predicts the iteration.

python studies/gpu_levers/run.py
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perfcore.design.design import Design
    from perfcore.design.hardware import Device, Node
    from perfcore.profile.profile import Profile

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

DESIGNS = HERE.parents[1] / "spaces" / "designs"
GRAPH = "CUDA graph"  # no hardware at all: the same GPU and host, the iteration captured and replayed
GPUS = ("a100-sxm4-80gb", "h100-sxm", "b200-sxm")
WORKLOADS: dict[str, tuple[str, ...]] = {
    "criteo_8gpu": (),
    "mlperf_dlrm_dcnv2": ("fusion.launches=eager",),
    "nvidia_dlrm_small": (
        "training.program=pytorch",
        "training.synchronize=false",
        "fusion.optimizer=foreach",
    ),
    "dlrm_default": ("training.global_batch=2048", "training.program=pytorch"),
}


def _multiprocessors(device: Device) -> Device:
    return replace(
        device,
        sm_count=2 * device.sm_count,
        fp32_flops_per_s=2 * device.fp32_flops_per_s,
        tf32_flops_per_s=2 * device.tf32_flops_per_s,
        bf16_flops_per_s=2 * device.bf16_flops_per_s,
    )


def _cache(device: Device) -> Device:
    return replace(device, l2_bytes=2 * device.l2_bytes, l2_bytes_per_s=2 * device.l2_bytes_per_s)


def _everything(device: Device) -> Device:
    more = _cache(_multiprocessors(device))
    return replace(more, hbm_bytes_per_s=2 * more.hbm_bytes_per_s, h2d_bytes_per_s=2 * more.h2d_bytes_per_s)


def _links(node: Node) -> Node:
    more = replace(node, intra_bytes_per_s=2 * node.intra_bytes_per_s)
    return replace(more, intra_latency_us=node.intra_latency_us / 2)


def _same(value: Any) -> Any:
    return value


LEVERS: dict[str, tuple[Callable[[Device], Device], Callable[[Node], Node], float]] = {
    "as it is": (_same, _same, 1.0),
    "multiprocessors": (_multiprocessors, _same, 1.0),
    "memory bandwidth": (lambda d: replace(d, hbm_bytes_per_s=2 * d.hbm_bytes_per_s), _same, 1.0),
    "cache": (_cache, _same, 1.0),
    "links": (_same, lambda n: replace(n, intra_bytes_per_s=2 * n.intra_bytes_per_s), 1.0),
    "link latency": (_same, lambda n: replace(n, intra_latency_us=n.intra_latency_us / 2), 1.0),
    "host-to-device copies": (lambda d: replace(d, h2d_bytes_per_s=2 * d.h2d_bytes_per_s), _same, 1.0),
    "all but the host": (_everything, _links, 1.0),
    "host": (_same, _same, 0.5),
    GRAPH: (_same, _same, 1.0),
}


def changed(design: Design, lever: str) -> tuple[Design, Profile]:
    """The design on a GPU that nobody has built, its tables placed anew, and the profile that prices it."""
    from dse.placement import plan_for
    from perfcore.overheads import scaled
    from perfcore.profile.profile import profile_for

    of_device, of_node, host = LEVERS[lever]
    system = design.system
    device = of_device(replace(system.device, name=f"{system.device.name} and more"))
    node = of_node(replace(system.node, name=f"{system.node.name} and more", device=device.name))
    moved = replace(system, device=device, node=node)
    plan = plan_for(design.model, design.training, moved, policy="auto", fusion=design.fusion)
    profile = profile_for(device, node)
    return (
        replace(design, system=moved, sharding=plan),
        replace(profile, overheads=scaled(profile.overheads, host)),
    )


def sweep(gpus: Sequence[str] = GPUS, workloads: Sequence[str] = tuple(WORKLOADS)) -> list[dict[str, Any]]:
    """Iteration time of every workload on every GPU with every lever, one row each."""
    from dse.config import load_design
    from dse.placement import plan_for
    from perfcore.design.training import Launches
    from perfcore.predictor import Predictor

    rows = []
    for gpu in gpus:
        for workload in workloads:
            overrides = [f"system.device={gpu}", *WORKLOADS[workload]]
            design = load_design(DESIGNS / f"{workload}.yaml", overrides=overrides, place=plan_for)
            for lever in LEVERS:
                fusion = replace(
                    design.fusion, launches=Launches.CUDA_GRAPH if lever == GRAPH else Launches.EAGER
                )
                moved, profile = changed(replace(design, fusion=fusion), lever)
                p = Predictor(profile).predict(moved)
                time_ms = round(p.iteration_time_us / 1e3, 4)
                rows.append(
                    {
                        "gpu": gpu,
                        "workload": workload,
                        "lever": lever,
                        "iteration_time_ms": time_ms,
                        "bound_by": p.bound_by,
                    }
                )
    return rows


def answers(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """By how many percent each lever shortens the iteration."""
    base = {
        (r["gpu"], r["workload"]): r["iteration_time_ms"] for r in rows if r["lever"] == next(iter(LEVERS))
    }
    return [
        {
            "gpu": r["gpu"],
            "workload": r["workload"],
            "lever": r["lever"],
            "shorter_pct": round(100 * (1 - r["iteration_time_ms"] / base[r["gpu"], r["workload"]]), 2),
        }
        for r in rows
        if r["lever"] != next(iter(LEVERS))
    ]


def draw(gains: list[dict[str, Any]]) -> None:
    """Gains by lever, one panel a workload, one bar a GPU."""
    from figures import new_figure, save

    levers = list(LEVERS)[1:]
    figure, axes = new_figure(len(WORKLOADS), width=3.0, height=3.2)
    for axis, workload in zip(axes[0], WORKLOADS, strict=True):
        for i, (gpu, colour) in enumerate(zip(GPUS, ("tab:blue", "tab:orange", "tab:green"), strict=True)):
            values = [g["shorter_pct"] for g in gains if (g["gpu"], g["workload"]) == (gpu, workload)]
            places = [j + 0.27 * (i - 1) for j in range(len(levers))]
            axis.barh(places, values, height=0.25, color=colour, label=gpu)
        axis.set(title=workload, xlabel="% shorter", yticks=range(len(levers)), yticklabels=levers)
        axis.invert_yaxis()
        if axis is not axes[0][0]:
            axis.set_yticklabels([])
    axes[0][0].legend(frameon=False, fontsize=7)
    save(figure, HERE / "figure.svg")


def main() -> None:
    """Print the gains, write `results.json` and the figure."""
    rows = sweep()
    gains = answers(rows)
    names = list(LEVERS)[1:]
    print(f"{'GPU':16s} {'workload':18s} {'ms':>8s}  " + "  ".join(names))
    for row in rows:
        if row["lever"] in names:
            continue
        own = {
            g["lever"]: g["shorter_pct"] for g in gains if all(g[k] == row[k] for k in ("gpu", "workload"))
        }
        cells = "  ".join(f"{own[n]:{len(n)}.1f}" for n in names)
        print(f"{row['gpu']:16s} {row['workload']:18s} {row['iteration_time_ms']:8.2f}  {cells}")
    (HERE / "results.json").write_text(json.dumps({"rows": rows, "gains": gains}, indent=1) + "\n")
    draw(gains)


if __name__ == "__main__":
    main()
