"""`dse plan DESIGN`: the tables of a design, by its predicted iteration time."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from dse.errors import DseError, NoFeasibleCandidateError, StorageError
from dse.placement.design.limits import Transform, by_tables, design_transform
from dse.placement.instances.limits_schema import LimitsFile
from dse.placement.report.build import Certificate, OtherWay, PlanReport, RankLine, TableLine
from dse.placement.report.files import DESIGN
from dse.yaml_loader import Document
from perfcore.design.sharding import ComputeKernel, ShardingPlan, ShardingType
from perfcore.units import BYTES_PER_GIB, US_PER_MS

if TYPE_CHECKING:
    from dse.cli.plan_by_tables import PlannedByTables
    from dse.placement.design.certify import Alternative, CertifiedPlan, TableChoice
    from perfcore.design.design import Design
    from perfcore.predictor import Predictor


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be planned, and how.

    Attributes:
        path: the design file.
        overrides: `section.key=value` each.
        profile: prices it; the device's own if `None`.
        limits: a file of limits.
        time_limit_s: for solver and bound.
        seed: of the search.
        cache_ratios: large tables may lie in host memory, behind caches of these shares of their rows.
    """

    path: Path
    overrides: tuple[str, ...]
    profile: str | None
    limits: Path | None
    time_limit_s: float
    seed: int
    cache_ratios: tuple[float, ...] = ()


def planned(request: Request, imported: Path | None) -> PlanReport:
    """The report of the best placement found; beside it what an imported plan would take.

    Raises:
        ConfigError: mistakes in the design or the limits.
        NoFeasibleCandidateError: nothing fits.
        SpaceError: the imported plan is none of this design.
    """
    design, predictor = _load(request)
    document = _document(request)
    if imported is not None and document is not None and any(e.slowness != 1 for e in document.value.ranks):
        raise DseError("`slowness` does not go with --import: the time of an iteration does not know it.")
    if _by_tables(request, document):
        by = _planned_by_tables(request, design, predictor, document)
        if imported is None or by.iteration_time_us is None:
            return by.report
        theirs = _imported(imported, design, predictor, by.iteration_time_us)
        return replace(by.report, facts={**by.report.facts, f"imported plan {imported.name}": theirs})
    found = _certified(request, design, predictor)
    facts = {
        "bound by": _bound_by(design, predictor, found),
        "fullest rank": _memory(design, found),
        "profile": predictor.profile.name,
    }
    if imported is not None:
        facts[f"imported plan {imported.name}"] = _imported(
            imported, design, predictor, found.iteration_time_us
        )
    return report_of_plan(found, design, title=request.path.name, facts=facts)


def export(request: Request, out: Path | None) -> None:
    """Write the program that builds the plan in TorchRec's terms."""
    from dse.placement.torchrec import export_plan

    design, predictor = _load(request)
    document = _document(request)
    found: PlannedByTables | CertifiedPlan
    if _by_tables(request, document):
        found = _planned_by_tables(request, design, predictor, document)
    else:
        found = _certified(request, design, predictor)
    text = export_plan(replace(design, sharding=found.plan))
    if out is None:
        typer.echo(text, nl=False)
        return
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as err:
        raise StorageError(f"{out} cannot be written: {err.strerror or err}.") from err
    us = found.iteration_time_us
    typer.echo(f"{out}: " + ("written" if us is None else f"{us / US_PER_MS:.3f} ms an iteration"), err=True)


def compare(request: Request, *, as_json: bool) -> None:
    """TorchRec's planner beside this one, priced alike."""
    from dse.placement.torchrec import compare_design

    if request.limits is not None:
        raise DseError("--limits and --compare exclude one another: TorchRec's planner knows no such limits.")
    if request.cache_ratios:
        raise DseError(
            "--cache-ratio and --compare exclude one another: where tables do not fit, the comparison offers caches by itself."
        )
    design, predictor = _load(request)
    found = compare_design(design, time_limit_s=request.time_limit_s, seed=request.seed, predictor=predictor)
    if as_json:
        typer.echo(json.dumps(found.to_json()))
    else:
        for line in found.lines():
            typer.echo(line)


def report_of_plan(found: CertifiedPlan, design: Design, *, title: str, facts: dict[str, str]) -> PlanReport:
    """A design's plan as the report."""
    local = design.system.local_world_size
    tables = tuple(
        _table_line(choice, held) for choice, held in zip(found.tables, _bytes(found, design), strict=True)
    )
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
        ranks=_rank_lines(found, tables, local),
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


def _bytes(found: CertifiedPlan, design: Design) -> list[float]:
    """Memory of each table; on one rank, where there is nothing to choose, of the whole table."""
    if design.system.world_size > 1:
        return [choice.bytes for choice in found.tables]
    from dse.placement.design.shortage import tables_problem

    problem, _ = tables_problem(design)
    return [float(b) for b in problem.bytes]


