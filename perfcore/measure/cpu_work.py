"""What a kernel makes a CPU do: calls, flops, bytes, lookups."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perfcore.errors import UnsupportedError
from perfcore.graph import kernels as k

Array = NDArray[np.float64]

TABLE_KINDS = (k.EmbeddingForward, k.EmbeddingBackward)


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """Amounts of work of one kernel.

    Attributes:
        kind: which fit prices it.
        amounts: `(..., f)`, the first of them the call itself.
        present: `(...)`, False where there is nothing to do.
    """

    kind: str
    amounts: Array
    present: NDArray[np.bool_]


def parts(kernel: k.Kernel) -> list[k.Kernel]:
    """What a CPU runs for a kernel: nothing for copies to a device, several kernels for a fused one."""
    kernel = k.resolve(kernel)
    match kernel:
        case k.Memcpy(kind=k.CopyKind.D2D, bytes=size) | k.Memset(bytes=size):
            return [k.Elementwise("copy", 0.0, size, size)]
        case k.Memcpy():
            return []
        case k.FusedInteraction(backward=False) as f:
            features = np.asarray(f.features)
            return [
                k.Gemm(f.features, f.features, f.dim, k.DType.FP32, batch=f.batch),
                k.PairGather(f.batch, f.features, features * (features - 1) / 2, f.element_bytes),
            ]
        case k.FusedInteraction() as f:
            features = np.asarray(f.features)
            return [
                k.PairGather(f.batch, f.features, features * (features - 1), f.element_bytes, backward=True),
                k.Gemm(f.features, f.dim, f.features, k.DType.FP32, batch=f.batch),
            ]
        case k.EmbeddingBackward(optimizer=str()) as e:
            plain = k.EmbeddingBackward(
                e.batch, e.rows, e.pooling, e.dim, e.skew, e.element_bytes, batched=e.batched
            )
            return [plain, *_updates(e)]
        case _:
            return [kernel]


def work_of(kernel: k.Kernel) -> Work:
    """The work of a resolved kernel that `parts` returned.

    Raises:
        UnsupportedError: collectives, which one device does not run.
    """
    match kernel:
        case k.Gemm() as g:
            return _gemm(g)
        case k.Elementwise(bytes_read=read, bytes_written=written):
            return _work("elementwise", _sum(read, written))
        case k.Reduction(rows=rows, cols=cols, element_bytes=size):
            return _work("reduction", _product(rows, cols, size), _array(cols))
        case k.Concat(bytes=size, parts=count, split=split):
            return _work("split" if split else "concat", _array(size), _array(count))
        case k.Transpose(batch=batch, m=m, n=n, element_bytes=size):
            return _work("transpose", _product(batch, m, n, size))
        case k.PairGather(batch=batch, features=features, pairs=pairs, element_bytes=size, backward=backward):
            return _work(
                "pair_scatter" if backward else "pair_gather",
                _product(batch, pairs),
                _product(batch, features, features, size),
            )
        case k.EmbeddingForward() | k.EmbeddingBackward() as e:
            kind = "embedding_forward" if isinstance(e, k.EmbeddingForward) else "embedding_backward"
            lookups = _product(e.batch, e.pooling)
            return _lookups(kind, lookups, e.rows, e.dim, e.element_bytes, _product(e.batch, e.dim))
        case k.SparseUpdate(lookups=lookups, rows=rows, dim=dim, element_bytes=size):
            return _lookups("sparse_update", lookups, rows, dim, size)
        case k.Sort(keys=keys):
            n = _array(keys)
            return _work("sort", n, n * np.log2(np.maximum(n, 2)))
        case k.MultiTensor(elements=elements, tensors=tensors, bytes_per_element=size):
            return _work("multi_tensor", _product(elements, size), _array(tensors))
        case _:
            raise UnsupportedError(f"One CPU runs no {type(kernel).__name__}.")


def _gemm(g: k.Gemm) -> Work:
    flops = 2 * _product(g.m, g.n, g.k, g.batch)
    size = g.dtype.bytes * np.asarray(g.batch)
    a, b, c = _product(g.m, g.k, size), _product(g.k, g.n, size), _product(g.m, g.n, size)
    kind = "bmm" if np.any(np.asarray(g.batch) > 1) else f"gemm_{g.layout}"
    return _work(f"{kind}_bf16" if g.dtype is k.DType.BF16 else kind, flops, a, b, c)


def _lookups(kind: str, lookups: k.Dim, rows: k.Dim, dim: k.Dim, size: k.Dim, *more: Array) -> Work:
    """Lookups miss caches the more, the larger the table: their cost grows with the logarithm of its bytes."""
    count = _array(lookups)
    spread = count * np.log2(np.maximum(_product(rows, dim, size), 2.0))
    work = _work(kind, count, _product(count, dim, size), spread, *more)
    return Work(kind, work.amounts, np.broadcast_to(_array(rows) > 0, work.present.shape))


def _updates(e: k.EmbeddingBackward) -> list[k.Kernel]:
    """The row updates, one kernel for each table of the last axis."""
    names = ("batch", "rows", "pooling", "dim", "element_bytes")
    batch, rows, pooling, dim, size = np.broadcast_arrays(
        *(np.atleast_1d(_array(getattr(e, name))) for name in names)
    )
    return [
        k.SparseUpdate(batch[..., t] * pooling[..., t], rows[..., t], dim[..., t], 0.0, size[..., t])
        for t in range(rows.shape[-1])
    ]


def _work(kind: str, *amounts: Array) -> Work:
    shape = np.broadcast_shapes(*(np.shape(a) for a in amounts))
    columns = [np.ones(shape), *(np.broadcast_to(a, shape) for a in amounts)]
    stacked = np.stack(columns, axis=-1)
    return Work(kind, stacked, stacked[..., 1] > 0)


def _array(value: k.Dim) -> Array:
    assert not isinstance(value, (k.Total, k.Bucket)), "resolve the kernel first"
    return np.asarray(value, dtype=np.float64)


def _product(*values: k.Dim) -> Array:
    out = np.ones(())
    for value in values:
        out = out * _array(value)
    return np.asarray(out, dtype=np.float64)


def _sum(*values: k.Dim) -> Array:
    return np.asarray(sum(_array(v) for v in values), dtype=np.float64)
