"""The tables' optimizer where its update is not fused into the embedding's gradient."""

from __future__ import annotations

import numpy as np

from perfcore.design.training import EmbeddingFusion, Optimizer, Precision
from perfcore.graph.groups import MODULE, batched_groups
from perfcore.graph.kernels import Array, MultiTensor, Sort, SparseUpdate
from perfcore.graph.ops import Launch, Leaf, Op, Shape
from perfcore.graph.optimizer import FOR_LOOP, step_name
from perfcore.graph.parts import (
    BF16_BYTES,
    FP32_BYTES,
    INT64_BYTES,
    Mask,
    elementwise,
    mask_of,
    storage_bytes,
    tiny,
)
from perfcore.graph.sizes import Sizes, Table

CLASS_NAME = {
    Optimizer.SGD: "SGD",
    Optimizer.ADAGRAD: "Adagrad",
    Optimizer.ADAM: "SparseAdam",
    Optimizer.ROWWISE_ADAGRAD: "RowwiseAdagrad",
}

# What `step()` dispatches per table on a sparse gradient, and what it launches.
# Shapes: w the table, i its indices, v its gradient rows, n one value a gradient row, k `(n, 1)`, r one value
# a row of the table, 0 the step counter on the host. Launches: `each` reads one value and writes one,
# `both` reads two; `rows` and `squeeze` are per gradient row; `merge` is a coalesce, `scatter` adds rows.
_COALESCE = (("is_coalesced", "w", ""), ("_coalesce", "w", "merge"))
_PARTS = (("_indices", "w", ""), ("detach", "i", ""), ("_values", "w", ""), ("detach", "v", ""))
_STATE = (("sparse_mask", "ww", "each"), ("_values", "w", ""), ("detach", "v", ""))
_ADD_ROWS = (("_sparse_coo_tensor_with_dims_and_tensors", "iv", ""), ("add_", "ww", "scatter"))
_SPARSE: dict[Optimizer, tuple[tuple[str, str, str], ...]] = {
    Optimizer.SGD: (("add_", "ww", "scatter_all"),),
    Optimizer.ADAGRAD: (
        ("add_", "0", ""),
        ("_local_scalar_dense", "0", ""),
        *_COALESCE,
        *_PARTS,
        ("pow", "v", "each"),
        *_ADD_ROWS,
        *_STATE,
        ("sqrt_", "v", "each"),
        ("add_", "v", "each"),
        ("div", "vv", "both"),
        *_ADD_ROWS,
    ),
    Optimizer.ADAM: (
        *_COALESCE,
        *_PARTS,
        *_STATE,
        ("sub", "vv", "both"),
        ("mul_", "v", "each"),
        *_ADD_ROWS,
        *_STATE,
        ("pow", "v", "each"),
        ("sub_", "vv", "both"),
        ("mul_", "v", "each"),
        *_ADD_ROWS,
        ("add_", "vv", "both"),
        ("add_", "vv", "both"),
        ("sqrt_", "v", "each"),
        ("add_", "v", "each"),
        ("div_", "vv", "both"),
        ("mul", "v", "each"),
        *_ADD_ROWS,
    ),
    Optimizer.ROWWISE_ADAGRAD: (
        *_COALESCE,
        ("indices", "w", ""),
        ("detach", "i", ""),
        ("select", "i", ""),
        ("values", "w", ""),
        ("pow", "v", "each"),
        ("mean", "v", "squeeze"),
        ("index_add_", "rnn", "rows"),
        ("index", "rn", "rows"),
        ("sqrt", "n", "rows"),
        ("add", "n", "rows"),
        ("reciprocal", "n", "rows"),
        ("mul", "n", "rows"),
        ("unsqueeze", "n", ""),
        ("mul", "kv", "each"),
        ("neg", "v", "each"),
        ("index_add_", "wnv", "scatter"),
    ),
}


def optimizer_names(optimizer: Optimizer, embedding: EmbeddingFusion) -> tuple[str, ...]:
    """Class of the tables' own optimizer; none where the update is fused."""
    return (CLASS_NAME[optimizer],) if embedding is EmbeddingFusion.PER_TABLE else ()


def step(
    sizes: Sizes,
    embedding: EmbeddingFusion,
    optimizer: Optimizer,
    table_precision: Precision,
    *,
    distributed: bool,
) -> tuple[Op, ...]:
    """`step()` on every table a rank holds; replicated tables have dense gradients."""
    if embedding is EmbeddingFusion.PER_TABLE:
        return _per_table(sizes, optimizer, table_precision, distributed=distributed)
    # Only tables with dense gradients are left, kept as one parameter; a row-wise accumulator costs as Adagrad's.
    groups = [group for group in batched_groups(sizes, distributed=distributed) if group.dense]
    if not groups:
        return ()
    values = sum(u.values_read + u.values_written for u in FOR_LOOP[_dense_kind(optimizer)])
    elements = np.asarray(sum(group.elements for group in groups))
    update = MultiTensor(optimizer.value, elements, 1.0, values * FP32_BYTES)
    name, present = step_name(CLASS_NAME[optimizer]), mask_of(elements > 0)
    return (Op(name, (Launch(update),), present=present, phase="optimizer", module=MODULE),)


