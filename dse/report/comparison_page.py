"""Runs beside each other as one HTML page, readable offline."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import resources
from string import Template
from typing import TYPE_CHECKING

import numpy as np

from dse.report.comparison import RUN, Comparison
from dse.report.figures import BLUE, GREEN, ORANGE, PINK, RED, SKY, html_of
from dse.report.markup import escaped, table_of
from dse.report.style import style
from dse.report.words import compact, label, number

if TYPE_CHECKING:
    import pandas as pd

MAX_ROWS = 40
COLOURS = (BLUE, ORANGE, GREEN, RED, PINK, SKY, "#7a5195", "#8c6d31", "#495057")


def comparison_page(found: Comparison) -> str:
    """The whole page; the same runs give the same text."""
    from plotly.offline import get_plotlyjs

    text = resources.files("dse.report").joinpath("comparison_template.html").read_text(encoding="utf-8")
    return Template(text).substitute(
        style=style(),
        title=escaped(" | ".join(r.name for r in found.runs)),
        subtitle=escaped(_subtitle(found)),
        fronts=_fronts(found),
        runs=_runs(found),
        ratios_note=escaped(ratios_note(found)),
        ratios=_ratios(found),
        table_note=escaped(_table_note(found)),
        table=_table(found),
        own=_own(found),
        plotly=get_plotlyjs(),
    )


def ratios_note(found: Comparison) -> str:
    """What the table of ratios says, in words."""
    first, *rest = (label(o.metric) for o in found.objectives)
    at = f"at no worse {' and '.join(rest)}" if rest else "of the best designs"
    return (
        f"Each row's run beside each column's, {at}: the ratio of {first}, the median over the column's front "
        f"({'less' if found.objectives[0].minimize else 'more'} than 1 is better for the row)."
    )


def _subtitle(found: Comparison) -> str:
    members = sum(r.members for r in found.runs)
    return f"{members} designs of {len(found.runs)} runs; {len(found.front)} are on the joint front. Everything is predicted."


def _fronts(found: Comparison) -> str:
    import plotly.graph_objects as go

    x, y = _drawn(found)
    joint = set(zip(found.front[RUN], found.front["row"], strict=True))
    figure = go.Figure()
    for i, (name, front) in enumerate(found.fronts.items()):
        colour = COLOURS[i % len(COLOURS)]
        table = front.sort_values([x, y], kind="stable")
        sizes = [9 if (name, row) in joint else 5 for row in table["row"]]
        figure.add_scatter(
            x=table[x].tolist(), y=table[y].tolist(), mode="lines+markers", name=name, text=[_hover(name, r) for _, r in table.iterrows()],
            line={"color": colour, "width": 1.2, "shape": "hv"}, marker={"size": sizes, "color": colour}, hovertemplate="%{text}<extra></extra>",
        )  # fmt: skip
    values = np.concatenate([f[x].to_numpy(dtype=np.float64) for f in found.fronts.values()])
    wide = values.min() > 0 and values.max() / values.min() > 8
    figure.update_xaxes(title_text=label(x), type="log" if wide else "linear")
    figure.update_yaxes(title_text=label(y))
    return html_of(figure, "fronts", height=520)


def _drawn(found: Comparison) -> tuple[str, str]:
    metrics = [o.metric for o in found.objectives]
    return metrics[0], metrics[1] if len(metrics) > 1 else "hbm_gib"


def _axes(columns: Iterable[object]) -> tuple[str, ...]:
    return tuple(str(c) for c in columns if "." in str(c))


def _hover(name: str, row: pd.Series) -> str:
    settings = compact({str(k): v for k, v in row.items()}, _axes(row.index))
    x = "<br>".join(f"{k}: {v}" for k, v in settings.items())
    return f"<b>{escaped(name)}, row {int(row['row'])}</b><br>{escaped(number(float(row['iteration_time_ms'])))} ms an iteration<br>{x}"


def _runs(found: Comparison) -> str:
    best = [f"best {label(o.metric)}" for o in found.objectives]
    head = ["run", "GPU", "designs on its front", "of them on the joint front", *best, "share of the joint hypervolume (%)"]  # fmt: skip
    rows = [
        [
            escaped(r.name),
            escaped(r.gpu),
            str(r.members),
            str(r.joint),
            *(number(v) for v in r.best),
            number(r.hypervolume_pct, digits=3),
        ]
        for r in found.runs
    ]
    return table_of([escaped(h) for h in head], rows, numeric=range(2, len(head)))


def _ratios(found: Comparison) -> str:
    cells = {(r.a, r.b): r for r in found.ratios}
    names = [r.name for r in found.runs]
    rows = [
        [escaped(a), *("–" if a == b else _cell(cells[a, b].median, cells[a, b].matched, cells[a, b].of) for b in names)]
        for a in names
    ]  # fmt: skip
    return table_of(["", *map(escaped, names)], rows, numeric=range(1, len(names) + 1))


def _cell(median: float, matched: int, of: int) -> str:
    return f'{number(median, digits=3)} <span class="soft">({matched} of {of})</span>' if matched else "–"


def _table_note(found: Comparison) -> str:
    shown = min(MAX_ROWS, len(found.front))
    said = f"{shown} of {len(found.front)}." if shown < len(found.front) else "All of them."
    common = found.shared_settings()
    words = " · ".join(f"{k} {v}" for k, v in compact(common, tuple(common)).items() if v != "–")
    return f"{said} Each has: {words}." if words else said


def _table(found: Comparison) -> str:
    metrics = [o.metric for o in found.objectives]
    metrics += [m for m in ("iteration_time_ms", "hbm_gib") if m in found.front and m not in metrics]
    common = found.shared_settings()
    axes = tuple(a for a in _axes(found.front.columns) if a not in common)
    rows = []
    for i in np.unique(np.linspace(0, len(found.front) - 1, min(MAX_ROWS, len(found.front))).astype(int)):
        row = {str(k): v for k, v in found.front.iloc[i].to_dict().items()}
        settings = " · ".join(f"{k} {v}" for k, v in compact(row, axes).items() if v != "–")
        rows.append([escaped(row[RUN]), str(int(row["row"])), *(number(float(row[m])) for m in metrics), escaped(settings)])  # fmt: skip
    head = ["run", "row", *(escaped(label(m)) for m in metrics), "design"]
    return table_of(head, rows, numeric=range(1, 2 + len(metrics)))


def _own(found: Comparison) -> str:
    rows = [[escaped(r.name), "<br>".join(escaped(fact) for fact in r.own) or "–"] for r in found.runs]
    return table_of(["run", "what not all runs have"], rows)
