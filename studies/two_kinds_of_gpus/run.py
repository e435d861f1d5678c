"""Prices a job on two kinds of GPUs by the kernels of each, and by one factor for the slower kind.

python studies/two_kinds_of_gpus/run.py
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from perfcore.design.design import Design
    from perfcore.predictor import Predictor

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

DESIGN = HERE.parents[1] / "spaces" / "designs" / "criteo_8gpu.yaml"
PAIRS = (("h100-sxm", "a100-sxm4-80gb"), ("a100-sxm4-80gb", "v100-sxm2-32gb"))
SLOW = np.arange(8) >= 4  # half of the ranks
_WIDE = ("model.bottom_hidden=[2048,1024]", "model.top_hidden=[4096,4096,2048]")
SETTINGS: dict[str, tuple[str, ...]] = {
    "as it is": (),
    "fp32": ("training.precision=fp32",),
    "an eighth of the batch": ("training.global_batch=8192",),
    "... and a CUDA graph": ("training.global_batch=8192", "fusion.launches=cuda_graph"),
    "wide layers": _WIDE,
    "wide layers, a quarter of the batch": (*_WIDE, "training.global_batch=16384"),
}


def predictor_of(gpu: str) -> Predictor:
    """Prices a GPU of the catalogue in its usual machine."""
    from perfcore.design import hardware
    from perfcore.predictor import Predictor
    from perfcore.profile.profile import profile_for

    return Predictor(profile_for(hardware.device(gpu), hardware.default_node(gpu)))


def design_on(gpu: str, settings: tuple[str, ...]) -> Design:
    """The design on eight such GPUs, its tables placed by the policy `auto`."""
    from dse.config import load_design
    from dse.placement import plan_for

    return load_design(DESIGN, overrides=[f"system.device={gpu}", *settings], place=plan_for)


def own_kernels(design: Design, fast: Predictor, slow: Predictor) -> tuple[float, float]:
    """Iteration time in µs with each rank's kernels priced for its own GPU, and how much longer the slower GPU's take.

    The latter is the ratio of the kernel times of all ranks together, collectives apart: what a person finds who
    predicts the design on one kind and on the other.
    """
    from perfcore.graph.dlrm import graph_of
    from perfcore.graph.kernels import Collective, resolve
    from perfcore.schedule import compile_steps, schedule

    graph = graph_of(design)
    kernels = [resolve(launch.kernel) for launch in graph.launches()]
    shared = [isinstance(kernel, Collective) for kernel in kernels]
    both = [
        (np.broadcast_to(a, (1, len(SLOW))), np.broadcast_to(b, (1, len(SLOW))))
        for a, b in zip(fast.cost.predict_us(kernels), slow.cost.predict_us(kernels), strict=True)
    ]
    mixed = [a if same else np.where(SLOW, b, a) for same, (a, b) in zip(shared, both, strict=True)]
    totals = np.sum(
        [(a.sum(), b.sum()) for same, (a, b) in zip(shared, both, strict=True) if not same], axis=0
    )
    steps = compile_steps(graph, mixed, fast.profile.overheads)
    return float(schedule(steps).iteration_time_us[0]), float(totals[1] / totals[0])


def slowed(design: Design, factor: float) -> Design:
    """The design with one factor for its slower half."""
    slowness = tuple(np.where(SLOW, factor, 1.0).tolist())
    return replace(design, system=replace(design.system, slowness=slowness))


def sweep() -> list[dict[str, Any]]:
    """A row for each pair of GPUs and each setting."""
    return [row for pair in PAIRS for row in _of_pair(*pair)]


def _of_pair(quick: str, old: str) -> list[dict[str, Any]]:
    from dse.placement import plan_for

    fast, slow, rows, first = predictor_of(quick), predictor_of(old), [], 0.0
    for name, settings in SETTINGS.items():
        design = design_on(quick, settings)
        own_us, factor = own_kernels(design, fast, slow)
        first = first or factor
        said = slowed(design, factor)
        placed = plan_for(said.model, said.training, said.system, "auto", said.fusion)
        rows.append(
            {
                "fast": quick,
                "slow": old,
                "setting": name,
                "factor": round(factor, 3),
                "fast_alone_ms": round(fast.iteration_time_us(design) / 1e3, 3),
                "own_kernels_ms": round(own_us / 1e3, 3),
                "one_factor_ms": round(fast.iteration_time_us(said) / 1e3, 3),
                "first_factor_ms": round(fast.iteration_time_us(slowed(design, first)) / 1e3, 3),
                "placed_anew_ms": round(
                    own_kernels(replace(design, sharding=placed), fast, slow)[0] / 1e3, 3
                ),
            }
        )
    return rows


def draw(rows: list[dict[str, Any]]) -> None:
    """Errors of one factor, per setting and pair."""
    from figures import new_figure, save

    figure, axes = new_figure(len(PAIRS), width=5.0, height=3.2)
    for axis, (quick, old) in zip(axes[0], PAIRS, strict=True):
        own = [r for r in rows if (r["fast"], r["slow"]) == (quick, old)]
        places = np.arange(len(own))
        for shift, key, label in (
            (-0.2, "one_factor_ms", "the setting's own factor"),
            (0.2, "first_factor_ms", "the first setting's factor for all"),
        ):
            errors = [100 * (r[key] / r["own_kernels_ms"] - 1) for r in own]
            axis.barh(places + shift, errors, height=0.38, label=label)
        axis.set_yticks(places, [f"{r['setting']} ({r['factor']:.2f})" for r in own])
        axis.invert_yaxis()
        axis.axvline(0, color="#333", linewidth=0.8)
        axis.set_title(f"four {quick} beside four {old}")
        axis.set_xlabel("iteration time against kernels of each GPU (%)")
    axes[0][1].legend(loc="upper right")
    save(figure, HERE / "figure.svg")


def main() -> None:
    """Sweep, store, draw, print."""
    rows = sweep()
    (HERE / "results.json").write_text(json.dumps({"rows": rows}, indent=1) + "\n", encoding="utf-8")
    draw(rows)
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()
