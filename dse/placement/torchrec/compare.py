"""TorchRec's planner and the solver here, on one job, priced by the same costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING

from dse.placement.instances.instance import Instance, Objective
from dse.placement.solver.problem import Assignment, Problem, loads_of
from dse.placement.torchrec.assigned import Choice, assignment_of_choices, plan_of_assignment, price_ms
from dse.placement.torchrec.comparison import DEFAULT, ITERATION, OURS, THEIRS, Comparison, PricedPlan, Tried
from dse.placement.torchrec.estimate import estimate
from dse.placement.torchrec.job import Job, job_of
from dse.placement.torchrec.packages import require
from perfcore.design.design import Design
from perfcore.design.sharding import ShardingPlan
from perfcore.units import US_PER_MS

if TYPE_CHECKING:
    from dse.placement.torchrec.run_planner import Found
    from perfcore.predictor import Predictor

COLUMN_WIDTHS = (None, 64, 32)


@dataclass(frozen=True, slots=True)
class _Run:
    """TorchRec's plans as assignments of the instance."""

    instance: Instance
    found: tuple[Found, ...]
    assignments: tuple[tuple[Assignment | None, Assignment | None], ...]  # by rating, by critical path

    def best(self, objective: Objective) -> tuple[int, Assignment] | None:
        """The setting with the best plan of all by an objective, and that plan."""
        problem = self.instance.problem(objective)
        plans = [(i, a) for i, pair in enumerate(self.assignments) for a in pair if a is not None]
        return min(plans, key=lambda p: loads_of(problem, p[1]).objective, default=None)


def compare(
    job: Job,
    *,
    column_widths: Sequence[int | None] = COLUMN_WIDTHS,
    torchrec_time_s: float = 60.0,
    time_limit_s: float = 20.0,
    seed: int = 0,
) -> Comparison:
    """TorchRec's planner beside the solver, both by TorchRec's costs.

    TorchRec's best plan is a start of the solver, so the solver's is never the worse one.

    Args:
        job: tables, batch and machine.
        column_widths: narrowest column pieces; TorchRec runs once with each, the solver has all of their options.
        torchrec_time_s: how long TorchRec's planner may try its settings; its default is among them.
        time_limit_s: of the solver, for each objective.
        seed: of the solver.

    Raises:
        MissingPackageError: TorchRec is not installed.
    """
    run = _torchrec(job, column_widths, torchrec_time_s)
    theirs = [price for price, _ in _their_prices(run)]
    ours = [_ours(run, objective, time_limit_s, seed)[0] for objective in Objective]
    return Comparison(len(job.tables), job.machine.num_ranks, (*theirs, *ours), _tried(run))


def compare_design(
    design: Design,
    *,
    predictor: Predictor,
    column_widths: Sequence[int | None] = COLUMN_WIDTHS,
    torchrec_time_s: float = 60.0,
    time_limit_s: float = 20.0,
    seed: int = 0,
) -> Comparison:
    """As `compare`, with the predicted iteration time of each plan, and the plan that is made to minimise it.

    Args:
        design: model, training, fusion and system; its own placement does not matter.
        predictor: of the design's device.
        column_widths: as in `compare`.
        torchrec_time_s: as in `compare`.
        time_limit_s: as in `compare`, and for the plan by iteration time.
        seed: as in `compare`.

    Raises:
        MissingPackageError: TorchRec is not installed.
        NoFeasibleCandidateError: no placement fits the memory.
    """
    job = job_of(design)
    run = _torchrec(job, column_widths, torchrec_time_s)
    pairs = [*_their_prices(run), *(_ours(run, o, time_limit_s, seed) for o in Objective)]
    priced = [
        (
            replace(
                p, iteration_time_ms=_iteration_ms(design, plan_of_assignment(run.instance, a), predictor)
            ),
            a,
        )
        for p, a in pairs
    ]
    best = _by_iteration(design, priced, predictor=predictor, time_limit_s=time_limit_s, seed=seed)
    return Comparison(len(job.tables), job.machine.num_ranks, (*(p for p, _ in priced), best), _tried(run))


def _torchrec(job: Job, column_widths: Sequence[int | None], time_limit_s: float) -> _Run:
    require()
    from dse.placement.torchrec.run_planner import plans_of

    widths = (None, *column_widths)
    instance = estimate(job, column_widths=widths)
    found = tuple(plans_of(job, column_widths=widths, time_limit_s=time_limit_s))

    def assigned(choices: tuple[Choice, ...] | None) -> Assignment | None:
        return None if choices is None else assignment_of_choices(instance, choices)

    return _Run(instance, found, tuple((assigned(f.rating), assigned(f.critical_path)) for f in found))