def _table_line(choice: TableChoice, held_bytes: float) -> TableLine:
    all_ranks_ms = choice.load_us / US_PER_MS
    return TableLine(
        name=choice.table,
        type=str(choice.type),
        kernel=_kernel(choice.type),
        ranks=choice.ranks,
        events_ms={},
        rank_ms=all_ranks_ms / len(set(choice.ranks)),
        all_ranks_ms=all_ranks_ms,
        hbm_gib=held_bytes / BYTES_PER_GIB,
        bound_by="",
        together=(),
        others=tuple(_other(a) for a in choice.alternatives),
    )


def _kernel(kind: ShardingType) -> str:
    """Of the plan search's options: replicas have a dense gradient, the others update as they go."""
    return str(ComputeKernel.DENSE if kind is ShardingType.DATA_PARALLEL else ComputeKernel.FUSED)


def _other(found: Alternative) -> OtherWay:
    fits = found.iteration_time_us != float("inf")
    return OtherWay(
        type=str(found.type),
        kernel=_kernel(found.type),
        shards=len(found.ranks),
        change_ms=found.effect_us / US_PER_MS if fits else 0.0,
        missing_gib=0.0 if fits else float("inf"),
    )


def _rank_lines(found: CertifiedPlan, tables: tuple[TableLine, ...], local: int) -> tuple[RankLine, ...]:
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


def _bound_by(design: Design, predictor: Predictor, found: CertifiedPlan) -> str:
    p = predictor.predict(replace(design, sharding=found.plan))
    return f"{p.bound_by} ({100 * p.bound_share[p.bound_by]:.0f} % of the critical path)"


def _memory(design: Design, found: CertifiedPlan) -> str:
    rank = int(found.total_hbm_bytes.argmax())
    used, there = (b / BYTES_PER_GIB for b in (found.total_hbm_bytes[rank], design.system.device.hbm_bytes))
    return f"{rank}, {used:.1f} of {there:.1f} GiB with everything else of the job"


def _imported(path: Path, design: Design, predictor: Predictor, own_us: float) -> str:
    from dse.placement.torchrec import read_plan

    theirs = predictor.predict(replace(design, sharding=read_plan(path, design)))
    slower = 100 * (theirs.iteration_time_us / own_us - 1)
    said = f"{theirs.iteration_time_us / US_PER_MS:.3f} ms an iteration, {slower:+.1f} % beside this plan"
    lacks = theirs.shortfall_bytes / BYTES_PER_GIB
    return said if theirs.fits else f"{said}; it does not fit, {lacks:.1f} GiB are missing"


def _load(request: Request) -> tuple[Design, Predictor]:
    from dse.config import load_design
    from perfcore.predictor import Predictor
    from perfcore.profile.profile import priced

    def anywhere(model: Any, *_: Any) -> ShardingPlan:
        return ShardingPlan.on_one_rank(model)  # the planner looks for its own

    design = load_design(request.path, overrides=list(request.overrides), place=anywhere)
    design, profile = priced(design, request.profile)
    return design, Predictor(profile)


def _certified(request: Request, design: Design, predictor: Predictor) -> CertifiedPlan:
    from dse.placement.design.certify import plan_design

    transform = _transform(request, design)
    try:
        return plan_design(
            design,
            predictor=predictor,
            seed=request.seed,
            time_limit_s=request.time_limit_s,
            limits=transform,
        )
    except NoFeasibleCandidateError:
        from dse.cli.plan_by_tables import cache_remedies, memory_solver
        from dse.placement.design.shortage import design_refusal

        cached = cache_remedies(design, predictor, _document(request), seed=request.seed)
        solve = memory_solver(request.seed)
        raise design_refusal(design, solve, limited=transform is not None, more=cached) from None


def _transform(request: Request, design: Design) -> Transform | None:
    document = _document(request)
    if document is None:
        return None
    names = [t.name for t in design.model.tables]
    return design_transform(document, names, num_ranks=design.system.world_size)


def _by_tables(request: Request, document: Document[LimitsFile] | None) -> bool:
    """Whether anything is asked for that a bound of the iteration does not know."""
    return bool(request.cache_ratios) or (document is not None and by_tables(document.value))


def _document(request: Request) -> Document[LimitsFile] | None:
    from dse.placement.instances.limits import read_limits

    return None if request.limits is None else read_limits(request.limits)


def _planned_by_tables(
    request: Request, design: Design, predictor: Predictor, document: Document[LimitsFile] | None
) -> PlannedByTables:
    from dse.cli.plan_by_tables import planned_by_tables

    return planned_by_tables(
        design,
        predictor,
        document,
        cache_ratios=request.cache_ratios,
        time_limit_s=request.time_limit_s,
        seed=request.seed,
        title=request.path.name,
    )
