"""`dse plan DESIGN`: the tables of a design, by its predicted iteration time."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from dse.cli.plan_report import facts_of, report_of_plan
from dse.errors import DseError, StorageError
from dse.placement.design.limits import transform_of
from dse.placement.design.options import Offer
from dse.placement.report.build import PlanReport
from perfcore.design.sharding import ShardingPlan
from perfcore.design.training import EmbeddingFusion
from perfcore.units import BYTES_PER_GIB, US_PER_MS

if TYPE_CHECKING:
    from dse.placement.design.certify import CertifiedPlan
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
        offer: what tables may be beside the usual.
    """

    path: Path
    overrides: tuple[str, ...]
    profile: str | None
    limits: Path | None
    time_limit_s: float
    seed: int
    offer: Offer = field(default_factory=Offer)


def planned(request: Request, imported: Path | None) -> PlanReport:
    """The report of the best placement found; beside it what an imported plan would take.

    Raises:
        ConfigError: mistakes in the design or the limits.
        NoFeasibleCandidateError: nothing fits.
        SpaceError: the imported plan is none of this design.
    """
    design, predictor = _load(request)
    found = _certified(request, design, predictor)
    facts = facts_of(found, predictor, caches=bool(request.offer.cache_ratios))
    if imported is not None:
        facts[f"imported plan {imported.name}"] = _imported(imported, found, predictor)
    return report_of_plan(found, title=request.path.name, facts=facts)


def export(request: Request, out: Path | None) -> None:
    """Write the program that builds the plan in TorchRec's terms."""
    from dse.placement.torchrec import export_plan

    found = _certified(request, *_load(request))
    text = export_plan(found.design)
    if out is None:
        typer.echo(text, nl=False)
        return
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as err:
        raise StorageError(f"{out} cannot be written: {err.strerror or err}.") from err
    typer.echo(f"{out}: {found.iteration_time_us / US_PER_MS:.3f} ms an iteration", err=True)


def compare(request: Request, *, as_json: bool) -> None:
    """TorchRec's planner beside this one, priced alike."""
    from dse.placement.torchrec import compare_design

    if request.limits is not None:
        raise DseError("--limits and --compare exclude one another: TorchRec's planner knows no such limits.")
    if request.offer.dense:
        raise DseError(
            "--dense and --compare exclude one another: both planners are compared on fused kernels."
        )
    if request.offer.cache_ratios:
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


def _imported(path: Path, found: CertifiedPlan, predictor: Predictor) -> str:
    from dse.placement.torchrec import read_plan

    theirs = predictor.predict(replace(found.design, sharding=read_plan(path, found.design)))
    slower = 100 * (theirs.iteration_time_us / found.iteration_time_us - 1)
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
    from dse.cli.plan_remedies import remedies
    from dse.placement.design.certify import plan_design
    from dse.placement.instances.limits import read_limits

    if request.offer.cache_ratios and design.fusion.embedding is not EmbeddingFusion.TABLE_BATCHED:
        raise DseError(
            "`--cache-ratio` needs `embedding: table_batched`: tables in host memory are looked up in no other way, "
            f"but got embedding={design.fusion.embedding}."
        )
    document = None if request.limits is None else read_limits(request.limits)
    return plan_design(
        design,
        predictor=predictor,
        seed=request.seed,
        time_limit_s=request.time_limit_s,
        limits=None if document is None else transform_of(document, design),
        offer=request.offer,
        remedies=lambda: remedies(design, predictor, document, offer=request.offer, seed=request.seed),
    )
