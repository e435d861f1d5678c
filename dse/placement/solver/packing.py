"""Lower bounds that see how large tables pack.

The bound without ranks spreads every table evenly. Here some ranks are told apart. First the problem is relaxed: each rank gets the
most memory and the least slowness of any, and shards of `HOST` and `WITHIN` go wherever they like. Then all ranks are alike.
Some of them are *places* of their own, all others together are one place more. With x_o the share of option o, y_cp the shards of class c
(equal shards of an option o(c), n_c of them) on place p of |p| ranks, M_e the maximum of event e and U_e what all options on every
rank add at least, every assignment obeys

1. sum_p y_cp = n_c x_o(c);
2. sum_c cost_ce y_cp + |p| U_e <= |p| M_e, summed over the ranks of a place;
3. sum_c bytes_c y_cp + |p| sum_(o ALL) x_o min_s bytes_s <= |p| capacity;

and the rules of `bound`, so that the least sum of M_e, a linear program, is at most the optimum. It rises when tables are decided:
in every assignment a table has an option or has another one; and each shard of its option lies on a place where a shard was decided to be
before, or on another rank. Ranks are alike, so that this may be the first place without such shards; when all places of one rank have
some, it is in the place of all others. Of equal shards the one on the first of these places may be decided first. So the least bound over
a tree of such decisions is a bound, whichever tables are decided, in whatever order, and wherever the tree ends.

Letters: t tables, o options, c classes, p places, e events, j columns: those of the relaxation, then y.
"""

from __future__ import annotations

import heapq
import time
from dataclasses import dataclass, replace
from itertools import count
from typing import NamedTuple

import numpy as np

from dse.placement.solver.bound import Bound, Options, options_of, rank_free_parts
from dse.placement.solver.linear import Program, Resolved, Rows
from dse.placement.solver.problem import Array, Ints, Mask, Problem, Where

MOST_COLUMNS = 20_000  # of y; a larger program takes longer than the rest of the solver
SINGLE_PLACES = 5
_MEMORY_SIZE = 0.5  # what a share of a rank's memory counts beside a share of the objective
_WHOLE = 0.999  # a share from which a table is as good as decided
_ROUNDING = 1e-9  # relative
_TINY = 1e-300


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """A lower bound, and where the program has the tables.

    Attributes:
        value: no feasible assignment is below this, or the known objective is; infinite when none fits.
        finished: more time or nodes do not raise it.
        option: `(t,)` of the largest share, where the bound is least; `None` when no point was found.
        ranks: of each table whose shards may go anywhere and are undivided the rank of each shard, of others `None`.
        nodes: programs solved.
    """

    value: float
    finished: bool
    option: Ints | None = None
    ranks: tuple[tuple[int, ...] | None, ...] = ()
    nodes: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class _Classes:
    """Equal shards of options that are not on every rank.

    Attributes:
        of: `(s,)` class of each shard, or -1.
        option: `(c,)` whose.
        number: `(c,)` how many.
        cost: `(c, e)` of one, by the fastest rank.
        bytes: `(c,)` of one.
    """

    of: Ints
    option: Ints
    number: Ints
    cost: Array
    bytes: Array


class _Decision(NamedTuple):
    """What is decided: that a table takes an option or does not, or where one more shard of a class of a taken option is."""

    option: int
    against: bool = False
    of: int = -1  # class
    place: int = -1


class _Node(NamedTuple):
    """Decisions, and what no assignment that obeys them is below."""

    bound: float
    order: int
    decided: tuple[_Decision, ...] = ()
    leaf: bool = False  # nothing is left to decide, or the time was up


def most_weight(problem: Problem, weights: Array) -> Ints:
    """`(t,)` the option with the largest share of each table."""
    parts = np.split(weights, problem.first_option[1:-1])
    most: Ints = problem.first_option[:-1] + np.array([int(np.argmax(p)) for p in parts])
    return most


def packed_bound(
    problem: Problem,
    relaxed: Bound,
    *,
    below: float,
    time_limit_s: float,
    most_nodes: int = 100_000,
    single_places: int = SINGLE_PLACES,
) -> Packed | None:
    """A lower bound with ranks for the largest tables; see the module for the proof.

    Args:
        problem: best reduced first (`dominance.reduced`).
        relaxed: its bound without ranks.
        below: a known objective; infinite when none is known.
        time_limit_s: after which the bound so far is returned.
        most_nodes: programs to solve.
        single_places: ranks that are places of their own, at most.

    Returns:
        The bound; `None` where the program would be too large.
    """
    usable = options_of(problem).usable
    if np.isfinite(below) and relaxed.by_option is not None:
        usable = usable & (relaxed.by_option <= below * (1.0 + _ROUNDING))
    single = min(problem.num_ranks, single_places)
    rest = problem.num_ranks - single
    places = np.array([1.0] * single + ([float(rest)] if rest else []))
    fewest = int((usable & (problem.where != Where.ALL)).sum())
    if fewest * len(places) > MOST_COLUMNS:
        return None
    classes = _classes_of(problem, usable)
    if len(classes.option) * len(places) > MOST_COLUMNS:
        return None
    tree = _Tree(problem, classes, places, usable, below=below)
    found = tree.grow(until=time.perf_counter() + time_limit_s, most_nodes=most_nodes)
    return replace(found, value=min(max(relaxed.value, found.value), below))


