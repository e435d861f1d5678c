"""How each table of a design may be split, where its rows may lie, and the shards that such a split is made of.

Letters: t tables, o options, s shards of all options, p probes (distinct shards), f families, w ways, m column pieces.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from dse.placement.design.ways import Probe, Ways, row_sizes, ways_of
from dse.placement.solver.problem import Array, Ints, Mask, Where
from perfcore.design.design import Design
from perfcore.design.model import EmbeddingTable
from perfcore.design.sharding import ON_HOST, ComputeKernel, ShardingPlan, ShardingType, Shards, TableSharding
from perfcore.graph.parts import storage_bytes

# Which flag of `Shards` a shard has, and whether its gradient is dense (`+`); the ops of an iteration are there for each
# of these that some shard has.
FLAGS = ("pooled", "row_split", "staged", "replicated", "pooled+", "row_split+", "staged+")
POOLED, ROW_SPLIT, STAGED, REPLICATED = range(4)
DENSE = 4  # flags from here on
WORTH_A_HOST = 0.01  # of device memory: smaller tables are not offered a place in the host's
MOST_PIECES = 16  # column pieces of a table


def shard_kind(flag: Ints) -> Ints:
    """Positions of flags of `Shards`: the same with a dense gradient and without."""
    return np.asarray(flag % DENSE)


def flag_fields(flag: Ints, held: Mask) -> dict[str, Mask]:
    """The flags of `Shards` where shards are held, from positions in `FLAGS` that broadcast."""
    fields = {name: held & (shard_kind(flag) == i) for i, name in enumerate(FLAGS[:DENSE])}
    return fields | {"dense": held & (flag >= DENSE)}


@dataclass(frozen=True, slots=True)
class Offer:
    """What tables may be beside the usual: whole, split and replicated in device memory, the update fused.

    Attributes:
        cache_ratios: large tables may lie in host memory, behind caches of these shares of their rows; 0 is no cache.
        dense: tables may have a gradient of their size, and a separate optimizer.
        one_machine: column pieces may be asked to stay on one machine; they are no better there than on any ranks.
    """

    cache_ratios: tuple[float, ...] = ()
    dense: bool = False
    one_machine: bool = False


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
        share: of the rows in device memory; 1 unless the table lies in the host's.
    """

    table: int
    type: ShardingType
    pieces: int
    parts: int
    flag: int
    where: Where
    copies: int = 1
    share: float = 1.0

    @property
    def count(self) -> int:
        """Shards."""
        return self.pieces * self.parts * self.copies

    @property
    def kernel(self) -> ComputeKernel:
        """Of its shards, as plans say it: replicas compute as `dense` does, whatever is said."""
        if self.share < 1:
            return ComputeKernel.FUSED_UVM_CACHING if self.share > 0 else ComputeKernel.FUSED_UVM
        return ComputeKernel.DENSE if self.flag >= DENSE else ComputeKernel.FUSED

    @property
    def kernel_label(self) -> str:
        """What people call it; a cache is followed by its ratio: `fused_uvm_caching@0.2`."""
        if self.flag == REPLICATED:
            return str(ComputeKernel.DENSE)
        return f"{self.kernel}@{self.share:g}" if 0 < self.share < 1 else str(self.kernel)

    def placed(self, table: str, ranks: tuple[int, ...]) -> TableSharding:
        """The option on these ranks."""
        cached = self.kernel is ComputeKernel.FUSED_UVM_CACHING
        return TableSharding(table, self.type, ranks, self.kernel, self.share if cached else None)


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
    def probe_share(self) -> Array:
        """`(p,)`: share of the rows in device memory."""
        return np.array([p.share for p in self.probes])

    @cached_property
    def first_of_flag(self) -> Ints:
        """`(7,)`: some probe of each flag, one with a cache if there is one; -1 where there is none."""
        flags = [self.probe_flag == i for i in range(len(FLAGS))]
        cached = (self.probe_share > 0) & (self.probe_share < 1)
        return np.array([_first(f & cached if (f & cached).any() else f) for f in flags], dtype=np.int64)

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
            host=held & (self.probe_share < 1)[:, None, None],
            cache_ratio=np.where(held, self.probe_share[:, None, None], 1.0),
            **flag_fields(self.probe_flag[:, None, None], held),
        )

    def plan(self, chosen: Ints, ranks: tuple[tuple[int, ...], ...]) -> ShardingPlan:
        """The plan of `(t,)` chosen options and the ranks of their shards."""
        names = [t.name for t in self.design.model.tables]
        return ShardingPlan(
            tuple(
                self.options[o].placed(name, tuple(int(r) for r in placed))
                for name, o, placed in zip(names, chosen, ranks, strict=True)
            )
        )

    def chosen(self, plan: ShardingPlan) -> Ints | None:
        """`(t,)`: the options that a plan takes; `None` where it splits a table in another way."""
        known = {(o.table, o.type, o.count, o.kernel, o.share): i for i, o in enumerate(self.options)}
        found = [known.get((t, p.type, len(p.ranks), *_kernel(p)), -1) for t, p in enumerate(plan.tables)]
        return None if min(found) < 0 else np.array(found, dtype=np.int64)

    def nearest(self, shares: Array) -> Ints:
        """`(t,)`: for each table the option that comes closest to the largest of the `(w,)` shares of its ways."""
        ways = self.ways
        ends = np.searchsorted(ways.table, np.arange(len(self.design.model.tables) + 1))
        pieces, share = np.array([[o.pieces, o.share] for o in self.options]).T
        out = []
        for t, first in enumerate(ends[:-1]):
            way = int(first + np.argmax(shares[first : ends[t + 1]]))
            mine = np.flatnonzero(self.table == t)
            other = (self.flag[mine] != ways.flag[way]) | (share[mine] != ways.share[ways.family[way]])
            distance = np.abs(pieces[mine] - ways.least[way]) + len(ways.table) * other
            out.append(int(mine[np.argmin(distance)]))
        return np.array(out, dtype=np.int64)

    def joined(self, option: int, ranks: Ints) -> tuple[Ints, Ints]:
        """`(s',)` ranks and probes of an option's shards at `(s,)` ranks, pieces that share a rank being one shard."""
        o = self.options[option]
        ways = self.ways
        of_option = (ways.table == o.table) & (ways.flag == o.flag) & (ways.share[ways.family] == o.share)
        family = int(ways.family[of_option][0])
        fine = int(self.ways.pieces[family]) // o.pieces
        first, counts = np.unique(ranks[:: o.parts], return_counts=True)
        at = (first[:, None] + np.arange(o.parts)).ravel()
        larger = row_sizes(self.design.model.tables[o.table].num_embeddings, o.parts)[0][1]
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


