"""Bounds of a class that tell its plans apart by the bytes that their collectives send.

A linear program lets a rank hold three tables and a quarter, takes a collective's time from the hull under a curve that
bends the other way, and knows nothing of that. A *load* is what every plan has exactly one of: the most that a rank sends in
an all-to-all, or what all reduce together. The plans of a class are parted by ranges of loads, a tree whose leaves each have
a linear program of their own, and the least over leaves bounds all plans. In a leaf where no rank has more than C,

- the hull is that of the curve between its ends, at whole multiples of the bytes that all shards are multiples of;
- with `u(s) = s / C` where `(k + 1) s / C` is a whole number, `floor((k + 1) s / C) / k` elsewhere, shards that fit on a
  rank together have `Σ u <= 1` for every k = 1, 2, ... (a dual feasible function: Fekete and Schepers 2001), so those of all
  R ranks `Σ u <= R`. Of a table on n ranks, the least sum of u over the ways to share its pieces out counts; u grows with s,
  so the least bytes of a shard may stand for it.

Collectives that send the same in the same proportion have one load. A leaf's bound is one of every design with the same
steps (`dse.placement.design.proofs`), so one tree serves them all: the design with the widest gap decides which leaf is
solved or parted next.

Letters: n designs, p probes, w ways, q loads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from dse.placement.design.program import MasterProgram, hull_of_multiples
from dse.placement.design.relaxed import Cut, Role, transfer_us
from dse.placement.solver.problem import Array, Ints

if TYPE_CHECKING:
    from dse.placement.design.bound import ClassBound

Range: TypeAlias = tuple[float, float]
_SAME = 1e-9  # relative
_MOST_COUNTS = 8  # k's of one load
_STEPS = 1000  # in which loads are counted that are no multiples of anything
_MOST_STEPS = 1e12  # shards of more fit nowhere
_CUTS = 3  # found in one leaf for one design, at most
_NARROW = 1.02  # ranges of loads that are no multiples are not parted further
_LEAST = 1e-6  # of a range's upper end, where the lower one is nothing
_ROUNDING = 1e-6  # of a unit
_VIOLATED = 1e-4  # ranks by which shares exceed a row that a narrower range would have


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    """What collectives send, in the same proportion.

    Attributes:
        each: `(p,)` bytes of the first collective that a shard adds to its rank.
        factors: by collective (a variable), its bytes for each of these.
        unit: every plan's load is a whole multiple of it; 0 where that is not known.
        packs: it is the sum of a rank's shards and nothing else.
    """

    each: Array
    factors: dict[int, float]
    unit: float
    packs: bool

    def counts(self, most: float) -> tuple[Ints, int]:
        """`(p,)` sizes of shards and the size of a rank, as whole numbers: what fits together still does."""
        step = self.unit or most / _STEPS
        sizes = np.floor(np.minimum(self.each / step, _MOST_STEPS) + _SAME)
        return sizes.astype(np.int64), int(min(np.floor(most / step + _SAME), _MOST_STEPS))


@dataclass(eq=False)
class Leaf:
    """Plans whose loads are within ranges.

    Attributes:
        ranges: of each load.
        lower_us: `(n,)` bounds of their times.
        hulls: by collective.
        parts: by design that the leaf was solved for, the load to part next and where; `None` where nothing is left to part.
    """

    ranges: tuple[Range, ...]
    lower_us: Array
    hulls: dict[int, tuple[Array, Array]] = field(default_factory=dict)
    parts: dict[int, tuple[int, float] | None] = field(default_factory=dict)


def loads_of(bound: ClassBound) -> list[Load]:
    """The loads of a class's collectives, whose bytes no more than shards decide."""
    used = np.unique(bound.options.ways.probe[np.unique(bound.options.ways.family)])
    loads: list[Load] = []
    adds: list[Array] = []
    for v, variable in enumerate(bound.program.variables):
        own = np.concatenate([variable.each[used], variable.everywhere[used]])
        if variable.role is Role.RANK or not own.any():
            continue
        for load, known in zip(loads, adds, strict=True):
            factor = float(own.max() / known.max())
            if np.allclose(own, factor * known, rtol=_SAME, atol=0.0):
                load.factors[v] = factor
                break
        else:
            packs = variable.role is Role.FULLEST and not variable.everywhere.any()
            loads.append(Load(variable.each, {v: 1.0}, _unit(own), packs))
            adds.append(own)
    return loads


def _unit(each: Array) -> float:
    """What all bytes are multiples of."""
    whole = np.round(each)
    return float(np.gcd.reduce(whole.astype(np.int64))) if bool((whole == each).all()) else 0.0


