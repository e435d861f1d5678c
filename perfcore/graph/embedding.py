"""Embedding lookups and their gradients: one `nn.EmbeddingBag` a table, or FBGEMM's table-batched kernels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from perfcore.design.training import EmbeddingFusion, IndexType, Optimizer, Precision
from perfcore.graph.kernels import (
    Array,
    EmbeddingBackward,
    EmbeddingForward,
    Memset,
    Sort,
)
from perfcore.graph.ops import Launch, Leaf, Op, Stream
from perfcore.graph.parts import (
    FP32_BYTES,
    Mask,
    accumulate_grad,
    elementwise,
    mask_of,
    on_cuda_only,
    storage_bytes,
    tiny,
)
from perfcore.graph.sizes import Sizes, Table

MODULE = "embedding"
INT32_BYTES = 4.0
Waits = tuple[tuple[Stream, Stream], ...]


def forward(
    sizes: Sizes,
    fusion: EmbeddingFusion,
    table_precision: Precision,
    optimizer: Optimizer,
    index_dtype: IndexType,
    *,
    distributed: bool,
) -> tuple[Op, ...]:
    """Pooled lookups of all tables that a rank holds."""
    size, index_bytes = storage_bytes(table_precision), float(index_dtype.bytes)
    if fusion is EmbeddingFusion.PER_TABLE:
        tables = sizes.tables(distributed=distributed)
        return tuple(op for table in tables for op in _bag(table, size, index_bytes))
    groups = batched_groups(sizes, distributed=distributed)
    return tuple(op for group in groups for op in _batched(group, size, index_bytes, optimizer))


def backward(
    sizes: Sizes,
    fusion: EmbeddingFusion,
    table_precision: Precision,
    optimizer: Optimizer,
    index_dtype: IndexType,
    *,
    distributed: bool,
) -> tuple[Op, ...]:
    """Gradients of all tables, the last first; fused with the update where tables are batched."""
    size, index_bytes = storage_bytes(table_precision), float(index_dtype.bytes)
    if fusion is EmbeddingFusion.PER_TABLE:
        tables = sizes.tables(distributed=distributed)
        return tuple(op for table in reversed(tables) for op in _bag_backward(table, size, index_bytes))
    groups = batched_groups(sizes, distributed=distributed)
    return tuple(
        op for group in reversed(groups) for op in _batched_backward(group, size, index_bytes, optimizer)
    )


def output_bytes(fusion: EmbeddingFusion, table_precision: Precision) -> float:
    """Bytes of one element of a pooled embedding: FBGEMM's output is fp32 unless asked otherwise."""
    return storage_bytes(table_precision) if fusion is EmbeddingFusion.PER_TABLE else FP32_BYTES


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Tables that one table-batched launch looks up; fields `(..., r, t)`, 0 where a rank holds none.

    Attributes:
        dense: the gradient is dense and all-reduced (replicated tables); else the update is fused.
        present: where a rank holds any of them.
        lookups: `(..., r)`, over all tables.
        elements: `(..., r)`: weights.
    """

    rows: Array
    pooling: Array
    dim: Array
    skew: Array
    batch: Array
    dense: bool
    present: Mask | bool
    lookups: Array
    elements: Array


def batched_groups(sizes: Sizes, *, distributed: bool) -> tuple[Group, ...]:
    """One launch for all tables of a single rank; one for each kind of sharding otherwise, as TorchRec groups."""
    shards = sizes.dims.shards
    if not distributed:
        return _group(sizes, np.ones_like(shards.present), sizes.batch, dense=False)
    return (
        *_group(sizes, shards.pooled, sizes.global_batch, dense=False),
        *_group(sizes, shards.row_split, sizes.global_batch, dense=False),
        *_group(sizes, shards.replicated, sizes.batch, dense=True),
    )


def _group(sizes: Sizes, members: Mask, batch: Array, *, dense: bool) -> tuple[Group, ...]:
    """The group, or nothing where no design has a member."""
    shards = sizes.dims.shards
    held = members & shards.present
    present = mask_of(np.asarray(held.any(axis=-1)))
    if present is False:
        return ()
    rows, pooling, dim = shards.rows * held, shards.pooling * held, shards.dim * held
    return (
        Group(
            rows=rows,
            pooling=pooling,
            dim=dim,
            skew=shards.skew,
            batch=batch[..., None],
            dense=dense,
            present=present,
            lookups=batch * pooling.sum(axis=-1),
            elements=(rows * dim).sum(axis=-1),
        ),
    )


def _bag(table: Table, element_bytes: float, index_bytes: float) -> list[Op]:
    kernel = EmbeddingForward(
        table.batch[..., None],
        table.rows[..., None],
        table.pooling[..., None],
        table.dim[..., None],
        table.skew[..., None],
        element_bytes,
        index_bytes=index_bytes,
    )
    leaf = Leaf("aten._embedding_bag", ((table.rows, table.dim), (table.lookups,), (table.batch,)))
    return [
        Op("aten::embedding_bag", (Launch(kernel),), (leaf,), present=present, phase="forward", module=MODULE)
        for present in (_either(table),)
        if present is not False
    ]


def _either(table: Table) -> Mask | bool:
    if table.replicated is False:
        return table.sharded
    return mask_of(np.logical_or(table.sharded, table.replicated))


def _bag_backward(table: Table, element_bytes: float, index_bytes: float) -> list[Op]:
    ops: list[Op] = []
    if table.sharded is not False:
        ops += _sparse_backward(table, element_bytes, index_bytes)
    if table.replicated is not False:
        ops += _dense_backward(table, element_bytes, index_bytes)
    return ops


def _backward_kernel(table: Table, element_bytes: float, index_bytes: float) -> Launch:
    return Launch(
        EmbeddingBackward(
            table.batch[..., None],
            table.rows[..., None],
            table.pooling[..., None],
            table.dim[..., None],
            table.skew[..., None],
            element_bytes,
            index_bytes=index_bytes,
        )
    )


def _bag_backward_leaf(table: Table) -> Leaf:
    """Gradient, indices, offsets, and what CUDA's forward saved: bag of each lookup, bag sizes, no maxima."""
    shapes = ((table.batch, table.dim), (table.lookups,), (table.batch,), (table.lookups,), (table.batch,))
    return Leaf("aten._embedding_bag_backward", (*shapes, (_ZERO,)))


