"""Searches one space on the node of each of six GPUs, joins the fronts, and asks what an epoch takes and costs.

python studies/which_gpu/run.py
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from numpy.typing import NDArray

    from dse.space import SearchSpace

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

GPUS = ("v100-sxm2-32gb", "a100-sxm4-80gb", "l40s", "h100-sxm", "h200-sxm", "b200-sxm")
LOSS, HOURS, COST = "quality_loss", "hours_per_epoch", "cost_per_epoch_usd"
LEVELS = (1.25, 1.05)  # times the smallest loss of the space: a small model, and nearly the largest
WIDTHS = tuple(f"model.top_hidden.{layer}" for layer in range(1, 5))
LAUNCHES = ("eager", "cuda_graph")


def fronts(gpus: tuple[str, ...] = GPUS) -> dict[tuple[str, str], pd.DataFrame]:
    """The front of every GPU's node, eager and captured, every design priced."""
    from dse.report.data import read_run
    from dse.search.evaluator import pricing_of
    from dse.search.request import RunRequest
    from dse.search.run import run_space

    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for gpu in gpus:
            for launches in LAUNCHES:
                request = RunRequest(
                    space_file=HERE / "space.yaml",
                    overrides=(f"system.device={gpu}", f"fusion.launches={launches}"),
                    runs_dir=Path(folder),
                    name=f"{gpu}-{launches}",
                    designs=1,
                )
                done = run_space(request, pricing_of=pricing_of, on_batch=lambda _config, _progress: None)
                found[gpu, launches] = read_run(done.run_dir).front
    return found


def answers(found: dict[tuple[str, str], pd.DataFrame]) -> list[dict[str, Any]]:
    """For each GPU, way to launch, and level of the loss: its fastest and its cheapest design."""
    least = min(float(front[LOSS].min()) for front in found.values())
    rows = []
    for (gpu, launches), front in found.items():
        for level in LEVELS:
            good = front[front[LOSS] <= level * least]
            for aim in (HOURS, COST) if len(good) else ():
                best = good.loc[good[aim].idxmin()]
                rows.append(
                    {
                        "gpu": gpu,
                        "launches": launches,
                        "level": level,
                        "aim": aim,
                        "hours": round(float(best[HOURS]), 4),
                        "usd": round(float(best[COST]), 3),
                        "gpus": int(best["world_size"]),
                        "batch": int(best["global_batch"]),
                        "dim": int(best["model.embedding_dim"]),
                        "top": [int(best[c]) for c in WIDTHS if best[c] > 0],
                    }
                )
    return rows


def hours_again(row: dict[str, Any]) -> float:
    """Hours of an epoch of one answer's design, predicted by itself."""
    from dse.candidate import design_of
    from dse.search.placing import SpacePlanner
    from dse.study_config import load_space
    from perfcore.predictor import Predictor
    from perfcore.profile.profile import profile_for

    overrides = [f"system.device={row['gpu']}", f"fusion.launches={row['launches']}"]
    config = load_space(HERE / "space.yaml", overrides=overrides)
    space = config.space
    wanted = {
        "model.embedding_dim": row["dim"],
        "model.top_hidden.depth": len(row["top"]),
        "training.global_batch": row["batch"],
        "system.world_size": row["gpus"],
    } | dict(zip(WIDTHS, row["top"], strict=False))
    codes = space.canonical(_codes(space, wanted))[0]
    profile = profile_for(space.device, space.node)
    design = design_of(space, codes, SpacePlanner(space, profile))
    iterations = config.circumstances.dataset_samples / row["batch"]
    return float(Predictor(profile).predict(design).iteration_time_us * iterations / 3.6e9)


def _codes(space: SearchSpace, wanted: dict[str, Any]) -> NDArray[np.int16]:
    import numpy as np

    codes = [[a.values.index(wanted[a.name]) if a.name in wanted else 0 for a in space.axes]]  # noqa: PD011
    return np.array(codes, np.int16)


def curves(found: dict[tuple[str, str], pd.DataFrame]) -> list[dict[str, Any]]:
    """For each GPU and way to launch the hours and dollars of what reaches the lower level of loss, the best by both."""
    import numpy as np

    from dse.pareto import pareto_mask

    least = min(float(front[LOSS].min()) for front in found.values())
    drawn = []
    for (gpu, launches), front in found.items():
        points = front[front[LOSS] <= LEVELS[1] * least][[HOURS, COST]].to_numpy(dtype=np.float64)
        points = points[pareto_mask(points)]
        points = points[np.argsort(points[:, 0], kind="stable")].round(4)
        drawn.append(
            {
                "gpu": gpu,
                "launches": launches,
                "hours": points[:, 0].tolist(),
                "usd": points[:, 1].tolist(),
            }
        )
    return drawn


def draw(drawn: list[dict[str, Any]]) -> None:
    """Hours and dollars, one panel a way to launch, one line a GPU."""
    from figures import new_figure, save
    from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

    figure, axes = new_figure(len(LAUNCHES), width=4.8, height=3.8)
    for axis, launches in zip(axes[0], LAUNCHES, strict=True):
        for gpu, marker in zip(GPUS, "ovsD^P", strict=True):
            (line,) = (d for d in drawn if (d["gpu"], d["launches"]) == (gpu, launches))
            axis.plot(line["hours"], line["usd"], marker=marker, markersize=5, linewidth=1, label=gpu)
        axis.set(xlabel="hours an epoch", xscale="log", yscale="log", title=launches)
        axis.set(xlim=(0.07, 0.9), ylim=(1.7, 14))
        for side, ticks in ((axis.xaxis, (0.1, 0.2, 0.4, 0.8)), (axis.yaxis, (2, 4, 8))):
            side.set_major_locator(FixedLocator(ticks))
            side.set_minor_locator(NullLocator())
            side.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes[0][0].set_ylabel("US$ an epoch")
    axes[0][0].legend(frameon=False, fontsize=7, loc="upper left")
    save(figure, HERE / "figure.svg")


def main() -> None:
    """Print the answers, write `results.json` and the figure."""
    found = fronts()
    rows = answers(found)
    print(
        f"{'GPU':16s} {'launches':10s} {'loss':>5s} {'aim':18s} {'hours':>8s} {'US$':>8s} {'GPUs':>5s} {'batch':>7s}"
    )
    for r in rows:
        print(
            f"{r['gpu']:16s} {r['launches']:10s} {r['level']:5.2f} {r['aim']:18s} {r['hours']:8.3f} {r['usd']:8.2f} {r['gpus']:5d} {r['batch']:7d}"
        )
    drawn = curves(found)
    (HERE / "results.json").write_text(json.dumps({"rows": rows, "curves": drawn}, indent=1) + "\n")
    draw(drawn)


if __name__ == "__main__":
    main()
