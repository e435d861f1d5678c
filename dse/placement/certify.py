"""A design's plan with the proof of how good it is.

The bound comes from `dse.placement.design_bound`, the plans from the solver on surrogates: the class with the least bound first, at
the solution of its linear program, then again at the best plan found, whose critical cycle may be another. Every plan
is priced whole by the predictor, and so are single changes of the best one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from dse.errors import NoFeasibleCandidateError
from dse.placement.alternatives import alternatives
from dse.placement.design_bound import ClassBound, class_bounds, refine
from dse.placement.design_options import options_of
from dse.placement.design_problem import (
    DesignProblem,
    Surrogate,
    Transform,
    problem_of,
    rank_loads,
    surrogate_of,
    values_us,
)
from dse.placement.labels import Labels
from dse.placement.options import tables_capacity_bytes
from dse.placement.plan_time import PlanTimes
from dse.placement.problem import Array, Assignment, Problem, loads_of
from dse.placement.shard_costs import shard_costs
from dse.placement.shortage import capacity_remedy, memory_problem, refusal, shortage_of
from perfcore.design.design import Design
from perfcore.design.sharding import ShardingPlan, ShardingType, TableSharding
from perfcore.memory import memory_of
from perfcore.predictor import Predictor, feed_us
from perfcore.units import BYTES_PER_GIB

PROVEN = 1e-4  # a plan within this share of the bound is the best there is, but for what is not worth knowing
_SEARCH_SHARE = 0.15  # of the time left, for one search
_LEAST_SEARCH_S = 0.05
_ROUNDS = 4  # searches of one class
_WHOLE_SHARE = 0.1  # of the time left, for one class's bound with whole ways
_HEAVIEST = 20  # doublings
_MOST_PRICED = 3e6  # plans times ranks times tables: of single changes that are priced whole
_PRICED_AT_ONCE = 2e5  # likewise between two looks at the clock
_SAME = 1e-9  # relative


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
        return _on_one_rank(design, predictor, started)
    run = PlanSearch(design, predictor, seed, started + time_limit_s, limits)
    run.run()
    if run.plan is None:
        raise _nothing_fits(run)
    return _result(run, started, explain=explain)


def gap_pct(time_us: float, lower_us: float) -> float:
    """By how much a time may exceed the best one, in percent of the bound."""
    return max(100.0 * (time_us / lower_us - 1.0), 0.0)


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """One table of a plan split in another way.

    Attributes:
        table: position.
        moved: its new sharding.
        plan: the whole plan then.
        estimate_us: its iteration time, by the critical cycle of the plan before.
    """

    table: int
    moved: TableSharding
    plan: ShardingPlan
    estimate_us: float


@dataclass(eq=False)
class PlanSearch:
    """The state of one call: bounds of all classes, and the best plan."""

    design: Design
    predictor: Predictor
    seed: int
    until: float
    limits: Transform | None
    plan: ShardingPlan | None = None
    upper_us: float = np.inf
    found: dict[int, Assignment] = field(default_factory=dict)
    _known: dict[ShardingPlan, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Options, their costs, and the first bounds."""
        overheads = self.predictor.profile.overheads
        self.options = options_of(self.design)
        self.costs = shard_costs(self.options, self.predictor.cost, overheads)
        self.problem = self._problem()
        self.bounds = class_bounds(
            self.options,
            self.costs,
            self.predictor.cost,
            overheads,
            capacity_bytes=self.problem.capacity_bytes,
        )
        self.feed_us = feed_us(self.design)
        self.times = PlanTimes(self.predictor, self.design, self.options, self.costs)

    def _problem(self) -> DesignProblem:
        """What may be chosen; takes away from the options what the limits do."""
        shards = self.costs.bytes[self.options.shard_probe]
        most = np.maximum.reduceat(shards, self.options.first_shard[:-1])
        capacity = np.full(self.design.system.world_size, tables_capacity_bytes(self.design))
        problem = DesignProblem(self.options.options, most, capacity)
        if self.limits is None:
            return problem
        limited = self.limits(problem)
        left = set(limited.options)
        self.options = self.options.restricted(np.array([o in left for o in self.options.options]))
        return limited

    @property
    def left_s(self) -> float:
        """Time left."""
        return max(self.until - time.perf_counter(), 0.0)

    @property
    def lower_us(self) -> float:
        """No plan is faster."""
        least = min((b.lower_us for b in self.bounds), default=np.inf)
        return max(min(least, self.upper_us), self.feed_us)

    def run(self) -> None:
        """Bound, search, improve, until the gap is closed or the time is up."""
        self._refine()
        for rounds in range(1, _ROUNDS + 1):
            before = self.upper_us
            for number in self._open_classes():
                if self.left_s > 0 or self.plan is None:
                    self._search(number, rounds)
            if self.plan is None or self.closed or self.left_s <= 0:
                break
            self._close_in(rounds)
            if rounds > 1 and self.upper_us >= before:
                break
        if self.plan is not None and self.left_s > 0 and self._improve():
            self._close_in(1)

    @property
    def closed(self) -> bool:
        """No better plan is worth looking for."""
        return self.upper_us <= self.lower_us * (1 + PROVEN)

    def _refine(self) -> None:
        refine(self.bounds, upper_us=self.upper_us, seconds_left=lambda: self.left_s)

    def _close_in(self, rounds: int) -> None:
        """Bound again the classes that may hold a better plan, knowing the time of the best one."""
        for number in self._open_classes():
            if self.left_s > 0:
                self.bounds[number].close_in(
                    self.upper_us,
                    seconds_left=lambda: self.left_s,
                    whole_s=_WHOLE_SHARE * self.left_s * rounds,
                )

    def _open_classes(self) -> list[int]:
        """Classes whose bound leaves room for a better plan, the one with most room first."""
        order = sorted(range(len(self.bounds)), key=lambda i: self.bounds[i].lower_us)
        return [i for i in order if self.bounds[i].lower_us < self.upper_us * (1 - PROVEN)]

    def _search(self, number: int, rounds: int) -> None:
        """One search of a class: at the linear program's solution, later at the plan that the last one found."""
        from dse.placement.solve import search

        bound = self.bounds[number]
        if bound.lower_us >= self.upper_us * (1 - PROVEN):
            return  # since the list was made
        start = self._start(number)
        surrogate = self.surrogate(bound, start)
        found = search(
            surrogate.problem,
            seed=self.seed + rounds - 1,
            time_limit_s=max(_SEARCH_SHARE * self.left_s, _LEAST_SEARCH_S),
            start=start,
            options=bound.options_of_shares() if rounds == 1 else None,
            enough=bound.lower_us - surrogate.constant_us,
        )
        if loads_of(surrogate.problem, found).overflow_bytes(surrogate.problem) <= 0:
            self.found[number] = found
            self.offer([bound.options.plan(found.option, found.ranks)])

    def _start(self, number: int) -> Assignment | None:
        """The best plan, if it is of the class, or else the class's last one."""
        bound = self.bounds[number]
        if self.plan is not None:
            option = bound.options.chosen(self.plan)
            if option is not None and set(bound.options.flag[option]) == set(bound.kinds):
                return Assignment(option, tuple(t.ranks for t in self.plan.tables))
        return self.found.get(number)

    def surrogate(self, bound: ClassBound, at: Assignment | None) -> Surrogate:
        """The cut at an assignment, or at the linear program's solution, as a problem.

        Where the critical cycle runs through what no plan changes, tables are made heavier until it does not: all plans
        are alike, and the one with small loads is preferred.
        """
        values, bytes_at = bound.values() if at is None else values_us(bound, rank_loads(bound, at))
        for _ in range(_HEAVIEST):
            _, cut = bound.program.cut(values)
            if cut.segments:
                break
            values = 2 * values
        return surrogate_of(bound, cut, bytes_at, self.problem)

    def offer(self, plans: Sequence[ShardingPlan]) -> Array:
        """`(n,)` predicted times of plans that fit; the best so far is kept."""
        times_us = self.priced(plans)
        i = int(np.argmin(times_us))
        if times_us[i] < self.upper_us * (1 - _SAME):
            self.plan, self.upper_us = plans[i], float(times_us[i])
        return times_us

    def priced(self, plans: Sequence[ShardingPlan]) -> Array:
        """`(n,)` predicted times, remembered."""
        new = [p for p in dict.fromkeys(plans) if p not in self._known]
        self._known.update(zip(new, self.times(new).tolist(), strict=True))
        return np.array([self._known[p] for p in plans])

    def at_plan(self) -> tuple[ClassBound, Assignment]:
        """The best plan in the class of most kinds that knows its options."""
        assert self.plan is not None
        for bound in sorted(self.bounds, key=lambda b: -len(b.kinds)):
            option = bound.options.chosen(self.plan)
            if option is not None:
                return bound, Assignment(option, tuple(t.ranks for t in self.plan.tables))
        raise AssertionError("a plan is found in some class")

    def _improve(self) -> bool:
        """Price single changes of the best plan; whether one is better."""
        before = self.upper_us
        changes = self.changes()
        step = max(1, int(_PRICED_AT_ONCE / self._size))
        for first in range(0, min(len(changes), int(_MOST_PRICED / self._size)), step):
            if self.left_s <= 0:
                break
            self.offer([c.plan for c in changes[first : first + step]])
        return self.upper_us < before

    @property
    def _size(self) -> int:
        return self.design.system.world_size * len(self.design.model.tables)

    def known_us(self, plan: ShardingPlan) -> float | None:
        """The predicted time of a plan that was priced."""
        return self._known.get(plan)

    def changes(self) -> list[Change]:
        """The best plan with one table split in another way, the most promising first."""
        assert self.plan is not None
        bound, assignment = self.at_plan()
        problem = self.surrogate(bound, assignment).problem
        loads = loads_of(problem, assignment)
        out = []
        for t in range(problem.num_tables):
            for other in alternatives(problem, assignment, loads, t):
                table = self.plan.tables[t]
                option = bound.options.options[other.option]
                moved = TableSharding(table.table, option.type, other.ranks)
                tables = (*self.plan.tables[:t], moved, *self.plan.tables[t + 1 :])
                estimate = self.upper_us + other.objective - loads.objective
                fits = other.missing_bytes <= 0
                out.append(Change(t, moved, ShardingPlan(tables), estimate if fits else np.inf))
        return sorted((c for c in out if np.isfinite(c.estimate_us)), key=lambda c: c.estimate_us)


