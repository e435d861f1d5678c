"""A few good plans of a design, found by an amount of work and not of time.

For each class of plans that its bound does not rule out, the cut at the linear program's solution is searched briefly.
"""

from __future__ import annotations

import numpy as np

from dse.placement.design.classes import refine
from dse.placement.design.plan_search import PROVEN, PlanSearch
from dse.placement.solver.problem import loads_of
from dse.placement.solver.search import search
from perfcore.design.design import Design
from perfcore.design.sharding import ShardingPlan
from perfcore.predictor import Predictor

_WORK = 2_000  # steps of the search of a class, beside its greedy starts
_PROMISING = 1.05  # classes whose bound is within this factor of the least are searched


def brief_plans(
    design: Design, *, predictor: Predictor, seed: int = 0, work: int = _WORK
) -> tuple[ShardingPlan, ...]:
    """The plans found, of the most promising class first; none where nothing was found to fit.

    Args:
        design: on several ranks; its own plan does not matter.
        predictor: of its device.
        seed: of the searches; the same seed gives the same plans everywhere.
        work: steps of each search.
    """
    run = PlanSearch(design, predictor, seed, np.inf, None)
    least_us = refine(run.bounds, upper_us=np.inf, seconds_left=lambda: np.inf)
    found: dict[ShardingPlan, float] = {}
    for bound in sorted(run.bounds, key=lambda b: b.lower_us):
        best_us = min(found.values(), default=np.inf)
        if bound.lower_us > min(least_us * _PROMISING, best_us * (1 - PROVEN)):
            break
        surrogate = run.surrogate(bound, None)
        assignment = search(
            surrogate.problem,
            seed=seed,
            work=work,
            time_limit_s=np.inf,
            options=bound.options_of_shares(),
            enough=bound.lower_us - surrogate.constant_us,
        )
        if loads_of(surrogate.problem, assignment).overflow_bytes(surrogate.problem) <= 0:
            plan = bound.options.plan(assignment.option, assignment.ranks)
            found[plan] = float(run.priced([plan])[0])
    return tuple(found)
