"""A design's plan with the proof of how good it is.

The bound comes from `dse.placement.design.bound`, the plans from the solver on surrogates: the class with the least bound first, at
the solution of its linear program, then again at the best plan found, whose critical cycle may be another. Every plan
is priced whole by the predictor, and so are single changes of the best one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dse.errors import NoFeasibleCandidateError
from dse.placement.capacity import rest_bytes
from dse.placement.design.options import Offer, Options
from dse.placement.design.plan_search import PROVEN, PlanSearch
from dse.placement.design.problem import Transform, problem_of
from dse.placement.instances.labels import Labels
from dse.placement.instances.shortage import capacity_remedy, memory_problem, refusal, shortage_of
from dse.placement.solver.problem import Array, Assignment, Problem, loads_of
from perfcore.design.design import Design
from perfcore.design.sharding import ShardingPlan, ShardingType
from perfcore.predictor import Predictor

_REMEDY_S = 0.05  # for each placement that is tried out where nothing fits


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another way to split one table, all others staying where they are.

    Attributes:
        type: sharding type.
        kernel: compute kernel; a cache is followed by its ratio: `fused_uvm_caching@0.2`.
        ranks: of its shards.
        iteration_time_us: of the whole plan then, predicted.
        effect_us: how much longer than the plan's.
        priced: predicted whole; else estimated by the plan's critical cycle.
    """

    type: ShardingType
    kernel: str
    ranks: tuple[int, ...]
    iteration_time_us: float
    effect_us: float
    priced: bool = True


@dataclass(frozen=True, slots=True)
class TableChoice:
    """Where a table went.

    Attributes:
        table: its name.
        type: sharding type.
        kernel: compute kernel; a cache is followed by its ratio: `fused_uvm_caching@0.2`.
        ranks: of its shards.
        bytes: device memory on all ranks together.
        host_bytes: host memory on all machines together.
        load_us: what its shards add to the events of their ranks, summed.
        together: tables that are split alike and lie beside it.
        alternatives: other ways to split it, best first.
    """

    table: str
    type: ShardingType
    kernel: str
    ranks: tuple[int, ...]
    bytes: float
    host_bytes: float
    load_us: float
    together: tuple[str, ...]
    alternatives: tuple[Alternative, ...]


@dataclass(frozen=True, slots=True, eq=False)
class CertifiedPlan:
    """A plan and what is known of it. Letters: r ranks, e events.

    Attributes:
        design: with the plan, and ranks as slow as the limits say.
        iteration_time_us: predicted.
        lower_bound_us: no plan of the design's options is predicted to be faster.
        certified_gap_pct: by how much the plan may at most exceed the best one, in percent of the bound.
        proven: the gap is nothing.
        wall_s: time spent.
        events: what the columns of `load_us` are: the critical cycle's segments and collectives.
        load_us: `(r, e)`: what each rank's shards add to them.
        hbm_bytes: `(r,)` device memory of each rank's shards.
        capacity_bytes: `(r,)` what each rank can give to tables.
        total_hbm_bytes: `(r,)` device memory of each rank in all.
        host_bytes: `(h,)` host memory of each machine's tables.
        host_capacity_bytes: `(h,)` what each machine can give to tables.
        tables: in the model's order.
    """

    design: Design
    iteration_time_us: float
    lower_bound_us: float
    certified_gap_pct: float
    proven: bool
    wall_s: float
    events: tuple[str, ...]
    load_us: Array
    hbm_bytes: Array
    capacity_bytes: Array
    total_hbm_bytes: Array
    host_bytes: Array
    host_capacity_bytes: Array
    tables: tuple[TableChoice, ...]

    @property
    def plan(self) -> ShardingPlan:
        """Where each table lives."""
        return self.design.sharding


def plan_design(
    design: Design,
    *,
    predictor: Predictor,
    seed: int = 0,
    time_limit_s: float = 10.0,
    limits: Transform | None = None,
    offer: Offer | None = None,
    remedies: Callable[[], Sequence[str]] = tuple,
    explain: bool = True,
) -> CertifiedPlan:
    """The best plan found for a design's tables, and a bound that no plan goes below.

    Args:
        design: its own plan does not matter.
        predictor: of its device.
        seed: of the search; the same seed gives the same answer where the time limit cuts nothing off.
        time_limit_s: of everything together, roughly.
        limits: takes options and memory away, keeps tables together, makes ranks slower.
        offer: what tables may be beside the usual.
        remedies: what would do beside more memory, asked for where nothing fits.
        explain: price the alternatives of every table.

    Raises:
        NoFeasibleCandidateError: no placement fits the memory.
    """
    started = time.perf_counter()
    run = PlanSearch(design, predictor, seed, started + time_limit_s, limits, offer)
    run.run()
    if run.plan is None:
        raise _nothing_fits(run, remedies())
    return _result(run, started, explain=explain)