def _classes_of(problem: Problem, usable: Mask) -> _Classes:
    shards = np.flatnonzero(np.repeat(usable & (problem.where != Where.ALL), problem.shard_counts))
    keys = np.column_stack([problem.option_of_shard[shards], problem.cost[shards], problem.bytes[shards]])
    rows, which, number = np.unique(keys, axis=0, return_inverse=True, return_counts=True)
    of = np.full(len(problem.bytes), -1)
    of[shards] = which.ravel()
    option, cost = rows[:, 0].astype(np.int64), rows[:, 1:-1] * float(problem.slowness.min())
    return _Classes(of, option, number.astype(np.int64), cost, rows[:, -1])


class _Tree:
    """A tree of decisions about tables."""

    def __init__(
        self, problem: Problem, classes: _Classes, places: Array, usable: Mask, *, below: float
    ) -> None:
        self._problem, self._places, self._below = problem, places, below
        options = options_of(problem)
        self._program = _program(problem, options, usable, classes, places, below=below)
        self._solver = Resolved(self._program)
        self._classes = classes
        self._first = len(self._program.high) - len(classes.option) * len(places)
        self._movable = (problem.where == Where.ANY) & (problem.allowed is None)
        self._number = count()
        self._point: Array | None = None
        self._size: Array | None = None

    def grow(self, *, until: float, most_nodes: int) -> Packed:
        """Decide where the bound is least, until the time is up or more decisions do not help."""
        heap, nodes = [_Node(-np.inf, next(self._number))], 0
        while heap and not heap[0].leaf and nodes < most_nodes and (left := until - time.perf_counter()) > 0:
            nodes += 1
            for node in self._after(heapq.heappop(heap), time_limit_s=left):
                heapq.heappush(heap, node)
        finished = not heap or heap[0].leaf
        return self._packed(Packed(heap[0].bound if heap else np.inf, finished, nodes=nodes))

    def _after(self, node: _Node, *, time_limit_s: float) -> list[_Node]:
        """What a node becomes: nothing, where no assignment is better than the known one."""
        found, x = self._solver.solve(*self._limits(node.decided), time_limit_s=time_limit_s)
        bound = max(found, node.bound)
        if bound >= self._below * (1.0 - _ROUNDING):
            return []
        if x is None or not (following := self._following(x, node.decided)):
            self._point = x if x is not None else self._point
            return [node._replace(bound=bound, leaf=True)]
        self._point = x
        return [_Node(bound, next(self._number), (*node.decided, *more)) for more in following]

    def _limits(self, decided: tuple[_Decision, ...]) -> tuple[Array, Array]:
        """`(j,)` each: lowest and highest values under decisions."""
        low, high = self._program.low.copy(), self._program.high.copy()
        y = low[self._first :].reshape(-1, len(self._places))
        for option, against, of, place in decided:
            if of >= 0:
                y[of, place] += 1.0
            else:
                low[option], high[option] = (0.0, 0.0) if against else (1.0, high[option])
        complete = np.flatnonzero(y.sum(axis=1) == self._classes.number)
        high[self._first :].reshape(y.shape)[complete] = y[complete]
        return low, high

    def _following(self, x: Array, decided: tuple[_Decision, ...]) -> list[list[_Decision]]:
        """The next decision, each way: about the largest table that is divided; empty when none is."""
        most, apart, divided = self._divided(x)
        if self._size is None:
            self._size = _sizes(self._problem, x)
        weight = np.where(divided[most], self._size[most], 0.0)
        table = int(np.argmax(weight))
        if weight[table] <= 0.0:
            return []
        option = int(most[table])
        if _Decision(option) not in decided:
            return [[_Decision(option)], [_Decision(option, against=True)]]
        of = int(np.flatnonzero(apart & (self._classes.option == option))[0])
        last = max((d.place for d in decided if d.of == of), default=0)
        places = [p for p in self._open_places(decided) if p >= last]
        return [[_Decision(option, of=of, place=p)] for p in places]

    def _open_places(self, decided: tuple[_Decision, ...]) -> range:
        """The places that have a decided shard, and the next one."""
        taken = max((d.place for d in decided), default=-1) + 1
        return range(min(taken + 1, len(self._places)))

    def _divided(self, x: Array) -> tuple[Ints, Mask, Mask]:
        """`(t,)` options of the largest share, and whether `(c,)` a shard, `(o,)` an option or one of its shards is divided."""
        shares = x[: self._problem.num_options]
        y = x[self._first :].reshape(-1, len(self._places))
        apart = np.floor(y + 1.0 - _WHOLE).sum(axis=1) < self._classes.number
        divided = shares < _WHOLE
        divided[self._classes.option[apart]] = True
        return most_weight(self._problem, shares), apart, divided

    def _packed(self, found: Packed) -> Packed:
        """With the last point."""
        if self._point is None:
            return found
        option, _, divided = self._divided(self._point)
        y = self._point[self._first :].reshape(-1, len(self._places))
        ranks = tuple(self._ranks(y, int(o)) if self._movable[o] and not divided[o] else None for o in option)
        return replace(found, option=option, ranks=ranks)

    def _ranks(self, y: Array, option: int) -> tuple[int, ...] | None:
        """The places of an option's shards; `None` when one is not a rank alone."""
        of = self._classes.of[self._problem.first_shard[option] : self._problem.first_shard[option + 1]]
        ranks = np.zeros(len(of), dtype=np.int64)
        for c in np.unique(of):
            ranks[of == c] = np.repeat(np.arange(len(self._places)), np.rint(y[c]).astype(np.int64))
        alone = bool((self._places[ranks] == 1.0).all())
        return tuple(ranks.tolist()) if alone else None


