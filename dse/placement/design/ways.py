"""Ways to split tables over ranks when it is forgotten which ranks: what the bound of a design chooses from.

Letters: w ways, f families, m column pieces, p probes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from dse.placement.solver.problem import Array, Ints, Mask
from perfcore.design.design import Design

if TYPE_CHECKING:
    from dse.placement.design.options import Option

MOST_WAYS = 4000  # of all tables, beyond which numbers of ranks are gathered in ranges
Sums: TypeAlias = Callable[[Array], tuple[Array, Array, Array]]


@dataclass(frozen=True, slots=True)
class Probe:
    """A shard on a rank by itself."""

    table: int
    flag: int
    share: float
    rows: int
    dim: int


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

    def shards(self, of_probe: Array) -> Array:
        """`(m, f)`: the least that a shard of so many pieces adds to its rank, from `(p,)` costs of probes alone."""
        costs = np.minimum(of_probe[self.probe[:, :, 0]], of_probe[self.probe[:, :, 1]]).T
        return np.where(np.arange(len(costs))[:, None] < self.pieces, costs, np.inf)

    def largest(self, of_probe: Array) -> Array:
        """`(w,)`: some rank has a shard of at least this cost: one of at least a `most`-th of the pieces."""
        costs = self.shards(of_probe)
        at_least = np.minimum.accumulate(costs[::-1], axis=0)[::-1]
        pieces = self.pieces[self.family]
        return np.asarray(at_least[-(-pieces // self.most) - 1, self.family])

    def total(self, of_probe: Array, *, once: bool = False) -> Array:
        """`(w,)`: all shards together cost at least this; `once` counts copies as one."""
        sums = _least_sums(self.shards(of_probe), self.pieces)
        found = sums[self.least - 1, self.family]
        return np.asarray(found if once else found * self.copies[self.family])


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


def ways_of(design: Design, options: list[Option], probes: dict[Probe, int]) -> Ways:
    """What is left of a design's options when ranks are forgotten; `probes` gets the shards of joined pieces."""
    tables, dims = design.model.tables, design.model.table_dims
    finest: dict[tuple[int, int, float], Option] = {}
    for o in options:
        key = o.table, o.flag, -o.share  # device memory first
        known = finest.get(key)
        finest[key] = o if known is None or o.pieces > known.pieces else known
    families = [finest[key] for key in sorted(finest)]
    widest = max(o.pieces for o in families)
    probe = np.zeros((len(families), widest, 2), dtype=np.int64)
    rows: list[tuple[int, int, int, int, int]] = []
    for f, o in enumerate(families):
        sizes = row_sizes(tables[o.table].num_embeddings, o.parts)
        for i, (size, _) in enumerate((sizes[0], sizes[-1])):
            for j in range(1, o.pieces + 1):
                wider = Probe(o.table, o.flag, o.share, size, dims[o.table] // o.pieces * j)
                probe[f, j - 1, i] = probes.setdefault(wider, len(probes))
        coarse = len(families) * o.pieces > MOST_WAYS
        rows += [(o.table, o.flag, f, least, most) for least, most in _spreads(o.pieces, coarse=coarse)]
    table, flag, family, least, most = np.array(rows, dtype=np.int64).T
    return Ways(
        table,
        flag,
        family,
        least,
        most,
        copies=np.array([o.parts * o.copies for o in families], dtype=np.int64),
        pieces=np.array([o.pieces for o in families], dtype=np.int64),
        probe=probe,
        share=np.array([o.share for o in families]),
    )


def _spreads(pieces: int, *, coarse: bool) -> list[tuple[int, int]]:
    """On how many ranks pieces may lie: each number, or ranges of them."""
    if not coarse:
        return [(n, n) for n in range(1, pieces + 1)]
    ends = [1]
    while ends[-1] < pieces:
        ends.append(min(2 * ends[-1], pieces))
    return [(before + 1, end) for before, end in zip([0, *ends], ends, strict=False)]


def row_sizes(rows: int, parts: int) -> list[tuple[int, int]]:
    """Rows of a part and how many parts have as many; the larger ones first, as plans count them."""
    larger = rows % parts
    sizes = [(rows // parts + 1, larger)] if larger else []
    return [*sizes, (rows // parts, parts - larger)]
