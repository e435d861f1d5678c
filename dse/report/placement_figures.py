"""The figures of a placement's page, drawn with plotly."""

from __future__ import annotations

from typing import Any

import numpy as np

from dse.placement.report.build import PlanReport
from dse.placement.solver.problem import Array
from dse.report.figures import BLUE, FONT, GREY

MANY_RANKS, READABLE_RANKS = 128, 32  # above which bars touch, and ticks are left to plotly


def draw_heat(report: PlanReport) -> str:
    """Load of every rank by event."""
    import plotly.graph_objects as go

    order = [*(report.used_events or (0,))][::-1]
    names = [report.events[e] for e in order]
    figure = go.Figure(
        go.Heatmap(
            z=report.load_ms[:, order].T.round(6).tolist(), y=names, x=list(range(len(report.ranks))),
            colorscale=[[0, "#f3f7fb"], [0.5, "#56b4e9"], [1, "#003a5c"]], zmin=0, xgap=1 if len(report.ranks) <= 64 else 0, ygap=1,
            colorbar={"title": {"text": "ms", "side": "top"}, "thickness": 12},
            hovertemplate="rank %{x}, %{y}: %{z:.4~g} ms<extra></extra>",
        )
    )  # fmt: skip
    slowest = report.load_ms[:, order].max(axis=0)
    shares = 100 * report.load_ms[:, order] / np.where(slowest > 0, slowest, 1.0)
    figure.update_layout(updatemenus=[_switch(report.load_ms[:, order], shares)])
    figure.update_xaxes(title_text="rank", dtick=1 if len(report.ranks) <= READABLE_RANKS else None)
    return _html(figure, "heat", height=150 + 30 * len(names), top=60)


def _switch(load_ms: Array, shares: Array) -> dict[str, Any]:
    """Buttons: time, or share of each event's slowest rank."""
    views = (("time", load_ms, "ms", 0.0), ("share of the slowest", shares, "%", float(shares.min())))
    buttons = [
        {
            "label": label,
            "method": "restyle",
            "args": [
                {
                    "z": [values.T.round(6).tolist()],
                    "zmin": [low],
                    "zmax": [float(values.max())],
                    "colorbar.title.text": [unit],
                    "hovertemplate": [f"rank %{{x}}, %{{y}}: %{{z:.4~g}} {unit}<extra></extra>"],
                }
            ],
        }
        for label, values, unit, low in views
    ]
    place = {
        "type": "buttons",
        "direction": "right",
        "x": 1,
        "xanchor": "right",
        "y": 1.02,
        "yanchor": "bottom",
    }
    return place | {"buttons": buttons, "bgcolor": "#fff", "bordercolor": "#dfe3e8", "font": {"size": 12}}


def draw_memory(report: PlanReport) -> str:
    """Memory of every rank beside what it has."""
    import plotly.graph_objects as go

    ranks = [r.rank for r in report.ranks]
    figure = go.Figure()
    figure.add_bar(
        x=ranks, y=[round(r.hbm_gib, 4) for r in report.ranks], name="tables", marker={"color": BLUE, "line": {"width": 0}},
        hovertemplate="rank %{x}: %{y:.4~g} GiB<extra></extra>",
    )  # fmt: skip
    figure.add_scatter(
        x=ranks, y=[round(r.capacity_gib, 4) for r in report.ranks], name="room", mode="lines",
        line={"color": "#333", "dash": "dash", "width": 1.5, "shape": "hvh"}, hovertemplate="room on rank %{x}: %{y:.4~g} GiB<extra></extra>",
    )  # fmt: skip
    figure.update_xaxes(title_text="rank", dtick=1 if len(ranks) <= READABLE_RANKS else None)
    figure.update_yaxes(title_text="GiB", rangemode="tozero")
    figure.update_layout(showlegend=True, bargap=0.25 if len(ranks) <= MANY_RANKS else 0)
    return _html(figure, "memory", height=300)


def _html(figure: Any, div_id: str, *, height: int, top: int = 34) -> str:
    """A fragment that needs plotly on the page."""
    import plotly.io

    figure.update_layout(
        template="plotly_white", height=height, font={"family": FONT, "size": 13, "color": "#1f2933"},
        margin={"l": 10, "r": 20, "t": top, "b": 48}, hoverlabel={"font": {"family": FONT}, "align": "left"},
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.0, "x": 0},
    )  # fmt: skip
    figure.update_xaxes(automargin=True, showgrid=False)
    figure.update_yaxes(automargin=True, gridcolor=GREY)
    html: str = plotly.io.to_html(
        figure,
        include_plotlyjs=False,
        full_html=False,
        div_id=div_id,
        config={"displayModeBar": False, "responsive": True},
    )
    return html
