"""What the figures of all studies share: matplotlib without a display, reproducible SVG."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def new_figure(columns: int = 1, *, width: float = 6.0, height: float = 4.0) -> tuple[Any, Any]:
    """A figure and its axes, one row."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams.update({"svg.hashsalt": "dlrm-dse", "font.size": 9, "axes.spines.top": False})
    mpl.rcParams.update({"axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.3})
    from matplotlib import pyplot

    return pyplot.subplots(1, columns, figsize=(width * columns, height), squeeze=False)


def save(figure: Any, path: Path) -> None:
    """Write an SVG without a date, so that a re-run gives the same file."""
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
