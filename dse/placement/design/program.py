"""The linear program of one class of plans: see `dse.placement.design.bound` for what it says and why it is a bound.

Letters: w ways.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from dse.placement.design.measures import Key, Terms
from dse.placement.design.relaxed import Cut, Variable, transfer_us
from dse.placement.solver.linear import Program as LinearProgram
from dse.placement.solver.linear import Rows, Solved, solve_relaxed, solve_whole
from dse.placement.solver.problem import Array, Ints
from perfcore.cost.model import CostModel

if TYPE_CHECKING:
    from dse.placement.design.bound import ClassBound

_GRID = 150  # points of a collective's curve


def under_hull(variable: Variable, low: float, high: float, cost: CostModel) -> tuple[Array, Array]:
    """Corners of a convex, growing function that is nowhere above the collective's time between two sizes."""
    high = max(high, low * (1 + 1e-9), 1.0)
    start = max(low, high * 1e-7)
    grid = np.geomspace(start, high, _GRID)
    times = transfer_us(variable, grid, cost)
    first = times[0] if low > 0 else 0.0
    return _corners(np.concatenate([[low], grid[1:]]), np.concatenate([[first], times[:-1]]))


def hull_of_multiples(
    variable: Variable, low: float, high: float, cost: CostModel, *, unit: float
) -> tuple[Array, Array]:
    """Likewise where sizes are the lower end and whole multiples of a unit more; 0 if they may be anything."""
    if high <= low * (1 + 1e-9):
        us = float(transfer_us(variable, np.array([low]), cost)[0]) if low > 0 else 0.0
        return np.array([low, low * (1 + 1e-6) + 1e-6]), np.array([us, us])
    if not unit or high - low > (_GRID - 1) * unit:
        return under_hull(variable, low, high, cost)
    sizes = low + unit * np.arange(round((high - low) / unit) + 1.0)
    times = transfer_us(variable, sizes, cost)
    return _corners(sizes, np.where(sizes > 0, times, 0.0))


def _corners(x: Array, y: Array) -> tuple[Array, Array]:
    """Of the lower convex hull of points from left to right."""
    corners: list[tuple[float, float]] = []
    for point in zip(x.tolist(), y.tolist(), strict=True):
        while len(corners) > 1 and _right_turn(corners[-2], corners[-1], point):
            corners.pop()
        corners.append(point)
    found = np.array(corners)
    return found[:, 0], found[:, 1]


def _right_turn(a: tuple[float, float], b: tuple[float, float], c: tuple[float, float]) -> bool:
    return (b[1] - a[1]) * (c[0] - a[0]) >= (c[1] - a[1]) * (b[0] - a[0])


