"""Feature interactions: DLRM's pairwise dot products, concatenation, DCNv2's low-rank cross network."""

from __future__ import annotations

import numpy as np

from perfcore.design.training import EmbeddingFusion, InteractionFusion, Precision
from perfcore.graph.kernels import (
    Array,
    Concat,
    FusedInteraction,
    Gemm,
    GemmLayout,
    Memset,
    PairGather,
    Sort,
)
from perfcore.graph.ops import Launch, Leaf, Op, Shape
from perfcore.graph.parts import (
    FP32_BYTES,
    GEMM_DTYPE,
    INT64_BYTES,
    cast,
    elementwise,
    on_cuda_only,
    storage_bytes,
    tiny,
)
from perfcore.graph.sizes import Sizes

MODULE = "interaction"


def forward(
    sizes: Sizes,
    precision: Precision,
    fusion: InteractionFusion,
    embedding: EmbeddingFusion,
    table_precision: Precision,
) -> tuple[Op, ...]:
    """Dot interaction: cat, view, transpose, bmm, index of the lower triangle, cat; or one kernel."""
    casts = embedding_casts(sizes, embedding, table_precision)
    if fusion is InteractionFusion.FUSED:
        return (*casts, _fused(sizes, backward=False))
    batch, dim, size = sizes.batch, sizes.embedding_dim, storage_bytes(precision)
    f, pairs = _full(sizes.features), _full(sizes.pairs)
    features, transposed, products = (batch, f, dim), (batch, dim, f), (batch, f, f)
    cast_launches, cast_leaves = [], []
    if precision is Precision.BF16:  # one cast an argument of `bmm`, though both are one tensor
        cast_launches = [cast(batch * f * dim, to_bf16=True) for _ in range(2)]
        cast_leaves = [Leaf("aten._to_copy", (transposed,)), Leaf("aten._to_copy", (features,))]
    bmm = Gemm(f, f, dim, GEMM_DTYPE[precision], batch=batch)
    gather = PairGather(batch, f, pairs, size)
    return (
        *casts,
        *concat(sizes, precision, embedding),
        _forward("aten::view", (), Leaf("aten.view", ((batch, f * dim),))),
        _forward("aten::transpose", (), Leaf("aten.transpose", (features,))),
        _forward(
            "aten::bmm", (*cast_launches, Launch(bmm)), *cast_leaves, Leaf("aten.bmm", (features, transposed))
        ),
        _forward("aten::index", (Launch(gather),), Leaf("aten.index", (products, (pairs,), (pairs,)))),
        _forward(
            "aten::cat",
            (Launch(Concat(batch * (dim + pairs) * size, 2.0)),),
            Leaf("aten.cat", ((batch, dim), (batch, pairs))),
        ),
    )


def backward(
    sizes: Sizes,
    precision: Precision,
    fusion: InteractionFusion,
    embedding: EmbeddingFusion,
    table_precision: Precision,
) -> tuple[Op, ...]:
    """The dot interaction's gradient; the lower triangle is scattered by a sorted `index_put_`."""
    casts = embedding_casts_backward(sizes, embedding, table_precision)
    if fusion is InteractionFusion.FUSED:
        return (_fused(sizes, backward=True), *casts)
    batch, dim, size = sizes.batch, sizes.embedding_dim, storage_bytes(precision)
    f, pairs = _full(sizes.features), _full(sizes.pairs)
    features, transposed, products = (batch, f, dim), (batch, dim, f), (batch, f, f)
    elements, out = batch * f * dim, (batch, dim + pairs)
    dtype = GEMM_DTYPE[precision]
    copies: list[Op] = []
    if precision is Precision.BF16:
        copies = [
            _backward("ToCopyBackward0", (cast(elements, to_bf16=False),), Leaf("aten._to_copy", (shape,)))
            for shape in (features, transposed)
        ]
    return (
        _backward("CatBackward0", (), Leaf("aten.slice", (out,)), Leaf("aten.slice", (out,))),
        _backward(
            "IndexBackward0",
            _scatter(batch, f, pairs, size),
            Leaf("aten.new_zeros", ((batch, pairs),)),
            Leaf("aten.index_put", (products, (pairs,), (pairs,), (batch, pairs))),
        ),
        _backward(
            "BmmBackward0",
            (
                Launch(Gemm(dim, f, f, dtype, batch=batch, layout=GemmLayout.GRAD_WEIGHT)),
                Launch(Gemm(f, dim, f, dtype, batch=batch, layout=GemmLayout.GRAD_INPUT)),
            ),
            Leaf("aten.transpose", (features,)),
            Leaf("aten.bmm", (transposed, products)),
            Leaf("aten.transpose", (transposed,)),
            Leaf("aten.bmm", (products, features)),
        ),
        *copies,
        _backward(
            "TransposeBackward0",
            (elementwise("add", elements, read=2 * FP32_BYTES, written=FP32_BYTES),),
            Leaf("aten.transpose", (transposed,)),
            Leaf("aten.add", (features, features)),
        ),
        _backward("ViewBackward0", (), Leaf("aten.view", (features,))),
        *concat_backward(sizes, precision, embedding, adds_dense=True),
        *casts,
    )


def concat_forward(
    sizes: Sizes, precision: Precision, embedding: EmbeddingFusion, table_precision: Precision
) -> tuple[Op, ...]:
    """All features side by side."""
    return (*embedding_casts(sizes, embedding, table_precision), *concat(sizes, precision, embedding))


