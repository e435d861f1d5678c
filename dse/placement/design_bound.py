"""A lower bound of a design's iteration time over all plans, by cutting planes.

For each class of plans (which kinds of sharding occur at all) a linear program over (table, option) shares `x`:

    minimise T
    T   >= constant + Σ weight · M_segment + Σ weight · D_collective             every cut (`dse.placement.relaxed`)
    M   >= base + Σ_tables shared(x) + average over ranks of the shards' sum      a maximum is at least the average
    M   >= base + Σ_tables shared(x) + one shard of table t                       every table: each shard is on some rank
    D   >= tangents of the convex hull of transfer(B),  B >= likewise in bytes
    Σ x = 1 a table, Σ x >= 1 a kind of the class, memory of all shards <= memory of all ranks

Every plan is a point of it at which T is its iteration time or less: its own shares, segments and bytes satisfy all rows.
So its minimum is a lower bound of the class, and the least over classes one of the design. Cuts are added where
the critical cycle at the solution says more (Kelley 1960); classes are refined in the order of their bounds.

The hull: transfers grow with bytes, so on a grid `b_0 < b_1 < ...` the points `(b_{i+1}, transfer(b_i))` lie on or under
the curve's graph to their left; the lower convex hull of them and the first point underestimates the curve.

Letters: o options, v variables, t tables, k segments.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import TypeAlias

import numpy as np

from dse.placement.design_options import FLAGS, Options
from dse.placement.problem import Array, Ints
from dse.placement.relaxed import Cut, Program, Role, Variable, program_of, transfer_us
from dse.placement.shard_costs import ShardCosts
from perfcore.cost.model import CostModel
from perfcore.overheads import OverheadTable

_GRID = 300  # points of a collective's curve
_TOLERANCE = 1e-6  # relative; cuts that say less are not worth a round
_MOST_ROUNDS = 30  # of one class
Key: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Terms:
    """What ways add to a segment (µs) or to a collective (bytes).

    Attributes:
        average: `(w,)` to every rank, if all shards are spread evenly.
        largest: `(w,)` to some rank.
        everywhere: `(w,)` to every rank in any case.
        base: whatever the plan.
    """

    average: Array
    largest: Array
    everywhere: Array
    base: float


@dataclass(eq=False)
class ClassBound:
    """The linear program of one class, which grows by cuts.

    Attributes:
        kinds: positions in `FLAGS`.
        options: those of these kinds.
        program: the steps of its plans.
        costs: of all probes.
        cost: prices collectives.
        capacity_bytes: of all ranks together.
        lower_us: the bound so far; infinite where the class has no plan.
        shares: `(o,)` the solution.
        cuts: so far.
        settled: no cut says more.
    """

    kinds: tuple[int, ...]
    options: Options
    program: Program
    costs: ShardCosts
    cost: CostModel
    capacity_bytes: float
    lower_us: float = 0.0
    shares: Array = field(default_factory=lambda: np.empty(0))
    cuts: list[Cut] = field(default_factory=list)
    settled: bool = False
    _rounds: int = 0
    _terms: dict[Key, Terms] = field(default_factory=dict)
    _hulls: dict[int, tuple[Array, Array]] = field(default_factory=dict)

    def start(self) -> None:
        """The first cuts: nothing placed costs anything, and all tables by their cheapest option."""
        nothing = np.array([self._value(v, np.zeros(len(self.options.ways.table))) for v in self._variables])
        self._add(self.program.cut(nothing)[1])
        self._solve()

    def values(self) -> tuple[Array, dict[int, float]]:
        """`(v,)` durations at the solution, and by variable the bytes of collectives."""
        variables = self.program.variables
        bytes_at = {
            i: self._segment((i,), self.shares) for i, v in enumerate(variables) if v.role is not Role.RANK
        }
        return np.array([self._value(v, self.shares) for v in self._variables]), bytes_at

    def refine(self) -> None:
        """One round: the critical cycle at the solution, and the program solved anew."""
        _, cut = self.program.cut(self.values()[0])
        known = cut in self.cuts
        self._rounds += 1
        if known or self.cut_us(cut) <= self.lower_us * (1 + _TOLERANCE) or self._rounds > _MOST_ROUNDS:
            self.settled = True
            return
        self._add(cut)
        self._solve()

    @property
    def _variables(self) -> range:
        return range(len(self.program.variables))

    def cut_us(self, cut: Cut) -> float:
        """What a cut says of the solution."""
        return (
            cut.constant_us
            + sum(w * self._segment(key, self.shares) for w, key in cut.segments)
            + sum(w * self._transfer(v, self.shares) for w, v in cut.transfers)
        )

    def terms(self, key: Key) -> Terms:
        """What each way adds to a segment, or to the bytes of a collective."""
        if key not in self._terms:
            variables = [self.program.variables[v] for v in key]
            each = np.asarray(np.sum([v.each for v in variables], axis=0))
            everywhere = np.asarray(np.sum([v.everywhere for v in variables], axis=0))
            ways, ranks = self.options.ways, self.options.design.system.world_size
            self._terms[key] = Terms(
                ways.total(each) / ranks,
                ways.largest(each),
                ways.total(everywhere, once=True) if everywhere.any() else np.zeros(len(ways.table)),
                float(sum(v.base for v in variables)),
            )
        return self._terms[key]

    def _segment(self, key: Key, shares: Array) -> float:
        terms = self.terms(key)
        average = float(shares @ terms.average)
        largest = float(np.bincount(self.options.ways.table, shares * terms.largest).max())
        return terms.base + float(shares @ terms.everywhere) + max(average, largest)

    def _transfer(self, v: int, shares: Array) -> float:
        x, y = self._hull(v)
        return float(np.interp(self._segment((v,), shares), x, y))

    def _value(self, v: int, shares: Array) -> float:
        if self.program.variables[v].role is Role.RANK:
            return self._segment((v,), shares)
        return self._transfer(v, shares)

    def _hull(self, v: int) -> tuple[Array, Array]:
        """The convex hull under a collective's time over its bytes."""
        if v not in self._hulls:
            variable = self.program.variables[v]
            terms = self.terms((v,))
            # On one rank alone, a table brings all its bytes at once, which is most on a rank that holds all tables.
            whole = terms.average * self.options.design.system.world_size + terms.everywhere
            most = terms.base + float(np.maximum.reduceat(whole, self.starts).sum())
            self._hulls[v] = under_hull(variable, terms.base + self._least_bytes(terms), most, self.cost)
        return self._hulls[v]

    def _least_bytes(self, terms: Terms) -> float:
        """Some rank has at least these: those of the smallest shard of a kind that uses the collective."""
        bytes_ = terms.largest + terms.everywhere
        uses = np.isin(self.options.ways.flag, np.unique(self.options.ways.flag[bytes_ > 0]))
        return float(bytes_[uses].min()) if bool(uses.any()) else 0.0

    @property
    def starts(self) -> Ints:
        """`(t,)`: the first way of each table."""
        tables = len(self.options.design.model.tables)
        return np.searchsorted(self.options.ways.table, np.arange(tables)).astype(np.int64)

    def _add(self, cut: Cut) -> None:
        self.cuts.append(cut)

    def _solve(self) -> None:
        solution = _MasterProgram(self).solve()
        if solution is None:
            self.lower_us, self.settled = np.inf, True
        else:
            self.lower_us, self.shares = max(self.lower_us, solution[0]), solution[1]


