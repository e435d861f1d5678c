"""The plan of a design as the report that people and machines read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from dse.placement.report.build import Certificate, OtherWay, PlanReport, RankLine, TableLine
from dse.placement.report.files import DESIGN
from dse.ranks import differing_text
from perfcore.units import BYTES_PER_GIB, US_PER_MS

if TYPE_CHECKING:
    from dse.placement.design.certify import Alternative, CertifiedPlan, TableChoice
    from perfcore.predictor import Predictor


def report_of_plan(found: CertifiedPlan, *, title: str, facts: dict[str, str]) -> PlanReport:
    """A design's plan as the report."""
    tables = tuple(map(_table_line, found.tables))
    return PlanReport(
        title=title,
        objective=DESIGN,
        certificate=Certificate(
            found.iteration_time_us / US_PER_MS,
            found.lower_bound_us / US_PER_MS,
            found.certified_gap_pct,
            found.proven,
            found.wall_s,
        ),
        events=_unique(found.events),
        load_ms=found.load_us / US_PER_MS,
        ranks=_rank_lines(found, tables),
        tables=tables,
        facts=facts,
    )


def _unique(names: Sequence[str]) -> tuple[str, ...]:
    """Names of which no two are alike: later ones get a number."""
    seen: Counter[str] = Counter()
    out = []
    for name in names:
        seen[name] += 1
        out.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return tuple(out)


def _table_line(choice: TableChoice) -> TableLine:
    all_ranks_ms = choice.load_us / US_PER_MS
    return TableLine(
        name=choice.table,
        type=str(choice.type),
        kernel=choice.kernel,
        ranks=choice.ranks,
        events_ms={},
        rank_ms=all_ranks_ms / len(set(choice.ranks)),
        all_ranks_ms=all_ranks_ms,
        hbm_gib=choice.bytes / BYTES_PER_GIB,
        bound_by="",
        together=choice.together,
        others=tuple(_other(a) for a in choice.alternatives),
    )


def _other(found: Alternative) -> OtherWay:
    fits = found.iteration_time_us != float("inf")
    return OtherWay(
        type=str(found.type),
        kernel=found.kernel,
        shards=len(found.ranks),
        change_ms=found.effect_us / US_PER_MS if fits else 0.0,
        missing_gib=0.0 if fits else float("inf"),
    )


def _rank_lines(found: CertifiedPlan, tables: tuple[TableLine, ...]) -> tuple[RankLine, ...]:
    local = found.design.system.local_world_size
    load = found.load_us / US_PER_MS
    slowest = (load >= load.max(axis=0) * (1 - 1e-9)) & (load.max(axis=0) > load.min(axis=0))
    shards = Counter(r for t in tables for r in t.ranks)
    dearest = sorted(tables, key=lambda t: -t.rank_ms)
    return tuple(
        RankLine(
            rank=r,
            machine=r // local,
            load_ms=float(load[r].sum()),
            hbm_gib=float(found.hbm_bytes[r]) / BYTES_PER_GIB,
            capacity_gib=float(found.capacity_bytes[r]) / BYTES_PER_GIB,
            shards=shards[r],
            slowest_in=tuple(name for e, name in enumerate(_unique(found.events)) if slowest[r, e]),
            top=tuple(t.name for t in dearest if r in t.ranks)[:3],
        )
        for r in range(len(load))
    )


def facts_of(found: CertifiedPlan, predictor: Predictor, *, caches: bool) -> dict[str, str]:
    """What else a person may want to know; of host memory where `caches` were offered."""
    p = predictor.predict(found.design)
    facts = {
        "bound by": f"{p.bound_by} ({100 * p.bound_share[p.bound_by]:.0f} % of the critical path)",
        "fullest rank": _fullest(found),
    }
    if caches:
        facts["tables in host memory"] = _on_hosts(found)
    if found.design.system.uneven:
        facts["ranks that differ"] = differing_text(found.design.system)
    return facts | {"profile": predictor.profile.name}


def _fullest(found: CertifiedPlan) -> str:
    all_there = np.array(found.design.system.rank_hbm_bytes)
    rank = int((found.total_hbm_bytes - all_there).argmax())
    there = all_there[rank]
    used = found.total_hbm_bytes[rank]
    return f"{rank}, {used / BYTES_PER_GIB:.1f} of {there / BYTES_PER_GIB:.1f} GiB with everything else of the job"


def _on_hosts(found: CertifiedPlan) -> str:
    count = sum(t.host_bytes > 0 for t in found.tables)
    if not count:
        return "none, this plan keeps all on the devices"
    machine = int((found.host_bytes / found.host_capacity_bytes).argmax())
    used, there = (b[machine] / BYTES_PER_GIB for b in (found.host_bytes, found.host_capacity_bytes))
    return f"{count} of {len(found.tables)}, {used:.1f} of {there:.1f} GiB on the fullest machine"
