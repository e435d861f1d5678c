"""A placement as a folder: an offline page, `plan.json`, `tables.csv`, `ranks.csv`."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from string import Template

import numpy as np

from dse.errors import StorageError
from dse.manifest import write_atomically
from dse.placement.report.build import OtherWay, PlanReport, RankLine, TableLine
from dse.placement.report.files import DESIGN, ranks_csv, report_json, tables_csv
from dse.report.markup import escaped, table_of
from dse.report.placement_figures import draw_heat, draw_memory
from dse.report.style import style
from dse.report.words import gib, number

MAX_TABLES, MAX_RANKS, MAX_OTHERS = 200, 64, 4
_ALIKE_MS = 5e-7


def write_plan(report: PlanReport, folder: Path) -> None:
    """Write the page and the files into a folder, which is made if it is not there.

    Raises:
        StorageError: it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as err:
        raise StorageError(f"{folder} cannot be a folder: {err.strerror or err}.") from err
    write_atomically(folder / "plan.json", json.dumps(report_json(report), indent=1))
    write_atomically(folder / "tables.csv", tables_csv(report))
    write_atomically(folder / "ranks.csv", ranks_csv(report))
    write_atomically(folder / "report.html", page_of(report))


def page_of(report: PlanReport) -> str:
    """The whole page; the same report gives the same text."""
    from plotly.offline import get_plotlyjs

    template = Template(_resource("placement_template.html"))
    return template.substitute(
        title=escaped(f"{report.title}: placement"),
        style=style(),
        plotly=get_plotlyjs(),
        heading=escaped(report.title),
        subtitle=escaped(
            f"{len(report.tables):,} tables on {len(report.ranks):,} ranks of {report.machines} "
            f"machine{'s' * (report.machines > 1)}. Found in {number(report.certificate.wall_s, digits=2)} s."
        ),
        headline=_headline(report),
        cards="".join(_cards(report)),
        heat_note=_heat_note(report),
        heat=draw_heat(report),
        events_note=_events_note(report),
        events=_events(report),
        memory_note=_memory_note(report),
        memory=draw_memory(report),
        table_note=_table_note(report),
        tables=_tables(report),
        ranks=_ranks(report),
        trust=_trust(report),
    )


def _resource(name: str) -> str:
    return resources.files("dse.report").joinpath(name).read_text(encoding="utf-8")


def _headline(report: PlanReport) -> str:
    c = report.certificate
    what = "An iteration takes" if report.objective == DESIGN else f"Its {escaped(report.objective)} is"
    said = f"{what} <b>{number(c.objective_ms)} ms</b>. "
    if c.proven:
        return said + "No placement is better: this one is <b>proven optimal</b> for the costs given."
    if not math.isfinite(c.gap_pct):
        return said + "How far that may be from the best is not known: no bound above 0 was found."
    return (
        said
        + f"The best placement there is lies between {number(c.lower_bound_ms)} ms and that: this one is "
        f"<b>at most {number(c.gap_pct, digits=3)} %</b> worse."
    )


def _cards(report: PlanReport) -> list[str]:
    load = np.array([r.load_ms for r in report.ranks])
    fullest = max(report.ranks, key=lambda r: r.hbm_gib / max(r.capacity_gib, 1e-9))
    waits = report.load_ms.max(axis=0).sum()
    split = sum(len(t.ranks) > 1 for t in report.tables)
    replicated = sum(t.type == "data_parallel" for t in report.tables)
    return [
        _card("certified gap", f"{number(report.certificate.gap_pct, digits=3)} %", "to a lower bound for every placement"),
        _card("mean load of a rank", f"{number(load.mean())} ms", f"of {number(float(waits))} ms; the rest is waiting for others"),
        _card("fullest rank", f"{number(fullest.hbm_gib, digits=3)} GiB", f"of {number(fullest.capacity_gib, digits=3)} GiB for tables, rank {fullest.rank}"),
        _card("tables in pieces", f"{split - replicated:,}", f"of {len(report.tables):,}; {replicated:,} more are on every rank"),
    ]  # fmt: skip


def _card(name: str, big: str, note: str) -> str:
    return (
        f'<div class="card"><div class="soft">{escaped(name)}</div><div class="big">{escaped(big)}</div>'
        f'<div class="soft">{escaped(note)}</div></div>'
    )


def _heat_note(report: PlanReport) -> str:
    return (
        "One row an event, one column a rank: the darker, the longer. An event's darkest ranks decide when it ends; a row of one "
        "colour is balanced. The second button compares the ranks of each event with its slowest one. Point at a cell for its value."
    )


def _events_note(report: PlanReport) -> str:
    said = "Each event ends when its slowest rank ends, and the events follow one another. "
    if report.rest_ms > _ALIKE_MS:
        said += (
            "The sum of the first column is what the tables add to the iteration; the last line is everything beside them: the dense "
            "part, the host, latencies. "
        )
    else:
        said += "The plan's time is the sum of the first column. "
    return said + "What the other ranks wait for is the difference to the second."