def under_hull(variable: Variable, low: float, high: float, cost: CostModel) -> tuple[Array, Array]:
    """Corners of a convex, growing function that is nowhere above the collective's time between two sizes."""
    high = max(high, low * (1 + 1e-9), 1.0)
    start = max(low, high * 1e-7)
    grid = np.geomspace(start, high, _GRID)
    times = transfer_us(variable, grid, cost)
    first = times[0] if low > 0 else 0.0
    x, y = np.concatenate([[low], grid[1:]]), np.concatenate([[first], times[:-1]])
    corners: list[int] = []
    for i in range(len(x)):
        while len(corners) > 1 and _right_turn(x, y, corners[-2], corners[-1], i):
            corners.pop()
        corners.append(i)
    return x[corners], y[corners]


def _right_turn(x: Array, y: Array, a: int, b: int, c: int) -> bool:
    return bool((y[b] - y[a]) * (x[c] - x[a]) >= (y[c] - y[a]) * (x[b] - x[a]))


class _MasterProgram:
    """Assembles the rows of a class's linear program. Columns: T, x, then as they are first used."""

    def __init__(self, bound: ClassBound) -> None:
        self._bound = bound
        self._columns = 1 + len(bound.options.ways.table)
        self._rows: list[
            tuple[Array, Array, float]
        ] = []  # columns, values, right-hand side: values · z <= rhs
        self._measures: dict[Key, int] = {}
        self._transfers: dict[int, int] = {}

    def solve(self) -> tuple[float, Array] | None:
        """The least T and the shares; `None` where no plan satisfies memory and kinds."""
        from scipy.optimize import linprog
        from scipy.sparse import csr_matrix

        bound, options = self._bound, self._bound.options
        for cut in bound.cuts:
            self._cut(cut)
        self._memory_and_kinds()
        sizes = [len(c) for c, _, _ in self._rows]
        a = csr_matrix(
            (
                np.concatenate([v for _, v, _ in self._rows]),
                (
                    np.repeat(np.arange(len(sizes)), sizes),
                    np.concatenate([c for c, _, _ in self._rows]),
                ),
            ),
            shape=(len(sizes), self._columns),
        )
        tables, of_way = len(options.design.model.tables), options.ways.table
        ones = csr_matrix(
            (np.ones(len(of_way)), (of_way, 1 + np.arange(len(of_way)))), shape=(tables, self._columns)
        )
        objective = np.zeros(self._columns)
        objective[0] = 1.0
        found = linprog(
            objective,
            A_ub=a,
            b_ub=[r for _, _, r in self._rows],
            A_eq=ones,
            b_eq=np.ones(tables),
            method="highs",
        )
        if found.status == 2:
            return None
        if found.status != 0:
            return bound.lower_us, bound.shares if len(bound.shares) else np.zeros(len(of_way))
        return self._safe(found), np.asarray(found.x[1 : 1 + len(of_way)])

    def _safe(self, found: object) -> float:
        """The optimum, less what the solver's tolerances may have cost."""
        return float(found.fun) * (1 - 1e-7)  # type: ignore[attr-defined]

    def _cut(self, cut: Cut) -> None:
        columns, values = [0], [-1.0]
        for weight, key in cut.segments:
            columns.append(self._measure(key))
            values.append(weight)
        for weight, v in cut.transfers:
            columns.append(self._transfer(v))
            values.append(weight)
        self._row(columns, values, -cut.constant_us)

    def _measure(self, key: Key) -> int:
        """The column of a segment's length (or a collective's bytes), with its rows."""
        if key in self._measures:
            return self._measures[key]
        column = self._measures[key] = self._columns
        self._columns += 1
        terms, starts = self._bound.terms(key), self._bound.starts
        shared = self._shared(terms.everywhere)
        extra = [] if shared is None else [shared]
        head = [-1.0, *([1.0] * len(extra))]
        x = 1 + np.arange(len(terms.average))
        self._row([column, *extra, *x], [*head, *terms.average], -terms.base)
        average = float(np.minimum.reduceat(terms.average, starts).sum())
        for ways in np.split(np.arange(len(x)), starts[1:]):
            if float(terms.largest[ways].max()) > average:  # a smaller shard is never more than the average
                self._row([column, *extra, *(1 + ways)], [*head, *terms.largest[ways]], -terms.base)
        return column

    def _shared(self, everywhere: Array) -> int | None:
        """The column of what all ranks see, `None` for nothing."""
        if not everywhere.any():
            return None
        column = self._columns
        self._columns += 1
        self._row([column, *(1 + np.arange(len(everywhere)))], [-1.0, *everywhere], 0.0)
        return column

    def _transfer(self, v: int) -> int:
        """The column of a collective's time, with its tangents."""
        if v in self._transfers:
            return self._transfers[v]
        bytes_ = self._measure((v,))
        column = self._transfers[v] = self._columns
        self._columns += 1
        x, y = self._bound._hull(v)
        for i in range(len(x) - 1):
            slope = (y[i + 1] - y[i]) / (x[i + 1] - x[i])
            self._row([column, bytes_], [-1.0, slope], slope * x[i] - y[i])
        return column

    def _memory_and_kinds(self) -> None:
        bound, ways = self._bound, self._bound.options.ways
        x = 1 + np.arange(len(ways.table))
        held = ways.total(bound.costs.bytes)
        scale = max(float(held.max()), 1.0)
        self._row(x, held / scale, bound.capacity_bytes / scale)
        for kind in bound.kinds:
            of_kind = x[ways.flag == kind]
            self._row(of_kind, -np.ones(len(of_kind)), -1.0)

    def _row(self, columns: Sequence[int] | Ints, values: Sequence[float] | Array, most: float) -> None:
        self._rows.append((np.asarray(columns, dtype=np.int64), np.asarray(values, dtype=np.float64), most))


