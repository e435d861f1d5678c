"""The anytime search for placements: starts, a pool of assignments, rounds of annealing.

Every start is scheduled greedily and annealed a little. Then rounds alternate between the best of this pool
and the others, each twice as long as some rounds before. All lengths count steps and not seconds: the same seed and
work give the same answer everywhere.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from dse.placement.solver.dominance import reduced
from dse.placement.solver.local_search_core import rebuild
from dse.placement.solver.local_search_data import (
    ALL,
    HOST,
    WEIGHT_OVER,
    Best,
    Data,
    State,
    data_of,
    empty_state,
)
from dse.placement.solver.local_search_moves import anneal, schedule
from dse.placement.solver.problem import Array, Assignment, Ints, Problem, loads_of
from dse.placement.solver.problem_check import check_assignment, check_problem
from dse.placement.solver.starts import by_memory, by_size, start_options

CHUNK = 20_000  # steps between two sums from scratch, which end the drift of rounding
# A search ends when it has gone on without a gain for so many times the steps to its last one, or of its starts.
PATIENCE = 10
_POOL = 8
_ALIKE = 0.02  # of the objective: starts whose events differ less in total are taken as one
_STEPS_PER_TABLE, _FEWEST_STEPS, _MOST_STEPS = 100, 5_000, 4_000_000  # of a round
_ROUNDS_OF_A_LENGTH = 6
_HEATS = (0.03, 0.1, 0.1, 0.03, 0.03, 0.1)  # of the objective, per table
_HEATS_OF_FEW = (0.1, 1.0, 0.3, 10.0, 0.03, 3.0)  # few large tables hold each other in place
_FEW_TABLES = 64
_COOLED = 0.1
_NORMS = ((1.0, 3), (0.1, 4), (0.5, 4), (0.3, 5), (1.0, 2), (0.1, 6))  # weight and log2 of p
_GREEDY_NORM = (1.0, 3)
_SWAPS, _FOCUS, _MOVE_SAMPLES, _INSERT_SAMPLES = 0.35, 0.5, 2.0, 4.0
_REPLACED = (0.05, 0.25)  # least and most share of changes of option
_FEW_RANKS = 3.0  # over ranks: that share in between
_OVERFLOW_WEIGHT, _GREEDY_OVERFLOW_WEIGHT = 3.0, 100.0  # of the objective, for a rank's memory
_CLOSE = 1.03  # pool members that much worse than the best are left alone
_OPEN_WORK = 3_000_000  # options times ranks, beyond which an open greedy start costs too much
_LEAST_SHARE = 1e-6  # of the largest memory: a rank with less has that much when memory is shared out
_TINY = 1e-300


class _Round(NamedTuple):
    member: Best
    steps: int
    heat: float
    norm: tuple[float, int]


class _Start(NamedTuple):
    best: Best
    events: Array


@dataclass(slots=True, eq=False)
class _Cursor:
    round: _Round
    done: int = 0


class Search:
    """A search that can always go on; `best` is the best assignment so far.

    Attributes:
        objective: of `best`, infinite while it overflows memory.
        steps: done so far.
        round_steps: what the first rounds take.
    """

    def __init__(
        self,
        problem: Problem,
        *,
        seed: int = 0,
        start: Assignment | None = None,
        options: Ints | None = None,
        fine: bool = True,
    ) -> None:
        """Build the greedy starts.

        Args:
            problem: what to solve.
            seed: of the random numbers.
            start: an assignment to begin with, beside the usual starts.
            options: a `(t,)` choice of options (of `problem`) to begin with as well, e.g. a relaxation's;
                tables whose choice was dropped as dominated are left open.
            fine: more starts, which take longer than a short search.

        Raises:
            SpaceError: the problem has no solution for want of tables or ranks, or the start is not one of its
                assignments.
        """
        check_problem(problem)
        if start is not None:
            check_assignment(problem, start)
        self._problem, self._reduced = problem, reduced(problem)
        self._small = self._reduced.problem
        self._data = data_of(self._small)
        self._state = empty_state(self._small, self._data, seed=seed)
        self._seed, self.steps, self._gained_at = seed, 0, 0
        self._given, self._fine = start, fine
        self._pool = self._starts(start, [] if options is None else [self._translated(options)])
        self.round_steps = len(self._pool) * _ROUNDS_OF_A_LENGTH * self._first_steps
        self._packing: Search | None = None
        self._rounds = self._schedule()
        self._cursor = _Cursor(next(self._rounds))

    @property
    def best(self) -> Assignment:
        """The best assignment so far, of the problem given; the start given where nothing is better."""
        member = self._leader()
        found = self._reduced.original(_assignment(self._small, self._data, member.option, member.place))
        if self._given is not None and _key(self._problem, self._given) <= _key(self._problem, found):
            return self._given
        return found

    @property
    def objective(self) -> float:
        """Objective of the best assignment, infinite while it overflows memory."""
        over, value = self._leader().value
        return float(value) if over <= 0.0 else np.inf

    @property
    def overflow_bytes(self) -> float:
        """Memory beyond capacity of the best assignment."""
        return float(self._leader().value[0])

    def run(self, *, time_limit_s: float, work: float = np.inf, enough: float = 0.0) -> None:
        """Improve until `work` steps in all, the time limit, an objective that is `enough`, or long without a gain.

        At least one piece of a first round is done, whatever the limits.
        """
        until = time.perf_counter() + time_limit_s
        while self.steps < min(work, PATIENCE * max(self._gained_at, self.round_steps)):
            if self.objective <= enough or (self.steps and time.perf_counter() >= until):
                return
            before = self.overflow_bytes, self.objective
            self.improve(min(CHUNK, math.ceil(work - self.steps) if work < np.inf else CHUNK))
            if (self.overflow_bytes, self.objective) < before:
                self._gained_at = self.steps

    def offer(self, options: Ints, ranks: Sequence[tuple[int, ...] | None]) -> None:
        """Go on with a start more, which is scheduled around what it fixes.

        Args:
            options: a `(t,)` choice of options, as at the beginning.
            ranks: of tables whose shards are already placed (`Where.ANY` alone) the rank of each shard, of others `None`.
        """
        translated = self._translated(options)
        placed = {t: r for t, r in enumerate(ranks) if r is not None and translated[t] >= 0}
        member = self._greedy(by_size(self._data), translated, placed).best
        self._pool = [*sorted(self._pool, key=_rank)[:_POOL], member]
        self._cursor = _Cursor(self._round(member, self._first_steps, 0))

    def improve(self, work: int) -> None:
        """Go on for `work` steps, rounded up to whole pieces of rounds."""
        end = self.steps + work
        while self.steps < end:
            if self._cursor.done >= self._cursor.round.steps:
                self._cursor = _Cursor(next(self._rounds))
            self._advance(self._cursor)

    def _advance(self, cursor: _Cursor) -> None:
        todo, s = cursor.round, self._state
        if cursor.done == 0:
            s.option[:], s.place[:] = todo.member.option, todo.member.place
            s.settings[WEIGHT_OVER] = _OVERFLOW_WEIGHT * self._per_byte(todo.member.value[1])
        steps = min(CHUNK, todo.steps - cursor.done)
        rebuild(self._data, s, *todo.norm, np.zeros(len(s.base)))
        hot, cold = (todo.heat * _COOLED ** (i / todo.steps) for i in (cursor.done, cursor.done + steps))
        anneal(self._data, s, todo.member, steps, hot, cold, self._mix())
        cursor.done += steps
        self.steps += steps

    @property
    def _first_steps(self) -> int:
        return max(_FEWEST_STEPS, _STEPS_PER_TABLE * self._small.num_tables)

    def _schedule(self) -> Iterator[_Round]:
        """Every member once, then for ever the best and the others in turn."""
        first = self._first_steps
        for member in list(self._pool):
            yield self._round(member, first, 0)
        i = 0
        while True:
            steps = min(_MOST_STEPS, first * 2 ** min(i // _ROUNDS_OF_A_LENGTH, 30))
            if i % len(self._pool) == 0 and self.overflow_bytes > 0.0:
                self._pack(steps)
            yield self._round(self._chosen(i), steps, i)
            i += 1

    def _pack(self, steps: int) -> None:
        """Search for an assignment that fits, whatever it costs."""
        if self._packing is None:
            self._packing = Search(_memory_alone(self._small), seed=self._seed, fine=self._fine)
        packing, before = self._packing, self._packing.steps
        while packing.steps < before + steps and packing.objective > 1.0:
            packing.improve(CHUNK)
        self.steps += packing.steps - before
        self._pool = [*self._pool[:_POOL], self._placed(packing.best).best]

    def _round(self, member: Best, steps: int, i: int) -> _Round:
        heats = _HEATS_OF_FEW if self._few else _HEATS
        scale = max(float(member.value[1]), _TINY) / self._small.num_tables
        return _Round(member, steps, scale * heats[i % len(heats)], _NORMS[i % len(_NORMS)])

    @property
    def _few(self) -> bool:
        return self._small.num_tables <= _FEW_TABLES

    def _chosen(self, i: int) -> Best:
        leader = self._leader()
        limit = np.inf if self._few else leader.value[1] * _CLOSE
        close = [m for m in self._pool if m.value[0] <= leader.value[0] and m.value[1] <= limit]
        return close[i // 2 % len(close)] if i % 2 else leader

    def _leader(self) -> Best:
        return min(self._pool, key=_rank)

    def _mix(self) -> Array:
        least, most = _REPLACED
        share = min(most, max(least, _FEW_RANKS / self._small.num_ranks))
        return np.array([_SWAPS, share, _FOCUS, _MOVE_SAMPLES, _INSERT_SAMPLES])

    def _per_byte(self, value: float) -> float:
        limits = self._small.capacity_bytes[np.isfinite(self._small.capacity_bytes)]
        scale = float(np.abs(limits).mean()) if len(limits) else 1.0
        return max(float(value), _TINY) / max(scale, 1.0)

    def _translated(self, options: Ints) -> Ints:
        place = np.full(self._problem.num_options, -1)
        place[self._reduced.option] = np.arange(len(self._reduced.option))
        translated: Ints = np.where(options < 0, -1, place[options])
        return translated

    def _starts(self, start: Assignment | None, more: list[Ints]) -> list[Best]:
        problem, data = self._small, self._data
        size = by_size(data)
        pool = [self._greedy(size, options) for options in more]
        pool += [self._greedy(size, o) for o in start_options(problem, data, tight=False, fine=self._fine)]
        if problem.num_options * problem.num_ranks <= _OPEN_WORK:
            pool.append(self._greedy(size, np.full(problem.num_tables, -1)))
        if min(_rank(m.best) for m in pool) > (0.0, np.inf):
            memory = by_memory(problem, data)
            for options in start_options(problem, data, tight=True, fine=self._fine):
                pool += [self._greedy(order, options) for order in (size, memory)]
            pool.append(self._greedy(memory, np.full(problem.num_tables, -1)))
        distinct = _unlike(sorted(pool, key=lambda m: _rank(m.best)))
        if start is not None and (given := self._reduced.translated(start)):
            distinct.insert(0, self._placed(given).best)
        return distinct

    def _greedy(self, order: Ints, options: Ints, placed: dict[int, tuple[int, ...]] | None = None) -> _Start:
        s, data, placed = self._state, self._data, placed or {}
        share = float(np.minimum.reduceat(data.total, data.first_option[:-1]).sum()) / len(s.held)
        s.option[:] = -1
        for table, ranks in placed.items():
            s.option[table] = options[table]
            s.place[data.slot0[table] : data.slot0[table] + len(ranks)] = ranks
        s.settings[WEIGHT_OVER] = _GREEDY_OVERFLOW_WEIGHT * self._per_byte(share)
        scale = np.full(len(s.base), max(share, _TINY) / len(s.base))
        rebuild(data, s, *_GREEDY_NORM, scale)
        schedule(data, s, order[s.option[order] < 0], options, 0)
        return _noted(s)

    def _placed(self, assignment: Assignment) -> _Start:
        s, data = self._state, self._data
        s.option[:] = assignment.option
        for table, (option, ranks) in enumerate(zip(assignment.option, assignment.ranks, strict=True)):
            places = _places(self._small, int(option), ranks)
            s.place[data.slot0[table] : data.slot0[table] + len(places)] = places
        rebuild(data, s, *_GREEDY_NORM, np.zeros(len(s.base)))
        return _noted(s)


def _memory_alone(problem: Problem) -> Problem:
    """A problem whose objective is the largest used share of a rank's memory."""
    ranks = problem.num_ranks
    least = max(float(np.abs(problem.capacity_bytes).max()) * _LEAST_SHARE, _TINY)
    return replace(
        problem,
        cost=np.ascontiguousarray(problem.bytes[:, None]),
        slowness=1.0 / np.maximum(problem.capacity_bytes, least),
        capacity_bytes=np.full(ranks, np.inf),
    )


