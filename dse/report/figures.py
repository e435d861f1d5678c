"""The report's figures: first computed, as plain values, then drawn with plotly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dse.report.breakdown import COMMUNICATION, HOST, IDLE, Breakdown
from dse.report.data import RunFiles, row_of
from dse.report.importance import Importance
from dse.report.words import axis_label, compact, label, number

if TYPE_CHECKING:
    import pandas as pd

Array: TypeAlias = NDArray[np.float64]

QUALITY, UNCERTAINTY = "quality_loss", "quality_std"
MAX_CLOUD = 3_000
LEGEND_COLUMNS = 4
# Okabe and Ito's palette, which colour-blind readers tell apart.
BLUE, ORANGE, GREEN, YELLOW, SKY, RED, PINK, GREY = (
    "#0072b2", "#e69f00", "#009e73", "#f0e442", "#56b4e9", "#d55e00", "#cc79a7", "#b8bec6",
)  # fmt: skip
PARTS = (BLUE, SKY, GREEN, YELLOW, PINK, "#7a5195", "#8c6d31", "#5c940d", "#495057")
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"


@dataclass(frozen=True, slots=True, eq=False)
class Cloud:
    """Candidates beside the front: `(k,)` coordinates."""

    x: Array
    y: Array


@dataclass(frozen=True, slots=True, eq=False)
class Pareto:
    """The front in its first two objectives, sorted by x.

    Attributes:
        x: `(k,)` first objective.
        y: `(k,)` second one; the memory where there is no second.
        band: `(k,)` one standard deviation of y, `None` where y is certain.
        texts: for each row what a reader sees on pointing at it.
        knee: position of the knee.
        feasible: candidates beside the front.
        infeasible: likewise.
        x_label: with unit.
        y_label: with unit.
        log_x: x spans more than a factor of eight.
    """

    x: Array
    y: Array
    band: Array | None
    texts: tuple[str, ...]
    knee: int | None
    feasible: Cloud
    infeasible: Cloud
    x_label: str
    y_label: str
    log_x: bool


def second_metric(run: RunFiles) -> str:
    """What the front is drawn against: the second objective, else the memory."""
    return run.objectives[1].metric if len(run.objectives) > 1 else "hbm_gib"


def compute_pareto(run: RunFiles) -> Pareto:
    """Points, band and texts of the front and of the candidates beside it."""
    x_name, y_name = run.objectives[0].metric, second_metric(run)
    x, y = (run.front[name].to_numpy(dtype=np.float64) for name in (x_name, y_name))
    order = np.argsort(x, kind="stable")
    banded = y_name == QUALITY and UNCERTAINTY in run.front
    texts = [_hover(run, i) for i in order]
    clouds = [_cloud(run, x_name, y_name, feasible=wanted) for wanted in (True, False)]
    everything = np.concatenate([x, *(cloud.x for cloud in clouds)])
    spread = everything.max() / everything.min() if everything.min() > 0 else 1.0
    return Pareto(
        x=x[order],
        y=y[order],
        band=run.front[UNCERTAINTY].to_numpy(dtype=np.float64)[order] if banded else None,
        texts=tuple(texts),
        knee=None if run.knee is None else int(np.flatnonzero(order == run.knee)[0]),
        feasible=clouds[0],
        infeasible=clouds[1],
        x_label=label(x_name),
        y_label=label(y_name),
        log_x=bool(spread > 8),
    )


def _hover(run: RunFiles, index: int) -> str:
    row = row_of(run, index)
    metrics = [o.metric for o in run.objectives]
    metrics += [
        m for m in ("iteration_time_ms", "samples_per_second", "hbm_gib") if m in row and m not in metrics
    ]
    lines = [f"<b>row {int(row['row'])}</b>"] + [f"{label(m)}: {number(float(row[m]))}" for m in metrics]
    return "<br>".join(lines + [f"{k}: {v}" for k, v in compact(row, run.axes).items()])


def _cloud(run: RunFiles, x_name: str, y_name: str, *, feasible: bool) -> Cloud:
    table = None if run.candidates is None else run.candidates.table
    if table is None or x_name not in table or y_name not in table:
        return Cloud(np.empty(0), np.empty(0))
    rows = table[table["feasible"] == int(feasible)].head(MAX_CLOUD)
    points = rows[[x_name, y_name]].to_numpy(dtype=np.float64)
    points = points[np.isfinite(points).all(axis=1)]
    return Cloud(points[:, 0], points[:, 1])


def draw_pareto(points: Pareto) -> str:
    """The front as an HTML fragment."""
    import plotly.graph_objects as go

    figure = go.Figure()
    for cloud, name, colour, symbol in (
        (points.infeasible, "does not fit", RED, "x-thin-open"),
        (points.feasible, "feasible, beaten", GREY, "circle"),
    ):
        if len(cloud.x):
            marker = {"color": colour, "size": 5, "symbol": symbol, "opacity": 0.55}
            figure.add_scatter(
                x=cloud.x.tolist(),
                y=cloud.y.tolist(),
                mode="markers",
                name=name,
                marker=marker,
                hoverinfo="skip",
            )
    if points.band is not None:
        low, high = points.y - points.band, points.y + points.band
        figure.add_scatter(
            x=[*points.x.tolist(), *points.x[::-1].tolist()], y=[*high.tolist(), *low[::-1].tolist()], fill="toself",
            fillcolor="rgba(0,114,178,0.13)", line={"width": 0}, name="± 1 standard deviation", hoverinfo="skip",
        )  # fmt: skip
    figure.add_scatter(
        x=points.x.tolist(), y=points.y.tolist(), mode="lines+markers", name="Pareto front",
        line={"color": BLUE, "width": 1.5, "shape": "hv"}, marker={"size": 7, "color": BLUE},
        text=list(points.texts), hovertemplate="%{text}<extra></extra>",
    )  # fmt: skip
    if points.knee is not None:
        x, y = float(points.x[points.knee]), float(points.y[points.knee])
        figure.add_scatter(
            x=[x], y=[y], mode="markers", name="knee", text=[points.texts[points.knee]], hovertemplate="%{text}<extra></extra>",
            marker={"size": 15, "symbol": "star", "color": ORANGE, "line": {"width": 1, "color": "#333"}},
        )  # fmt: skip
    figure.update_xaxes(title_text=points.x_label, type="log" if points.log_x else "linear")
    figure.update_yaxes(title_text=points.y_label)
    return html_of(figure, "pareto", height=520)


@dataclass(frozen=True, slots=True)
class Stacks:
    """Stacked bars: for each series one value per design, and what the bars' ends are."""

    names: tuple[str, ...]
    series: dict[str, tuple[float, ...]]
    unit: str


