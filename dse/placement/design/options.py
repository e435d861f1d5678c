"""How each table of a design may be split, and the shards that such a split is made of.

Letters: t tables, o options, s shards of all options, p probes (distinct shards), f families, w ways, m column pieces.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dse.placement.design.ways import Ways
from dse.placement.solver.problem import Array, Ints, Mask, Where
from perfcore.design.design import Design
from perfcore.design.model import EmbeddingTable
from perfcore.design.sharding import ShardingPlan, ShardingType, Shards, TableSharding

# Which flag of `Shards` a shard has; the ops of an iteration are there for each flag that some shard has.
FLAGS = ("pooled", "row_split", "staged", "replicated")
MOST_PIECES = 16  # column pieces of a table
MOST_WAYS = 4000  # of all tables, beyond which numbers of ranks are gathered in ranges


@dataclass(frozen=True, slots=True)
class Option:
    """One way to split one table.

    Attributes:
        table: position in the model.
        type: sharding type.
        pieces: column pieces.
        parts: row parts of each piece.
        flag: position in `FLAGS`.
        where: ranks that the shards may take.
        copies: every shard is the whole table.
    """

    table: int
    type: ShardingType
    pieces: int
    parts: int
    flag: int
    where: Where
    copies: int = 1

    @property
    def count(self) -> int:
        """Shards."""
        return self.pieces * self.parts * self.copies


@dataclass(frozen=True, slots=True)
class Probe:
    """A shard on a rank by itself."""

    table: int
    flag: int
    rows: int
    dim: int


@dataclass(frozen=True, eq=False)
class Options:
    """The options of all tables of a design.

    Attributes:
        design: whose tables they are; its own plan does not matter.
        options: ascending by table.
        probes: `(p,)` distinct shards.
        shard_probe: `(s,)` probe of every shard of every option, in order.
        ways: the same without ranks.
    """

    design: Design
    options: tuple[Option, ...]
    probes: tuple[Probe, ...]
    shard_probe: Ints
    ways: Ways

    @cached_property
    def count(self) -> Ints:
        """`(o,)`: shards."""
        return np.array([o.count for o in self.options], dtype=np.int64)

    @cached_property
    def table(self) -> Ints:
        """`(o,)`: tables."""
        return np.array([o.table for o in self.options], dtype=np.int64)

    @cached_property
    def flag(self) -> Ints:
        """`(o,)`: positions in `FLAGS`."""
        return np.array([o.flag for o in self.options], dtype=np.int64)

    @cached_property
    def first_shard(self) -> Ints:
        """`(o + 1,)`: shards of option `o` are `first_shard[o]` to `first_shard[o + 1] - 1`."""
        return np.concatenate([[0], np.cumsum(self.count)]).astype(np.int64)

    @cached_property
    def probe_flag(self) -> Ints:
        """`(p,)`: positions in `FLAGS`."""
        return np.array([p.flag for p in self.probes], dtype=np.int64)

    @cached_property
    def first_of_flag(self) -> Ints:
        """`(4,)`: some probe of each flag, -1 where there is none."""
        return np.array([_first(self.probe_flag == i) for i in range(len(FLAGS))], dtype=np.int64)

    def shards(self, columns: int) -> Shards:
        """`(p, 2, columns)`: each probe a candidate, `columns` times on rank 0; rank 1 is empty."""
        tables = self.design.model.tables

        def spread(values: list[float]) -> Array:
            full = np.zeros((len(values), 2, columns))
            full[:, 0, :] = np.array(values, dtype=np.float64)[:, None]
            return full

        whole = [tables[p.table] for p in self.probes]
        rows = spread([float(p.rows) for p in self.probes])
        held = rows > 0
        return Shards(
            rows=rows,
            dim=spread([float(p.dim) for p in self.probes]),
            pooling=spread(
                [
                    t.pooling_factor * p.rows / t.num_embeddings
                    for t, p in zip(whole, self.probes, strict=True)
                ]
            ),
            skew=spread([t.skew for t in whole]),
            **{name: held & (self.probe_flag == i)[:, None, None] for i, name in enumerate(FLAGS)},
        )

    def plan(self, chosen: Ints, ranks: tuple[tuple[int, ...], ...]) -> ShardingPlan:
        """The plan of `(t,)` chosen options and the ranks of their shards."""
        names = [t.name for t in self.design.model.tables]
        return ShardingPlan(
            tuple(
                TableSharding(name, self.options[o].type, tuple(int(r) for r in placed))
                for name, o, placed in zip(names, chosen, ranks, strict=True)
            )
        )

    def chosen(self, plan: ShardingPlan) -> Ints | None:
        """`(t,)`: the options that a plan takes; `None` where it splits a table in another way."""
        known = {(o.table, o.type, o.count): i for i, o in enumerate(self.options)}
        found = [known.get((t, p.type, len(p.ranks)), -1) for t, p in enumerate(plan.tables)]
        return None if min(found) < 0 else np.array(found, dtype=np.int64)

    def joined(self, option: int, ranks: Ints) -> tuple[Ints, Ints]:
        """`(s',)` ranks and probes of an option's shards at `(s,)` ranks, pieces that share a rank being one shard."""
        o = self.options[option]
        family = int(self.ways.family[(self.ways.table == o.table) & (self.ways.flag == o.flag)][0])
        fine = int(self.ways.pieces[family]) // o.pieces
        first, counts = np.unique(ranks[:: o.parts], return_counts=True)
        at = (first[:, None] + np.arange(o.parts)).ravel()
        larger = _row_sizes(self.design.model.tables[o.table].num_embeddings, o.parts)[0][1]
        smaller = np.tile(np.arange(o.parts) >= larger, len(first)).astype(np.int64)
        probes = self.ways.probe[family, np.repeat(counts, o.parts) * fine - 1, smaller]
        return at, probes

    def restricted(self, kept: Mask) -> Options:
        """Without the options that `(o,)` leaves out."""
        options = tuple(o for o, k in zip(self.options, kept, strict=True) if k)
        return Options(
            self.design,
            options,
            self.probes,
            self.shard_probe[np.repeat(kept, self.count)],
            self.ways.kept(_still_there(self.ways, options)),
        )


