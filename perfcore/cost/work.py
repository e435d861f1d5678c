"""What a kernel makes a device do: calls, flops, bytes, lookups. Measured kernels are fitted over these."""

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


def work_of(kernel: k.Kernel) -> Work:
    """The work of a kernel; tables of one launch are added up.

    Raises:
        UnsupportedError: collectives, which one device does not run, and kernels of unknown work.
    """
    kernel = k.resolve(kernel)
    match kernel:
        case k.Gemm() as g:
            return _gemm(g)
        case k.Elementwise(function=function, elements=elements, bytes_read=read, bytes_written=written):
            return _work(f"elementwise_{function}", _sum(read, written), _array(elements))
        case k.Reduction(rows=rows, cols=cols, element_bytes=size):
            return _work("reduction", _product(rows, cols, size), _array(cols))
        case k.Concat(bytes=size, parts=count, split=split):
            return _work("split" if split else "concat", _array(size), _array(count))
        case k.Transpose(batch=batch, m=m, n=n, element_bytes=size):
            return _work("transpose", _product(batch, m, n, size))
        case k.PairGather(batch=batch, features=features, pairs=pairs, element_bytes=size, backward=backward):
            kind = "pair_scatter" if backward else "pair_gather"
            return _work(kind, _product(batch, pairs), _product(batch, features, features, size))
        case k.FusedInteraction(batch=batch, features=features, dim=dim, element_bytes=size):
            kind = "fused_interaction_backward" if kernel.backward else "fused_interaction"
            square = _product(batch, features, features)
            return _work(kind, square * _array(dim), square, _product(batch, features, dim, size))
        case k.EmbeddingForward() | k.EmbeddingBackward():
            return _tables(kernel)
        case k.SparseUpdate(lookups=lookups, rows=rows, dim=dim, element_bytes=size):
            present = (_array(rows) > 0) & (_array(lookups) > 0)
            return _where(_work("sparse_update", *_lookups(lookups, rows, dim, size)), present)
        case _:
            return _plain(kernel)


def _plain(kernel: k.Kernel) -> Work:
    match kernel:
        case k.Sort(keys=keys):
            n = _array(keys)
            return _work("sort", n, n * np.log2(np.maximum(n, 2)))
        case k.MultiTensor(function=function, elements=elements, tensors=tensors, bytes_per_element=size):
            return _work(f"multi_tensor_{function}", _product(elements, size), _array(tensors))
        case k.Memset(bytes=size):
            return _work("memset", _array(size))
        case k.Memcpy(bytes=size, kind=kind):
            return _work(f"memcpy_{kind}", _array(size))
        case _:
            raise UnsupportedError(f"A {type(kernel).__name__} is not measured on one device.")


def _gemm(g: k.Gemm) -> Work:
    flops = 2 * _product(g.m, g.n, g.k, g.batch)
    size = g.dtype.bytes * np.asarray(g.batch)
    a, b, c = _product(g.m, g.k, size), _product(g.k, g.n, size), _product(g.m, g.n, size)
    batched = np.any(_array(g.batch) > 1)
    kind = "bmm" if batched else f"gemm_{g.layout}"
    return _work(f"{kind}_{g.dtype}", flops, a, b, c)


def _tables(e: k.EmbeddingForward | k.EmbeddingBackward) -> Work:
    """A launch's tables: their amounts are added up along the last axis; its call is one."""
    kind = "embedding_forward" if isinstance(e, k.EmbeddingForward) else "embedding_backward"
    if isinstance(e, k.EmbeddingBackward) and e.optimizer:
        kind += f"_{e.optimizer}"
    out = _product(e.batch, e.dim, e.element_bytes)
    amounts = (*_lookups(_product(e.batch, e.pooling), e.rows, e.dim, e.element_bytes), out)
    here = np.asarray((_array(e.rows) > 0) & (_array(e.batch) > 0))
    shape = np.broadcast_shapes(*(a.shape for a in amounts), here.shape)
    here = np.broadcast_to(here, shape)
    if not shape:
        return _where(_work(kind, *amounts), here)
    summed = [np.asarray(np.where(here, np.broadcast_to(a, shape), 0.0).sum(axis=-1)) for a in amounts]
    return _where(_work(kind, *summed), np.asarray(here.any(axis=-1)))


def _lookups(lookups: k.Dim, rows: k.Dim, dim: k.Dim, size: k.Dim) -> tuple[Array, Array, Array]:
    """Lookups miss caches the more, the larger the table: their cost grows with the logarithm of its bytes."""
    count = _array(lookups)
    spread = np.log2(np.maximum(_product(rows, dim, size), 2.0))
    return count, _product(count, dim, size), np.asarray(count * spread)


def _where(work: Work, present: NDArray[np.bool_]) -> Work:
    return Work(work.kind, work.amounts, np.broadcast_to(present, work.present.shape))


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