def _per_table(
    sizes: Sizes, optimizer: Optimizer, table_precision: Precision, *, distributed: bool
) -> tuple[Op, ...]:
    launches: list[Launch] = []
    leaves: list[Leaf] = []
    updates = _with_casts(_SPARSE[optimizer], optimizer, table_precision)
    for table in sizes.tables(distributed=distributed):
        if table.sharded is not False:
            shapes = _shapes(table)
            for name, args, launched in updates:
                leaves.append(Leaf(f"aten.{name}", tuple(shapes[a] for a in args)))
                launches += _launches(table, name, launched, storage_bytes(table_precision))
        if table.replicated is not False or table.dense is not False:
            present = mask_of(np.logical_or(table.replicated, table.dense))
            size = storage_bytes(table_precision)
            more_launches, more_leaves = _dense(table, optimizer, size, present=present)
            launches, leaves = launches + more_launches, leaves + more_leaves
    name = step_name(CLASS_NAME[optimizer])
    return (Op(name, tuple(launches), tuple(leaves), phase="optimizer", module=MODULE),)


def _with_casts(
    updates: tuple[tuple[str, str, str], ...], optimizer: Optimizer, table_precision: Precision
) -> tuple[tuple[str, str, str], ...]:
    """The row-wise accumulator is fp32: bf16 gradients are cast to it, and its update back."""
    if optimizer is not Optimizer.ROWWISE_ADAGRAD or table_precision is not Precision.BF16:
        return updates
    copy = ("_to_copy", "v", "each")
    out: list[tuple[str, str, str]] = []
    for update in updates:
        out += [copy, update] if update[0] in {"pow", "neg"} else [update]
    return tuple(out)


def _dense_kind(optimizer: Optimizer) -> Optimizer:
    return Optimizer.ADAGRAD if optimizer is Optimizer.ROWWISE_ADAGRAD else optimizer


def _unique_rows(table: Table) -> Array:
    """At most this many distinct rows have a gradient."""
    return np.minimum(table.lookups, table.rows)


def _shapes(table: Table) -> dict[str, Shape]:
    unique = _unique_rows(table)
    return {
        "w": (table.rows, table.dim),
        "i": (1.0, unique),
        "v": (unique, table.dim),
        "n": (unique,),
        "k": (unique, 1.0),
        "r": (table.rows,),
        "0": (),
    }


def _launches(table: Table, name: str, launched: str, size: float) -> list[Launch]:
    present = table.sharded
    unique = _unique_rows(table)
    pointwise = {"each": (1.0, 1.0), "both": (2.0, 1.0), "squeeze": (1.0, 1.0 / BF16_BYTES)}
    if launched in pointwise:
        read, written = pointwise[launched]
        return [
            elementwise(
                name.strip("_"), unique * table.dim, read=read * size, written=written * size, present=present
            )
        ]
    match launched:
        case "merge":
            return _coalesce(table, size, present=present)
        case "rows":
            return [
                elementwise(name.strip("_"), unique, read=FP32_BYTES, written=FP32_BYTES, present=present)
            ]
        case "scatter" | "scatter_all":
            rows = table.lookups if launched == "scatter_all" else unique
            return [Launch(SparseUpdate(rows, table.rows, table.dim, table.skew, size), present=present)]
        case _:
            return []


def _coalesce(table: Table, size: float, *, present: Mask | bool) -> list[Launch]:
    """Sort, find the distinct rows (the host waits for their number), sum the rows of each."""
    lookups = table.lookups
    return [
        Launch(Sort(lookups, INT64_BYTES), present=present),
        Launch(tiny().kernel, blocks=True, present=present, cuda_only=True),
        elementwise("coalesce", lookups * table.dim, read=size, written=size, present=present),
    ]


def _dense(
    table: Table, optimizer: Optimizer, size: float, *, present: Mask | bool
) -> tuple[list[Launch], list[Leaf]]:
    elements, shape = table.rows * table.dim, (table.rows, table.dim)
    updates = FOR_LOOP[_dense_kind(optimizer)]
    launches = [
        elementwise(
            u.name.strip("_"),
            elements,
            read=u.values_read * size,
            written=u.values_written * size,
            present=present,
        )
        for u in updates
        if u.tensors
    ]
    return launches, [Leaf(f"aten.{u.name}", (shape,) * u.tensors or ((),)) for u in updates]