def concat_only_backward(
    sizes: Sizes, precision: Precision, embedding: EmbeddingFusion, table_precision: Precision
) -> tuple[Op, ...]:
    """The gradient of `concat_forward`."""
    return (
        *concat_backward(sizes, precision, embedding, adds_dense=False),
        *embedding_casts_backward(sizes, embedding, table_precision),
    )


def concat(sizes: Sizes, precision: Precision, embedding: EmbeddingFusion) -> tuple[Op, ...]:
    """`cat` of the dense feature and the embeddings; under autocast it promotes to fp32."""
    dense = (sizes.batch, sizes.embedding_dim)
    launches: list[Launch] = []
    leaves: list[Leaf] = []
    if precision is Precision.BF16:
        launches.append(cast(dense[0] * dense[1], to_bf16=False))
        leaves.append(Leaf("aten._to_copy", (dense,)))
    parts = (dense, *embedding_parts(sizes, embedding))
    moved = sizes.batch * sizes.concat_width * FP32_BYTES
    launches.append(Launch(Concat(moved, float(len(parts)))))
    return (_forward("aten::cat", tuple(launches), *leaves, Leaf("aten.cat", parts)),)


def concat_backward(
    sizes: Sizes, precision: Precision, embedding: EmbeddingFusion, *, adds_dense: bool
) -> tuple[Op, ...]:
    """Slices are views; the dense feature's second gradient, from the last `cat`, is added to the first."""
    dense = (sizes.batch, sizes.embedding_dim)
    parts = 1 + len(embedding_parts(sizes, embedding))
    slices = [Leaf("aten.slice", ((sizes.batch, sizes.concat_width),))] * parts
    size = storage_bytes(precision)
    adds = (elementwise("add", dense[0] * dense[1], read=2 * size, written=size),) if adds_dense else ()
    add_leaves = [Leaf("aten.add", (dense, dense))] if adds_dense else []
    if precision is not Precision.BF16:
        return (_backward("CatBackward0", adds, *slices, *add_leaves),)
    copy = (cast(dense[0] * dense[1], to_bf16=True), *adds)
    return (
        _backward("CatBackward0", (), *slices),
        _backward("ToCopyBackward0", copy, Leaf("aten._to_copy", (dense,)), *add_leaves),
    )


def embedding_parts(sizes: Sizes, embedding: EmbeddingFusion) -> tuple[Shape, ...]:
    """Shapes of the pooled embeddings: one tensor a table, or one in all where tables are batched."""
    if embedding is EmbeddingFusion.PER_TABLE:
        return tuple((sizes.batch, dim) for dim in sizes.table_dims)
    return ((sizes.batch, sizes.concat_width - sizes.embedding_dim),)


def embedding_casts(sizes: Sizes, embedding: EmbeddingFusion, table_precision: Precision) -> tuple[Op, ...]:
    """Pooled bf16 embeddings become fp32; FBGEMM's are fp32 already."""
    if table_precision is not Precision.BF16 or embedding is EmbeddingFusion.TABLE_BATCHED:
        return ()
    return tuple(
        _forward("aten::to", (cast(s[0] * s[1], to_bf16=False),), Leaf("aten._to_copy", (s,)))
        for s in ((sizes.batch, dim) for dim in sizes.table_dims)
    )


def embedding_casts_backward(
    sizes: Sizes, embedding: EmbeddingFusion, table_precision: Precision
) -> tuple[Op, ...]:
    """The gradients of `embedding_casts`, the last table's first."""
    if table_precision is not Precision.BF16 or embedding is EmbeddingFusion.TABLE_BATCHED:
        return ()
    return tuple(
        _backward("ToCopyBackward0", (cast(s[0] * s[1], to_bf16=True),), Leaf("aten._to_copy", (s,)))
        for s in ((sizes.batch, dim) for dim in reversed(sizes.table_dims))
    )


def _scatter(batch: Array, features: Array, pairs: Array, size: float) -> tuple[Launch, ...]:
    """CUDA's accumulating `index_put_`: zeros, linear indices, their order, a radix sort, the scatter."""
    prepare = [elementwise(f, pairs, read=INT64_BYTES, written=INT64_BYTES) for f in ("add", "copy", "div")]
    sort = (*prepare, tiny(), Launch(Sort(pairs, INT64_BYTES)))
    return (
        Launch(Memset(batch * features * features * size)),
        *on_cuda_only(sort),
        Launch(PairGather(batch, features, pairs, size, backward=True)),
    )


def _fused(sizes: Sizes, *, backward: bool) -> Op:
    """One custom kernel that reads the features and writes the interaction's output, or its gradient."""
    kernel = FusedInteraction(
        sizes.batch, _full(sizes.features), sizes.embedding_dim, FP32_BYTES, backward=backward
    )
    name, phase = ("_PairProductsBackward", "backward") if backward else ("_PairProducts", "forward")
    return Op(name, (Launch(kernel),), phase=phase, module=MODULE)


def _forward(name: str, launches: tuple[Launch, ...], *leaves: Leaf) -> Op:
    return Op(name, launches, leaves, phase="forward", module=MODULE)


def _backward(name: str, launches: tuple[Launch, ...], *leaves: Leaf) -> Op:
    return Op(name, launches, leaves, phase="backward", module=MODULE)


def _full(value: float) -> Array:
    return np.full((1, 1), value)
