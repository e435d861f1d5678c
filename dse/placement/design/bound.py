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

Once a plan is known, the classes that may hold a faster one are bounded anew: by hulls over the bytes that such a plan may
send, with whole shares, and at last with ranks told apart (`dse.placement.design.packing`).

Letters: o options, v variables, t tables, k segments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from dse.placement.design.conditions import Conditions
from dse.placement.design.options import REPLICATED, ROW_SPLIT, Options, shard_kind
from dse.placement.design.packing import PackedProgram
from dse.placement.design.program import Key, MasterProgram, Terms, under_hull
from dse.placement.design.relaxed import Cut, Program, Role, transfer_us
from dse.placement.design.shard_costs import ShardCosts
from dse.placement.design.ways import Sums
from dse.placement.solver.problem import Array, Ints
from perfcore.cost.model import CostModel

_TOLERANCE = 1e-6  # relative; cuts that say less are not worth a round
_NO_SHARE = 1e-9  # shares this small are rounding
_MOST_ROUNDS = 30  # of one class
_CLOSER = 3  # times that bytes are bounded anew
_WORTH = 2e-4  # of the time: hulls that are closer stay
_FIRST_APART, _MORE_APART = (
    3,
    2,
)  # families that a packing takes piece by piece at first, and how many times more then
_MOST_WHOLE = 2000  # ways that a program takes whole


@dataclass(frozen=True, slots=True)
class _Proof:
    """A bound of one design of a class, and the cuts that it rests on; none where it says nothing of other designs."""

    lower_us: float
    number: int
    cuts: tuple[Cut, ...]