def _noted(state: State) -> _Start:
    events = state.base + state.top[:, 0]
    value = np.array([state.over[0], sum(events.tolist())])
    return _Start(Best(state.option.copy(), state.place.copy(), value), events)


def _rank(best: Best) -> tuple[float, float]:
    return float(best.value[0]), float(best.value[1])


def _unlike(ranked: list[_Start]) -> list[Best]:
    """The first starts that differ in how long their events last: alike ones end in one local optimum."""
    chosen: list[_Start] = []
    for start in ranked:
        near = _ALIKE * float(start.events.sum())
        if len(chosen) < _POOL and all(np.abs(start.events - c.events).sum() > near for c in chosen):
            chosen.append(start)
    return [start.best for start in chosen]


def _places(problem: Problem, option: int, ranks: tuple[int, ...]) -> list[int]:
    match problem.where[option]:
        case w if w == ALL:
            return [0]
        case w if w == HOST:
            return [r // problem.ranks_per_host for r in ranks[:: problem.ranks_per_host]]
    return list(ranks)


def _assignment(problem: Problem, data: Data, option: Ints, place: Ints) -> Assignment:
    ranks = []
    for table, o in enumerate(option):
        at = place[data.slot0[table] : data.slot0[table] + data.units[o]].tolist()
        if problem.where[o] == ALL:
            at = list(range(problem.num_ranks))
        elif problem.where[o] == HOST:
            local = range(problem.ranks_per_host)
            at = [host * problem.ranks_per_host + i for host in at for i in local]
        ranks.append(tuple(at))
    return Assignment(option.copy(), tuple(ranks))


def _key(problem: Problem, assignment: Assignment) -> tuple[float, float]:
    loads = loads_of(problem, assignment)
    return loads.overflow_bytes(problem), loads.objective
