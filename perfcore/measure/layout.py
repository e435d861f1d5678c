"""Which part of which table each rank holds, from a design's sharding plan."""

from __future__ import annotations

from dataclasses import dataclass, replace

from perfcore.design.design import Design
from perfcore.design.sharding import ComputeKernel, ShardingType, TableSharding

SUPPORTED = (
    ShardingType.TABLE_WISE,
    ShardingType.COLUMN_WISE,
    ShardingType.TABLE_COLUMN_WISE,
    ShardingType.ROW_WISE,
    ShardingType.TABLE_ROW_WISE,
    ShardingType.GRID_SHARD,
    ShardingType.DATA_PARALLEL,
)


@dataclass(frozen=True, slots=True)
class Shard:
    """What one rank holds of one table.

    Attributes:
        table: index of the table.
        rank: the holder.
        rows: first row, and the one after the last.
        columns: pieces of columns, each its first and the one after its last.
    """

    table: int
    rank: int
    rows: tuple[int, int]
    columns: tuple[tuple[int, int], ...]

    @property
    def height(self) -> int:
        """Rows."""
        return self.rows[1] - self.rows[0]

    @property
    def width(self) -> int:
        """Columns."""
        return sum(end - begin for begin, end in self.columns)


@dataclass(frozen=True, slots=True)
class Layout:
    """All shards of a design.

    Attributes:
        pooled: those whose pooled rows are exchanged (tables and columns), by rank, then by table.
        row_split: those whose partial sums are added up, likewise.
        replicated: tables that every rank holds.
        size: ranks.
    """

    pooled: tuple[Shard, ...]
    row_split: tuple[Shard, ...]
    replicated: tuple[int, ...]
    size: int

    def exchanged(self, rank: int) -> tuple[Shard, ...]:
        """The shards of a rank that get lookups from all ranks: pooled ones, then row-split ones."""
        return (*self.pooled_of(rank), *self.row_split_of(rank))

    def pooled_of(self, rank: int) -> tuple[Shard, ...]:
        """The pooled shards of a rank."""
        return tuple(s for s in self.pooled if s.rank == rank)

    def row_split_of(self, rank: int) -> tuple[Shard, ...]:
        """The row-split shards of a rank."""
        return tuple(s for s in self.row_split if s.rank == rank)

    @property
    def split_tables(self) -> tuple[int, ...]:
        """Tables whose rows are split, in order."""
        return tuple(sorted({s.table for s in self.row_split}))


def layout_of(design: Design) -> Layout:
    """The shards of a design whose plan has supported kinds alone."""
    pooled: list[Shard] = []
    row_split: list[Shard] = []
    replicated: list[int] = []
    for table, placed in enumerate(design.sharding.tables):
        rows, dim = design.model.tables[table].num_embeddings, design.model.table_dims[table]
        if placed.type is ShardingType.DATA_PARALLEL:
            replicated.append(table)
        elif placed.type is ShardingType.GRID_SHARD:
            # On one machine each column piece is split by rows alike: a rank's pieces are whole rows.
            once = replace(placed, type=ShardingType.ROW_WISE, ranks=placed.ranks[: design.system.world_size])
            row_split += _row_shards(table, once, rows, dim)
        elif placed.type in (ShardingType.ROW_WISE, ShardingType.TABLE_ROW_WISE):
            row_split += _row_shards(table, placed, rows, dim)
        else:
            pooled += _column_shards(table, placed, rows, dim)
    ordered = [tuple(sorted(shards, key=lambda s: (s.rank, s.table))) for shards in (pooled, row_split)]
    return Layout(ordered[0], ordered[1], tuple(replicated), design.system.world_size)


def can_run(design: Design) -> bool:
    """Whether every table is placed in a way that the real model has: in device memory, grids on one machine."""
    one_machine = design.system.world_size == design.system.local_world_size
    return all(
        placed.type in SUPPORTED
        and (one_machine or placed.type is not ShardingType.GRID_SHARD)
        and (placed.kernel is ComputeKernel.FUSED or placed.type is ShardingType.DATA_PARALLEL)
        for placed in design.sharding.tables
    )


def pieces(total: int, parts: int) -> list[tuple[int, int]]:
    """`parts` near-equal ranges that cover `total`, the larger ones first."""
    sizes = [total // parts + (p < total % parts) for p in range(parts)]
    ends = [sum(sizes[: p + 1]) for p in range(parts)]
    return [(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def _column_shards(table: int, placed: TableSharding, rows: int, dim: int) -> list[Shard]:
    """One a rank; a rank may hold several pieces."""
    held: dict[int, list[tuple[int, int]]] = {}
    for rank, columns in zip(placed.ranks, pieces(dim, len(placed.ranks)), strict=True):
        held.setdefault(rank, []).append(columns)
    return [Shard(table, rank, (0, rows), tuple(columns)) for rank, columns in held.items()]


def _row_shards(table: int, placed: TableSharding, rows: int, dim: int) -> list[Shard]:
    """Ranks beyond the last row hold nothing."""
    ranges = pieces(rows, len(placed.ranks))
    return [
        Shard(table, rank, piece, ((0, dim),))
        for rank, piece in zip(placed.ranks, ranges, strict=True)
        if piece[1] > piece[0]
    ]