def _their_prices(run: _Run) -> list[tuple[PricedPlan, Assignment]]:
    """TorchRec's default answer, then the best plans of all settings by rating and by critical path."""
    priced = []
    default = next(i for i, found in enumerate(run.found) if found.setting == DEFAULT)
    answer = run.assignments[default][0]
    if answer is not None:
        wall_s = run.found[default].wall_s
        priced.append((_priced(run, THEIRS, Objective.RATING, DEFAULT, answer, wall_s), answer))
    spent_s = sum(f.wall_s for f in run.found)
    for objective in Objective:
        best = run.best(objective)
        if best is not None:
            setting = f"best of {len(run.found)} settings: {run.found[best[0]].setting}"
            priced.append((_priced(run, THEIRS, objective, setting, best[1], spent_s), best[1]))
    return priced


def _priced(
    run: _Run,
    planner: str,
    objective: Objective,
    setting: str,
    assignment: Assignment,
    wall_s: float,
    lower_bound_ms: float | None = None,
) -> PricedPlan:
    problems = {o: run.instance.problem(o) for o in Objective}
    loads = {o: loads_of(p, assignment) for o, p in problems.items()}
    return PricedPlan(
        planner=planner,
        objective=objective.value,
        setting=setting,
        rating_ms=loads[Objective.RATING].objective,
        critical_path_ms=loads[Objective.CRITICAL_PATH].objective,
        iteration_time_ms=None,
        fits=loads[objective].overflow_bytes(problems[objective]) <= 0,
        lower_bound_ms=lower_bound_ms,
        wall_s=wall_s,
    )


def _tried(run: _Run) -> tuple[Tried, ...]:
    problems = {o: run.instance.problem(o) for o in Objective}

    def best_ms(pair: Sequence[Assignment | None], problem: Problem) -> float | None:
        return min((loads_of(problem, a).objective for a in pair if a is not None), default=None)

    return tuple(
        Tried(
            found.setting,
            best_ms(pair, problems[Objective.RATING]),
            best_ms(pair, problems[Objective.CRITICAL_PATH]),
            found.plans_tried,
            found.timed_out,
            found.wall_s,
        )
        for found, pair in zip(run.found, run.assignments, strict=True)
    )


def _ours(run: _Run, objective: Objective, time_limit_s: float, seed: int) -> tuple[PricedPlan, Assignment]:
    """The solver's plan; TorchRec's best is one of its starts."""
    from dse.placement.solver.certified import certify

    theirs = run.best(objective)
    start = None if theirs is None else theirs[1]
    problem = run.instance.problem(objective)
    answer = certify(problem, time_limit_s=time_limit_s, seed=seed, start=start)
    kept = start is not None and answer.objective >= loads_of(problem, start).objective
    setting = "TorchRec's best plan kept" if kept else "TorchRec's best plan is a start"
    assignment = answer.assignment
    priced = _priced(
        run, OURS, objective, setting, assignment, answer.wall_s, lower_bound_ms=answer.lower_bound
    )
    return priced, assignment


def _iteration_ms(design: Design, plan: ShardingPlan, predictor: Predictor) -> float:
    return predictor.predict(replace(design, sharding=plan)).iteration_time_us / US_PER_MS


def _by_iteration(
    design: Design,
    others: Sequence[tuple[PricedPlan, Assignment]],
    *,
    predictor: Predictor,
    time_limit_s: float,
    seed: int,
) -> PricedPlan:
    """The plan with the shortest predicted iteration: the solver's own, or one of the others where that is shorter."""
    from dse.placement.design.certify import plan_design

    found = plan_design(design, predictor=predictor, seed=seed, time_limit_s=time_limit_s)
    costs = price_ms(job_of(design), found.plan) or {}
    own = PricedPlan(
        planner=OURS,
        objective=ITERATION,
        setting="by predicted iteration time",
        rating_ms=costs.get(Objective.RATING),
        critical_path_ms=costs.get(Objective.CRITICAL_PATH),
        iteration_time_ms=found.iteration_time_us / US_PER_MS,
        fits=True,
        lower_bound_ms=found.lower_bound_us / US_PER_MS,
        wall_s=found.wall_s,
    )
    other = min((p for p, _ in others if p.fits), key=lambda p: p.iteration_time_ms or inf, default=own)
    if (other.iteration_time_ms or inf) >= (own.iteration_time_ms or inf):
        return own
    kept = f"kept: {other.planner} by {other.objective}, {other.setting}"
    return replace(
        other,
        planner=OURS,
        objective=ITERATION,
        setting=kept,
        lower_bound_ms=own.lower_bound_ms,
        wall_s=own.wall_s,
    )