def weights(sizes: Ints, rank: int, k: int) -> Array:
    """What shards weigh, such that those that fit on a rank of that size together weigh 1 at most."""
    scaled = (k + 1) * sizes
    return np.where(scaled % rank == 0, sizes / rank, (scaled // rank) / k)


class ByteTree:
    """The leaves of one class, and which of them to bound next."""

    def __init__(self, bound: ClassBound, designs: int) -> None:
        """One leaf of all plans."""
        self._bound, self.loads = bound, loads_of(bound)
        self._rows: dict[tuple[int, float], list[Array]] = {}
        self.leaves = [Leaf(tuple(self._whole(load) for load in self.loads), np.zeros(designs))]

    @property
    def lower_us(self) -> Array:
        """`(n,)` bounds of all plans."""
        return np.asarray(np.min([leaf.lower_us for leaf in self.leaves], axis=0))

    def grow(
        self, upper_us: Array, *, programs: int, seconds_left: Callable[[], float], worth: float
    ) -> None:
        """Solve and part leaves until no design gains, or so many linear programs are solved.

        Args:
            upper_us: `(n,)`: bounds above it are of no use.
            programs: linear programs, at most; one leaf may take a few more.
            seconds_left: asked between leaves; stops at 0.
            worth: relative; gaps and cuts that are smaller are not worth a program.
        """
        done = np.zeros(len(upper_us), dtype=bool)
        until = self._bound.programs + programs
        while self._bound.programs < until and seconds_left() > 0:
            share = np.where(done, np.inf, self.lower_us / upper_us)
            number = int(np.argmin(share))
            if share[number] >= 1 - worth:
                return
            leaf = min(self.leaves, key=lambda x: float(x.lower_us[number]))
            if number not in leaf.parts:
                self._solve(leaf, number, float(upper_us[number]), worth)
            elif leaf.parts[number] is None:
                done[number] = True
            else:
                self._part(leaf, number)

    def within(self, upper_us: Array) -> dict[int, Range]:
        """By collective the bytes that it sends in any plan that takes no longer than `(n,)` plans of the designs."""
        leaves = [leaf for leaf in self.leaves if bool((leaf.lower_us < upper_us).any())]
        found = {}
        for q, load in enumerate(self.loads):
            ends = np.array([leaf.ranges[q] for leaf in leaves]).reshape(-1, 2)
            for v in load.factors if len(ends) else ():
                found[v] = self._bytes(load, v, (float(ends[:, 0].min()), float(ends[:, 1].max())))
        return found

    def _whole(self, load: Load) -> Range:
        """The load of any plan of the class."""
        lows, highs = [], []
        for v, factor in load.factors.items():
            x, _ = self._bound.hull(v)
            base = self._base(v)
            lows.append(max(float(x[0]) - base, 0.0) / factor)
            highs.append((float(x[-1]) - base) / factor)
        low, high = max(lows), min(highs)
        if load.unit:
            low = np.ceil(low / load.unit * (1 - _SAME)) * load.unit
            high = np.floor(high / load.unit * (1 + _SAME)) * load.unit
        return float(low), max(float(high), float(low))

    def _bytes(self, load: Load, v: int, ends: Range) -> Range:
        base, factor = self._base(v), load.factors[v]
        return base + factor * ends[0], base + factor * ends[1]

    def _base(self, v: int) -> float:
        return float(self._bound.program.variables[v].base)

    def hull(self, leaf: Leaf, v: int) -> tuple[Array, Array] | None:
        """The hull under a collective in a leaf; `None` for one that has no load."""
        if v not in leaf.hulls:
            for load, ends in zip(self.loads, leaf.ranges, strict=True):
                if v in load.factors:
                    low, high = self._bytes(load, v, ends)
                    unit = load.unit * load.factors[v]
                    variable, cost = self._bound.program.variables[v], self._bound.cost
                    leaf.hulls[v] = hull_of_multiples(variable, low, high, cost, unit=unit)
        return leaf.hulls.get(v)

    def _solve(self, leaf: Leaf, number: int, upper_us: float, worth: float) -> None:
        """Bound a leaf for a design, and all others by that."""
        bound = self._bound
        leaf.parts[number] = None
        with bound.inside(lambda v: self.hull(leaf, v)):
            for _ in range(_CUTS):
                program = NarrowProgram(bound, bound.own_cuts(number), self, leaf)
                solved = bound.solve(program)
                if solved.x is None:
                    if np.isposinf(solved.bound):
                        leaf.lower_us[:] = np.inf
                    return
                said = bound.proofs.of_all(number, *program.proof(solved))
                leaf.lower_us = np.maximum(leaf.lower_us, said)
                if leaf.lower_us[number] >= upper_us or not bound.add_violated(number, worth):
                    break
            leaf.parts[number] = self._next(leaf, worth * upper_us)

    def _next(self, leaf: Leaf, worth_us: float) -> tuple[int, float] | None:
        """The load whose collectives take longer than their hulls say, or whose rows would say more if it were less."""
        open_ = [q for q in range(len(self.loads)) if self._parts(q, leaf)]
        slack = {q: self._slack_us(q, self._at(q, leaf, up=True)) for q in open_}
        at = {q: self._at(q, leaf, up=False) for q in open_}
        best = max(open_, key=slack.__getitem__, default=None)
        if best is not None and slack[best] > worth_us:
            return best, at[best]
        for q in open_:
            if self.loads[q].packs and at[q] < leaf.ranges[q][1] and self._exceeds(q, at[q]):
                return q, at[q]
        return None

    def _parts(self, q: int, leaf: Leaf) -> bool:
        """Whether a range has two parts."""
        low, high = leaf.ranges[q]
        unit = self.loads[q].unit
        return high - low >= unit * (1 - _SAME) if unit else high > low * _NARROW

    def _at(self, q: int, leaf: Leaf, *, up: bool) -> float:
        """A load at the solution, or the next one that a plan may have."""
        load = self.loads[q]
        v, factor = next(iter(load.factors.items()))
        at = (self._bound.measures.of_shares((v,), self._bound.shares) - self._base(v)) / factor
        if load.unit:
            at /= load.unit
            at = load.unit * float(np.ceil(at - _ROUNDING) if up else np.floor(at + _ROUNDING))
        return min(max(at, leaf.ranges[q][0]), leaf.ranges[q][1])

    def _slack_us(self, q: int, at: float) -> float:
        """By how much the collectives that cuts pass take longer than the solution says."""
        load, bound = self.loads[q], self._bound
        passed = {v for cut in bound.cuts for _, v in cut.transfers}
        slack = 0.0
        for v in passed & load.factors.keys():
            bytes_, _ = self._bytes(load, v, (at, at))
            true = float(transfer_us(bound.program.variables[v], np.array([bytes_]), bound.cost)[0])
            slack += true - bound.transfer_us(v)
        return slack

    def _exceeds(self, q: int, most: float) -> bool:
        """Whether the solution breaks rows of a leaf whose ranks have no more than this."""
        ranks = self._bound.options.design.system.world_size
        return any(float(self._bound.shares @ row) > ranks + _VIOLATED for row in self.rows(q, most))

    def _part(self, leaf: Leaf, number: int) -> None:
        """Two leaves in place of one: up to a load, and above it."""
        chosen = leaf.parts[number]
        assert chosen is not None
        q, at = chosen
        (low, high), unit = leaf.ranges[q], self.loads[q].unit
        if unit:
            below = min(at, high - unit)
            halves = (low, below), (below + unit, high)
        else:
            inner = low * _NARROW < at < high / _NARROW
            below = at if inner else float(np.sqrt(max(low, high * _LEAST) * high))
            halves = (low, below), (below, high)
        self.leaves.remove(leaf)
        for ends in halves:
            ranges = (*leaf.ranges[:q], ends, *leaf.ranges[q + 1 :])
            kept = {v: h for v, h in leaf.hulls.items() if v not in self.loads[q].factors}
            self.leaves.append(Leaf(ranges, leaf.lower_us.copy(), kept))

    def rows(self, q: int, most: float) -> list[Array]:
        """`(w,)` each: summed over the ways taken at most the number of ranks, where no rank has more."""
        if most <= 0:
            return []
        if (q, most) not in self._rows:
            bound = self._bound
            sizes, rank = self.loads[q].counts(most)
            ways = bound.options.ways
            used = np.unique(sizes[np.unique(ways.probe[np.unique(ways.family)])])
            used = used[(used > 0) & (used <= rank)]
            counts = np.unique(np.maximum(-(-rank // used) - 1, 1))[:_MOST_COUNTS] if rank else np.zeros(0)
            ranks = bound.options.design.system.world_size
            found = []
            for k in (int(count) for count in counts):
                weight = np.where(sizes > rank, 2.0 * ranks, weights(sizes, rank, k))
                found.append(bound.sums(weight)[0])
            least = [float(np.maximum.reduceat(row, bound.measures.starts).sum()) for row in found]
            self._rows[q, most] = [row for row, sum_ in zip(found, least, strict=True) if sum_ > ranks]
        return self._rows[q, most]


class NarrowProgram(MasterProgram):
    """The linear program of a leaf."""

    def __init__(self, bound: ClassBound, cuts: Sequence[Cut], tree: ByteTree, leaf: Leaf) -> None:
        super().__init__(bound, cuts)
        self._tree, self._leaf = tree, leaf

    def _build(self) -> None:
        super()._build()
        ranks = float(self._bound.options.design.system.world_size)
        for q, (load, (low, high)) in enumerate(zip(self._tree.loads, self._leaf.ranges, strict=True)):
            for v, factor in load.factors.items():
                if (v,) in self._measures:
                    column, scale, _ = self._parts[(v,)]
                    base = float(self._bound.program.variables[v].base)
                    least, most = ((base + factor * end) / scale for end in (low, high))
                    self._high[column] = min(self._high[column], most * (1 + _SAME))
                    self._row([column], [1.0], low=least * (1 - _SAME))
            if load.packs:
                for row in self._tree.rows(q, high):
                    self._row(self._ways, row, high=ranks * (1 + _SAME))