def _events(report: PlanReport) -> str:
    rows = []
    for e in report.used_events:
        load = report.load_ms[:, e]
        slowest = np.flatnonzero(load >= load.max() * (1 - 1e-9))
        who = "all alike" if len(slowest) == len(load) else _some([str(r) for r in slowest], most=6)
        waiting = 100 * (1 - load.mean() / load.max()) if load.max() > 0 else 0.0
        rows.append(
            [escaped(report.events[e]), number(float(load.max())), number(float(load.mean())), f"{waiting:.0f}", escaped(who)]
        )  # fmt: skip
    if report.rest_ms > _ALIKE_MS:
        rows.append(["everything beside the tables", number(report.rest_ms), "", "", ""])
    head = ["event", "slowest rank (ms)", "mean rank (ms)", "waiting (%)", "slowest ranks"]
    return table_of(head, rows, numeric=(1, 2, 3))


def _memory_note(report: PlanReport) -> str:
    held, room = sum(r.hbm_gib for r in report.ranks), sum(r.capacity_gib for r in report.ranks)
    return (
        f"All shards with their optimizer state and buffers take {number(held)} GiB of the {number(room)} GiB that the ranks have "
        f"for them ({100 * held / room:.0f} %)." if room > 0 else "The ranks have no memory for tables."
    )  # fmt: skip


def _table_note(report: PlanReport) -> str:
    shown = (
        "All tables"
        if len(report.tables) <= MAX_TABLES
        else f"The {MAX_TABLES} dearest of {len(report.tables):,} tables"
    )
    return (
        f"{shown}, dearest first: what each adds to the rank that it loads most. On the right "
        "what the whole plan would gain (−) or lose (+) if this table alone were split in another way, all others staying where they are. "
        'The whole list is in <a href="tables.csv">tables.csv</a>.'
    )


def _tables(report: PlanReport) -> str:
    by_event = any(t.bound_by for t in report.tables)
    rows = [
        [
            escaped(t.name),
            escaped(_kind(t.type, t.kernel, len(t.ranks))),
            escaped(_places(t, len(report.ranks))),
            number(t.rank_ms, digits=3),
            gib(t.hbm_gib),
            *([escaped(t.bound_by)] if by_event else []),
            _why(t),
        ]
        for t in report.dearest[:MAX_TABLES]
    ]
    head = [
        "table",
        "kind",
        "ranks",
        "ms on a rank",
        "GiB in all",
        *(["most of it"] if by_event else []),
        "instead",
    ]
    return table_of(head, rows, numeric=(3, 4))


def _kind(kind: str, kernel: str, shards: int) -> str:
    pieces = f" × {shards}" if kind in ("column_wise", "table_column_wise", "grid_shard") else ""
    return kind + pieces + ("" if kernel in ("fused", "dense", "") else f", {kernel}")


def _places(table: TableLine, ranks: int) -> str:
    own = sorted(set(table.ranks))
    if len(own) == ranks and ranks > 1:
        return "all"
    if len(own) > 2 and own == list(range(own[0], own[-1] + 1)):
        return f"{own[0]} to {own[-1]}"
    return _some([str(r) for r in own], most=8)


def _why(table: TableLine) -> str:
    best: dict[str, OtherWay] = {}
    for other in table.others:
        best.setdefault(other.type, other)
    shown = [
        f"{escaped(_kind(o.type, o.kernel, o.shards))} <b>{escaped(_change(o))}</b>" for o in best.values()
    ]
    if table.together:
        shown.insert(0, f"must stay with {escaped(_some(list(table.together), most=3))}")
    if not shown:
        return "no other way" if len(table.ranks) else ""
    return "; ".join(shown[:MAX_OTHERS])


def _change(other: OtherWay) -> str:
    if math.isinf(other.missing_gib):
        return "does not fit"
    if abs(other.change_ms) < _ALIKE_MS and other.missing_gib == 0:
        return "as good"
    if other.missing_gib > 0:
        return f"lacks {number(other.missing_gib, digits=3)} GiB"
    return f"{'+' if other.change_ms >= 0 else '−'}{number(abs(other.change_ms), digits=3)} ms"


def _ranks(report: PlanReport) -> str:
    lines = sorted(report.ranks, key=lambda r: -r.load_ms)[:MAX_RANKS]
    note = (
        ""
        if len(report.ranks) <= MAX_RANKS
        else f'<p class="soft">The {MAX_RANKS} most loaded of {len(report.ranks):,}; <a href="ranks.csv">ranks.csv</a> has all.</p>'
    )
    head = [
        "rank",
        "machine",
        "load (ms)",
        "memory (GiB)",
        "room (GiB)",
        "shards",
        "delays",
        "dearest tables",
    ]
    return note + table_of(head, [_rank_row(r) for r in lines], numeric=(0, 1, 2, 3, 4, 5))


def _rank_row(line: RankLine) -> list[str]:
    return [
        str(line.rank),
        str(line.machine),
        number(line.load_ms),
        gib(line.hbm_gib),
        gib(line.capacity_gib),
        str(line.shards),
        escaped(_some(list(line.slowest_in), most=3) or "–"),
        escaped(", ".join(line.top)),
    ]


def _trust(report: PlanReport) -> str:
    facts = [[escaped(k), escaped(v)] for k, v in report.facts.items()]
    return (
        "<p>The bound holds for every placement within the options offered, by the costs given; it says nothing of how well these costs "
        "match a machine. <code>plan.json</code> beside this page has every number of it.</p>"
        + (table_of(["", ""], facts) if facts else "")
    )


def _some(names: Sequence[str], *, most: int) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
