"""The search for a design's plan, between a bound that rises and a best time that falls.

Letters: n plans.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from dse.placement.capacity import rank_capacity_bytes
from dse.placement.design.bound import ClassBound
from dse.placement.design.changes import Change, single_changes
from dse.placement.design.classes import class_bounds, refine
from dse.placement.design.conditions import Conditions
from dse.placement.design.options import Offer, options_of
from dse.placement.design.plan_time import PlanTimes
from dse.placement.design.probing import shard_costs
from dse.placement.design.problem import (
    DesignProblem,
    Surrogate,
    Transform,
    rank_loads,
    surrogate_of,
    values_us,
)
from dse.placement.solver.problem import Array, Assignment, loads_of
from perfcore.design.design import Design
from perfcore.design.sharding import ShardingPlan, ShardingType
from perfcore.predictor import Predictor, feed_us

PROVEN = 1e-4  # a plan within this share of the bound is the best there is, but for what is not worth knowing
_SEARCH_SHARE = 0.15  # of the time left, for one search
_LEAST_SEARCH_S = 0.05
_ROUNDS = 12  # searches of one class
_IDLE = 3  # rounds without a better plan, after which no more is looked for
_WHOLE_SHARE = 0.1  # of the time left, for one class's bound with whole ways
_PACK_SHARE = 0.3  # of all time is left for bounds with ranks told apart
_PACK_SHARES = (0.25, 0.5, 1.0)  # of the time left, for a class's bound with ranks told apart, at each try
_LEAST_WHOLE_S = 1.0
_HEAVIEST = 20  # doublings
_MOST_PRICED = 3e6  # plans times ranks times tables: of single changes that are priced whole
_PRICED_AT_ONCE = 2e5  # likewise between two looks at the clock
_PROMISING = 1.05  # classes whose bound is within this factor of the least are searched first
_SAME = 1e-9  # relative
_REFUTED = 1e-6  # relative; by less, rounding may put a plan below its bound


@dataclass(eq=False)
class PlanSearch:
    """The state of one call: bounds of all classes, and the best plan."""

    design: Design
    predictor: Predictor
    seed: int
    until: float
    limits: Transform | None
    offered: Offer | None = None
    plan: ShardingPlan | None = None
    upper_us: float = np.inf
    packing_s: float = 0.0
    found: dict[int, Assignment] = field(default_factory=dict)
    _known: dict[ShardingPlan, float] = field(default_factory=dict)
    _changes: tuple[ShardingPlan, list[Change]] | None = None

    def __post_init__(self) -> None:
        """Options, their costs, and the first bounds."""
        overheads = self.predictor.profile.overheads
        # Under limits that forbid other kinds, column pieces on one machine may be all that is left.
        offer = replace(self.offered or Offer(), one_machine=self.limits is not None)
        self.options = options_of(self.design, offer)
        self.costs = shard_costs(self.options, self.predictor.cost, overheads)
        self.problem = self._problem()
        if self.problem.conditions.uneven:
            slowness = tuple(self.problem.conditions.slowness.tolist())
            self.design = replace(self.design, system=replace(self.design.system, slowness=slowness))
            self.options = replace(self.options, design=self.design)
        self.bounds = class_bounds(
            self.options,
            self.costs,
            self.predictor.cost,
            overheads,
            capacity_bytes=self.problem.capacity_bytes,
            conditions=self.problem.conditions,
        )
        self.feed_us = feed_us(self.design)
        self.times = PlanTimes(self.predictor, self.design, self.options, self.costs)

    def _problem(self) -> DesignProblem:
        """What may be chosen; takes away from the options what the limits do."""
        shards = self.costs.bytes[self.options.shard_probe]
        most = np.maximum.reduceat(shards, self.options.first_shard[:-1])
        capacity, conditions = rank_capacity_bytes(self.design), Conditions.of(self.design)
        problem = DesignProblem(self.options.options, most, capacity, conditions)
        if self.limits is None:
            return problem
        limited = _without_copies(self.limits(problem))
        left = set(limited.options)
        self.options = self.options.restricted(np.array([o in left for o in self.options.options]))
        return limited

    @property
    def left_s(self) -> float:
        """Time left."""
        return max(self.until - time.perf_counter(), 0.0)

    @property
    def lower_us(self) -> float:
        """No plan is faster; the only plan is the best."""
        if (
            self.plan is not None
            and self.design.system.world_size == 1
            and len(self.options.options) == len(self.plan.tables)
        ):
            return self.upper_us
        least = min((b.lower_us for b in self.bounds), default=np.inf)
        return max(min(least, self.upper_us), self.feed_us)

    def run(self) -> None:
        """Bound, search, improve, until the gap is closed or the time is up."""
        self._refine()
        idle, self.packing_s = 0, _PACK_SHARE * self.left_s
        for rounds in range(1, _ROUNDS + 1):
            if self.left_s < self.packing_s:
                break
            before = self.upper_us
            for number in self._open_classes(promising=rounds == 1):
                if self.left_s > 0 or self.plan is None:
                    self._search_anew(number, rounds)
            if self.plan is None or self.closed or self.left_s <= 0:
                break
            self._close_in(rounds)
            idle = 0 if self.upper_us < before else idle + 1
            if idle == _IDLE:
                break
        better = False
        while self.plan is not None and self.left_s > self.packing_s and self._improve():
            better = True
        if better:
            self._close_in(1)
        self._pack()

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
                    whole_s=max(_WHOLE_SHARE * self.left_s * rounds, _LEAST_WHOLE_S),
                )

    def _pack(self) -> None:
        """Bound the class with the least bound with ranks told apart, again and longer, as long as it may help."""
        tries: Counter[int] = Counter()
        while self.plan is not None and not self.closed and self.left_s > 0:
            number = self._least()
            share = _PACK_SHARES[min(tries[number], len(_PACK_SHARES) - 1)]
            tries[number] += 1
            if (
                not self.bounds[number].pack(self.upper_us, time_limit_s=share * self.left_s)
                and self._least() == number
            ):
                return

    def _least(self) -> int:
        return min(range(len(self.bounds)), key=lambda i: self.bounds[i].lower_us)

    def _open_classes(self, *, promising: bool = False) -> list[int]:
        """Classes whose bound leaves room for a better plan, the one with most room first; or those with much."""
        order = sorted(range(len(self.bounds)), key=lambda i: self.bounds[i].lower_us)
        most = self.upper_us * (1 - PROVEN)
        if promising and order:
            least = self.bounds[order[0]].lower_us
            most = min(most, least * _PROMISING)
        return [i for i in order if self.bounds[i].lower_us < most]

    def _search_anew(self, number: int, rounds: int) -> None:
        """Search a class; the first plan found rules classes out before they are searched."""
        first = self.plan is None
        self._search(number, rounds)
        if first and self.plan is not None:
            self._close_in(rounds)

    def _search(self, number: int, rounds: int) -> None:
        """One search of a class: at the linear program's solution, later at the plan that the last one found."""
        from dse.placement.solver.search import search

        bound = self.bounds[number]
        if bound.lower_us >= self.upper_us * (1 - PROVEN):
            return  # since the list was made
        # Every other search begins anew, from what the linear program would choose.
        start = self._start(number) if rounds % 2 == 0 or number not in self.found else None
        surrogate = self.surrogate(bound, start)
        found = surrogate.from_solver(
            search(
                surrogate.solved,
                seed=self.seed + rounds - 1,
                time_limit_s=max(_SEARCH_SHARE * self.left_s, _LEAST_SEARCH_S),
                start=None if start is None else surrogate.to_solver(start),
                options=surrogate.chosen(bound.options_of_shares()),
                enough=bound.lower_us - surrogate.constant_us,
            )
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
        for plan, time_us in zip(plans, times_us.tolist(), strict=True):
            self._check(plan, time_us)
        i = int(np.argmin(times_us))
        if times_us[i] < self.upper_us * (1 - _SAME):
            self.plan, self.upper_us = plans[i], float(times_us[i])
        return times_us

    def _check(self, plan: ShardingPlan, time_us: float) -> None:
        """A plan below the bound of its class would refute the bound: no gap may be told then.

        Raises:
            AssertionError: it is below.
        """
        option = self.options.chosen(plan)
        kinds = None if option is None else tuple(sorted(set(self.options.flag[option].tolist())))
        for bound in self.bounds:
            if bound.kinds == kinds and time_us < bound.lower_us * (1 - _REFUTED):
                raise AssertionError(f"a plan takes {time_us} µs, but the bound says {bound.lower_us} µs")

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
        """Price single changes of the best plan, and of the plans of classes that may hold a better one."""
        before = self.upper_us
        self._price(self.changes())
        for number in self._open_classes():
            if number in self.found:
                self._price(self._changes_of(self.bounds[number], self.found[number]))
        return self.upper_us < before

    def _price(self, changes: Sequence[Change]) -> None:
        step = max(1, int(_PRICED_AT_ONCE / self._size))
        for first in range(0, min(len(changes), int(_MOST_PRICED / self._size)), step):
            if self.left_s <= self.packing_s:
                break
            self.offer([c.plan for c in changes[first : first + step]])

    @property
    def _size(self) -> int:
        return self.design.system.world_size * len(self.design.model.tables)

    def known_us(self, plan: ShardingPlan) -> float | None:
        """The predicted time of a plan that was priced."""
        return self._known.get(plan)

    def changes(self) -> list[Change]:
        """Single changes of the best plan, the most promising first."""
        assert self.plan is not None
        if self._changes is None or self._changes[0] != self.plan:
            self._changes = self.plan, self._changes_of(*self.at_plan())
        return self._changes[1]

    def _changes_of(self, bound: ClassBound, assignment: Assignment) -> list[Change]:
        plan, surrogate = (
            bound.options.plan(assignment.option, assignment.ranks),
            self.surrogate(bound, assignment),
        )
        return single_changes(plan, float(self.priced([plan])[0]), bound.options, assignment, surrogate)


def _without_copies(problem: DesignProblem) -> DesignProblem:
    """Without column pieces that stay on one machine, where the same pieces may lie anywhere."""
    free = {
        (o.table, o.pieces, o.kernel_label) for o in problem.options if o.type is ShardingType.COLUMN_WISE
    }
    kept = [
        o.type is not ShardingType.TABLE_COLUMN_WISE or (o.table, o.pieces, o.kernel_label) not in free
        for o in problem.options
    ]
    return problem.keep(np.array(kept))
