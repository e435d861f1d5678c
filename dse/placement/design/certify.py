"""A design's plan with the proof of how good it is.

The bound comes from `dse.placement.design.bound`, the plans from the solver on surrogates: the class with the least bound first, at
the solution of its linear program, then again at the best plan found, whose critical cycle may be another. Every plan
is priced whole by the predictor, and so are single changes of the best one.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np

from dse.errors import NoFeasibleCandidateError
from dse.placement.capacity import tables_capacity_bytes
from dse.placement.design.options import Option
from dse.placement.design.plan_search import PROVEN, PlanSearch
from dse.placement.design.problem import DesignProblem, Transform, problem_of
from dse.placement.design.shard_costs import replaced
from dse.placement.instances.labels import Labels
from dse.placement.instances.shortage import capacity_remedy, memory_problem, refusal, shortage_of
from dse.placement.solver.problem import Array, Assignment, Problem, Where, loads_of
from perfcore.design.design import Design
from perfcore.design.sharding import ShardingPlan, ShardingType, Shards
from perfcore.graph.dims import dims_of, structure_of
from perfcore.memory import embedding_bytes, memory_of
from perfcore.predictor import Predictor
from perfcore.units import BYTES_PER_GIB

_REMEDY_S = 0.05  # for each placement that is tried out where nothing fits


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another way to split one table, all others staying where they are.

    Attributes:
        type: sharding type.
        ranks: of its shards.
        iteration_time_us: of the whole plan then, predicted.
        effect_us: how much longer than the plan's.
        priced: predicted whole; else estimated by the plan's critical cycle.
    """

    type: ShardingType
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
        ranks: of its shards.
        bytes: device memory on all ranks together.
        load_us: what its shards add to the events of their ranks, summed.
        alternatives: other ways to split it, best first.
    """

    table: str
    type: ShardingType
    ranks: tuple[int, ...]
    bytes: float
    load_us: float
    alternatives: tuple[Alternative, ...]


@dataclass(frozen=True, slots=True, eq=False)
class CertifiedPlan:
    """A plan and what is known of it. Letters: r ranks, e events.

    Attributes:
        plan: where each table lives.
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
        tables: in the model's order.
    """

    plan: ShardingPlan
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
    tables: tuple[TableChoice, ...]


def plan_design(
    design: Design,
    *,
    predictor: Predictor,
    seed: int = 0,
    time_limit_s: float = 10.0,
    limits: Transform | None = None,
    explain: bool = True,
) -> CertifiedPlan:
    """The best plan found for a design's tables, and a bound that no plan goes below.

    Args:
        design: its own plan does not matter.
        predictor: of its device.
        seed: of the search; the same seed gives the same answer where the time limit cuts nothing off.
        time_limit_s: of everything together, roughly.
        limits: takes options and memory away.
        explain: price the alternatives of every table.

    Raises:
        NoFeasibleCandidateError: no placement fits the memory.
    """
    started = time.perf_counter()
    if design.system.world_size == 1:
        return _on_one_rank(design, predictor, started, limits)
    run = PlanSearch(design, predictor, seed, started + time_limit_s, limits)
    run.run()
    if run.plan is None:
        raise _nothing_fits(run)
    return _result(run, started, explain=explain)


def gap_pct(time_us: float, lower_us: float) -> float:
    """By how much a time may exceed the best one, in percent of the bound."""
    return max(100.0 * (time_us / lower_us - 1.0), 0.0)


def _on_one_rank(
    design: Design, predictor: Predictor, started: float, limits: Transform | None
) -> CertifiedPlan:
    """The only plan there is."""
    alone = replace(design, sharding=ShardingPlan.on_one_rank(design.model))
    memory = memory_of(alone)
    own_bytes = np.array([tables_capacity_bytes(alone)])
    capacity = _limited_capacity(alone, own_bytes, limits)
    held = memory.total - (alone.system.device.hbm_bytes - own_bytes)
    if not memory.fits(alone.system.device) or held[0] > capacity[0]:
        raise NoFeasibleCandidateError(
            f"Tables need at most {max(float(capacity[0]), 0.0) / BYTES_PER_GIB:.1f} GiB beside the rest of the job, "
            f"but need {float(held[0]) / BYTES_PER_GIB:.1f} GiB.",
            hint="Raise world_size, lower embedding_dim or the batch, or store tables in bf16.",
        )
    time_us = predictor.iteration_time_us(alone)
    tables = tuple(
        TableChoice(t.table, t.type, t.ranks, bytes_, 0.0, ())
        for t, bytes_ in zip(alone.sharding.tables, _bytes_alone(alone), strict=True)
    )
    return CertifiedPlan(
        plan=alone.sharding,
        iteration_time_us=time_us,
        lower_bound_us=time_us,
        certified_gap_pct=0.0,
        proven=True,
        wall_s=time.perf_counter() - started,
        events=("nothing",),
        load_us=np.zeros((1, 1)),
        hbm_bytes=held,
        capacity_bytes=capacity,
        total_hbm_bytes=memory.total,
        tables=tables,
    )


def _limited_capacity(alone: Design, capacity_bytes: Array, limits: Transform | None) -> Array:
    """`(1,)`: what limits leave of a rank's memory; they may leave a table no way at all."""
    if limits is None:
        return capacity_bytes
    whole = tuple(Option(t, p.type, 1, 1, 0, Where.ANY) for t, p in enumerate(alone.sharding.tables))
    return limits(DesignProblem(whole, np.array(_bytes_alone(alone)), capacity_bytes)).capacity_bytes


