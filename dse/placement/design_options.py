"""How each table of a design may be split, and the shards that such a split is made of.

Letters: t tables, o options, s shards of all options, p probes (distinct shards), l lower parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dse.placement.problem import Array, Ints, Mask, Where
from perfcore.design.design import Design
from perfcore.design.model import EmbeddingTable
from perfcore.design.sharding import Shards, ShardingPlan, ShardingType, TableSharding

# Which flag of `Shards` a shard has; the ops of an iteration are there for each flag that some shard has.
FLAGS = ("pooled", "row_split", "staged", "replicated")
MOST_PIECES = 16  # column pieces of a table


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

    Pieces of one table that share a rank are one wider shard, which may cost less than its parts. So a shard has
    two prices: its own, and the least share of any wider shard that it can be part of (`low_*`), of which the cost of
    every rank is at least the sum.

    Attributes:
        design: whose tables they are; its own plan does not matter.
        options: ascending by table.
        probes: `(p,)` distinct shards.
        shard_probe: `(s,)` probe of every shard of every option, in order.
        low_probe: `(l,)` probes that an option's shard may be part of, option after option.
        low_share: `(l,)` shards that the probe is made of.
        first_low: `(o + 1,)` entries of option `o` are `first_low[o]` to `first_low[o + 1] - 1`.
    """

    design: Design
    options: tuple[Option, ...]
    probes: tuple[Probe, ...]
    shard_probe: Ints
    low_probe: Ints
    low_share: Array
    first_low: Ints

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

    def least(self, of_probe: Array) -> Array:
        """`(o,)`: the least that one shard of an option adds to its rank, from `(p,)` costs of probes alone."""
        shares = of_probe[self.low_probe] / self.low_share
        return np.asarray(np.minimum.reduceat(shares, self.first_low[:-1]))

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
                [t.pooling_factor * p.rows / t.num_embeddings for t, p in zip(whole, self.probes, strict=True)]
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

    def restricted(self, kept: Mask) -> Options:
        """Without the options that `(o,)` leaves out."""
        shard_kept = np.repeat(kept, self.count)
        low_kept = np.repeat(kept, np.diff(self.first_low))
        return Options(
            self.design,
            tuple(o for o, k in zip(self.options, kept, strict=True) if k),
            self.probes,
            self.shard_probe[shard_kept],
            self.low_probe[low_kept],
            self.low_share[low_kept],
            np.concatenate([[0], np.cumsum(np.diff(self.first_low)[kept])]).astype(np.int64),
        )


def options_of(design: Design) -> Options:
    """Every useful way to split each table of a design on several ranks."""
    ranks, local = design.system.world_size, design.system.local_world_size
    probes: dict[Probe, int] = {}
    options: list[Option] = []
    shard_probe: list[int] = []
    low: list[list[tuple[int, int]]] = []
    for t, (table, dim) in enumerate(zip(design.model.tables, design.model.table_dims, strict=True)):
        for option in _ways(t, table, dim, ranks, local):
            options.append(option)
            sizes = _row_sizes(table.num_embeddings, option.parts)
            width = dim // option.pieces

            def probe(rows: int, columns: int, option: Option = option) -> int:
                key = Probe(option.table, option.flag, rows, columns)
                return probes.setdefault(key, len(probes))

            rows = sizes * option.copies if option.parts == 1 else sizes
            shard_probe += [probe(r, width) for r in rows] * option.pieces
            low.append([(probe(r, width * j), j) for j in range(1, option.pieces + 1) for r in set(sizes)])
    return Options(
        design,
        tuple(options),
        tuple(probes),
        np.array(shard_probe, dtype=np.int64),
        np.array([p for parts in low for p, _ in parts], dtype=np.int64),
        np.array([float(j) for parts in low for _, j in parts]),
        np.concatenate([[0], np.cumsum([len(parts) for parts in low])]).astype(np.int64),
    )


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


def _row_sizes(rows: int, parts: int) -> list[int]:
    """Rows of each part; the larger ones first, as plans count them."""
    return [rows // parts + (p < rows % parts) for p in range(parts)]