def class_bounds(
    options: Options,
    costs: ShardCosts,
    cost: CostModel,
    overheads: OverheadTable,
    *,
    capacity_bytes: Array,
) -> list[ClassBound]:
    """One bound for each class that has a plan, with its first cut.

    Args:
        options: of the design.
        costs: of all probes.
        cost: prices kernels.
        overheads: host times of ops.
        capacity_bytes: `(r,)` memory of each rank for tables.
    """
    most = float(capacity_bytes.max())
    options = options.restricted(
        np.maximum.reduceat(costs.bytes[options.shard_probe], options.first_shard[:-1]) <= most
    )
    ways = options.ways
    fits = ways.largest(costs.bytes) <= most
    usable = [i for i in range(len(FLAGS)) if bool((fits & (ways.flag == i)).any())]
    bounds = []
    tables = len(options.design.model.tables)
    for size in range(1, min(len(usable), tables) + 1):
        for kinds in combinations(usable, size):
            kept = fits & np.isin(ways.flag, kinds)
            if len(np.unique(ways.table[kept])) < tables:
                continue
            bound = ClassBound(
                kinds,
                replace(options.restricted(np.isin(options.flag, kinds)), ways=ways.kept(kept)),
                program_of(options, kinds, costs, cost, overheads),
                costs,
                cost,
                float(np.maximum(capacity_bytes, 0.0).sum()),
            )
            bound.start()
            bounds.append(bound)
    return bounds


def refine(bounds: Sequence[ClassBound], *, upper_us: float, seconds_left: object) -> float:
    """Refine the classes with the least bounds until no cut says more, or none is below `upper_us`.

    Args:
        bounds: changed in place.
        upper_us: no bound above it is of use.
        seconds_left: asked between rounds; stops at 0.

    Returns:
        The least bound.
    """
    queue = [(b.lower_us, i) for i, b in enumerate(bounds)]
    heapq.heapify(queue)
    while queue:
        lower_us, i = queue[0]
        if lower_us >= upper_us or bounds[i].settled or seconds_left() <= 0:  # type: ignore[operator]
            break
        bounds[i].refine()
        heapq.heapreplace(queue, (bounds[i].lower_us, i))
    return min((b.lower_us for b in bounds), default=np.inf)