def _kernel(placed: TableSharding) -> tuple[ComputeKernel, float]:
    """A plan's kernel and share of rows in device memory, as options have them."""
    if placed.type is ShardingType.DATA_PARALLEL:
        return ComputeKernel.FUSED, 1.0
    return placed.kernel, (placed.cache_ratio or 0.0) if placed.kernel in ON_HOST else 1.0


def _still_there(ways: Ways, options: tuple[Option, ...]) -> Mask:
    """`(w,)`: which ways some option takes. One of fewer pieces than were taken off may be a little too many."""
    pieces: dict[tuple[int, int, float], int] = {}
    for o in options:
        pieces[o.table, o.flag, o.share] = max(pieces.get((o.table, o.flag, o.share), 0), o.pieces)
    keys = zip(ways.table.tolist(), ways.flag.tolist(), ways.share[ways.family].tolist(), strict=True)
    most = np.array([pieces.get(key, 0) for key in keys])
    return np.asarray(ways.least <= most)


def options_of(design: Design, offer: Offer | None = None) -> Options:
    """Every useful way to split each table of a design, and what else is offered."""
    offer = offer or Offer()
    ranks, local = design.system.world_size, design.system.local_world_size
    probes: dict[Probe, int] = {}
    options: list[Option] = []
    shard_probe: list[int] = []
    for t, (table, dim) in enumerate(zip(design.model.tables, design.model.table_dims, strict=True)):
        size = table.num_embeddings * dim * storage_bytes(design.training.table_precision)
        large = size > WORTH_A_HOST * design.system.device.hbm_bytes
        own = offer if large else replace(offer, cache_ratios=())
        for option in _offered(_ways(t, table, dim, ranks, local), own, ranks=ranks, local=local):
            options.append(option)
            shards: list[int] = []
            for rows, count in row_sizes(table.num_embeddings, option.parts):
                key = Probe(t, option.flag, option.share, rows, dim // option.pieces)
                shards += [probes.setdefault(key, len(probes))] * count
            shard_probe += shards * option.pieces * option.copies
    ways = ways_of(design, options, probes)
    return Options(design, tuple(options), tuple(probes), np.array(shard_probe, dtype=np.int64), ways)


def _ways(t: int, table: EmbeddingTable, dim: int, ranks: int, local: int) -> list[Option]:
    rows, machines = table.num_embeddings, ranks // local
    ways = [Option(t, ShardingType.TABLE_WISE, 1, 1, POOLED, Where.ANY)]
    if ranks == 1:
        return ways
    for pieces in _piece_counts(dim, ranks):
        ways.append(Option(t, ShardingType.COLUMN_WISE, pieces, 1, POOLED, Where.ANY))
    if rows >= ranks:
        ways.append(Option(t, ShardingType.ROW_WISE, 1, ranks, ROW_SPLIT, Where.ALL))
    if machines > 1 and rows >= local > 1:
        ways.append(Option(t, ShardingType.TABLE_ROW_WISE, 1, local, STAGED, Where.HOST))
        for pieces in _piece_counts(dim, machines):
            ways.append(Option(t, ShardingType.GRID_SHARD, pieces, local, STAGED, Where.HOST))
    ways.append(Option(t, ShardingType.DATA_PARALLEL, 1, 1, REPLICATED, Where.ALL, copies=ranks))
    return ways


def _offered(ways: list[Option], offer: Offer, *, ranks: int, local: int) -> list[Option]:
    """The usual ways, and what else is offered: on one machine, with a dense gradient, in host memory."""
    if offer.one_machine:
        ways = ways + [
            replace(
                o, type=ShardingType.TABLE_COLUMN_WISE, where=Where.WITHIN if ranks > local else Where.ANY
            )
            for o in ways
            if o.type is ShardingType.COLUMN_WISE and o.pieces <= local
        ]
    own = [o for o in ways if o.flag != REPLICATED]
    dense = [replace(o, flag=o.flag + DENSE) for o in own if offer.dense]
    return [*ways, *dense, *(replace(o, share=r) for r in offer.cache_ratios for o in own)]


def _piece_counts(dim: int, most: int) -> list[int]:
    """Powers of two that divide the columns: pieces are then all alike."""
    counts, pieces = [], 2
    while pieces <= min(most, MOST_PIECES) and dim % pieces == 0:
        counts.append(pieces)
        pieces *= 2
    return counts