def _sizes(problem: Problem, x: Array) -> Array:
    """`(o,)`: share of an option's largest shard in the objective, or half its share in a rank's memory."""
    first, events = problem.first_shard[:-1], x[problem.num_options :][: problem.num_events]
    time_ = np.maximum.reduceat(problem.cost.sum(axis=1), first) / max(float(events.sum()), _TINY)
    held = np.maximum.reduceat(problem.bytes, first) / max(float(problem.capacity_bytes.max()), 1.0)
    return np.maximum(time_, _MEMORY_SIZE * held)


def _program(
    problem: Problem, options: Options, usable: Mask, classes: _Classes, places: Array, *, below: float
) -> Program:
    parts = rank_free_parts(problem, options, below=below if np.isfinite(below) else None, steps=None)
    first, rows, every = len(parts.high), parts.rows, np.arange(len(classes.option))
    of, place = (a.ravel() for a in np.indices((len(every), len(places))))
    at = first + np.arange(len(of))
    rows.add(
        np.concatenate([of, every]),
        np.concatenate([at, classes.option]),
        np.concatenate([np.ones(len(at)), -classes.number.astype(np.float64)]),
        count=len(every),
        low=0.0,
        high=0.0,
    )
    per_rank = 1.0 / places[place]
    _add_events(rows, problem, at, place, classes.cost[of] * per_rank[:, None], len(places))
    _add_memory(rows, problem, usable, at, place, classes.bytes[of] * per_rank, len(places))
    high = np.concatenate([parts.high, classes.number[of].astype(np.float64)])
    high[: problem.num_options] *= usable
    objective = np.concatenate([parts.objective, np.zeros(len(at))])
    whole = np.zeros(len(high), dtype=np.bool_)
    return rows.program(objective=objective, low=np.zeros(len(high)), high=high, whole=whole)


def _add_events(rows: Rows, problem: Problem, at: Ints, place: Ints, cost: Array, places: int) -> None:
    """Rule 2, divided by the ranks of the place; `cost` `(j, e)`."""
    every, ones = np.arange(places), np.ones(places)
    for event in range(problem.num_events):
        used = np.flatnonzero(cost[:, event])
        most = np.full(places, problem.num_options + event)
        rows.add(
            np.concatenate([place[used], every, every]),
            np.concatenate([at[used], most, most + problem.num_events]),
            np.concatenate([cost[used, event], -ones, ones]),
            count=places,
            high=0.0,
        )


def _add_memory(
    rows: Rows, problem: Problem, usable: Mask, at: Ints, place: Ints, bytes_: Array, places: int
) -> None:
    """Rule 3, likewise; `bytes_` `(j,)`."""
    capacity, every = float(problem.capacity_bytes.max()), np.arange(places)
    if not np.isfinite(capacity):
        return
    on_all = np.flatnonzero((problem.where == Where.ALL) & usable)
    held = np.minimum.reduceat(problem.bytes, problem.first_shard[:-1])[on_all]
    scale = max(float(problem.bytes.max(initial=0.0)), 1.0)
    rows.add(
        np.concatenate([place, np.repeat(every, len(on_all))]),
        np.concatenate([at, np.tile(on_all, places)]),
        np.concatenate([bytes_, np.tile(held, places)]) / scale,
        count=places,
        high=capacity / scale,
    )
