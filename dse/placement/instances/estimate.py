"""Cost instances of table sets by this project's own kernel and collective models.

A shard costs its rank what it adds to the table-batched kernels: bounds check and lookup forward; sort, run-length encoding and
fused update backward; and its share of the exchanges. What a launch or a collective costs whatever its size (floors, latencies)
is shared out evenly among the shards that a rank would hold if every table were split the same way, so that the sum over such a
rank is the predicted time of the whole kernel, latency included, and not bandwidth alone.

Left out, because no placement changes it: the dense part, the permutation of indices, the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from dse.errors import SpaceError
from dse.placement.instances.instance import Instance
from dse.placement.instances.labels import Labels
from dse.placement.instances.splits import Splits, splits_of
from dse.placement.solver.problem import Array, Problem, homogeneous
from perfcore.cost.model import CostModel
from perfcore.design.hardware import System
from perfcore.design.model import EmbeddingTable, Interaction, Loss
from perfcore.design.training import Fusion, Training
from perfcore.graph.communication import BUCKET_CAP_BYTES
from perfcore.graph.dims import Dims, structure_for
from perfcore.graph.groups import INT32_BYTES
from perfcore.graph.kernels import (
    CachePopulate,
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
from perfcore.memory import embedding_bytes, framework_reserve, host_bytes
from perfcore.units import US_PER_MS

COLUMNS_STEP = 4  # FBGEMM's kernels read rows in pieces of four columns
_TINY_FORWARD, _TINY_BACKWARD = 1, 8  # launches on counters and scans, as `perfcore.graph.embedding` has them
_UPDATE_READ, _UPDATE_WRITTEN = 2, 1  # a dense SGD step: weight and gradient in, weight out


_KernelsOf: TypeAlias = Callable[[Splits, Training, int], list[Kernel]]


def estimated_instance(
    tables: Sequence[EmbeddingTable],
    training: Training,
    system: System,
    cost: CostModel,
    *,
    cache_ratios: Sequence[float] = (),
    fusion: Fusion | None = None,
) -> Instance:
    """The priced options of every table on a system.

    Args:
        tables: every one with an `embedding_dim`.
        training: batch and formats of numbers.
        system: ranks, memory and links.
        cost: prices kernels of the system's device and collectives of its machines.
        cache_ratios: tables of some size may also lie in the host's memory, behind caches of these shares of their rows.
        fusion: of the job, which decides its buffers; the default if `None`.

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
    splits = splits_of(tables, training, system, cache_ratios)
    device_bytes, on_host = _bytes(splits, training, system, fusion or Fusion())
    compute = np.stack(_compute_us(splits, training, cost), axis=1)
    exchange = np.stack(_exchange_us(splits, training, system, cost), axis=1)
    per_shard = np.stack([compute[:, 0], exchange[:, 0], compute[:, 1], exchange[:, 1]], axis=1) / US_PER_MS
    return Instance(
        names=tuple(t.name for t in tables),
        types=splits.kinds,
        kernels=splits.kernels,
        where=splits.where,
        first_option=np.searchsorted(splits.table, np.arange(len(tables) + 1)).astype(np.int64),
        first_shard=np.concatenate([[0], np.cumsum(splits.count)]).astype(np.int64),
        cost_ms=np.repeat(per_shard, splits.count, axis=0),
        bytes=np.repeat(device_bytes, splits.count),
        capacity_bytes=system.device.hbm_bytes - _reserved_bytes(system),
        num_ranks=system.world_size,
        ranks_per_host=system.local_world_size,
        host_bytes=np.repeat(on_host, splits.count) if cache_ratios else None,
        host_capacity_bytes=system.node.host_memory_bytes if cache_ratios else np.inf,
    )


def memory_of_tables(
    tables: Sequence[EmbeddingTable],
    training: Training,
    system: System,
    *,
    capacity_bytes: float,
    fusion: Fusion | None = None,
) -> tuple[Problem, Labels]:
    """The same options with memory alone: what a shard costs is its share of the capacity."""
    splits = splits_of(tables, training, system)
    bytes_ = np.repeat(_bytes(splits, training, system, fusion or Fusion())[0], splits.count)
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


