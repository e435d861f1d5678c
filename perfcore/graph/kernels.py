"""Kernel kinds: what runs on a device, described by its dims.

A dim is a number or an array that broadcasts to `(..., r)`: candidate axes first, rank last. Embedding
kernels have a further, last axis `t` of tables, summed inside one kernel. A dim that depends on the
widths of all layers is a `Total` or a `Bucket` (`perfcore.graph.dim_types`); `resolve` turns those into plain arrays.

Kernels say nothing of time: `perfcore.cost` does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from enum import StrEnum
from operator import attrgetter
from typing import Any, TypeAlias

from perfcore.graph.dim_types import Array, Bucket, Dim, DType, GemmLayout, Total
from perfcore.graph.layer_kernels import BatchNorm, Convolution, Dropout, LayerNorm, Pooling, Softmax
from perfcore.values import dataclass

__all__ = [
    "Array",
    "BatchNorm",
    "Bucket",
    "Convolution",
    "DType",
    "Dim",
    "Dropout",
    "GemmLayout",
    "LayerNorm",
    "Pooling",
    "Softmax",
    "Total",
]


@dataclass(frozen=True, slots=True, eq=False)
class Gemm:
    """`C[m, n] = A[m, k] · B[k, n]`, `batch` times; `epilogue` adds bias and activation for free."""

    m: Dim
    n: Dim
    k: Dim
    dtype: DType
    batch: Dim = 1.0
    layout: GemmLayout = GemmLayout.FORWARD
    epilogue: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Elementwise:
    """A pointwise kernel; `function` is the aten name of what it computes (`add`, `relu`, `copy`, ...)."""

    function: str
    elements: Dim
    bytes_read: Dim
    bytes_written: Dim


@dataclass(frozen=True, slots=True, eq=False)
class Reduction:
    """Sum (or mean) of a `(rows, cols)` tensor over its rows (`axis=0`) or over everything (`axis=None`)."""

    rows: Dim
    cols: Dim
    element_bytes: Dim
    axis: int | None = 0


@dataclass(frozen=True, slots=True, eq=False)
class Concat:
    """Concatenation (`split=False`) or its inverse: `bytes` read, and as many written, by `parts` tensors."""

    bytes: Dim
    parts: Dim
    split: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Transpose:
    """A materialised transpose of `batch` `(m, n)` matrices."""

    batch: Dim
    m: Dim
    n: Dim
    element_bytes: Dim


@dataclass(frozen=True, slots=True, eq=False)
class PairGather:
    """`index` of the lower triangle of `(features, features)` per sample; `backward` scatters (`index_put_`)."""

    batch: Dim
    features: Dim
    pairs: Dim
    element_bytes: Dim
    backward: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class FusedInteraction:
    """Dot interaction of `(batch, features, dim)` in one kernel; `backward` reads the output's gradient."""

    batch: Dim
    features: Dim
    dim: Dim
    element_bytes: Dim
    backward: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddingForward:
    """Pooled lookup of one table, or of many in one launch; dims broadcast to `(..., r, t)`.

    Attributes:
        batch: bags.
        rows: rows of the table shard; 0 where a rank holds none.
        pooling: mean lookups per bag.
        dim: columns.
        skew: Zipf exponent of the accesses.
        element_bytes: of a weight.
        batched: one table-batched launch for all `t` (sum over them); else `t` has size 1.
        index_bytes: of an index or an offset.
        cache_ratio: share of the rows that device memory holds, the latest used ones; the others are read over
            the host's link.
    """

    batch: Dim
    rows: Dim
    pooling: Dim
    dim: Dim
    skew: Dim
    element_bytes: Dim
    batched: bool = False
    index_bytes: float = 8.0
    cache_ratio: Dim = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddingBackward:
    """Gradient of a pooled lookup, fused with the row update when `optimizer` is named.

    Dims as in `EmbeddingForward`. `optimizer=None` writes one gradient row per lookup (a sparse gradient).
    """

    batch: Dim
    rows: Dim
    pooling: Dim
    dim: Dim
    skew: Dim
    element_bytes: Dim
    batched: bool = False
    optimizer: str | None = None
    index_bytes: float = 8.0
    cache_ratio: Dim = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class CachePopulate:
    """Rows that a batch needs and the cache in device memory lacks come from the host; rows they replace go back.

    Dims as in `EmbeddingForward`; `t` tables in one launch.
    """

    batch: Dim
    rows: Dim
    pooling: Dim
    dim: Dim
    skew: Dim
    cache_ratio: Dim
    element_bytes: Dim


@dataclass(frozen=True, slots=True, eq=False)
class SparseUpdate:
    """`weight.add_(sparse_gradient)`: adds `lookups` rows of `dim` columns into a table."""

    lookups: Dim
    rows: Dim
    dim: Dim
    skew: Dim
    element_bytes: Dim


