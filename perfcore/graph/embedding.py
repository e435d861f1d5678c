"""Embedding lookups and their gradients: one `nn.EmbeddingBag` a table, or FBGEMM's table-batched kernels."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from perfcore.design.training import EmbeddingFusion, IndexType, Optimizer, Precision
from perfcore.graph.groups import INT32_BYTES, MODULE, Group, batched_groups, prefetch
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

Waits = tuple[tuple[Stream, Stream], ...]

FILL_WHEN_THERE = ((Stream.COPY, Stream.COMPUTE),)
AWAIT_FILL = ((Stream.COMPUTE, Stream.COPY),)


def forward(
    sizes: Sizes,
    fusion: EmbeddingFusion,
    table_precision: Precision,
    optimizer: Optimizer,
    index_dtype: IndexType,
    *,
    distributed: bool,
    fills: bool,
) -> tuple[Op, ...]:
    """Pooled lookups of all tables that a rank holds; caches get the batch's rows before if it `fills` them."""
    size, index_bytes = storage_bytes(table_precision), float(index_dtype.bytes)
    if fusion is EmbeddingFusion.PER_TABLE:
        tables = sizes.tables(distributed=distributed)
        return tuple(op for table in tables for op in _bag(table, size, index_bytes))
    groups = batched_groups(sizes, distributed=distributed)
    return tuple(op for group in groups for op in _batched(group, size, index_bytes, optimizer, fills=fills))


def backward(
    sizes: Sizes,
    fusion: EmbeddingFusion,
    table_precision: Precision,
    optimizer: Optimizer,
    index_dtype: IndexType,
    *,
    distributed: bool,
    awaits_fill: bool,
) -> tuple[Op, ...]:
    """Gradients of all tables, the last first; fused with the update where tables are batched.

    An update of cached rows `awaits_fill` of the next batch's, which moves rows, as FBGEMM's does on its prefetch stream.
    """
    size, index_bytes = storage_bytes(table_precision), float(index_dtype.bytes)
    if fusion is EmbeddingFusion.PER_TABLE:
        tables = sizes.tables(distributed=distributed)
        return tuple(op for table in reversed(tables) for op in _bag_backward(table, size, index_bytes))
    groups = batched_groups(sizes, distributed=distributed)
    waits = AWAIT_FILL if awaits_fill else ()
    return tuple(
        op
        for group in reversed(groups)
        for op in _batched_backward(
            group, size, index_bytes, optimizer, waits=() if group.cached is False else waits
        )
    )


def fill_ahead(
    sizes: Sizes,
    fusion: EmbeddingFusion,
    table_precision: Precision,
    index_dtype: IndexType,
    *,
    distributed: bool,
) -> tuple[Op, ...]:
    """Caches get the next batch's rows, on the copy stream, once that batch is there."""
    if fusion is EmbeddingFusion.PER_TABLE:
        return ()
    size, index_bytes = storage_bytes(table_precision), float(index_dtype.bytes)
    return tuple(
        replace(
            op, waits=FILL_WHEN_THERE, launches=tuple(replace(x, stream=Stream.COPY) for x in op.launches)
        )
        for group in batched_groups(sizes, distributed=distributed)
        for op in prefetch(group, size, index_bytes)
    )


def output_bytes(fusion: EmbeddingFusion, table_precision: Precision) -> float:
    """Bytes of one element of a pooled embedding: FBGEMM's output is fp32 unless asked otherwise."""
    return storage_bytes(table_precision) if fusion is EmbeddingFusion.PER_TABLE else FP32_BYTES


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
    if table.replicated is False and table.dense is False:
        return table.sharded
    return mask_of(np.logical_or(np.logical_or(table.sharded, table.replicated), table.dense))


def _bag_backward(table: Table, element_bytes: float, index_bytes: float) -> list[Op]:
    ops: list[Op] = []
    if table.sharded is not False:
        ops += _sparse_backward(table, element_bytes, index_bytes)
    if table.dense is not False:
        ops += _dense_backward(table, element_bytes, index_bytes, reduced=False)
    if table.replicated is not False:
        ops += _dense_backward(table, element_bytes, index_bytes, reduced=True)
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


def _dense_backward(table: Table, element_bytes: float, index_bytes: float, *, reduced: bool) -> list[Op]:
    """A gradient of the table's size; a replicated table's is `reduced` among all ranks."""
    elements, present = table.rows * table.dim, table.replicated if reduced else table.dense
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
            present=present,
            phase="backward",
            module=MODULE,
        ),
        accumulate_grad(table.rows, table.dim, distributed=reduced, present=present, module=MODULE),
    ]


def _batched(
    group: Group, element_bytes: float, index_bytes: float, optimizer: Optimizer, *, fills: bool
) -> list[Op]:
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
        cache_ratio=group.cache_ratio,
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
        *(prefetch(group, element_bytes, index_bytes) if fills else ()),
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
    group: Group, element_bytes: float, index_bytes: float, optimizer: Optimizer, *, waits: Waits
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
        cache_ratio=group.cache_ratio,
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
        waits=waits,
        present=group.present,
        phase="backward",
        module=MODULE,
    )
    if not group.dense:
        return [lookup]
    gradient = accumulate_grad(
        group.elements, distributed=group.reduced, present=group.present, module=MODULE
    )
    return [lookup, gradient]


_ONE, _ZERO = np.ones((1, 1)), np.zeros((1, 1))