def compute_stacks(designs: Sequence[Breakdown], names: Sequence[str], *, host: bool) -> Stacks:
    """Time per sample by part, so that bars of different batches compare."""
    maps = [d.host_ms if host else d.device_ms for d in designs]
    tail = () if host else (COMMUNICATION, IDLE)
    parts = list(HOST) if host else [*dict.fromkeys(p for m in maps for p in m if p not in tail), *tail]
    per_sample = [1e6 / d.global_batch for d in designs]
    series = {
        p: tuple(m.get(p, 0.0) * scale for m, scale in zip(maps, per_sample, strict=True)) for p in parts
    }
    return Stacks(tuple(names), {p: v for p, v in series.items() if max(v) > 0}, "ns per sample")


def compute_memory(designs: Sequence[Breakdown], names: Sequence[str]) -> Stacks:
    """Memory of the fullest GPU by kind."""
    kinds = [k for k in designs[0].memory_gib if any(d.memory_gib[k] > 0 for d in designs)]
    series = {k.replace("_", " "): tuple(d.memory_gib[k] for d in designs) for k in kinds}
    return Stacks(tuple(names), series, "GiB on the fullest GPU")


def draw_stacks(stacks: Stacks, *, div_id: str, limit: float | None = None) -> str:
    """Horizontal stacked bars; idle and waiting time in grey, `limit` as a line."""
    import plotly.graph_objects as go

    figure = go.Figure()
    colours = iter(PARTS * 3)
    for part, values in stacks.series.items():
        colour = {IDLE: GREY, "waiting": GREY, COMMUNICATION: RED}.get(part) or next(colours)
        figure.add_bar(
            y=list(stacks.names), x=list(values), name=part, orientation="h", marker={"color": colour},
            hovertemplate=f"{part}: %{{x:.3~g}} {stacks.unit}<extra></extra>",
        )  # fmt: skip
    if limit is not None:
        figure.add_vline(x=limit, line={"color": "#333", "dash": "dash", "width": 1.5})
        figure.add_annotation(
            x=limit, y=1, yref="paper", yanchor="bottom", text="device memory", showarrow=False,
            font={"size": 12, "color": "#333"},
        )  # fmt: skip
    figure.update_layout(barmode="stack", bargap=0.35)
    figure.update_yaxes(autorange="reversed", ticksuffix="  ")
    figure.update_xaxes(title_text=stacks.unit)
    return html_of(figure, div_id, height=170 + 42 * len(stacks.names))


