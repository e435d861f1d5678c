"""A plan's report as JSON and CSV."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from typing import Any

from dse.placement.report.build import OtherWay, PlanReport, RankLine, TableLine

DESIGN = "iteration time"


def certificate_json(report: PlanReport) -> dict[str, Any]:
    """What was minimised, its bound, and how long that took; in ms."""
    c = report.certificate
    name = "iteration_time_ms" if report.objective == DESIGN else "objective_ms"
    return {
        name: c.objective_ms,
        "lower_bound_ms": c.lower_bound_ms,
        "certified_gap_pct": c.gap_pct if math.isfinite(c.gap_pct) else None,
        "proven": c.proven,
        "wall_s": c.wall_s,
    }


def report_json(report: PlanReport) -> dict[str, Any]:
    """The whole report as plain values: times in ms, memory in GiB."""
    return {
        **certificate_json(report),
        "title": report.title,
        "objective": report.objective,
        "facts": dict(report.facts),
        "events": [
            {"name": name, "slowest_ms": float(load.max()), "mean_ms": float(load.mean())}
            for name, load in zip(report.events, report.load_ms.T, strict=True)
        ],
        "ranks": [_rank(report, line) for line in report.ranks],
        "tables": [_table(line) for line in report.tables],
    }


def _rank(report: PlanReport, line: RankLine) -> dict[str, Any]:
    events = dict(zip(report.events, report.load_ms[line.rank].tolist(), strict=True))
    return {
        "rank": line.rank,
        "machine": line.machine,
        "load_ms": line.load_ms,
        "hbm_gib": line.hbm_gib,
        "capacity_gib": line.capacity_gib,
        "shards": line.shards,
        "slowest_in": list(line.slowest_in),
        "top_tables": list(line.top),
        "events_ms": {name: ms for name, ms in events.items() if ms > 0},
    }


def _table(line: TableLine) -> dict[str, Any]:
    return {
        "table": line.name,
        "type": line.type,
        **_kernel(line.kernel),
        "ranks": list(line.ranks),
        "rank_ms": line.rank_ms,
        "all_ranks_ms": line.all_ranks_ms,
        "hbm_gib": line.hbm_gib,
        "bound_by": line.bound_by,
        "events_ms": dict(line.events_ms),
        "together_with": list(line.together),
        "alternatives": [_other(o) for o in line.others],
    }


def _kernel(name: str) -> dict[str, Any]:
    """`fused_uvm_caching@0.1` is a kernel and the share of rows in its cache."""
    word, _, ratio = name.partition("@")
    return {"kernel": word, "cache_ratio": float(ratio) if ratio else None}


def _other(other: OtherWay) -> dict[str, Any]:
    return {
        "type": other.type,
        **_kernel(other.kernel),
        "shards": other.shards,
        "change_ms": None if other.missing_gib > 0 else other.change_ms,
        "missing_gib": other.missing_gib if math.isfinite(other.missing_gib) else None,
        "fits": other.missing_gib == 0,
    }


def tables_csv(report: PlanReport) -> str:
    """One line a table, in the set's order."""
    head = (
        "table", "type", "kernel", "shards", "ranks", "rank_ms", "all_ranks_ms", "hbm_gib", "bound_by",
        "next_best", "next_best_change_ms",
    )  # fmt: skip
    return _csv(head, [_table_row(t) for t in report.tables])


def _table_row(line: TableLine) -> list[object]:
    fits = [o for o in line.others if o.missing_gib == 0]
    best = min(fits, key=lambda o: o.change_ms, default=None)
    ranks = " ".join(map(str, line.ranks))
    return [
        line.name, line.type, line.kernel, len(line.ranks), ranks, f"{line.rank_ms:.6g}", f"{line.all_ranks_ms:.6g}",
        f"{line.hbm_gib:.6g}", line.bound_by, "" if best is None else f"{best.type} x {best.shards}",
        "" if best is None else f"{best.change_ms:.6g}",
    ]  # fmt: skip


def ranks_csv(report: PlanReport) -> str:
    """One line a rank: loads of every event in ms."""
    head = ("rank", "machine", "shards", "hbm_gib", "capacity_gib", "load_ms", *report.events)
    return _csv(
        head,
        [
            [
                line.rank, line.machine, line.shards, f"{line.hbm_gib:.6g}", f"{line.capacity_gib:.6g}",
                f"{line.load_ms:.6g}", *(f"{ms:.6g}" for ms in report.load_ms[line.rank]),
            ]
            for line in report.ranks
        ],
    )  # fmt: skip


def _csv(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(head)
    writer.writerows(rows)
    return text.getvalue()
