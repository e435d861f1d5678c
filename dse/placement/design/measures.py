"""What the ways of a class add to the segments of its cuts and to the bytes of its collectives.

Letters: w ways, t tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from dse.placement.design.conditions import Conditions
from dse.placement.design.options import REPLICATED, ROW_SPLIT, Options, shard_kind
from dse.placement.design.relaxed import Role, Variable
from dse.placement.design.ways import Sums
from dse.placement.solver.problem import Array

Key: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Terms:
    """What ways add to a segment (µs) or to a collective (bytes).

    Attributes:
        average: `(w,)` to every rank, if all shards are spread evenly.
        largest: `(w,)` to some rank.
        everywhere: `(w,)` to every rank in any case.
        on_all: `(w,)` to every rank at least, by shards that are on all of them.
        base: whatever the plan.
        even, fastest, slowest: factors on what ranks take on average, at best, and where they are slowest.
    """

    average: Array
    largest: Array
    everywhere: Array
    on_all: Array
    base: float
    even: float = 1.0
    fastest: float = 1.0
    slowest: float = 1.0


class Measures:
    """Of one class; `starts`, `(t,)`, is the first way of each table, `group`, `(t,)`, who stays together."""

    def __init__(
        self, options: Options, variables: Sequence[Variable], sums: Sums, conditions: Conditions
    ) -> None:
        """Nothing is summed yet."""
        self._options, self._variables, self._sums, self._conditions = options, variables, sums, conditions
        self._terms: dict[Key, Terms] = {}
        tables = len(options.design.model.tables)
        self.starts = np.searchsorted(options.ways.table, np.arange(tables)).astype(np.int64)
        self.group = conditions.group
        self._group_of_way = self.group[options.ways.table]

    def terms(self, key: Key) -> Terms:
        """What each way adds to a segment, or to the bytes of a collective."""
        if key not in self._terms:
            variables = [self._variables[v] for v in key]
            each = np.asarray(np.sum([v.each for v in variables], axis=0))
            everywhere = np.asarray(np.sum([v.everywhere for v in variables], axis=0))
            total, largest, _ = self._sums(each)
            seen = self._sums(everywhere)[2] if everywhere.any() else np.zeros(len(total))
            ranks = self._options.design.system.world_size
            base = float(sum(v.base for v in variables))
            terms = Terms(total / ranks, largest, seen, self.on_all(largest), base)
            self._terms[key] = terms if variables[0].role is not Role.RANK else self._slowed(terms)
        return self._terms[key]

    def on_all(self, largest: Array) -> Array:
        """`(w,)`: what every rank has at least, from the shard that some rank has."""
        everywhere = np.isin(shard_kind(self._options.ways.flag), (ROW_SPLIT, REPLICATED))
        return np.where(everywhere, largest, 0.0)

    def _slowed(self, terms: Terms) -> Terms:
        """Durations on ranks that differ."""
        if not self._conditions.uneven:
            return terms
        even, fastest, slowest = self._conditions.paces
        return replace(terms, even=even, fastest=fastest, slowest=slowest)

    def of_shares(self, key: Key, shares: Array) -> float:
        """What a segment takes with `(w,)` shares, or how many bytes a collective sends."""
        terms = self.terms(key)
        base = terms.base + float(shares @ terms.everywhere)
        on_all = float(shares @ terms.on_all)
        largest = float(np.bincount(self._group_of_way, shares * (terms.largest - terms.on_all)).max())
        return max(
            terms.even * (base + float(shares @ terms.average)),
            terms.fastest * (base + on_all + largest),
            terms.slowest * (base + on_all),
        )

    def ends(self, key: Key) -> tuple[float, float]:
        """The least of some rank, and what a rank comes to that holds all shards of all tables."""
        terms, flag = self.terms(key), self._options.ways.flag
        # Some rank has the smallest shard of a kind that counts.
        some = terms.largest + terms.everywhere
        counts = np.isin(flag, np.unique(flag[some > 0]))
        least = float(some[counts].min()) if bool(counts.any()) else 0.0
        whole = terms.average * self._options.design.system.world_size + terms.everywhere
        most = terms.slowest * (terms.base + float(np.maximum.reduceat(whole, self.starts).sum()))
        return terms.base + least, most