def draw_importance(importance: Importance) -> str:
    """Bars of explained shares, one colour an objective."""
    import plotly.graph_objects as go

    figure = go.Figure()
    names = [axis_label(a) for a in importance.axes]
    for (metric, shares), colour in zip(
        importance.shares.items(), (BLUE, ORANGE, GREEN, PINK, SKY), strict=False
    ):
        figure.add_bar(
            y=names, x=[100 * s for s in shares], name=label(metric), orientation="h", marker={"color": colour},
            hovertemplate="%{y}: %{x:.1f} %<extra></extra>",
        )  # fmt: skip
    figure.update_layout(barmode="group", bargap=0.3)
    figure.update_yaxes(autorange="reversed", ticksuffix="  ")
    figure.update_xaxes(
        title_text="share of the variance that the axis explains by itself (%)", rangemode="tozero"
    )
    return html_of(figure, "importance", height=140 + 34 * len(names))


def html_of(figure: Any, div_id: str, *, height: int) -> str:
    """A fragment that needs plotly on the page; the same figure gives the same text."""
    import plotly.io

    legend_rows = -(-len(figure.data) // LEGEND_COLUMNS)
    figure.update_layout(
        template="plotly_white", height=height, font={"family": FONT, "size": 13, "color": "#1f2933"},
        margin={"l": 10, "r": 20, "t": 20 + 24 * legend_rows, "b": 48}, hoverlabel={"font": {"family": FONT}, "align": "left"},
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.0, "x": 0, "traceorder": "normal", "entrywidth": 1 / LEGEND_COLUMNS, "entrywidthmode": "fraction"},
    )  # fmt: skip
    figure.update_xaxes(automargin=True)
    figure.update_yaxes(automargin=True)
    html: str = plotly.io.to_html(
        figure,
        include_plotlyjs=False,
        full_html=False,
        div_id=div_id,
        config={"displayModeBar": False, "responsive": True},
    )
    return html


def shown_rows(front: pd.DataFrame, knee: int | None, *, most: int) -> list[int]:
    """Rows with a design file: the first, the last, the knee, and others evenly between."""
    files = [i for i, f in enumerate(front["design"].tolist()) if isinstance(f, str) and f]
    if len(files) <= most:
        return files
    even = [files[i] for i in np.linspace(0, len(files) - 1, most - 1).round().astype(int)]
    return sorted({*even, *([knee] if knee in files else [])})
