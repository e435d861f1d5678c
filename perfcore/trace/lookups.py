"""Table-batched embedding kernels of a trace: FBGEMM's lookups, whose sizes stand in the shapes of their inputs.

The forward op's inputs tell bags and lookups, weights and rows; its backward op's only the gradient, so the n-th backward
takes the sizes of the n-th forward from the end.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np

from perfcore.graph.kernels import EmbeddingBackward, EmbeddingForward, Kernel, MeasuredKernel
from perfcore.trace.link import Launched
from perfcore.trace.records import LeafCall

_BACKWARD_OP = "SplitLookupFunction_"
_BACKWARD = re.compile(r"embedding_backward_codegen_(\w+?)_(?:un)?weighted_kernel_(cta|warp)")
_WIDEST = 4096
_FP32_BYTES = 4.0
# Indices are not recorded; clicks are Zipf-like.
_SKEW = 1.0


def lookup_of(leaf: LeafCall) -> EmbeddingForward | None:
    """The lookup of an op `split_embedding_codegen_lookup_*`, all its tables being like the mean one.

    The first vector of whole numbers names each table's placement `(t,)`; the two longest long vectors are
    indices and offsets; the longest of floats the weights; the longest that divides them into rows is the state of row-wise optimizers.
    """
    vectors = [
        (s[0], kind) for s, kind in zip(leaf.shapes, leaf.types, strict=False) if len(s) == 1 and s[0] > 0
    ]
    tables = next((n for n, kind in vectors if kind == "int"), 0)
    every = [n for n, kind in vectors if kind.startswith("long")]
    longs = [n for n in every if n in sorted(every)[-2:]][:2]
    floats = [n for n, kind in vectors if kind == "float"]
    if not tables or len(longs) < 2 or not floats:
        return None
    lookups, bags = longs[0], longs[1] - 1
    weights = floats[0]
    rows = max((n for n in floats[1:] if weights % n < n and 1 < weights / n <= _WIDEST), default=0)
    if bags < tables or lookups == 0 or rows == 0:
        return None
    return _forward(tables, bags / tables, rows / tables, lookups / bags, weights / rows)


def _forward(tables: int, batch: float, rows: float, pooling: float, dim: float) -> EmbeddingForward:
    def each(value: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        return np.full(tables, value)

    return EmbeddingForward(
        each(batch), each(rows), each(pooling), each(dim), each(_SKEW), each(_FP32_BYTES), batched=True
    )


def backwards_of(launched: Sequence[Launched], lookups: Sequence[EmbeddingForward]) -> Mapping[int, Kernel]:
    """By launch: backward kernels. Two share the rows of one backward; the first stands for both."""
    groups: dict[int, list[int]] = {}
    for index, launch in enumerate(launched):
        if _BACKWARD_OP in launch.name and _BACKWARD.search(launch.kernel.name):
            groups.setdefault(launch.piece, []).append(index)
    kernels: dict[int, Kernel] = {}
    for group, forward in zip(groups.values(), reversed(lookups), strict=False):
        found = _BACKWARD.search(launched[group[0]].kernel.name)
        assert found is not None, "chosen by this pattern"
        f = forward
        kernels[group[0]] = EmbeddingBackward(
            f.batch, f.rows, f.pooling, f.dim, f.skew, f.element_bytes, batched=True, optimizer=found[1]
        )
        kernels |= {i: MeasuredKernel(launched[i].kernel.name, 0.0) for i in group[1:]}
    return kernels
