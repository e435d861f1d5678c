"""A few good plans of a design, found by an amount of work and not of time.

For each class of plans that its bound does not rule out, the cut at the linear program's solution is searched briefly; in
further rounds, the cut at the best plan so far. A search of more than one round ends with single changes of that plan.
"""

from __future__ import annotations

import numpy as np

from dse.placement.design.bound import ClassBound
from dse.placement.design.classes import refine
from dse.placement.design.plan_search import PROVEN, PlanSearch
from dse.placement.solver.problem import Assignment, loads_of
from dse.placement.solver.search import search
from perfcore.design.design import Design
from perfcore.design.sharding import ShardingPlan
from perfcore.predictor import Predictor

_WORK = 2_000  # steps of the search of a class, beside its greedy starts
_PROMISING = 1.05  # classes whose bound is within this factor of the least are searched
_CHANGES = 32  # single changes that are priced, the most promising first


def brief_plans(
    design: Design, *, predictor: Predictor, seed: int = 0, work: int = _WORK, rounds: int = 1
) -> tuple[ShardingPlan, ...]:
    """The plans found, the fastest first; none where nothing was found to fit.

    Args:
        design: on several ranks; its own plan does not matter.
        predictor: of its device.
        seed: of the searches; the same seed gives the same plans everywhere.
        work: steps of each search.
        rounds: searches of each class.
    """
    run = PlanSearch(design, predictor, seed, np.inf, None)
    least_us = refine(run.bounds, upper_us=np.inf, seconds_left=lambda: np.inf)
    found: dict[ShardingPlan, float] = {}
    for number in range(rounds):
        for bound in sorted(run.bounds, key=lambda b: b.lower_us):
            if bound.lower_us > min(least_us * _PROMISING, run.upper_us * (1 - PROVEN)):
                break
            at = _known(run, bound) if number else None
            plan = _searched(run, bound, at, seed=seed + number, work=work)
            if plan is not None:
                found[plan] = float(run.offer([plan])[0])
    if rounds > 1 and run.plan is not None:
        run.offer([c.plan for c in run.changes()[:_CHANGES]])
        found[run.plan] = run.upper_us
    return tuple(sorted(found, key=found.__getitem__))


def _known(run: PlanSearch, bound: ClassBound) -> Assignment | None:
    """The best plan so far, if it is of the class."""
    if run.plan is None:
        return None
    option = bound.options.chosen(run.plan)
    if option is None or set(bound.options.flag[option]) != set(bound.kinds):
        return None
    return Assignment(option, tuple(t.ranks for t in run.plan.tables))


def _searched(
    run: PlanSearch, bound: ClassBound, at: Assignment | None, *, seed: int, work: int
) -> ShardingPlan | None:
    """What a search of a class finds at the cut of an assignment, or at its linear program's solution."""
    surrogate = run.surrogate(bound, at)
    problem = surrogate.problem
    assignment = search(
        problem,
        seed=seed,
        work=work,
        time_limit_s=np.inf,
        start=at,
        options=bound.options_of_shares(),
        enough=bound.lower_us - surrogate.constant_us,
    )
    if loads_of(problem, assignment).overflow_bytes(problem) > 0:
        return None
    return bound.options.plan(assignment.option, assignment.ranks)
