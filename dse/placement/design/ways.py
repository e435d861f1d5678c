"""Ways to split tables over ranks when it is forgotten which ranks: what the bound of a design chooses from.

Letters: w ways, f families, m column pieces, p probes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from dse.placement.solver.problem import Array, Ints, Mask

Sums: TypeAlias = Callable[[Array], tuple[Array, Array, Array]]


@dataclass(frozen=True, slots=True, eq=False)
class Ways:
    """What is left of the options when ranks are forgotten: on how many ranks a table's columns lie.

    Pieces of one table that share a rank are one wider shard, which may cost less than its parts. All splits of a table's
    columns are partitions of its finest pieces, and `f` *families* (a table's columns whole or split, its rows, its
    copies, each on the device and in host memory) hold for each number of pieces on a rank the probe of that shard. A way is a family on so many ranks.

    Attributes:
        table: `(w,)`.
        flag: `(w,)` positions in `FLAGS`.
        family: `(w,)`.
        least: `(w,)` on at least so many ranks (machines, for staged tables) lie the columns.
        most: `(w,)` and on at most so many.
        copies: `(f,)` ranks that hold the same columns: all for row parts and replicas, a machine's for staged tables.
        pieces: `(f,)` finest pieces.
        probe: `(f, m, 2)` of shards of 1, 2, ... pieces, with the larger and the smaller row part.
        share: `(f,)` of the rows in device memory; 1 unless they lie in the host's.
    """

    table: Ints
    flag: Ints
    family: Ints
    least: Ints
    most: Ints
    copies: Ints
    pieces: Ints
    probe: Ints
    share: Array

    def kept(self, rows: Mask) -> Ways:
        """Without the ways that `(w,)` leaves out."""
        return replace(
            self, **{name: getattr(self, name)[rows] for name in ("table", "flag", "family", "least", "most")}
        )

    def largest(self, of_probe: Array) -> Array:
        """`(w,)`: some rank has a shard of at least this cost: one of at least a `most`-th of the pieces."""
        costs = self._shards(of_probe)
        at_least = np.minimum.accumulate(costs[::-1], axis=0)[::-1]
        pieces = self.pieces[self.family]
        return np.asarray(at_least[-(-pieces // self.most) - 1, self.family])

    def total(self, of_probe: Array, *, once: bool = False) -> Array:
        """`(w,)`: all shards together cost at least this; `once` counts copies as one."""
        sums = _least_sums(self._shards(of_probe), self.pieces)
        found = sums[self.least - 1, self.family]
        return np.asarray(found if once else found * self.copies[self.family])

    def _shards(self, of_probe: Array) -> Array:
        """`(m, f)`: the least that a shard of so many pieces adds to its rank, from `(p,)` costs of probes alone."""
        costs = np.minimum(of_probe[self.probe[:, :, 0]], of_probe[self.probe[:, :, 1]]).T
        return np.where(np.arange(len(costs))[:, None] < self.pieces, costs, np.inf)


def _least_sums(costs: Array, pieces: Ints) -> Array:
    """`(m, f)`: the least sum of n or more shards that make up a family's pieces, from `(m, f)` costs by pieces."""
    most, families = costs.shape
    at = pieces - 1, np.arange(families)
    sums = np.full((most, families), np.inf)
    fewer, sums[0] = costs, costs[at]
    for n in range(1, most):
        exactly = np.full((most, families), np.inf)
        for k in range(n, most):
            exactly[k] = (costs[:k][::-1] + fewer[:k]).min(axis=0)
        fewer, sums[n] = exactly, exactly[at]
    return np.minimum.accumulate(sums[::-1], axis=0)[::-1]


class SharedSums:
    """Least sums over ways from costs of probes; classes ask for the same again and again, flag by flag."""

    def __init__(self, ways: Ways, probe_flag: Ints) -> None:
        """Of a design's ways, before classes take some away, with the `(p,)` flags of its probes."""
        self._ways, self._probe_flag = ways, probe_flag
        self._known: dict[tuple[int, bytes], tuple[Array, Array, Array]] = {}

    def of(self, ways: Ways, kept: Ints) -> Sums:
        """The sums of those ways of a class which are `(w',)` of the design's."""

        def sums(of_probe: Array) -> tuple[Array, Array, Array]:
            found = [np.zeros(len(kept)) for _ in range(3)]
            for flag in np.unique(ways.flag):
                mine = ways.flag == flag
                for out, whole in zip(found, self._by_flag(int(flag), of_probe), strict=True):
                    out[mine] = whole[kept[mine]]
            return found[0], found[1], found[2]

        return sums

    def _by_flag(self, flag: int, of_probe: Array) -> tuple[Array, Array, Array]:
        """`(w,)` total, largest, and total of copies counted once, where ways have that flag."""
        costs = np.where(self._probe_flag == flag, of_probe, 0.0)
        key = flag, hashlib.blake2b(costs.tobytes(), digest_size=16).digest()
        if key not in self._known:
            ways = self._ways
            once = ways.total(costs, once=True)
            self._known[key] = once * ways.copies[ways.family], ways.largest(costs), once
        return self._known[key]