class MasterProgram:
    """Assembles a class's linear program. Columns: T, a share for each way, then as they are first used."""

    def __init__(self, bound: ClassBound, cuts: Sequence[Cut]) -> None:
        self._bound, self._cuts, self._rows = bound, cuts, Rows()
        self._ways = 1 + np.arange(len(bound.options.ways.table))
        self._high = [0.0, *np.ones(len(self._ways)).tolist()]
        self._measures: dict[Key, int] = {}
        # Of each measure: its column, its scale, the columns of what all ranks see.
        self._parts: dict[Key, tuple[int, float, list[int]]] = {}
        self._transfers: dict[int, int] = {}
        self._cut_rows: list[int] = []

    def solve(self, *, whole_s: float = 0.0, below_us: float = np.inf) -> Solved:
        """The least T with shares, whole ones if there is time; infinite where no plan satisfies memory and kinds.

        Whole shares that take `below_us` or more are of no interest.
        """
        self._build()
        self._solved = self._program(0, 1.0, whole=whole_s > 0)
        if whole_s > 0:
            return solve_whole(self._solved, time_limit_s=whole_s, below=below_us)
        return solve_relaxed(self._solved)

    def proof(self, solved: Solved) -> tuple[float, Array | None]:
        """The bound of what `solve` returned, and the `(c,)` weights of the cuts in it, which sum to 1 at most."""
        if solved.duals is None:
            return solved.bound, None
        weights = np.maximum(solved.duals[self._cut_rows], 0.0)
        total = float(weights.sum())
        if total <= 1.0:
            return solved.bound, weights
        return self._solved.dual_bound(solved.duals / total), weights / total

    def bytes_within(self, v: int, upper_us: float) -> tuple[float, float]:
        """The least and the most bytes of a collective in a plan that takes at most so long."""
        self._build()
        self._transfer(v)
        column, scale = self._measures[(v,)], float(self._bound.hull(v)[0][-1])
        self._high[0] = min(self._high[0], upper_us)
        least, most = (solve_relaxed(self._program(column, sign)).bound for sign in (1.0, -1.0))
        if np.isposinf(least) or np.isposinf(most):
            return 0.0, -1.0  # there is no such plan
        return max(least, 0.0) * scale, -most * scale

    def _build(self) -> None:
        for cut in self._cuts:
            self._cut(cut)
        self._choice()
        self._alike()
        self._memory_and_kinds()

    def _program(
        self, column: int, sign: float, *, whole: bool = False, also: Sequence[int] = ()
    ) -> LinearProgram:
        """Minimise one column, or maximise it where the sign is negative; shares whole, and `also` other columns."""
        high = np.array(self._high)
        objective, wholes = np.zeros(len(high)), np.zeros(len(high), dtype=bool)
        objective[column] = sign
        wholes[self._ways] = whole
        wholes[list(also)] = True
        return self._rows.program(objective=objective, low=np.zeros(len(high)), high=high, whole=wholes)

    def _cut(self, cut: Cut) -> None:
        """T is at least what the cut says."""
        columns, values, most = [0], [1.0], cut.constant_us
        for weight, key in cut.segments:
            columns.append(self._measure(key, scale=1.0))
            values.append(-weight)
            most += weight * self._high[columns[-1]]
        for weight, v in cut.transfers:
            columns.append(self._transfer(v))
            values.append(-weight)
            most += weight * self._high[columns[-1]]
        self._cut_rows.append(self._rows.count)
        self._row(columns, values, low=cut.constant_us)
        self._high[0] = max(self._high[0], most)

    def _measure(self, key: Key, *, scale: float) -> int:
        """The column of a segment's length (or a collective's bytes in units of `scale`), with its rows."""
        if key in self._measures:
            return self._measures[key]
        terms = self._bound.measures.terms(key)
        column = self._measures[key] = self._column(self._bound.measures.ends(key)[1] / scale)
        shared = self._shared(terms.everywhere, scale)
        extra = [] if shared is None else [shared]
        self._parts[key] = column, scale, extra
        columns, base = [column, *extra, *self._ways], terms.base / scale

        def row(pace: float, each: Array) -> None:
            self._row(columns, [1.0, *([-pace] * len(extra)), *(-pace * each / scale)], low=pace * base)

        row(terms.even, terms.average)
        if terms.slowest > terms.even:
            row(terms.slowest, terms.on_all)
        large = self._large(terms)
        if len(large):
            on_all = self._shared(terms.on_all, scale)
            seen = extra if on_all is None else [*extra, on_all]
            head = [1.0, *([-terms.fastest] * len(seen))]
            more = terms.fastest * (terms.largest - terms.on_all) / scale
            self._largest(large, [column, *seen], head, more, terms.fastest * base)
        return column

    def _large(self, terms: Terms) -> Ints:
        """Groups with a shard that may take longer than the average; smaller ones never do."""
        starts, group = self._bound.measures.starts, self._bound.measures.group
        average = terms.even * float(np.minimum.reduceat(terms.average, starts).sum())
        largest = terms.fastest * np.bincount(group, np.maximum.reduceat(terms.largest, starts))
        return np.flatnonzero(largest > average)

    def _largest(
        self, groups: Ints, columns: Sequence[int], values: Sequence[float], largest: Array, low: float
    ) -> None:
        """One row for each of these groups: its shards are on some rank, beside what is on all ranks."""
        of_way = self._bound.measures.group[self._bound.options.ways.table]
        mine = np.flatnonzero(np.isin(of_way, groups))
        rows = np.arange(len(groups))
        self._rows.add(
            np.concatenate([*([rows] * len(columns)), np.searchsorted(groups, of_way[mine])]),
            np.concatenate([*(np.full(len(rows), c) for c in columns), self._ways[mine]]),
            np.concatenate([*(np.full(len(rows), v) for v in values), -largest[mine]]),
            count=len(rows),
            low=low,
        )

    def _shared(self, everywhere: Array, scale: float) -> int | None:
        """The column of what all ranks see, or have; `None` for nothing."""
        if not everywhere.any():
            return None
        most = float(np.maximum.reduceat(everywhere, self._bound.measures.starts).sum()) / scale
        column = self._column(most)
        self._row([column, *self._ways], [1.0, *(-everywhere / scale)], low=0.0)
        return column

    def _transfer(self, v: int) -> int:
        """The column of a collective's time, with its tangents."""
        if v in self._transfers:
            return self._transfers[v]
        x, y = self._bound.hull(v)
        scale = float(x[-1])
        bytes_ = self._measure((v,), scale=scale)
        slopes = np.diff(y) / np.diff(x)
        most = float(y[-1] + slopes[-1] * scale * max(self._high[bytes_] - 1.0, 0.0))
        column = self._transfers[v] = self._column(most)
        for slope, x0, y0 in zip(slopes, x[:-1], y[:-1], strict=True):
            self._row([column, bytes_], [1.0, -slope * scale], low=float(y0 - slope * x0))
        return column

    def _choice(self) -> None:
        """Each table's shares add up to one."""
        tables = self._bound.options.ways.table
        self._rows.add(
            tables, self._ways, np.ones(len(tables)), count=int(tables.max()) + 1, low=1.0, high=1.0
        )

    def _alike(self) -> None:
        """Tables that stay together are of a kind to the same share."""
        ways = self._bound.options.ways
        kinds = np.stack([ways.flag, ways.share[ways.family]])
        for first, *others in (g for g in self._bound.conditions.groups if len(g) > 1):
            for kind in np.unique(kinds[:, ways.table == first], axis=1).T:
                of_kind = (kinds == kind[:, None]).all(axis=0)
                for other in others:
                    sign = (ways.table == first).astype(float) - (ways.table == other)
                    mine = np.flatnonzero(of_kind & (sign != 0))
                    self._row(self._ways[mine], sign[mine], low=0.0, high=0.0)

    def _memory_and_kinds(self) -> None:
        bound, ways = self._bound, self._bound.options.ways
        on_host = float(bound.conditions.host_capacity_bytes.sum())
        for bytes_, capacity in (
            (bound.costs.bytes, bound.capacity_bytes),
            (bound.costs.host_bytes, on_host),
        ):
            held = bound.sums(bytes_)[0]
            scale = max(float(held.max()), 1.0)
            if held.any():
                self._row(self._ways, held / scale, high=capacity / scale)
        for kind in bound.kinds:
            of_kind = self._ways[ways.flag == kind]
            self._row(of_kind, np.ones(len(of_kind)), low=1.0)

    def _column(self, most: float) -> int:
        self._high.append(most)
        return len(self._high) - 1

    def _row(
        self,
        columns: Sequence[int] | Ints,
        values: Sequence[float] | Array,
        *,
        low: float = -np.inf,
        high: float = np.inf,
    ) -> None:
        self._rows.add(np.zeros(len(columns), dtype=np.int64), columns, values, count=1, low=low, high=high)
