"""Search for placements on many ranks, whose steps cost the same however many there are.

It minimises, summed over events, the mean of the k largest loads (`tail_moves`), and lets k fall to a few while it cools: first
large loads are spread, at last the largest ones count. Options with a shard longer than the events should last are not
offered: they cost an event as much as all its other shards. How long that is, relaxations in boxes (`boxes`) say at
first, and the best plan afterwards.

Letters: t tables, o options, s shards, e events, r ranks, h machines, u slots, n entries.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np

from dse.placement.solver.bound import Bound
from dse.placement.solver.boxes import Boxes
from dse.placement.solver.packing import most_weight
from dse.placement.solver.problem import Array, Assignment, Ints, Mask, Problem, Where
from dse.placement.solver.tail_moves import ABOVE, BYTE, WORK, Parts, Plan, improve_plan, rebuild_plan

MOST_WORK = 3_000_000  # options times ranks, beyond which the usual search is slow
CHUNK = 2_000  # steps at one temperature and one k
_FEWEST_STEPS = 100_000  # whatever the time limit
_REBUILT = 50  # chunks between two sums from scratch, which end the drift of rounding
_STEPS_PER_RANK = 1_000  # of the first rounds; a quarter of it of the very first, for little time
_CEILINGS = (1.2, 1.3, 1.1)  # of the relaxation's events
_SHORTER = 0.93  # of the best plan's event
_HEATS = (5e-6, 1e-6)  # of the objective, at the beginning and at the end
_TAILS = (0.4, 0.002)  # k over ranks, likewise
_WORK_WEIGHT = 0.3  # of the mean over ranks beside that of the largest loads
_OVERFLOW_WEIGHT, _TIGHT_WEIGHT = 3.0, 30.0  # of the objective, for a rank's memory; and while nothing fits
_MIX = (0.05, 0.2, 0.85, 6.0, 4.0, 4.0)
_LEAST_S = 0.2  # for a relaxation at the end of the time
_TINY = 1e-300


def suits(problem: Problem) -> bool:
    """Whether the problem is large, of alike ranks that all tables may take, and needs no options within a machine."""
    large = problem.num_options * problem.num_ranks > MOST_WORK
    alike = problem.allowed is None and np.ptp(problem.slowness) == 0
    return bool(
        large and alike and np.logical_or.reduceat(_movable(problem), problem.first_option[:-1]).all()
    )


def _movable(problem: Problem) -> Mask:
    """`(o,)`: not several shards that must share a machine."""
    mask: Mask = (problem.where != Where.WITHIN) | (problem.shard_counts == 1)
    return mask


@dataclass(frozen=True, slots=True, eq=False)
class _Found:
    """The best so far.

    Attributes:
        overflow: memory beyond capacity.
        objective: of the plan.
        option: `(t,)`.
        place: `(u,)`.
        events: `(e,)` how long each lasts.
    """

    overflow: float
    objective: float
    option: Ints
    place: Ints
    events: Array

    @property
    def key(self) -> tuple[float, float]:
        return self.overflow, self.objective


@dataclass(frozen=True, slots=True)
class _Round:
    """Annealing of so many steps of the options offered."""

    steps: int
    parts: Parts
    option: Ints
    place: Ints


class TailSearch:
    """A search that can always go on.

    Attributes:
        steps: done so far.
    """

    def __init__(
        self, problem: Problem, relaxed: Bound, *, seed: int = 0, boxes: Boxes | None = None
    ) -> None:
        """Prepare.

        Args:
            problem: one that it `suits`.
            relaxed: its bound without ranks; without a point, the search begins with the cheapest options.
            seed: of the random numbers.
            boxes: of the problem, if made already.
        """
        self._problem, self._relaxed = problem, relaxed
        self._boxes = boxes or Boxes(problem)
        self._parts, self._common = _parts_of(problem)
        self._random = np.random.default_rng(seed)
        self._plan = _empty_plan(problem, self._parts, seed)
        self._best: _Found | None = None
        self._round: _Round | None = None
        self._done = self._number = self.steps = 0
        self._until = np.inf

    @property
    def best(self) -> Assignment:
        """The best assignment so far; `run` must have been called."""
        assert self._best is not None
        return _assignment(self._problem, self._parts, self._best)

    @property
    def objective(self) -> float:
        """Of the best assignment."""
        return np.inf if self._best is None else self._best.objective

    @property
    def overflow_bytes(self) -> float:
        """Memory beyond capacity of the best assignment."""
        return np.inf if self._best is None else self._best.overflow

    def run(self, *, time_limit_s: float, work: float = np.inf, enough: float = 0.0) -> None:
        """Improve until `work` steps in all, the time limit, or an objective that is `enough`; some pieces at least."""
        self._until = time.perf_counter() + time_limit_s
        while self.steps < work and not (self._best and self._best.key <= (0.0, enough)):
            if self.steps >= _FEWEST_STEPS and time.perf_counter() >= self._until:
                return
            self._advance()

    def _advance(self) -> None:
        if self._round is None or self._done >= self._round.steps:
            self._begin(self._next())
        assert self._round is not None
        passed = self._done / self._round.steps
        k = _between(_TAILS, passed) * self._problem.num_ranks
        hot = self._retarget(max(1, round(k)))
        self._note()
        heat = _between(_HEATS, passed) * max(self._scale, _TINY)
        improve_plan(self._round.parts, self._plan, hot, CHUNK, heat, np.array(_MIX))
        self._done += CHUNK
        self.steps += CHUNK
        if self._done // CHUNK % _REBUILT == 0 or self._done >= self._round.steps:
            rebuild_plan(self._round.parts, self._plan)
            self._note()

    def _begin(self, next_: _Round) -> None:
        self._round, self._done = next_, 0
        self._plan.option[:], self._plan.place[:] = next_.option, next_.place
        rebuild_plan(next_.parts, self._plan)

    def _next(self) -> _Round:
        """First from relaxations; then in turn from others with one event shorter than the best plan's, and from that plan."""
        number, first = self._number, _STEPS_PER_RANK * self._problem.num_ranks
        self._number += 1
        later = number - len(_CEILINGS)
        doubled = min(max(later, 0) // (2 * self._problem.num_events), 20)
        steps = first * 2**doubled if number else first // 4
        if self._best is None and self._relaxed.events is None:
            return self._from(-self._estimates(), self._boxes.options.usable, steps)
        if later < 0 and self._relaxed.events is not None:
            return self._relaxed_round(_CEILINGS[number] * self._relaxed.events, steps)
        if self._best is None:
            return self._from(np.asarray(self._relaxed.weights), self._boxes.options.usable, steps)
        if later % 2:
            parts = self._offering(self._short(self._best.events), self._best.option)
            return _Round(steps, parts, self._best.option, self._best.place)
        event = int(np.argsort(-self._best.events, kind="stable")[later // 2 % self._problem.num_events])
        high = self._best.events * np.where(np.arange(len(self._best.events)) == event, _SHORTER, 1.0)
        return self._relaxed_round(high, steps)

    def _relaxed_round(self, high: Array, steps: int) -> _Round:
        """From the relaxation without options with a shard that is longer than these `(e,)`; else the next one."""
        short, free = self._short(high), np.full(len(high), np.inf)
        left = max(self._until - time.perf_counter(), _LEAST_S)
        boxed = self._boxes.within(np.zeros(len(high)), free, usable=short, time_limit_s=left)
        return self._next() if boxed.weights is None else self._from(boxed.weights, short, steps)

    def _estimates(self) -> Array:
        """`(o,)` a rank's share in an option's work, much more where its largest shard exceeds the share in all work."""
        options, ranks = self._boxes.options, self._problem.num_ranks
        share, largest = options.total.sum(axis=1) / ranks, options.largest.sum(axis=1)
        fair = np.minimum.reduceat(
            np.where(options.usable, share, np.inf), self._problem.first_option[:-1]
        ).sum()
        estimates: Array = np.where(options.usable, share + ranks * np.maximum(largest - fair, 0.0), np.inf)
        return estimates

    def _short(self, high: Array) -> Mask:
        """`(o,)` options on every rank, and those without a shard that is longer than its event."""
        options = self._boxes.options
        return self._boxes.offered(high) | (options.usable & options.shared)

    def _from(self, weights: Array, mask: Mask, steps: int) -> _Round:
        """From the options with the largest shares, on random places."""
        option = most_weight(self._problem, np.where(_movable(self._problem), weights, -np.inf))
        hosts = self._problem.where[option][self._parts.table_of_slot] == Where.HOST
        places = np.where(hosts, len(self._problem.host_capacity_bytes), self._problem.num_ranks)
        place = (self._random.random(len(places)) * places).astype(np.int64)
        return _Round(steps, self._offering(mask, option), option, place)

    def _offering(self, mask: Mask, option: Ints) -> Parts:
        """The parts with these options to choose from, and those that are taken."""
        offered = mask & _movable(self._problem)
        offered[option] = True
        counts = np.add.reduceat(offered, self._problem.first_option[:-1])
        first = np.r_[0, counts.cumsum()].astype(np.int64)
        return replace(self._parts, first_offer=first, offer=np.flatnonzero(offered).astype(np.int64))

    def _retarget(self, k: int) -> Ints:
        """Set ceilings and prices for the mean of the k largest loads; the slots on ranks with one of them."""
        plan, ranks = self._plan, self._problem.num_ranks
        plan.ceiling[:] = np.partition(plan.load, ranks - k, axis=0)[ranks - k]
        plan.price[ABOVE], plan.price[WORK] = 1.0 / k, _WORK_WEIGHT / ranks
        limits = self._problem.capacity_bytes[np.isfinite(self._problem.capacity_bytes)]
        roomy = float(np.abs(limits).mean()) if len(limits) else 1.0
        weight = _TIGHT_WEIGHT if self._best and self._best.overflow > 0.0 else _OVERFLOW_WEIGHT
        plan.price[BYTE] = weight * self._scale / max(roomy, 1.0)
        hot = ((plan.load >= plan.ceiling) & (plan.ceiling > 0)).any(axis=1) | (
            plan.held > self._parts.capacity
        )
        return self._slots_on(hot)

    def _slots_on(self, hot: Mask) -> Ints:
        """Slots of units on some of the `(r,)` ranks, once a rank."""
        plan, parts = self._plan, self._parts
        option = plan.option[parts.table_of_slot]
        unit = np.arange(len(option)) - parts.slot0[parts.table_of_slot]
        used = np.flatnonzero((unit < parts.units[option]) & (self._problem.where[option] != Where.ALL))
        grouped, place = self._problem.where[option[used]] == Where.HOST, plan.place[used]
        machines = hot.reshape(-1, self._problem.ranks_per_host).sum(axis=1)
        times = np.where(grouped, machines[np.where(grouped, place, 0)], hot[np.where(grouped, 0, place)])
        return np.repeat(used, times).astype(np.int64)

    @property
    def _scale(self) -> float:
        return max(self._relaxed.value, 0.0) if self._best is None else self._best.objective

    def _note(self) -> None:
        """Keep the plan if it is the best."""
        plan, parts = self._plan, self._parts
        over = float(np.maximum(plan.held - parts.capacity, 0.0).sum())
        over += float(np.maximum(plan.host_held - parts.host_capacity, 0.0).sum())
        events = plan.load.max(axis=0) + self._common[plan.option].sum(axis=0)
        if self._best is None or (over, float(events.sum())) < self._best.key:
            self._best = _Found(over, float(events.sum()), plan.option.copy(), plan.place.copy(), events)


def _between(ends: tuple[float, float], share: float) -> float:
    """From the first to the last, by equal factors."""
    return float(ends[0] * (ends[1] / ends[0]) ** share)


def _parts_of(problem: Problem) -> tuple[Parts, Array]:
    """The arrays, and `(o, e)` what each rank gets at least from an `ALL` option."""
    on_all, first = problem.where == Where.ALL, problem.first_shard[:-1]
    least = np.minimum.reduceat(problem.cost, first, axis=0)
    same = on_all & (least == np.maximum.reduceat(problem.cost, first, axis=0)).all(axis=1)
    pace = float(problem.slowness[0])
    common = np.where(on_all[:, None], least, 0.0) * pace
    differ = np.flatnonzero(
        np.repeat(~same, problem.shard_counts)
    )  # most shards are of options that cost all ranks the same
    rest = problem.cost[differ] * pace - np.repeat(common[~same], problem.shard_counts[~same], axis=0)
    shard, event = np.nonzero(rest)
    counts = problem.shard_counts
    groups = np.where(problem.where == Where.HOST, counts // problem.ranks_per_host, counts)
    units = np.where(on_all, 1, groups).astype(np.int64)
    slots = np.maximum.reduceat(units, problem.first_option[:-1])
    parts = Parts(
        first_offer=problem.first_option,
        offer=np.arange(problem.num_options, dtype=np.int64),
        first_shard=problem.first_shard,
        where=problem.where.astype(np.int64),
        units=units,
        common=common.sum(axis=1),
        entry0=np.searchsorted(differ[shard], np.arange(len(problem.bytes) + 1)).astype(np.int64),
        event=event.astype(np.int64),
        value=rest[shard, event],
        bytes=problem.bytes.astype(np.float64),
        host_bytes=problem.host_bytes.astype(np.float64),
        capacity=problem.capacity_bytes.astype(np.float64),
        host_capacity=problem.host_capacity_bytes.astype(np.float64),
        per_host=problem.ranks_per_host,
        slot0=np.r_[0, slots.cumsum()].astype(np.int64),
        table_of_slot=np.repeat(np.arange(problem.num_tables), slots).astype(np.int64),
    )
    return parts, common


def _empty_plan(problem: Problem, parts: Parts, seed: int) -> Plan:
    slots = len(parts.table_of_slot)
    return Plan(
        option=problem.first_option[:-1].astype(np.int64),
        place=np.zeros(slots, dtype=np.int64),
        load=np.zeros((problem.num_ranks, problem.num_events)),
        held=np.zeros(problem.num_ranks),
        host_held=np.zeros(len(parts.host_capacity)),
        ceiling=np.zeros(problem.num_events),
        price=np.zeros(3),
        dice=np.random.SeedSequence(seed).generate_state(1, dtype=np.uint64) | np.uint64(1),
        scratch=np.zeros(slots, dtype=np.int64),
    )


def _assignment(problem: Problem, parts: Parts, found: _Found) -> Assignment:
    local = np.arange(problem.ranks_per_host)
    ranks: list[tuple[int, ...]] = []
    for table, option in enumerate(found.option):
        at = found.place[parts.slot0[table] : parts.slot0[table] + parts.units[option]]
        if problem.where[option] == Where.ALL:
            at = np.arange(problem.num_ranks)
        elif problem.where[option] == Where.HOST:
            at = (at[:, None] * problem.ranks_per_host + local).ravel()
        ranks.append(tuple(at.tolist()))
    return Assignment(found.option.copy(), tuple(ranks))
