"""How the tables of a set may be split over ranks, as arrays: options whose shards are all alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dse.placement.solver.problem import Array, Ints, Mask, Where
from perfcore.cost.memory_bound import SECTOR_BYTES
from perfcore.design.hardware import System
from perfcore.design.model import EmbeddingTable
from perfcore.design.sharding import ComputeKernel, Shards
from perfcore.design.training import Training
from perfcore.graph.parts import storage_bytes

COLUMNS_STEP = 4  # FBGEMM's kernels read rows in pieces of four columns
WORTH_A_HOST = 0.01  # of device memory: smaller tables are not offered a place in the host's


@dataclass(frozen=True, slots=True, eq=False)
class Splits:
    """Ways to split tables; `(o,)` each, of one shard, all shards of an option being alike.

    Attributes:
        kinds: sharding types.
        table: positions in the set.
        where: a `Where`.
        count: shards.
        rows, dim, pooling, skew, batch: of a shard.
        most_pooling: of the largest shard: rows that do not divide leave the first ranks one more.
        held: shards that a rank would hold if all tables were split so.
        cache_ratio: share of the rows in device memory; below 1 for tables in the host's.
    """

    kinds: tuple[str, ...]
    table: Ints
    where: Ints
    count: Ints
    rows: Array
    dim: Array
    pooling: Array
    most_pooling: Array
    skew: Array
    batch: Array
    held: Array
    cache_ratio: Array

    def of_kind(self, *kinds: str) -> Mask:
        """`(o,)`: which options are of these types."""
        return np.isin(np.array(self.kinds), kinds)

    @property
    def kernels(self) -> tuple[str, ...]:
        """`(o,)` compute kernels; a cache is followed by its ratio: `fused_uvm_caching@0.2`."""
        on_device = {True: str(ComputeKernel.DENSE), False: str(ComputeKernel.FUSED)}
        cached = f"{ComputeKernel.FUSED_UVM_CACHING}@"
        return tuple(
            on_device[d] if r == 1 else f"{cached}{r:g}" if r > 0 else str(ComputeKernel.FUSED_UVM)
            for d, r in zip(self.of_kind("data_parallel").tolist(), self.cache_ratio.tolist(), strict=True)
        )

    def shards(self) -> Shards:
        """`(o, 1, 1)`: each option a candidate of one rank and one table, its largest shard."""
        row_split = self.of_kind("row_wise")
        staged = self.of_kind("table_row_wise", "grid_shard")
        replicated = self.of_kind("data_parallel")
        fields = {n: _alone(getattr(self, n)) for n in ("rows", "dim", "skew", "cache_ratio")}
        return Shards(
            **fields,
            pooling=_alone(self.most_pooling),
            pooled=_alone(~row_split & ~staged & ~replicated),
            row_split=_alone(row_split),
            staged=_alone(staged),
            replicated=_alone(replicated),
            host=_alone(self.cache_ratio < 1),
        )


def _alone(values: Any) -> Any:
    """`(o,)` as `(o, 1, 1)`."""
    return values[:, None, None]


def splits_of(
    tables: Sequence[EmbeddingTable], training: Training, system: System, cache_ratios: Sequence[float] = ()
) -> Splits:
    """Every way to split each table; tables of some size also in the host's memory, with these caches."""
    rows = [
        (t, *way, ratio)
        for t, table in enumerate(tables)
        for way in _ways(table, training, system, len(tables))
        for ratio in (1.0, *(cache_ratios if _worth_a_host(table, way[0], training, system) else ()))
    ]
    kinds = tuple(r[1] for r in rows)
    at, where, count, shard_rows, dim, parts, held, ratio = (
        np.array([r[i] for r in rows]) for i in (0, 2, 3, 4, 5, 6, 7, 8)
    )
    replicated = np.array(kinds) == "data_parallel"
    pooling = np.array([t.pooling_factor for t in tables])[at]
    return Splits(
        kinds=kinds,
        table=at.astype(np.int64),
        where=where.astype(np.int64),
        count=count.astype(np.int64),
        rows=shard_rows.astype(np.float64),
        dim=dim.astype(np.float64),
        pooling=pooling / parts,
        most_pooling=pooling * shard_rows / np.array([t.num_embeddings for t in tables])[at],
        skew=np.array([t.skew for t in tables])[at],
        batch=np.where(replicated, training.global_batch / system.world_size, float(training.global_batch)),
        held=np.maximum(held, 1.0),
        cache_ratio=ratio,
    )


def column_counts(dim: int, element_bytes: float, most: int) -> list[int]:
    """Into how many equal pieces columns may be split: each a multiple of four columns and one sector at least."""
    narrowest = max(COLUMNS_STEP, int(SECTOR_BYTES / element_bytes))
    return [
        k
        for k in range(2, min(most, dim // narrowest) + 1)
        if dim % k == 0 and (dim // k) % COLUMNS_STEP == 0
    ]


def _worth_a_host(table: EmbeddingTable, kind: str, training: Training, system: System) -> bool:
    size = table.num_embeddings * (table.embedding_dim or 0) * storage_bytes(training.table_precision)
    return kind != "data_parallel" and size > WORTH_A_HOST * system.device.hbm_bytes


def _ways(
    table: EmbeddingTable, training: Training, system: System, tables: int
) -> Iterator[tuple[str, Where, int, int, int, int, float]]:
    """Type, where, shards, rows and columns of a shard, parts of the rows, shards a rank would hold."""
    rows, dim = table.num_embeddings, int(table.embedding_dim or 0)
    ranks, local = system.world_size, system.local_world_size
    yield "table_wise", Where.ANY, 1, rows, dim, 1, tables / ranks
    if ranks == 1:
        return
    element = storage_bytes(training.table_precision)
    for k in column_counts(dim, element, ranks):
        yield "column_wise", Where.ANY, k, rows, dim // k, 1, tables * k / ranks
    if rows >= ranks:
        yield "row_wise", Where.ALL, ranks, -(-rows // ranks), dim, ranks, tables
    if ranks > local > 1 and rows >= local:
        part, hosts = -(-rows // local), ranks // local
        yield "table_row_wise", Where.HOST, local, part, dim, local, tables / hosts
        for k in column_counts(dim, element, hosts):
            yield "grid_shard", Where.HOST, k * local, part, dim // k, local, tables * k / hosts
    yield "data_parallel", Where.ALL, ranks, rows, dim, 1, tables
