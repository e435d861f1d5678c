"""What a person reads of a plan in a terminal."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.console import Console, JustifyMethod
from rich.table import Table

from dse.cli._console import new_console
from dse.placement.report.build import OtherWay, PlanReport, RankLine, TableLine
from dse.report.words import gib, number

MAX_TABLES, MAX_RANKS, MAX_EVENTS = 10, 8, 12
_TEXT = ("table", "kind", "short", "rather than", "ends with", "delays", "dearest tables")
_NARROW = 80
_NARROWEST, _BETWEEN = 6, 3  # least width of a text, space between columns
_ALIKE_MS = 5e-7
_VARIABLE = ("column_wise", "table_column_wise", "grid_shard")
ABBREVIATIONS = {
    "table_wise": "TW",
    "column_wise": "CW",
    "row_wise": "RW",
    "table_row_wise": "TWRW",
    "table_column_wise": "TWCW",
    "data_parallel": "DP",
    "grid_shard": "GS",
}


def print_plan(report: PlanReport) -> None:
    """Headline, events, kinds, ranks and the dearest tables."""
    console = new_console()
    _headline(console, report)
    for part in (_events(report), _kinds(report), _ranks(report), _tables(report, console.width)):
        console.print(f"[bold]{part.title}[/bold]", highlight=False)
        console.print(_drawn(part, console.width))


@dataclass(frozen=True, slots=True)
class _Part:
    """A table to be: texts by row."""

    title: str
    columns: tuple[str, ...]
    rows: list[list[str]]


def _drawn(part: _Part, width: int) -> Table:
    """The table, texts cut where it would be too wide; numbers never are."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    text = [i == 0 or column in _TEXT for i, column in enumerate(part.columns)]
    widths = [
        max(len(column), *(len(row[i]) for row in part.rows), 0) for i, column in enumerate(part.columns)
    ]
    while sum(widths) + _BETWEEN * len(widths) - 1 > width:
        widest = max((i for i, t in enumerate(text) if t), key=lambda i: widths[i])
        if widths[widest] <= _NARROWEST:
            break
        widths[widest] -= 1
    for column, w, is_text in zip(part.columns, widths, text, strict=True):
        justify: JustifyMethod = "left" if is_text else "right"
        table.add_column(_cut(column, w), justify=justify, no_wrap=True, overflow="ellipsis")
    for row in part.rows:
        table.add_row(*(_cut(cell, w) for cell, w in zip(row, widths, strict=True)))
    return table


def _headline(console: Console, report: PlanReport) -> None:
    c = report.certificate
    proof = f"at most [bold]{c.gap_pct:.2f} %[/bold] above the best (bound {number(c.lower_bound_ms)} ms)"
    if c.proven:
        proof = "[green]proven optimal[/green]"
    elif not math.isfinite(c.gap_pct):
        proof = "and no bound above 0 was found"
    console.print(f"[bold]{number(c.objective_ms)} ms[/bold] {report.objective}, {proof}", highlight=False)
    where = f"{_count(len(report.ranks), 'rank')} of {_count(report.machines, 'machine')}"
    said = (
        f"{report.title}: {_count(len(report.tables), 'table')} on {where}, in {number(c.wall_s, digits=2)} s"
    )
    console.print(said, highlight=False, markup=False)
    for name, value in report.facts.items():
        console.print(f"{name}: {value}", highlight=False, markup=False)


def _events(report: PlanReport) -> _Part:
    order = [*report.used_events]
    rows = []
    for e in order[:MAX_EVENTS]:
        load = report.load_ms[:, e]
        alike = int((load >= load.max() * (1 - 1e-9)).sum())
        more = f" and {alike - 1} more" if alike > 1 else ""
        who = "all" if alike == len(load) else f"{load.argmax()}{more}"
        rows.append([report.events[e], number(float(load.max())), number(float(load.mean())), who])
    rest = order[MAX_EVENTS:]
    if rest:
        rows.append([f"{len(rest)} more", number(float(report.load_ms[:, rest].max(axis=0).sum())), "", ""])
    if report.rest_ms > _ALIKE_MS:
        rows.append(["all beside the tables", number(report.rest_ms), "", ""])
    return _Part("Events: each ends with its slowest rank", ("event", "ms", "mean rank", "ends with"), rows)