def _first(mask: Mask) -> int:
    return int(np.argmax(mask)) if mask.any() else -1


def _still_there(ways: Ways, options: tuple[Option, ...]) -> Mask:
    """`(w,)`: which ways some option takes. One of fewer pieces than were taken off may be a little too many."""
    pieces: dict[tuple[int, int], int] = {}
    for o in options:
        pieces[o.table, o.flag] = max(pieces.get((o.table, o.flag), 0), o.pieces)
    most = np.array([pieces.get(key, 0) for key in zip(ways.table.tolist(), ways.flag.tolist(), strict=True)])
    return np.asarray(ways.least <= most)


def options_of(design: Design) -> Options:
    """Every useful way to split each table of a design on several ranks."""
    ranks, local = design.system.world_size, design.system.local_world_size
    probes: dict[Probe, int] = {}
    options: list[Option] = []
    shard_probe: list[int] = []
    for t, (table, dim) in enumerate(zip(design.model.tables, design.model.table_dims, strict=True)):
        for option in _ways(t, table, dim, ranks, local):
            options.append(option)
            shards: list[int] = []
            for rows, count in _row_sizes(table.num_embeddings, option.parts):
                key = Probe(t, option.flag, rows, dim // option.pieces)
                shards += [probes.setdefault(key, len(probes))] * count
            shard_probe += shards * option.pieces * option.copies
    ways = _without_ranks(design, options, probes)
    return Options(design, tuple(options), tuple(probes), np.array(shard_probe, dtype=np.int64), ways)


def _without_ranks(design: Design, options: list[Option], probes: dict[Probe, int]) -> Ways:
    tables, dims = design.model.tables, design.model.table_dims
    finest: dict[tuple[int, int], Option] = {}
    for o in options:
        known = finest.get((o.table, o.flag))
        finest[o.table, o.flag] = o if known is None or o.pieces > known.pieces else known
    families = [finest[key] for key in sorted(finest)]
    widest = max(o.pieces for o in families)
    probe = np.zeros((len(families), widest, 2), dtype=np.int64)
    rows: list[tuple[int, int, int, int, int]] = []
    for f, o in enumerate(families):
        sizes = _row_sizes(tables[o.table].num_embeddings, o.parts)
        for i, (size, _) in enumerate((sizes[0], sizes[-1])):
            for j in range(1, o.pieces + 1):
                key = Probe(o.table, o.flag, size, dims[o.table] // o.pieces * j)
                probe[f, j - 1, i] = probes.setdefault(key, len(probes))
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
    )


def _spreads(pieces: int, *, coarse: bool) -> list[tuple[int, int]]:
    """On how many ranks pieces may lie: each number, or ranges of them."""
    if not coarse:
        return [(n, n) for n in range(1, pieces + 1)]
    ends = [1]
    while ends[-1] < pieces:
        ends.append(min(2 * ends[-1], pieces))
    return [(before + 1, end) for before, end in zip([0, *ends], ends, strict=False)]


def _ways(t: int, table: EmbeddingTable, dim: int, ranks: int, local: int) -> list[Option]:
    rows, machines = table.num_embeddings, ranks // local
    pooled, row_split, staged, replicated = range(len(FLAGS))
    ways = [Option(t, ShardingType.TABLE_WISE, 1, 1, pooled, Where.ANY)]
    for pieces in _piece_counts(dim, ranks):
        ways.append(Option(t, ShardingType.COLUMN_WISE, pieces, 1, pooled, Where.ANY))
    if rows >= ranks:
        ways.append(Option(t, ShardingType.ROW_WISE, 1, ranks, row_split, Where.ALL))
    if machines > 1 and rows >= local > 1:
        ways.append(Option(t, ShardingType.TABLE_ROW_WISE, 1, local, staged, Where.HOST))
        for pieces in _piece_counts(dim, machines):
            ways.append(Option(t, ShardingType.GRID_SHARD, pieces, local, staged, Where.HOST))
    ways.append(Option(t, ShardingType.DATA_PARALLEL, 1, 1, replicated, Where.ALL, copies=ranks))
    return ways


def _piece_counts(dim: int, most: int) -> list[int]:
    """Powers of two that divide the columns: pieces are then all alike."""
    counts, pieces = [], 2
    while pieces <= min(most, MOST_PIECES) and dim % pieces == 0:
        counts.append(pieces)
        pieces *= 2
    return counts


def _row_sizes(rows: int, parts: int) -> list[tuple[int, int]]:
    """Rows of a part and how many parts have as many; the larger ones first, as plans count them."""
    larger = rows % parts
    sizes = [(rows // parts + 1, larger)] if larger else []
    return [*sizes, (rows // parts, parts - larger)]
