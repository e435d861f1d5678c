"""A lower bound of a design's iteration time over all plans, by cutting planes.

For each class of plans (which kinds of sharding occur at all) a linear program over (table, option) shares `x`:

    minimise T
    T   >= constant + Σ weight · M_segment + Σ weight · D_collective             every cut (`dse.placement.design.relaxed`)
    M   >= base + Σ_tables shared(x) + average over ranks of the shards' sum      a maximum is at least the average
    M   >= base + Σ_tables shared(x) + one shard of table t + what is on all ranks    every table: each shard is on some rank
    D   >= tangents of the convex hull of transfer(B),  B >= likewise in bytes
    Σ x = 1 a table, Σ x >= 1 a kind of the class, memory of all shards <= memory of all ranks, of hosts likewise

Every plan is a point of it at which T is its iteration time or less: its own shares, segments and bytes satisfy all rows.
So its minimum is a lower bound of the class, and the least over classes one of the design. Cuts are added where
the critical cycle at the solution says more (Kelley 1960); classes are refined in the order of their bounds.

The hull: transfers grow with bytes, so on a grid `b_0 < b_1 < ...` the points `(b_{i+1}, transfer(b_i))` lie on or under
the curve's graph to their left; the lower convex hull of them and the first point underestimates the curve.

Tables that stay together have their shards side by side: they count as one in "one shard of table t", and as much of one
as of another is row_wise, say.

Ranks of slowness `s` take `s` times as long for what they launch in a segment, what no plan changes included. Any of them
may be the last one, so only what all ranks run counts as such (`dse.placement.design.class_program`). Of R ranks, with
`S = Σ 1 / s`, the sum over ranks of `M / s >= a rank's launches` and its slowest and fastest rank give

    M   >= (R · (base + Σ shared(x)) + the shards' sum) / S
    M   >= max s · (base + Σ shared(x) + the smallest part of what is on all ranks)
    M   >= min s · (base + Σ shared(x) + one shard of table t + the smallest part of what is on all ranks)

Once a plan is known, the classes that may hold a faster one are bounded anew: by ranges of the bytes that plans send
(`dse.placement.design.byte_tree`), with whole shares, and at last with ranks told apart (`dse.placement.design.packing`).

Letters: o options, v variables, t tables, k segments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np

from dse.placement.design.byte_tree import ByteTree
from dse.placement.design.conditions import Conditions
from dse.placement.design.measures import Measures
from dse.placement.design.options import Options
from dse.placement.design.packing import PackedProgram
from dse.placement.design.program import MasterProgram, under_hull
from dse.placement.design.proofs import Proofs
from dse.placement.design.relaxed import Cut, Program, Role
from dse.placement.design.shard_costs import ShardCosts
from dse.placement.design.ways import Sums
from dse.placement.solver.linear import Solved
from dse.placement.solver.problem import Array, Ints
from perfcore.cost.model import CostModel

_TOLERANCE = 1e-6  # relative; cuts that say less are not worth a round
_NO_SHARE = 1e-9  # shares this small are rounding
_MOST_ROUNDS = 30  # of one class
_CLOSER = 3  # times that bytes are bounded anew
_PROGRAMS = 40  # that parting plans by bytes takes, at most
_FIRST_APART, _MORE_APART = (
    3,
    2,
)  # families that a packing takes piece by piece at first, and how many times more then
_MOST_WHOLE = 2000  # ways that a program takes whole


@dataclass(eq=False)
class ClassBound:
    """The linear program of one class, which grows by cuts.

    One program serves n designs with the same steps, which differ in constants (`dse.placement.design.proofs`).

    Attributes:
        kinds: positions in `FLAGS`.
        options: those of these kinds.
        program: the steps of its plans.
        costs: of all probes.
        cost: prices collectives.
        capacity_bytes: of all ranks together.
        most_bytes: of the largest rank.
        sums: over the ways of the class: all shards, one of them, all with copies counted once.
        conditions: host memory, slower ranks, tables that stay together.
        shares: `(w,)` the last solution.
        cuts: so far, with the constants of the first design.
        feasible: the class has a plan, as far as the linear program can tell.
    """

    kinds: tuple[int, ...]
    options: Options
    program: Program
    costs: ShardCosts
    cost: CostModel
    capacity_bytes: float
    most_bytes: float
    sums: Sums
    conditions: Conditions
    shares: Array = field(default_factory=lambda: np.empty(0))
    cuts: list[Cut] = field(default_factory=list)
    feasible: bool = True
    _settled: set[int] = field(default_factory=set)
    _rounds: dict[int, int] = field(default_factory=dict)
    _solved: int = 0
    _apart: int = _FIRST_APART
    _hulls: dict[int, tuple[Array, Array]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Nothing is proven yet."""
        self.programs = 0
        self.measures = Measures(self.options, self.program.variables, self.sums, self.conditions)
        self._tree: ByteTree | None = None
        self._inside: Callable[[int], tuple[Array, Array] | None] | None = None
        self.proofs = Proofs(self.program.constant_us)

    @property
    def lower_us(self) -> float:
        """The bound so far; infinite where the class has no plan."""
        return self.lower_of(0)

    def lower_of(self, number: int) -> float:
        """Likewise of one of the designs."""
        return self.proofs.lower_of(number) if self.feasible else np.inf

    def settled(self, number: int = 0) -> bool:
        """No cut says more of that design."""
        return not self.feasible or number in self._settled

    def start(self) -> None:
        """The first cut: that of every table in the first of its ways."""
        self.shares = np.zeros(len(self.options.ways.table))
        self.shares[self.measures.starts] = 1.0
        self._add(self.program.cut(self.values()[0])[1])
        self._solve(0)

    def values(self) -> tuple[Array, dict[int, float]]:
        """`(v,)` durations at the solution, and by variable the bytes of collectives."""
        variables, ways = self.program.variables, self.options.ways
        used = np.flatnonzero(self.shares > _NO_SHARE)
        spread, copies = ways.least[used], ways.copies[ways.family[used]]
        probe = ways.probe[ways.family[used], -(-ways.pieces[ways.family[used]] // spread) - 1, 0]
        each = np.stack([v.each[probe] for v in variables]) * self.shares[used]
        everywhere = np.stack([v.everywhere[probe] for v in variables]) @ (self.shares[used] * spread)
        average = each @ (spread * copies) / self.options.design.system.world_size
        base = np.array([v.base for v in variables])
        values = base + everywhere + np.maximum(average, each.max(axis=1))
        bytes_at = {i: float(values[i]) for i, v in enumerate(variables) if v.role is not Role.RANK}
        for i, bytes_ in bytes_at.items():
            values[i] = float(np.interp(bytes_, *self.hull(i)))
        return values, bytes_at

    def refine(self, number: int = 0, *, worth: float = _TOLERANCE) -> None:
        """One round: the critical cycle of a design at the last solution, and the program solved anew.

        A bound within `worth` (relative) of what the solution comes to is as good as it gets.
        """
        rounds = self._rounds[number] = self._rounds.get(number, 0) + 1
        found, says = self._critical(number)
        new = self._is_new(number, says)
        close = says <= self.lower_of(number) * (1 + worth)
        if close or rounds > _MOST_ROUNDS or not (new or self._solved != number):
            self._settled.add(number)
            return
        if new:
            self._add(found)
        self._solve(number)

    def add_violated(self, number: int, worth: float) -> bool:
        """Whether there was a cut that says more of a design at the last solution, by that share; it is one of the cuts now."""
        found, says = self._critical(number)
        new = self._is_new(number, says, worth)
        if new:
            self._add(found)
        return new

    def _is_new(self, number: int, says_us: float, worth: float = _TOLERANCE) -> bool:
        return says_us > max(self.cut_us(c) for c in self.own_cuts(number)) * (1 + worth)

    def _critical(self, number: int) -> tuple[Cut, float]:
        """The cut that says most of a design at the last solution, with the first design's constant, and what it says."""
        cuts = (self.program.cut(values, number=number)[1] for values in self._paces())
        found = max(cuts, key=self.cut_us)
        constant_us = self.program.shifted(found, number=0, of=number)
        return replace(found, constant_us=constant_us), self.cut_us(found)

    def _add(self, cut: Cut) -> None:
        """A cut, with the constant of the first design."""
        self.cuts.append(cut)
        self.proofs.add_cut(cut)

    def own_cuts(self, number: int) -> list[Cut]:
        """The cuts with the constants of a design."""
        constants = self.proofs.constants_us[:, number].tolist()
        return [replace(c, constant_us=us) for c, us in zip(self.cuts, constants, strict=True)]

    def _paces(self) -> list[Array]:
        """`(v,)` durations at the solution; where ranks differ, also those of the slowest."""
        values, _ = self.values()
        if not self.conditions.uneven:
            return [values]
        on_rank = np.array([v.role is Role.RANK for v in self.program.variables])
        even, _, slowest = self.conditions.paces
        return [np.where(on_rank, pace * values, values) for pace in (even, slowest)]

    def cut_us(self, cut: Cut) -> float:
        """What a cut says of the solution."""
        return (
            cut.constant_us
            + sum(w * self.measures.of_shares(key, self.shares) for w, key in cut.segments)
            + sum(w * self.transfer_us(v) for w, v in cut.transfers)
        )

    def options_of_shares(self) -> Ints:
        """`(t,)`: for each table the option that comes closest to its largest share."""
        return self.options.nearest(self.shares)

    def transfer_us(self, v: int) -> float:
        """What a collective takes there, by its hull."""
        return float(np.interp(self.measures.of_shares((v,), self.shares), *self.hull(v)))

    def hull(self, v: int) -> tuple[Array, Array]:
        """The convex hull under a collective's time over its bytes."""
        inside = self._inside(v) if self._inside is not None else None
        if inside is not None:
            return inside
        if v not in self._hulls:
            variable = self.program.variables[v]
            self._hulls[v] = under_hull(variable, *self.measures.ends((v,)), self.cost)
        return self._hulls[v]

    def close_in(
        self,
        upper_us: float | Array,
        *,
        programs: int = _PROGRAMS,
        seconds_left: Callable[[], float],
        whole_s: float = 0.0,
        worth: float = _TOLERANCE,
    ) -> None:
        """Bound the designs anew, by ranges of bytes (`dse.placement.design.byte_tree`).

        Then, of the first design, plans that are faster than the one known: they keep every collective within bytes that
        another linear program finds, and the hulls over these are closer; at last each table takes one way whole.

        Args:
            upper_us: `(n,)` times of plans of the designs; bounds need not come closer than these.
            programs: linear programs, at most.
            seconds_left: asked between linear programs; stops at 0.
            whole_s: time limit of the program with whole ways; 0 leaves it out.
            worth: relative; gaps and cuts that are smaller are not worth a program.
        """
        upper = np.broadcast_to(np.asarray(upper_us, dtype=np.float64), len(self.program.constant_us))
        if self._tree is None:
            self._tree = ByteTree(self, len(upper))
        self._tree.grow(upper, programs=programs, seconds_left=seconds_left, worth=worth)
        self.proofs.add(self._tree.lower_us)
        self.proofs.close_in(upper)
        for _ in range(_CLOSER if whole_s > 0 else 0):
            if self.lower_us < upper[0] and seconds_left() > 0:
                self._tighten(float(upper[0]), seconds_left)
        whole_s = min(whole_s, seconds_left())
        if self.lower_us < upper[0] and len(self.shares) <= _MOST_WHOLE and whole_s > 0:
            self._solve_whole(whole_s)

    def _tighten(self, upper_us: float, seconds_left: Callable[[], float]) -> None:
        """Bound the first design's plans of interest by hulls over the bytes that these may send."""
        self._narrow()
        for v in sorted({v for cut in self.cuts for _, v in cut.transfers}):
            low, high = MasterProgram(self, self.own_cuts(0)).bytes_within(v, upper_us)
            if high < low:
                self.proofs.add_of_interest(0, np.inf)
                return
            self._hulls[v] = under_hull(self.program.variables[v], low, high, self.cost)
        again = True
        while again and self.lower_us < upper_us and seconds_left() > 0:
            program = MasterProgram(self, self.own_cuts(0))
            solved = self.solve(program)
            self.proofs.add_of_interest(0, program.proof(solved)[0])
            again = solved.x is not None and self.add_violated(0, _TOLERANCE)

    def _narrow(self) -> None:
        """Hulls over the bytes of plans that may be faster than the one known."""
        if self._tree is not None:
            for v, (low, high) in self._tree.within(self.proofs.upper_us).items():
                x, _ = self.hull(v)
                low, high = max(low, float(x[0])), min(high, float(x[-1]))
                self._hulls[v] = under_hull(self.program.variables[v], low, max(low, high), self.cost)

    def pack(self, upper_us: float, *, time_limit_s: float) -> bool:
        """Bound the first design with some ranks told apart, by plans that take less; whether more time may say more."""
        self.proofs.close_in(upper_us)
        self._narrow()
        program = PackedProgram(self, self.cuts)
        solved = program.least(self._apart, below_us=upper_us, time_limit_s=time_limit_s)
        if solved is None:
            return False
        self.proofs.add_of_interest(0, solved.bound)
        most = len(program.families())
        if not solved.finished:
            return True
        self._apart, before = min(_MORE_APART * self._apart, most), self._apart
        return before < most

    @contextmanager
    def inside(self, hull: Callable[[int], tuple[Array, Array] | None]) -> Iterator[None]:
        """Collectives have these hulls for a while, where there are any."""
        self._inside = hull
        try:
            yield
        finally:
            self._inside = None

    def solve(self, program: MasterProgram) -> Solved:
        """Solve a program of this class, and keep its shares."""
        solved = program.solve()
        self.programs += 1
        if solved.x is not None:
            self.shares = solved.x[1 : 1 + len(self.options.ways.table)]
        return solved

    def _solve(self, number: int) -> None:
        program = MasterProgram(self, self.own_cuts(number))
        solved = self.solve(program)
        self._solved = number
        if solved.x is None:
            self.feasible = self.feasible and np.isfinite(solved.bound)
            self._settled.add(number)
            return
        self.proofs.add(self.proofs.of_all(number, *program.proof(solved)))

    def _solve_whole(self, time_limit_s: float) -> None:
        self._narrow()
        upper_us = float(self.proofs.upper_us[0])
        solved = MasterProgram(self, self.own_cuts(0)).solve(whole_s=time_limit_s, below_us=upper_us)
        if solved.x is not None:
            self.shares = solved.x[1 : 1 + len(self.options.ways.table)]
        self.proofs.add_of_interest(0, solved.bound)