def _compute_us(splits: Splits, training: Training, cost: CostModel) -> tuple[Array, Array]:
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


def _shared(kernels: _KernelsOf, splits: Splits, training: Training, cost: CostModel) -> Array:
    """`(o,)`: the second of two equal shards costs its traffic, the first the launch's floor as well."""
    one, two = (sum(cost.predict_us(kernels(splits, training, copies))) for copies in (1, 2))
    added = np.maximum(two - np.asarray(one), 0.0)
    shared: Array = added + np.maximum(np.asarray(one) - added, 0.0) / splits.held
    return shared


def _forward_kernels(splits: Splits, training: Training, copies: int) -> list[Kernel]:
    lookups, index = splits.batch * splits.pooling * copies, float(training.index_dtype.bytes)
    return [
        *_prefetch_kernels(splits, training, copies),
        Elementwise("bounds_check_indices", lookups, lookups * index, 0.0),
        EmbeddingForward(**_dims(splits, training, copies), batched=True, index_bytes=index),
    ]


def _prefetch_kernels(splits: Splits, training: Training, copies: int) -> list[Kernel]:
    """What fills the caches of tables in the host's memory before their rows are looked up."""
    cached = (splits.cache_ratio > 0) & (splits.cache_ratio < 1)
    if not cached.any():
        return []
    dims, index = _dims(splits, training, copies), float(training.index_dtype.bytes)
    lookups = splits.batch * splits.pooling * cached * copies
    most = np.minimum(lookups, splits.rows * copies)
    return [
        Elementwise("linearize_cache_indices", lookups, lookups * index, lookups * index),
        Sort(lookups, index, pairs=False),
        Elementwise("run_length_encode", lookups, lookups * index, lookups * index),
        Elementwise(
            "lru_cache_find_uncached", most * cached, most * cached * index, most * cached * INT32_BYTES
        ),
        Sort(most * cached, INT32_BYTES),
        CachePopulate(**dims | {"rows": dims["rows"] * cached[:, None]}),
        Elementwise("lxu_cache_lookup", lookups, lookups * index, lookups * INT32_BYTES),
    ]


def _backward_kernels(splits: Splits, training: Training, copies: int) -> list[Kernel]:
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


def _dims(splits: Splits, training: Training, copies: int) -> dict[str, Array]:
    """`(o, copies)`: each option a rank whose table-batched kernel has so many equal tables."""
    names = ("batch", "rows", "pooling", "dim", "skew", "cache_ratio")
    size = np.asarray(storage_bytes(training.table_precision))
    values = {n: np.repeat(getattr(splits, n)[:, None], copies, axis=1) for n in names}
    return values | {"element_bytes": size}


def _exchange_us(splits: Splits, training: Training, system: System, cost: CostModel) -> tuple[Array, Array]:
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


def _bytes(splits: Splits, training: Training, system: System, fusion: Fusion) -> tuple[Array, Array]:
    """`(o,)` device and host memory of a shard by the account of `perfcore.memory`: weights, optimizer state, buffers."""
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
        shards=splits.shards(),
    )
    structure = structure_for(
        training,
        fusion,
        interaction=Interaction.CAT,
        cross_layers=0,
        loss=Loss.BCE,
        distributed=system.world_size > 1,
    )
    return embedding_bytes(dims, structure)[:, 0], host_bytes(dims, structure)[:, 0]


def _reserved_bytes(system: System) -> float:
    """What the framework holds on a rank beside tables."""
    reserve, distributed = framework_reserve(), system.world_size > 1
    peers = reserve.nccl_bytes + reserve.nccl_bytes_per_local_peer * (system.local_world_size - 1)
    return reserve.context_bytes + reserve.cublas_workspace_bytes + distributed * peers