def _sparse_backward(table: Table, element_bytes: float, index_bytes: float) -> list[Op]:
    """A sparse gradient: one row of the output's gradient per lookup."""
    weight, lookups = (table.rows, table.dim), table.lookups
    indices = (Leaf("aten._indices", (weight,)), Leaf("aten.detach", ((_ONE, lookups),)))
    values = (Leaf("aten._values", (weight,)), Leaf("aten.detach", ((lookups, table.dim),)))
    accumulate = (*indices, *values, *indices, Leaf("aten.clone", (weight,)))
    return [
        Op(
            "EmbeddingBagBackward0",
            (_backward_kernel(table, element_bytes, index_bytes),),
            (_bag_backward_leaf(table),),
            present=table.sharded,
            phase="backward",
            module=MODULE,
        ),
        accumulate_grad(distributed=False, present=table.sharded, module=MODULE, leaves=accumulate),
    ]


def _dense_backward(table: Table, element_bytes: float, index_bytes: float) -> list[Op]:
    """A replicated table's gradient is dense, for the all-reduce."""
    elements = table.rows * table.dim
    launches = (
        Launch(Memset(elements * element_bytes)),
        *on_cuda_only([Launch(Sort(table.lookups, index_bytes))]),
        _backward_kernel(table, element_bytes, index_bytes),
    )
    return [
        Op(
            "EmbeddingBagBackward0",
            launches,
            (_bag_backward_leaf(table),),
            present=table.replicated,
            phase="backward",
            module=MODULE,
        ),
        accumulate_grad(table.rows, table.dim, distributed=True, present=table.replicated, module=MODULE),
    ]


def _batched(group: Group, element_bytes: float, index_bytes: float, optimizer: Optimizer) -> list[Op]:
    indices, offsets = (group.lookups,), (_bags(group),)
    name = "dense_embedding_codegen_lookup_function"
    if not group.dense:
        name = f"split_embedding_codegen_lookup_{optimizer.value}_function"
    kernel = EmbeddingForward(
        group.batch,
        group.rows,
        group.pooling,
        group.dim,
        group.skew,
        element_bytes,
        batched=True,
        index_bytes=index_bytes,
    )
    check = elementwise("bounds_check_indices", group.lookups, read=index_bytes, written=0.0)
    return [
        Op(
            "fbgemm::bounds_check_indices",
            tuple(on_cuda_only((tiny(), check))),
            (Leaf("fbgemm.bounds_check_indices", (indices, offsets)),),
            present=group.present,
            phase="forward",
            module=MODULE,
        ),
        Op(
            f"fbgemm::{name}",
            (Launch(kernel),),
            (Leaf(f"fbgemm.{name}", ((group.elements,), indices, offsets)),),
            present=group.present,
            phase="forward",
            module=MODULE,
        ),
    ]


def _bags(group: Group) -> Array:
    """`(..., r)`: bags over all tables of a group."""
    return np.asarray((group.batch * (group.rows > 0)).sum(axis=-1))


def _batched_backward(
    group: Group, element_bytes: float, index_bytes: float, optimizer: Optimizer
) -> list[Op]:
    """Sort the lookups, find runs of equal rows, then one pass over the rows.

    The sequence of launches is the one in public traces of FBGEMM's backward: `linearize_index`, radix sort,
    run-length encoding with its scans and counters, long segments, rows by block, rows by warp.
    """
    keys = group.lookups
    kernel = EmbeddingBackward(
        group.batch,
        group.rows,
        group.pooling,
        group.dim,
        group.skew,
        element_bytes,
        batched=True,
        optimizer=None if group.dense else optimizer.value,
        index_bytes=index_bytes,
    )
    sort = [
        elementwise("linearize_index", keys, read=index_bytes, written=index_bytes + INT32_BYTES),
        Launch(Sort(keys, index_bytes)),
        tiny(),
        tiny(),
        tiny(),
        elementwise("run_length_encode", keys, read=index_bytes, written=index_bytes + INT32_BYTES),
        tiny(),
        tiny(),
        elementwise("cumsum", keys, read=INT32_BYTES, written=INT32_BYTES),
        tiny(),
        tiny(),
        elementwise("find_long_segments", keys, read=INT32_BYTES, written=0.0),
        tiny(),
    ]
    launches = [*on_cuda_only(sort), Launch(kernel)]
    name = "Dense_Op" if group.dense else f"{optimizer.value}_Op"
    if group.dense:
        launches.insert(0, Launch(Memset(group.elements * element_bytes)))
    lookup = Op(
        f"torch::autograd::CppNode<SplitLookupFunction_{name}>",
        tuple(launches),
        present=group.present,
        phase="backward",
        module=MODULE,
    )
    if not group.dense:
        return [lookup]
    gradient = accumulate_grad(group.elements, distributed=True, present=group.present, module=MODULE)
    return [lookup, gradient]


_ONE, _ZERO = np.ones((1, 1)), np.zeros((1, 1))
