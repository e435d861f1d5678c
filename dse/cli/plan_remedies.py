"""What would do where the tables of a design fit nowhere; each remedy is tried out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from dse.errors import NoFeasibleCandidateError
from dse.placement.design.certify import CertifiedPlan, plan_design
from dse.placement.design.limits import transform_of
from dse.placement.design.options import Offer
from dse.placement.design.shortage import design_remedies
from dse.placement.instances.limits import without_section
from dse.placement.instances.limits_schema import LimitsFile
from dse.placement.solver.certified import certify
from dse.placement.solver.problem import Assignment, Problem
from perfcore.design.training import EmbeddingFusion
from perfcore.units import US_PER_MS

if TYPE_CHECKING:
    from dse.yaml_loader import Document
    from perfcore.design.design import Design
    from perfcore.predictor import Predictor

REMEDY_RATIOS = (0.3, 0.1, 0.03, 0.01)  # of caches to try; a larger one misses less often
_MEMORY_S = 2.0  # for each change of the design
_PLAN_S = 3.0  # ... and for each change of what is asked for


def remedies(
    design: Design, predictor: Predictor, document: Document[LimitsFile] | None, *, offer: Offer, seed: int
) -> list[str]:
    """Limits that are too narrow, a cache, and without limits changes of the design."""

    def planned(changed: Document[LimitsFile] | None, offered: Offer) -> CertifiedPlan | None:
        limits = None if changed is None else transform_of(changed, design)
        try:
            return plan_design(
                design,
                predictor=predictor,
                seed=seed,
                time_limit_s=_PLAN_S,
                limits=limits,
                offer=offered,
                explain=False,
            )
        except NoFeasibleCandidateError:
            return None

    def lifted() -> Iterator[str]:
        if document is None:
            return
        sections = [(s, without_section(document, s)) for s in LimitsFile.model_fields]
        found = [f"The limits without their section `{s}`." for s, d in sections if d and planned(d, offer)]
        yield from found
        if not found and planned(None, offer):
            yield "No limits at all."

    def cached() -> Iterator[str]:
        smaller = [r for r in REMEDY_RATIOS if r < min(offer.cache_ratios, default=1.0)]
        for ratio in smaller if design.fusion.embedding is EmbeddingFusion.TABLE_BATCHED else ():
            plan = planned(document, replace(offer, cache_ratios=(ratio,)))
            if plan is not None:
                ms = plan.iteration_time_us / US_PER_MS
                yield (
                    f"Tables in host memory behind a cache: `--cache-ratio {ratio:g}` fits, "
                    f"{ms:.1f} ms an iteration predicted."
                )
                return

    def by_memory(problem: Problem) -> Assignment:
        return certify(problem, time_limit_s=_MEMORY_S, seed=seed).assignment

    changed = design_remedies(design, by_memory) if document is None else ()
    return [*changed, *lifted(), *cached()]