def gap_pct(time_us: float, lower_us: float) -> float:
    """By how much a time may exceed the best one, in percent of the bound."""
    return max(100.0 * (time_us / lower_us - 1.0), 0.0)


def _result(run: PlanSearch, started: float, *, explain: bool) -> CertifiedPlan:
    assert run.plan is not None
    bound, assignment = run.at_plan()
    surrogate = run.surrogate(bound, assignment)
    loads = loads_of(surrogate.problem, assignment)
    gap = gap_pct(run.upper_us, run.lower_us)
    capacity, conditions = run.problem.capacity_bytes, run.problem.conditions
    return CertifiedPlan(
        design=replace(run.design, sharding=run.plan),
        iteration_time_us=run.upper_us,
        lower_bound_us=run.lower_us,
        certified_gap_pct=gap,
        proven=gap <= 100 * PROVEN,
        wall_s=time.perf_counter() - started,
        events=surrogate.events,
        load_us=np.where(surrogate.launched, loads.cost, loads.cost / conditions.slowness[:, None]),
        hbm_bytes=loads.bytes,
        capacity_bytes=capacity,
        total_hbm_bytes=loads.bytes + rest_bytes(run.design),
        host_bytes=loads.host_bytes,
        host_capacity_bytes=conditions.host_capacity_bytes,
        tables=_tables(run, surrogate.problem, bound.options, assignment, explain=explain),
    )


def _tables(
    run: PlanSearch, problem: Problem, options: Options, assignment: Assignment, *, explain: bool
) -> tuple[TableChoice, ...]:
    """What became of each table."""
    names = [t.name for t in run.design.model.tables]
    others = _alternatives(run) if explain else [()] * len(names)
    groups = {t: g for g in run.problem.conditions.groups for t in g}
    out = []
    for t, o in enumerate(assignment.option):
        own = slice(problem.first_shard[o], problem.first_shard[o + 1])
        out.append(
            TableChoice(
                names[t],
                options.options[o].type,
                options.options[o].kernel_label,
                assignment.ranks[t],
                float(problem.bytes[own].sum()),
                float(problem.host_bytes[own].sum()),
                float(problem.cost[own].sum()),
                tuple(names[member] for member in groups[t] if member != t),
                others[t],
            )
        )
    return tuple(out)


def _alternatives(run: PlanSearch) -> list[tuple[Alternative, ...]]:
    """For each table its other ways, with the times that are known, estimates beyond."""
    assert run.plan is not None
    out: list[list[Alternative]] = [[] for _ in run.plan.tables]
    for change in (c for c in run.changes() if not c.moved):
        known = run.known_us(change.plan)
        us = change.estimate_us if known is None else known
        ranks = change.plan.tables[change.tables[0]].ranks
        of_group = Alternative(
            change.option.type,
            change.option.kernel_label,
            ranks,
            us,
            us - run.upper_us,
            priced=known is not None,
        )
        for table in change.tables:
            out[table].append(of_group)
    return [tuple(sorted(a, key=lambda x: x.iteration_time_us)) for a in out]


def _nothing_fits(run: PlanSearch, remedies: Sequence[str]) -> NoFeasibleCandidateError:
    """Why, and what would help: the remedies, and more memory."""
    from dse.placement.solver.search import search

    options, limits = run.options, run.problem
    problem = problem_of(options, np.zeros((len(options.shard_probe), 1)), run.costs, limits)
    labels = Labels(
        tables=tuple(t.name for t in run.design.model.tables),
        types=tuple(str(o.type) for o in options.options),
        kernels=tuple(o.kernel_label for o in options.options),
        events=("memory",),
    )

    def solve(problem: Problem) -> Assignment:
        return search(problem, seed=run.seed, time_limit_s=_REMEDY_S)

    memory = capacity_remedy(problem, solve)
    missing = shortage_of(problem, labels, solve(memory_problem(problem)))
    return refusal(missing, [*remedies, *([] if memory is None else [memory])])