def _bytes_alone(design: Design) -> list[float]:
    """Device memory of each table of a design on one rank."""
    dims = dims_of([design])
    shards = {
        name: np.broadcast_to(getattr(dims.shards, name), dims.shards.rows.shape)[0].T[:, :, None]
        for name in Shards.__dataclass_fields__
    }
    each = replaced(dims, shards=Shards(**shards))
    return [float(b) for b in embedding_bytes(each, structure_of(design))[:, 0]]


def _result(run: PlanSearch, started: float, *, explain: bool) -> CertifiedPlan:
    assert run.plan is not None
    bound, assignment = run.at_plan()
    surrogate = run.surrogate(bound, assignment)
    loads = loads_of(surrogate.problem, assignment)
    gap = gap_pct(run.upper_us, run.lower_us)
    others = _alternatives(run) if explain else [()] * len(run.plan.tables)
    shards = bound.options.first_shard
    tables = []
    for t, (placed, option) in enumerate(zip(run.plan.tables, assignment.option, strict=True)):
        own = slice(shards[option], shards[option + 1])
        held, load = surrogate.problem.bytes[own].sum(), surrogate.problem.cost[own].sum()
        tables.append(
            TableChoice(placed.table, placed.type, placed.ranks, float(held), float(load), others[t])
        )
    capacity = run.problem.capacity_bytes
    rest = run.design.system.device.hbm_bytes - tables_capacity_bytes(run.design)
    return CertifiedPlan(
        plan=run.plan,
        iteration_time_us=run.upper_us,
        lower_bound_us=run.lower_us,
        certified_gap_pct=gap,
        proven=gap <= 100 * PROVEN,
        wall_s=time.perf_counter() - started,
        events=surrogate.events,
        load_us=loads.cost,
        hbm_bytes=loads.bytes,
        capacity_bytes=capacity,
        total_hbm_bytes=loads.bytes + rest,
        tables=tuple(tables),
    )


def _alternatives(run: PlanSearch) -> list[tuple[Alternative, ...]]:
    """For each table its other ways, with the times that are known, estimates beyond."""
    assert run.plan is not None
    out: list[list[Alternative]] = [[] for _ in run.plan.tables]
    for change in run.changes():
        known = run.known_us(change.plan)
        us = change.estimate_us if known is None else known
        out[change.table].append(
            Alternative(
                change.moved.type, change.moved.ranks, us, us - run.upper_us, priced=known is not None
            )
        )
    return [tuple(sorted(a, key=lambda x: x.iteration_time_us)) for a in out]


def _nothing_fits(run: PlanSearch) -> NoFeasibleCandidateError:
    """Why, and what would help."""
    from dse.placement.solver.search import search

    options, limits = run.options, run.problem
    problem = problem_of(options, np.zeros((len(options.shard_probe), 1)), run.costs.bytes, limits)
    labels = Labels(
        tables=tuple(t.name for t in run.design.model.tables),
        types=tuple(str(o.type) for o in options.options),
        kernels=("fused",) * len(options.options),
        events=("memory",),
    )

    def solve(problem: Problem) -> Assignment:
        return search(problem, seed=run.seed, time_limit_s=_REMEDY_S)

    remedy = capacity_remedy(problem, solve)
    return refusal(shortage_of(problem, labels, solve(memory_problem(problem))), [remedy] if remedy else [])