@dataclass(eq=False)
class ClassBound:
    """The linear program of one class, which grows by cuts.

    One program serves n designs with the same steps, which differ in constants: a design's bound is that of another plus
    the least that the constants of the cuts it rests on grow by, since then every cut grows by as much.

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
    _proofs: list[_Proof] = field(default_factory=list)
    _settled: set[int] = field(default_factory=set)
    _rounds: dict[int, int] = field(default_factory=dict)
    _upper_us: float = np.inf
    _apart: int = _FIRST_APART
    _terms: dict[Key, Terms] = field(default_factory=dict)
    _hulls: dict[int, tuple[Array, Array]] = field(default_factory=dict)

    @property
    def lower_us(self) -> float:
        """The bound so far; infinite where the class has no plan."""
        return self.lower_of(0)

    def lower_of(self, number: int) -> float:
        """Likewise of one of the designs."""
        if not self.feasible:
            return np.inf
        return max((self._transferred(p, number) for p in self._proofs), default=0.0)

    def _transferred(self, proof: _Proof, number: int) -> float:
        if number == proof.number:
            return proof.lower_us
        if not proof.cuts:
            return 0.0
        grown = [
            self.program.shifted(c, number=number) - self.program.shifted(c, number=proof.number)
            for c in proof.cuts
        ]
        return proof.lower_us + min(grown)

    def settled(self, number: int = 0) -> bool:
        """No cut says more of that design."""
        return not self.feasible or number in self._settled

    def start(self) -> None:
        """The first cut: that of every table in the first of its ways."""
        self.shares = np.zeros(len(self.options.ways.table))
        self.shares[self.starts] = 1.0
        self.cuts.append(self.program.cut(self.values()[0])[1])
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

    def refine(self, number: int = 0) -> None:
        """One round: the critical cycle of a design at its solution, and the program solved anew."""
        rounds = self._rounds[number] = self._rounds.get(number, 0) + 1
        if number and rounds == 1:
            self._solve(number)
        cuts = (self.program.cut(values, number=number)[1] for values in self._paces())
        found = max(cuts, key=self.cut_us)
        cut = replace(found, constant_us=self.program.shifted(found, number=0, of=number))
        says = self.cut_us(found)
        if says <= self.lower_of(number) * (1 + _TOLERANCE) or rounds > _MOST_ROUNDS:
            self._settled.add(number)
            return
        self.cuts.append(cut)
        self._solve(number)

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
            + sum(w * self._segment(key, self.shares) for w, key in cut.segments)
            + sum(w * self._transfer(v, self.shares) for w, v in cut.transfers)
        )

    def terms(self, key: Key) -> Terms:
        """What each way adds to a segment, or to the bytes of a collective."""
        if key not in self._terms:
            variables = [self.program.variables[v] for v in key]
            each = np.asarray(np.sum([v.each for v in variables], axis=0))
            everywhere = np.asarray(np.sum([v.everywhere for v in variables], axis=0))
            total, largest, _ = self.sums(each)
            seen = self.sums(everywhere)[2] if everywhere.any() else np.zeros(len(total))
            ranks = self.options.design.system.world_size
            base = float(sum(v.base for v in variables))
            terms = Terms(total / ranks, largest, seen, self.on_all(largest), base)
            self._terms[key] = terms if variables[0].role is not Role.RANK else self._slowed(terms)
        return self._terms[key]

    def on_all(self, largest: Array) -> Array:
        """`(w,)`: what every rank has at least, from the shard that some rank has."""
        everywhere = np.isin(shard_kind(self.options.ways.flag), (ROW_SPLIT, REPLICATED))
        return np.where(everywhere, largest, 0.0)

    def _slowed(self, terms: Terms) -> Terms:
        """Durations on ranks that differ."""
        if not self.conditions.uneven:
            return terms
        even, fastest, slowest = self.conditions.paces
        return replace(terms, even=even, fastest=fastest, slowest=slowest)

    def options_of_shares(self) -> Ints:
        """`(t,)`: for each table the option that comes closest to its largest share."""
        return self.options.nearest(self.shares)

    def _segment(self, key: Key, shares: Array) -> float:
        terms = self.terms(key)
        base = terms.base + float(shares @ terms.everywhere)
        group = self.conditions.group[self.options.ways.table]
        on_all = float(shares @ terms.on_all)
        largest = float(np.bincount(group, shares * (terms.largest - terms.on_all)).max())
        return max(
            terms.even * (base + float(shares @ terms.average)),
            terms.fastest * (base + on_all + largest),
            terms.slowest * (base + on_all),
        )

    def _transfer(self, v: int, shares: Array) -> float:
        x, y = self.hull(v)
        return float(np.interp(self._segment((v,), shares), x, y))

    def hull(self, v: int) -> tuple[Array, Array]:
        """The convex hull under a collective's time over its bytes."""
        if v not in self._hulls:
            variable = self.program.variables[v]
            terms = self.terms((v,))
            least = terms.base + self._least_bytes(terms)
            self._hulls[v] = under_hull(variable, least, self.most(terms), self.cost)
        return self._hulls[v]

    def most(self, terms: Terms) -> float:
        """What a segment or collective comes to on a rank that holds all shards of all tables."""
        whole = terms.average * self.options.design.system.world_size + terms.everywhere
        return terms.slowest * (terms.base + float(np.maximum.reduceat(whole, self.starts).sum()))

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

    def close_in(self, upper_us: float, *, seconds_left: Callable[[], float], whole_s: float) -> None:
        """Bound the first design anew, knowing that plans slower than `upper_us` are of no interest.

        A plan that is faster keeps every collective within bytes that another linear program finds; the hulls over
        these alone are closer. Then each table takes one way whole. The bound is of such plans, so at most `upper_us`.

        Args:
            upper_us: the time of a plan.
            seconds_left: asked between linear programs; stops at 0.
            whole_s: time limit of the program with whole ways; 0 leaves it out.
        """
        self._upper_us = upper_us
        for _ in range(_CLOSER):
            if not self._tighten(upper_us, seconds_left):
                break
            self._settled.discard(0)
            self._rounds[0] = 0
            self._solve(0)
            while not self.settled() and self.lower_us < upper_us and seconds_left() > 0:
                self.refine()
        if self.lower_us < upper_us and len(self.shares) <= _MOST_WHOLE and min(whole_s, seconds_left()) > 0:
            self._solve(0, whole_s=min(whole_s, seconds_left()))

    def pack(self, upper_us: float, *, time_limit_s: float) -> bool:
        """Bound the first design with some ranks told apart, by plans that take less; whether more time may say more."""
        program = PackedProgram(self, self.cuts)
        solved = program.least(self._apart, below_us=upper_us, time_limit_s=time_limit_s)
        if solved is None:
            return False
        self._upper_us = min(self._upper_us, upper_us)
        self._proofs.append(_Proof(min(solved.bound, upper_us), 0, ()))
        most = len(program.families())
        if not solved.finished:
            return True
        self._apart, before = min(_MORE_APART * self._apart, most), self._apart
        return before < most

    def _tighten(self, upper_us: float, seconds_left: Callable[[], float]) -> bool:
        """Hulls of the collectives that these are far from, over the bytes that matter; whether any changed."""
        changed = False
        for v, slack_us in self._slack_us().items():
            if slack_us < _WORTH * upper_us or seconds_left() <= 0 or self.lower_us >= upper_us:
                continue
            low, high = MasterProgram(self, self.cuts).bytes_within(v, upper_us)
            if high < low:
                self._proofs.append(_Proof(upper_us, 0, ()))
                return False
            self._hulls[v] = under_hull(self.program.variables[v], low, high, self.cost)
            changed = True
        return changed

    def _slack_us(self) -> dict[int, float]:
        """By how much each collective that cuts pass takes longer at the solution than its hull says."""
        slack = {}
        for v in sorted({v for cut in self.cuts for _, v in cut.transfers}):
            bytes_ = self._segment((v,), self.shares)
            true = float(transfer_us(self.program.variables[v], np.array([bytes_]), self.cost)[0])
            slack[v] = true - float(np.interp(bytes_, *self.hull(v)))
        return slack

    def _solve(self, number: int, *, whole_s: float = 0.0) -> None:
        own = [replace(c, constant_us=self.program.shifted(c, number=number)) for c in self.cuts]
        solved = MasterProgram(self, own).solve(whole_s=whole_s, below_us=self._upper_us)
        if np.isfinite(self._upper_us):
            self._proofs.append(_Proof(min(solved.bound, self._upper_us), number, ()))
            if solved.x is not None:
                self.shares = solved.x[1 : 1 + len(self.options.ways.table)]
            else:
                self._settled.add(number)
            return
        if solved.x is None:
            self.feasible = self.feasible and np.isfinite(solved.bound)
            self._settled.add(number)
            return
        self.shares = solved.x[1 : 1 + len(self.options.ways.table)]
        tight = [
            c
            for c, o in zip(self.cuts, own, strict=True)
            if self.cut_us(o) >= solved.bound * (1 - _TOLERANCE)
        ]
        self._proofs.append(_Proof(solved.bound, number, tuple(tight or self.cuts)))