def _kinds(report: PlanReport) -> _Part:
    by_kind: dict[str, list[TableLine]] = defaultdict(list)
    for line in report.tables:
        by_kind[_kind(line)].append(line)
    rows = [
        [
            kind,
            _short_kind(lines[0]),
            f"{len(lines):,}",
            f"{sum(len(t.ranks) for t in lines):,}",
            gib(sum(t.hbm_gib for t in lines)),
            number(sum(t.all_ranks_ms for t in lines)),
        ]
        for kind, lines in sorted(by_kind.items(), key=lambda item: -sum(t.all_ranks_ms for t in item[1]))
    ]
    columns = ("kind", "short", "tables", "shards", "GiB", "ms on all ranks")
    return _Part("How tables are split", columns, rows)


def _ranks(report: PlanReport) -> _Part:
    lines = sorted(report.ranks, key=lambda r: -r.load_ms)
    few = len(lines) <= MAX_RANKS
    shown = sorted(lines, key=lambda r: r.rank) if few else [*lines[: MAX_RANKS - 2], *lines[-2:]]
    title = (
        "Ranks" if few else f"Ranks: the {MAX_RANKS - 2} most loaded and the 2 least loaded of {len(lines):,}"
    )
    rows = [
        [
            f"{line.rank}",
            number(line.load_ms),
            gib(line.hbm_gib),
            gib(line.capacity_gib),
            f"{line.shards}",
            _delays(line),
            ", ".join(line.top[:2]),
        ]
        for line in shown
    ]
    return _Part(title, ("rank", "ms", "GiB", "of", "shards", "delays", "dearest tables"), rows)


def _delays(line: RankLine) -> str:
    events = line.slowest_in
    if len(events) > 1:
        return f"{len(events)} events"
    return events[0] if events else "–"


def _tables(report: PlanReport, width: int) -> _Part:
    lines = report.dearest
    title = "Tables" if len(lines) <= MAX_TABLES else f"Tables: the {MAX_TABLES} dearest of {len(lines):,}"
    rows = [
        [
            line.name,
            _short_kind(line),
            _ranks_of(line),
            number(line.rank_ms, digits=3),
            gib(line.hbm_gib),
            why(line.others, most=2 if width <= _NARROW else 4),
        ]
        for line in lines[:MAX_TABLES]
    ]
    return _Part(title, ("table", "kind", "ranks", "ms", "GiB", "rather than"), rows)


def why(others: Iterable[OtherWay], *, most: int) -> str:
    """The nearest other ways and what each would cost the plan; one of each sharding type."""
    by_type: dict[str, OtherWay] = {}
    for other in others:
        by_type.setdefault(other.type, other)
    shown = [f"{short(o.type, o.shards)}{_cache(o.kernel)} {_change(o)}" for o in by_type.values()]
    return ", ".join(shown[:most])


def _change(other: OtherWay) -> str:
    if other.missing_gib > 0:
        return (
            "does not fit"
            if math.isinf(other.missing_gib)
            else f"lacks {number(other.missing_gib, digits=2)} GiB"
        )
    if abs(other.change_ms) < _ALIKE_MS:
        return "as good"
    sign = "+" if other.change_ms >= 0 else "−"
    return f"{sign}{number(abs(other.change_ms), digits=2)} ms"


def short(kind: str, shards: int) -> str:
    """TorchRec's abbreviation, with the number of shards where that varies: `CW×4`."""
    name = ABBREVIATIONS.get(kind, kind)
    return f"{name}×{shards}" if kind in _VARIABLE else name


def _short_kind(line: TableLine) -> str:
    return short(line.type, len(line.ranks)) + _cache(line.kernel)


def _kind(line: TableLine) -> str:
    pieces = f" × {len(line.ranks)}" if line.type in _VARIABLE else ""
    return line.type + pieces + _kernel(line)


def _cache(kernel: str) -> str:
    """` UVM@0.2` for rows in host memory behind such a cache."""
    return f" {kernel.replace('fused_uvm_caching', 'UVM')}" if "uvm" in kernel else ""


def _kernel(line: TableLine) -> str:
    return "" if line.kernel in ("fused", "dense", "") else f" {line.kernel}"


def _ranks_of(line: TableLine) -> str:
    ranks = sorted(set(line.ranks))
    if ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}" if len(ranks) == 1 else f"{ranks[0]}–{ranks[-1]}"
    return _cut(",".join(map(str, ranks)), 11)


def _cut(text: str, room: int) -> str:
    return text if len(text) <= room else f"{text[: room - 1]}…"


def _count(count: int, what: str) -> str:
    return f"{count:,} {what}" + ("" if count == 1 else "s")
