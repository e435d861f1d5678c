"""Cost instances of table sets by this project's own kernel and collective models.

A shard costs its rank what it adds to the table-batched kernels: bounds check and lookup forward; sort, run-length encoding and
fused update backward; and its share of the exchanges. What a launch or a collective costs whatever its size (floors, latencies)
is shared out evenly among the shards that a rank would hold if every table were split the same way, so that the sum over such a
rank is the predicted time of the whole kernel, latency included, and not bandwidth alone.

Left out, because no placement changes it: the dense part, the permutation of indices, the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from dse.errors import SpaceError
from dse.placement.instance import Instance
from dse.placement.labels import Labels
from dse.placement.problem import Array, Ints, Problem, Where, homogeneous
from perfcore.cost.memory_bound import SECTOR_BYTES
from perfcore.cost.model import CostModel
from perfcore.design.hardware import System
from perfcore.design.model import EmbeddingTable, Interaction, Loss
from perfcore.design.sharding import Shards
from perfcore.design.training import Fusion, Training
from perfcore.graph.communication import BUCKET_CAP_BYTES
from perfcore.graph.dims import Dims, structure_for
from perfcore.graph.groups import INT32_BYTES
from perfcore.graph.kernels import (
    Collective,
    CollectiveKind,
    Elementwise,
    EmbeddingBackward,
    EmbeddingForward,
    Kernel,
    Memset,
    Sort,
)
from perfcore.graph.parts import FP32_BYTES, storage_bytes
from perfcore.memory import embedding_bytes, framework_reserve
from perfcore.units import US_PER_MS

COLUMNS_STEP = 4  # FBGEMM's kernels read rows in pieces of four columns
_TINY_FORWARD, _TINY_BACKWARD = 1, 8  # launches on counters and scans, as `perfcore.graph.embedding` has them
_UPDATE_READ, _UPDATE_WRITTEN = 2, 1  # a dense SGD step: weight and gradient in, weight out


@dataclass(frozen=True, slots=True, eq=False)
class _Splits:
    """Ways to split tables; `(o,)` each, of one shard, all shards of an option being alike.

    Attributes:
        kinds: sharding types.
        table: positions in the set.
        where: a `Where`.
        count: shards.
        rows, dim, pooling, skew, batch: of a shard.
        held: shards that a rank would hold if all tables were split so.
    """

    kinds: tuple[str, ...]
    table: Ints
    where: Ints
    count: Ints
    rows: Array
    dim: Array
    pooling: Array
    skew: Array
    batch: Array
    held: Array

    def of_kind(self, *kinds: str) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """`(o,)`: which options are of these types."""
        return np.isin(np.array(self.kinds), kinds)


_KernelsOf: TypeAlias = Callable[[_Splits, Training, int], list[Kernel]]


def estimated_instance(
    tables: Sequence[EmbeddingTable], training: Training, system: System, cost: CostModel
) -> Instance:
    """The priced options of every table on a system.

    Args:
        tables: every one with an `embedding_dim`.
        training: batch and formats of numbers.
        system: ranks, memory and links.
        cost: prices kernels of the system's device and collectives of its machines.

    Raises:
        SpaceError: a table names no embedding_dim, or the batch does not divide by the ranks.
    """
    without = [t.name for t in tables if t.embedding_dim is None]
    if without:
        raise SpaceError(
            f"An instance needs the columns of every table, but {without[0]!r} names none.",
            hint="Add a column embedding_dim to the file, or give --dim.",
        )
    if training.global_batch % system.world_size:
        raise SpaceError(
            f"`global_batch % world_size == 0` must hold, but got {training.global_batch} and {system.world_size}."
        )
    splits = _splits(tables, training, system)
    compute = np.stack(_compute_us(splits, training, cost), axis=1)
    exchange = np.stack(_exchange_us(splits, training, system, cost), axis=1)
    per_shard = np.stack([compute[:, 0], exchange[:, 0], compute[:, 1], exchange[:, 1]], axis=1) / US_PER_MS
    return Instance(
        names=tuple(t.name for t in tables),
        types=splits.kinds,
        kernels=tuple("dense" if kind == "data_parallel" else "fused" for kind in splits.kinds),
        where=splits.where,
        first_option=np.searchsorted(splits.table, np.arange(len(tables) + 1)).astype(np.int64),
        first_shard=np.concatenate([[0], np.cumsum(splits.count)]).astype(np.int64),
        cost_ms=np.repeat(per_shard, splits.count, axis=0),
        bytes=np.repeat(_bytes(splits, training, system), splits.count),
        capacity_bytes=system.device.hbm_bytes - _reserved_bytes(system),
        num_ranks=system.world_size,
        ranks_per_host=system.local_world_size,
    )


def memory_of_tables(
    tables: Sequence[EmbeddingTable], training: Training, system: System, *, capacity_bytes: float
) -> tuple[Problem, Labels]:
    """The same options with memory alone: what a shard costs is its share of the capacity."""
    splits = _splits(tables, training, system)
    bytes_ = np.repeat(_bytes(splits, training, system), splits.count)
    problem = homogeneous(
        first_option=np.searchsorted(splits.table, np.arange(len(tables) + 1)).astype(np.int64),
        first_shard=np.concatenate([[0], np.cumsum(splits.count)]).astype(np.int64),
        where=splits.where,
        cost=bytes_[:, None] / max(capacity_bytes, 1.0),
        bytes_=bytes_,
        capacity_bytes=capacity_bytes,
        num_ranks=system.world_size,
        ranks_per_host=system.local_world_size,
    )
    kernels = ("",) * len(splits.kinds)
    return problem, Labels(tuple(t.name for t in tables), splits.kinds, kernels, ("memory",))


def column_counts(dim: int, element_bytes: float, most: int) -> list[int]:
    """Into how many equal pieces columns may be split: each a multiple of four columns and one sector at least."""
    narrowest = max(COLUMNS_STEP, int(SECTOR_BYTES / element_bytes))
    return [
        k
        for k in range(2, min(most, dim // narrowest) + 1)
        if dim % k == 0 and (dim // k) % COLUMNS_STEP == 0
    ]


def _splits(tables: Sequence[EmbeddingTable], training: Training, system: System) -> _Splits:
    rows = [
        (t, *split) for t, table in enumerate(tables) for split in _ways(table, training, system, len(tables))
    ]
    kinds = tuple(r[1] for r in rows)
    at, where, count, shard_rows, dim, parts, held = (
        np.array([r[i] for r in rows]) for i in (0, 2, 3, 4, 5, 6, 7)
    )
    replicated = np.array(kinds) == "data_parallel"
    pooling = np.array([t.pooling_factor for t in tables])[at] / parts
    return _Splits(
        kinds=kinds,
        table=at.astype(np.int64),
        where=where.astype(np.int64),
        count=count.astype(np.int64),
        rows=shard_rows.astype(np.float64),
        dim=dim.astype(np.float64),
        pooling=pooling,
        skew=np.array([t.skew for t in tables])[at],
        batch=np.where(replicated, training.global_batch / system.world_size, float(training.global_batch)),
        held=np.maximum(held, 1.0),
    )


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


def _compute_us(splits: _Splits, training: Training, cost: CostModel) -> tuple[Array, Array]:
    """`(o,)` forward and backward µs: what the shard adds to its kernels, and its share of their floors."""
    forward, backward = (
        _shared(_forward_kernels, splits, training, cost),
        _shared(_backward_kernels, splits, training, cost),
    )
    tiny = float(cost.predict_us([Memset(FP32_BYTES)])[0])
    forward += _TINY_FORWARD * tiny / splits.held
    backward += _TINY_BACKWARD * tiny / splits.held
    dense = splits.of_kind("data_parallel")
    elements = splits.rows * splits.dim * dense
    size = storage_bytes(training.table_precision)
    update = Elementwise("add", elements, _UPDATE_READ * elements * size, _UPDATE_WRITTEN * elements * size)
    backward += dense * sum(cost.predict_us([Memset(elements * size), update]))
    idle = splits.batch * splits.pooling == 0
    return np.where(idle, 0.0, forward), np.where(idle, 0.0, backward)


def _shared(kernels: _KernelsOf, splits: _Splits, training: Training, cost: CostModel) -> Array:
    """`(o,)`: the second of two equal shards costs its traffic, the first the launch's floor as well."""
    one, two = (sum(cost.predict_us(kernels(splits, training, copies))) for copies in (1, 2))
    added = np.maximum(two - np.asarray(one), 0.0)
    shared: Array = added + np.maximum(np.asarray(one) - added, 0.0) / splits.held
    return shared