@dataclass(frozen=True, slots=True, eq=False)
class Sort:
    """Radix sort of `keys` keys (with values when `pairs`)."""

    keys: Dim
    key_bytes: Dim
    pairs: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class MultiTensor:
    """One foreach or fused-optimizer kernel over `tensors` tensors of `elements` elements in all.

    `bytes_per_element` counts reads and writes; `function` names what is computed (`sgd`, `adam`, `add`, ...).
    """

    function: str
    elements: Dim
    tensors: Dim
    bytes_per_element: float


class CopyKind(StrEnum):
    """Direction of a memory copy, and the host memory's kind."""

    H2D_PINNED = "h2d_pinned"
    H2D_PAGEABLE = "h2d_pageable"
    D2H = "d2h"
    D2D = "d2d"


@dataclass(frozen=True, slots=True, eq=False)
class Memcpy:
    """A memory copy of `bytes`."""

    bytes: Dim
    kind: CopyKind


@dataclass(frozen=True, slots=True, eq=False)
class Memset:
    """A memory fill of `bytes`."""

    bytes: Dim


class CollectiveKind(StrEnum):
    """NCCL's collectives that hybrid-parallel DLRM uses."""

    ALL_REDUCE = "all_reduce"
    ALL_TO_ALL = "all_to_all"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"


@dataclass(frozen=True, slots=True, eq=False)
class Collective:
    """One collective; its duration is the transfer once every rank has arrived.

    Attributes:
        kind: which.
        bytes: the size in nccl-tests' convention: all_reduce: the buffer; all_to_all: what a rank sends
            in all, its own part included, maximum over ranks of sent and received; all_gather: the
            gathered output; reduce_scatter: the input.
        world_size: ranks that take part.
        local_world_size: ranks on one machine.
    """

    kind: CollectiveKind
    bytes: Dim
    world_size: Dim
    local_world_size: Dim


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredKernel:
    """A kernel of a trace whose work is not known: its name and how long it ran."""

    name: str
    us: Dim


Kernel: TypeAlias = (
    Gemm
    | Elementwise
    | Reduction
    | Concat
    | Transpose
    | PairGather
    | FusedInteraction
    | EmbeddingForward
    | EmbeddingBackward
    | CachePopulate
    | SparseUpdate
    | Sort
    | MultiTensor
    | Memcpy
    | Memset
    | Convolution
    | BatchNorm
    | Pooling
    | LayerNorm
    | Softmax
    | Dropout
    | Collective
    | MeasuredKernel
)


def dim_names(kind: type[Any]) -> tuple[str, ...]:
    """Names of a kernel class's numeric fields, in order; enums, strings and flags are left out."""
    return _fields_of(kind)[0]


def dim_values(kernel: Kernel) -> tuple[Dim, ...]:
    """The numeric fields of a kernel, in the order of `dim_names`."""
    return _fields_of(type(kernel))[1](kernel)


def _fields_of(kind: type[Any]) -> tuple[tuple[str, ...], Callable[[Any], tuple[Dim, ...]]]:
    known = _FIELDS.get(kind)
    if known is None:
        names = tuple(f.name for f in fields(kind) if f.type in ("Dim", "float"))
        read: Callable[[Any], Any] = attrgetter(*names)  # of one name alone it reads no tuple
        known = _FIELDS[kind] = (names, read if len(names) > 1 else lambda kernel: (read(kernel),))
    return known


def dims(kernel: Kernel) -> dict[str, Dim]:
    """The numeric fields of a kernel by name, in order."""
    return dict(zip(dim_names(type(kernel)), dim_values(kernel), strict=True))


def summed_dim(kernel: Kernel) -> str | None:
    """Name of the dim that is a `Total` or `Bucket`, `None` where there is none; at most one may be."""
    summed = [i for i, value in enumerate(dim_values(kernel)) if type(value) in _SUMS]
    assert len(summed) <= 1, f"one summed dim at most, but got {len(summed)} in {kernel}"
    return dim_names(type(kernel))[summed[0]] if summed else None


def with_dims(kernel: Kernel, **values: Any) -> Kernel:
    """The same kernel with other dims."""
    kept = {f.name: getattr(kernel, f.name) for f in fields(kernel)}
    return type(kernel)(**kept | values)


def resolve(kernel: Kernel) -> Kernel:
    """The kernel with every `Total` and `Bucket` replaced by its value."""
    name = summed_dim(kernel)
    return kernel if name is None else with_dims(kernel, **{name: getattr(kernel, name).value()})


_SUMS = frozenset({Total, Bucket})
_FIELDS: dict[
    type[Any], tuple[tuple[str, ...], Callable[[Any], tuple[Dim, ...]]]
] = {}  # by class, when first read
