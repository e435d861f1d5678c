"""Plot predicted over measured times of what the fits had not seen: one panel a kernel and device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfcore.profile.fit_tables import curves_left_out
from perfcore.profile.profile import POOLED
from perfcore.profile.schema import read_json

HELD_OUT = "held_out.json"
COLUMNS = 4
MEASURED = "nccl-tests"  # other sources hold a smooth fit, whose points tell each other
FACTOR_SHOWN = 1.6  # beyond it a point lies on the edge


def held_out_points(profiles: Path) -> dict[str, NDArray[np.float64]]:
    """`(p, 2)` predicted and measured µs by "kernel, device"."""
    stored = json.loads((profiles / POOLED / HELD_OUT).read_text(encoding="utf-8"))
    points = {name: np.array(rows) for name, rows in stored.items()}
    for path in sorted(profiles.glob("*/collectives.json")):
        collectives = read_json(path)
        if MEASURED in collectives.text("source"):
            left_out = curves_left_out(collectives.list_of_sections("curves"))
            points[f"collectives, {path.parent.name}"] = left_out
    return points


def plot(profiles: Path, path: Path) -> None:
    """Write the picture; equal profiles give equal files."""
    figure = _figure(held_out_points(profiles))
    figure.savefig(path, dpi=75, metadata={"Software": None})


def _figure(points: dict[str, NDArray[np.float64]]) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = -(-len(points) // COLUMNS)
    figure = Figure(figsize=(3.2 * COLUMNS, 2.2 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    for number, (name, values) in enumerate(points.items()):
        axes = figure.add_subplot(rows, COLUMNS, number + 1)
        _panel(axes, name, values)
        if number % COLUMNS == 0:
            axes.set_ylabel("predicted / measured", fontsize=8)
        if number >= len(points) - COLUMNS:
            axes.set_xlabel("measured, µs", fontsize=8)
    return figure


def _panel(axes: Any, name: str, values: NDArray[np.float64]) -> None:
    ratio = np.clip(values[:, 0] / values[:, 1], 1 / FACTOR_SHOWN, FACTOR_SHOWN)
    axes.axhspan(1 / 1.1, 1.1, color="0.9")
    axes.plot(values[:, 1], ratio, ".", markersize=3, color="C0")
    axes.set(xscale="log", yscale="log", ylim=(0.97 / FACTOR_SHOWN, 1.03 * FACTOR_SHOWN))
    axes.set_yticks([0.7, 0.9, 1.0, 1.1, 1.4], ["0.7", "0.9", "1", "1.1", "1.4"])
    axes.minorticks_off()
    axes.tick_params(labelsize=7)
    axes.set_title(name, fontsize=8)
