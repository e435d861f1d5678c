"""`dse plan --instance`: the tables of a cost instance."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dse.errors import DseError, NoFeasibleCandidateError
from dse.placement.instances.instance import Objective, read_instance
from dse.placement.instances.labels import Labels, labels_of
from dse.placement.instances.limits import Limited, limited, read_limits, unlimited, without_section
from dse.placement.instances.limits_schema import LimitsFile
from dse.placement.report.build import Certificate, PlanReport, report_of
from dse.placement.solver.problem import Assignment, Problem

if TYPE_CHECKING:
    from dse.yaml_loader import Document

WORDS = {
    Objective.RATING: "rating",
    Objective.CRITICAL_PATH: "critical path",
}
_MEMORY_S = 3.0  # for each remedy that is tried out


def planned(
    path: Path, objective: str | None, limits: Path | None, *, time_limit_s: float, seed: int
) -> PlanReport:
    """The report of the best placement found.

    Raises:
        SpaceError: the file is no instance.
        ConfigError: mistakes in the limits.
        NoFeasibleCandidateError: nothing fits.
    """
    from dse.placement.solver.certified import certify

    wanted, instance = _objective(objective), read_instance(path)
    document = None if limits is None else read_limits(limits)
    problem, labels = instance.problem(wanted), labels_of(instance, wanted)
    under = unlimited(problem, labels) if document is None else limited(problem, labels, document)
    found = certify(under.problem, time_limit_s=time_limit_s, seed=seed)
    if not found.feasible:
        raise _refusal(problem, labels, under, document, found.assignment, seed=seed)
    return report_of(
        problem,
        labels,
        under,
        found.assignment,
        Certificate(found.objective, found.lower_bound, found.gap_pct, found.proven, found.wall_s),
        title=path.name,
        objective=WORDS[wanted],
    )


def _objective(name: str | None) -> Objective:
    try:
        return Objective(name or Objective.CRITICAL_PATH)
    except ValueError:
        raise DseError(f"`--objective` must be one of {', '.join(Objective)}, but got {name!r}.") from None


def _refusal(
    problem: Problem,
    labels: Labels,
    under: Limited,
    document: Document[LimitsFile] | None,
    best: Assignment,
    *,
    seed: int,
) -> NoFeasibleCandidateError:
    """What is missing, and remedies that were tried out: more memory, or one section of the limits less."""
    from dse.placement.instances.shortage import capacity_remedy, fullest_share, refusal, shortage_of
    from dse.placement.solver.certified import certify

    def solve(of: Problem) -> Assignment:
        return certify(of, time_limit_s=_MEMORY_S, seed=seed).assignment

    remedies = [r for r in [capacity_remedy(under.problem, solve)] if r is not None]
    if document is not None:
        for section in LimitsFile.model_fields:
            lifted = without_section(document, section)
            if lifted is not None and fullest_share(limited(problem, labels, lifted).problem, solve) <= 1:
                remedies.append(f"The limits without their section `{section}`.")
    return refusal(shortage_of(under.problem, under.labels, best), remedies)