def _on_one_rank(design: Design, predictor: Predictor, started: float) -> CertifiedPlan:
    """The only plan there is."""
    alone = replace(design, sharding=ShardingPlan.on_one_rank(design.model))
    memory = memory_of(alone)
    capacity = np.array([tables_capacity_bytes(alone)])
    held = memory.total - (alone.system.device.hbm_bytes - capacity)
    if not memory.fits(alone.system.device):
        raise NoFeasibleCandidateError(
            f"Tables need at most {max(float(capacity[0]), 0.0) / BYTES_PER_GIB:.1f} GiB beside the rest of the job, "
            f"but need {float(held[0]) / BYTES_PER_GIB:.1f} GiB.",
            hint="Raise world_size, lower embedding_dim or the batch, or store tables in bf16.",
        )
    time_us = predictor.iteration_time_us(alone)
    tables = tuple(
        TableChoice(t.table, t.type, t.ranks, float("nan"), 0.0, ()) for t in alone.sharding.tables
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
    from dse.placement.solve import search

    options, limits = run.options, run.problem
    problem = problem_of(options, np.zeros((len(options.shard_probe), 1)), run.costs.bytes, limits)
    labels = Labels(
        tables=tuple(t.name for t in run.design.model.tables),
        types=tuple(str(o.type) for o in options.options),
        kernels=("fused",) * len(options.options),
        events=("memory",),
    )

    def solve(problem: Problem) -> Assignment:
        return search(problem, seed=run.seed, time_limit_s=_LEAST_SEARCH_S)

    remedy = capacity_remedy(problem, solve)
    return refusal(shortage_of(problem, labels, solve(memory_problem(problem))), [remedy] if remedy else [])