def _forward_kernels(splits: _Splits, training: Training, copies: int) -> list[Kernel]:
    lookups, index = splits.batch * splits.pooling * copies, float(training.index_dtype.bytes)
    return [
        Elementwise("bounds_check_indices", lookups, lookups * index, 0.0),
        EmbeddingForward(**_dims(splits, training, copies), batched=True, index_bytes=index),
    ]


def _backward_kernels(splits: _Splits, training: Training, copies: int) -> list[Kernel]:
    keys, index = splits.batch * splits.pooling * copies, float(training.index_dtype.bytes)
    dims, dense = _dims(splits, training, copies), splits.of_kind("data_parallel")
    fused, unfused = (dims | {"rows": dims["rows"] * chosen[:, None]} for chosen in (~dense, dense))
    optimizer = training.table_optimizer.value
    return [
        Elementwise("linearize_index", keys, keys * index, keys * (index + INT32_BYTES)),
        Sort(keys, index),
        Elementwise("run_length_encode", keys, keys * index, keys * (index + INT32_BYTES)),
        Elementwise("cumsum", keys, keys * INT32_BYTES, keys * INT32_BYTES),
        Elementwise("find_long_segments", keys, keys * INT32_BYTES, 0.0),
        EmbeddingBackward(**fused, batched=True, optimizer=optimizer, index_bytes=index),
        EmbeddingBackward(**unfused, batched=True, optimizer=None, index_bytes=index),
    ]


