"""`dse plan DESIGN` by the critical path of its tables alone, where a bound of the iteration does not know what is asked for.

Such are limits on hosts and kernels, slower ranks, tables that stay together, and tables in host memory behind a cache. The
iteration time of the plan is predicted afterwards; the bound and the gap are those of the tables' critical path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dse.cli.plan_instance import solve_instance
from dse.errors import DseError
from dse.placement.design.limits import by_tables
from dse.placement.design.shortage import design_remedies, instance_of_design, least_bytes
from dse.placement.instances.instance import Instance, Objective
from dse.placement.instances.labels import labels_of
from dse.placement.instances.limits import limited, unlimited
from dse.placement.instances.shortage import Solve
from dse.placement.report.build import PlanReport
from dse.placement.solver.certified import certify
from dse.placement.solver.problem import Assignment, Problem, loads_of
from dse.placement.torchrec.assigned import plan_of_assignment
from perfcore.design.sharding import ON_HOST, ShardingPlan
from perfcore.design.training import EmbeddingFusion
from perfcore.memory import memory_of
from perfcore.units import BYTES_PER_GIB, US_PER_MS

if TYPE_CHECKING:
    from dse.placement.instances.limits_schema import LimitsFile
    from dse.yaml_loader import Document
    from perfcore.design.design import Design
    from perfcore.predictor import Predictor

REMEDY_RATIOS = (0.3, 0.1, 0.03, 0.01)  # of caches to try where nothing fits; a larger one misses less often
_ON_HOST = "tables in host memory"
_MEMORY_S = 2.0  # for each remedy that is tried out
_CACHE_S = 5.0  # ... of a cache, which is priced as well


@dataclass(frozen=True, slots=True, eq=False)
class PlannedByTables:
    """A plan by the tables' critical path.

    Attributes:
        report: of the critical path.
        plan: of every table.
        iteration_time_us: predicted for the plan; `None` where ranks differ, which no prediction knows.
    """

    report: PlanReport
    plan: ShardingPlan
    iteration_time_us: float | None


def planned_by_tables(
    design: Design,
    predictor: Predictor,
    document: Document[LimitsFile] | None,
    *,
    cache_ratios: Sequence[float],
    time_limit_s: float,
    seed: int,
    title: str,
) -> PlannedByTables:
    """The best plan found, tables behind caches of these shares of their rows among the options.

    Raises:
        DseError: caches for embeddings that are not table-batched.
        ConfigError: mistakes in the limits.
        NoFeasibleCandidateError: nothing fits.
    """
    if cache_ratios and not _can_cache(design):
        raise DseError(
            "`--cache-ratio` needs `embedding: table_batched`: tables in host memory are looked up in no other way, "
            f"but got embedding={design.fusion.embedding}."
        )

    def remedies() -> list[str]:
        smaller = [r for r in REMEDY_RATIOS if r < min(cache_ratios, default=1.0)]
        cached = cache_remedies(design, predictor, document, ratios=smaller, seed=seed)
        return [*cached, *(design_remedies(design, memory_solver(seed)) if document is None else ())]

    instance = instance_of_design(design, predictor.cost, cache_ratios=cache_ratios)
    solved = solve_instance(
        instance,
        Objective.CRITICAL_PATH,
        document,
        time_limit_s=time_limit_s,
        seed=seed,
        title=title,
        facts={"note": _note(document, cached=bool(cache_ratios))},
        remedies=remedies,
    )
    placed = replace(design, sharding=plan_of_assignment(instance, solved.assignment))
    us = None if _slower_ranks(document) else predictor.iteration_time_us(placed)
    facts = {**solved.report.facts, **_facts(instance, solved.assignment, placed, us)}
    if not (document is not None and by_tables(document.value)):
        facts.setdefault(_ON_HOST, "none: without --cache-ratio the plan is certified by its iteration time")
    return PlannedByTables(replace(solved.report, facts=facts), placed.sharding, us)


def cache_remedies(
    design: Design,
    predictor: Predictor,
    document: Document[LimitsFile] | None,
    *,
    ratios: Sequence[float] = REMEDY_RATIOS,
    seed: int,
) -> list[str]:
    """The largest cache in front of tables in host memory with which a plan was found, and its time; or nothing."""
    for ratio in ratios if _can_cache(design) else ():
        instance = instance_of_design(design, predictor.cost, cache_ratios=(ratio,))
        found = _fitting(instance, document, seed)
        if found is None:
            continue
        said = f"Tables in host memory behind a cache: `--cache-ratio {ratio:g}` fits"
        if _slower_ranks(document):
            return [f"{said}."]
        us = predictor.iteration_time_us(replace(design, sharding=plan_of_assignment(instance, found)))
        return [f"{said}, {us / US_PER_MS:.1f} ms an iteration predicted."]
    return []


def memory_solver(seed: int) -> Solve:
    """Places tables by memory alone, for a remedy that is tried out."""

    def solve(problem: Problem) -> Assignment:
        return certify(problem, time_limit_s=_MEMORY_S, seed=seed).assignment

    return solve


def _fitting(instance: Instance, document: Document[LimitsFile] | None, seed: int) -> Assignment | None:
    """A placement under the limits, if one was found."""
    wanted = Objective.CRITICAL_PATH
    problem, labels = instance.problem(wanted), labels_of(instance, wanted)
    under = unlimited(problem, labels) if document is None else limited(problem, labels, document)
    if least_bytes(under.problem) > under.problem.capacity_bytes.clip(min=0.0).sum():
        return None
    found = certify(under.problem, time_limit_s=_CACHE_S, seed=seed)
    return under.original(found.assignment) if found.feasible else None


def _can_cache(design: Design) -> bool:
    return design.fusion.embedding is EmbeddingFusion.TABLE_BATCHED


def _slower_ranks(document: Document[LimitsFile] | None) -> bool:
    return document is not None and any(e.slowness != 1.0 for e in document.value.ranks)


def _note(document: Document[LimitsFile] | None, *, cached: bool) -> str:
    limits = document is not None and by_tables(document.value)
    unknown = ["such limits"] * limits + ["tables in host memory"] * cached
    return (
        "by the tables' critical path, of which bound and gap are: a bound of the iteration does not know "
        + " and ".join(unknown)
    )


def _facts(instance: Instance, answer: Assignment, placed: Design, us: float | None) -> dict[str, str]:
    """The iteration time of the plan, and host memory where a table lies there."""
    facts = {} if us is None else {"iteration time of this plan": f"{us / US_PER_MS:.3f} ms"}
    on_host = [t for t in placed.sharding.tables if t.kernel in ON_HOST]
    if on_host:
        held = loads_of(instance.problem(Objective.CRITICAL_PATH), answer).host_bytes
        facts[_ON_HOST] = (
            f"{len(on_host)} of {len(instance.names)}, {held.max() / BYTES_PER_GIB:.1f} of "
            f"{instance.host_capacity_bytes / BYTES_PER_GIB:.1f} GiB on the fullest machine"
        )
    if us is not None:
        total = memory_of(placed).total
        rank, there = int(total.argmax()), placed.system.device.hbm_bytes
        facts["fullest rank"] = (
            f"{rank}, {total[rank] / BYTES_PER_GIB:.1f} of {there / BYTES_PER_GIB:.1f} GiB with everything else of the job"
        )
    return facts