def _dims(splits: _Splits, training: Training, copies: int) -> dict[str, Array]:
    """`(o, copies)`: each option a rank whose table-batched kernel has so many equal tables."""
    names = ("batch", "rows", "pooling", "dim", "skew")
    size = np.asarray(storage_bytes(training.table_precision))
    values = {n: np.repeat(getattr(splits, n)[:, None], copies, axis=1) for n in names}
    return values | {"element_bytes": size}


def _exchange_us(splits: _Splits, training: Training, system: System, cost: CostModel) -> tuple[Array, Array]:
    """`(o,)` forward and backward µs of indices out, pooled rows back, and their gradients."""
    forward, backward = np.zeros(len(splits.kinds)), np.zeros(len(splits.kinds))
    ranks, local = system.world_size, system.local_world_size
    if ranks == 1:
        return forward, backward
    indices = splits.batch * splits.pooling * training.index_dtype.bytes
    pooled = splits.batch * splits.dim * FP32_BYTES
    gradients = splits.rows * splits.dim * storage_bytes(training.table_precision)
    world, inside, across = (ranks, local), (local, local), (ranks // local, 1)
    to_all, reduce, gather = (
        CollectiveKind.ALL_TO_ALL,
        CollectiveKind.REDUCE_SCATTER,
        CollectiveKind.ALL_GATHER,
    )
    steps = {
        "table_wise": ([(to_all, pooled, world)], [(to_all, pooled, world)]),
        "column_wise": ([(to_all, pooled, world)], [(to_all, pooled, world)]),
        "row_wise": ([(reduce, pooled, world)], [(gather, pooled, world)]),
        "table_row_wise": (
            [(reduce, pooled, inside), (to_all, pooled / local, across)],
            [(to_all, pooled / local, across), (gather, pooled, inside)],
        ),
    }
    steps["grid_shard"] = steps["table_row_wise"]
    for kind, (out, back) in steps.items():
        at = splits.of_kind(kind)
        for kernel, size, group in [(to_all, indices, world), *out]:
            forward[at] += _collective_us(cost, kernel, size[at], splits.held[at], group)
        for kernel, size, group in back:
            backward[at] += _collective_us(cost, kernel, size[at], splits.held[at], group)
    at = splits.of_kind("data_parallel")
    backward[at] += _bucketed_us(cost, gradients[at], world)
    return forward, backward


def _collective_us(
    cost: CostModel, kind: CollectiveKind, bytes_: Array, held: Array, group: tuple[int, int]
) -> Array:
    """`(k,)`: each shard's share, by bytes, of one collective of as many such shards as a rank would hold."""
    even = float((bytes_ * held).mean()) if len(bytes_) else 0.0
    if even == 0.0:
        return np.zeros(len(bytes_))
    whole = cost.predict_us([Collective(kind, even, float(group[0]), float(group[1]))])[0]
    return np.asarray(whole * bytes_ / even, dtype=np.float64)


def _bucketed_us(cost: CostModel, bytes_: Array, group: tuple[int, int]) -> Array:
    """`(k,)`: the share of the gradient bucket that a replica's gradient fills, or of the one that it needs alone."""
    bucket = np.maximum(bytes_, min(BUCKET_CAP_BYTES, float(bytes_.sum())))
    kernel = Collective(CollectiveKind.ALL_REDUCE, bucket, float(group[0]), float(group[1]))
    return np.asarray(cost.predict_us([kernel])[0] * bytes_ / np.maximum(bucket, 1.0))


def _bytes(splits: _Splits, training: Training, system: System) -> Array:
    """`(o,)` device memory of a shard by the account of `perfcore.memory`: weights, optimizer state, buffers."""
    row_split = splits.of_kind("row_wise", "table_row_wise", "grid_shard")
    replicated = splits.of_kind("data_parallel")
    fields = {n: getattr(splits, n)[:, None, None] for n in ("rows", "dim", "pooling", "skew")}
    shards = Shards(
        **fields,
        pooled=(~row_split & ~replicated)[:, None, None],
        row_split=row_split[:, None, None],
        replicated=replicated[:, None, None],
    )
    one = np.ones((1, 1))
    dims = Dims(
        global_batch=one * training.global_batch,
        world_size=one * system.world_size,
        local_world_size=one * system.local_world_size,
        num_dense_features=1,
        embedding_dim=one,
        bottom_hidden=(),
        top_hidden=(),
        cross_rank=one,
        shards=shards,
    )
    structure = structure_for(
        training,
        Fusion(),
        interaction=Interaction.CAT,
        cross_layers=0,
        loss=Loss.BCE,
        distributed=system.world_size > 1,
    )
    return embedding_bytes(dims, structure)[:, 0]


def _reserved_bytes(system: System) -> float:
    """What the framework holds on a rank beside tables."""
    reserve, distributed = framework_reserve(), system.world_size > 1
    peers = reserve.nccl_bytes + reserve.nccl_bytes_per_local_peer * (system.local_world_size - 1)
    return reserve.context_bytes + reserve.cublas_workspace_bytes + distributed * peers
