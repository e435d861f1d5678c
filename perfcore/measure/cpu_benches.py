"""The kernels that a quick calibration times: each kind at a grid of shapes, as a description and as a torch call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perfcore.graph import kernels as k

MAX_FLOPS = 1e9
MAX_BYTES = 3e7
BAG: dict[str, Any] = {"scale_grad_by_freq": False, "mode": 0, "sparse": True}


@dataclass(frozen=True, slots=True, eq=False)
class Bench:
    """A kernel's description and the torch call that runs it."""

    kernel: k.Kernel
    call: Callable[[], object]


def benches(generator: torch.Generator) -> Iterator[Bench]:
    """Every kind of kernel at a grid of shapes, small to what a design of a thousand samples has."""
    yield from _gemms(generator)
    yield from _batched_gemms(generator)
    yield from _memory_bound(generator)
    yield from _pairs(generator)
    yield from _embeddings(generator)
    yield from _updates(generator)


def _gemms(generator: torch.Generator) -> Iterator[Bench]:
    for m in (16, 128, 1024):
        for n in (1, 16, 128, 512):
            for depth in (13, 64, 384):
                if 2 * m * n * depth > MAX_FLOPS:
                    continue
                x, w, g = _randn(generator, m, depth), _randn(generator, n, depth), _randn(generator, m, n)
                bias = _randn(generator, n)
                for dtype in (k.DType.FP32, k.DType.BF16):
                    yield from _three_products(x, w, g, bias, dtype)


def _three_products(x: Tensor, w: Tensor, g: Tensor, bias: Tensor, dtype: k.DType) -> Iterator[Bench]:
    (m, depth), n = x.shape, len(w)
    if dtype is k.DType.BF16:
        x, w, g, bias = (t.bfloat16() for t in (x, w, g, bias))
    yield Bench(k.Gemm(m, n, depth, dtype), lambda: torch.addmm(bias, x, w.t()))
    yield Bench(k.Gemm(m, depth, n, dtype, layout=k.GemmLayout.GRAD_INPUT), lambda: g.mm(w))
    yield Bench(k.Gemm(n, depth, m, dtype, layout=k.GemmLayout.GRAD_WEIGHT), lambda: g.t().mm(x))


def _batched_gemms(generator: torch.Generator) -> Iterator[Bench]:
    for batch in (16, 256, 1024):
        for count, dim in ((4, 8), (9, 32), (27, 16), (27, 64)):
            x, g = _randn(generator, batch, count, dim), _randn(generator, batch, count, count)
            for dtype in (k.DType.FP32, k.DType.BF16):
                a, b = (x, g) if dtype is k.DType.FP32 else (x.bfloat16(), g.bfloat16())
                yield Bench(
                    k.Gemm(count, count, dim, dtype, batch=batch),
                    lambda a=a: torch.bmm(a, a.transpose(1, 2)),  # type: ignore[misc]
                )
                yield Bench(
                    k.Gemm(count, dim, count, dtype, batch=batch),
                    lambda a=a, b=b: torch.bmm(b, a),  # type: ignore[misc]
                )


def _memory_bound(generator: torch.Generator) -> Iterator[Bench]:
    for rows, cols in ((4, 8), (128, 64), (128, 512), (2048, 64), (2048, 1024)):
        x, out = _randn(generator, rows, cols), torch.empty(rows, cols)
        size = 4.0 * rows * cols
        yield Bench(k.Elementwise("relu", x.numel(), size, size), lambda x=x: torch.relu(x))  # type: ignore[misc]
        yield Bench(k.Elementwise("copy", x.numel(), size, size), lambda o=out, x=x: o.copy_(x))  # type: ignore[misc]
        yield Bench(k.Elementwise("add", x.numel(), 2 * size, size), lambda o=out, x=x: o + x)  # type: ignore[misc]
        yield Bench(k.Reduction(rows, cols, 4), lambda x=x: x.sum(0))  # type: ignore[misc]
        yield Bench(k.Transpose(1, rows, cols, 4), lambda x=x: x.t().contiguous())  # type: ignore[misc]
        for count in (2, 8, 27):
            whole = [x] * count
            if size * count < MAX_BYTES:
                yield Bench(k.Concat(size * count, count), lambda w=whole: torch.cat(w, 1))  # type: ignore[misc]
                joined = torch.cat(whole, 1)
                yield Bench(
                    k.Concat(size * count, count, split=True),
                    lambda w=joined, c=cols: [p.contiguous() for p in w.split(c, 1)],  # type: ignore[misc]
                )
    for keys in (64, 4096, 65536):
        values = torch.randint(1 << 30, (keys,), generator=generator)
        yield Bench(k.Sort(keys, 8), lambda v=values: torch.sort(v))  # type: ignore[misc]


def _pairs(generator: torch.Generator) -> Iterator[Bench]:
    for batch in (16, 256, 1024):
        for count in (4, 9, 27):
            x = _randn(generator, batch, count, count)
            rows, columns = torch.tril_indices(count, count, -1)
            pairs = x[:, rows, columns]
            yield Bench(
                k.PairGather(batch, count, len(rows), 4),
                lambda x=x, r=rows, c=columns: x[:, r, c],  # type: ignore[misc]
            )
            yield Bench(
                k.PairGather(batch, count, len(rows), 4, backward=True),
                lambda x=x, r=rows, c=columns, p=pairs: torch.zeros_like(x).index_put_(  # type: ignore[misc]
                    (torch.arange(len(x))[:, None], r, c), p, accumulate=True
                ),
            )


def _embeddings(generator: torch.Generator) -> Iterator[Bench]:
    for rows, dim in ((100, 8), (10_000, 16), (10_000, 64), (500_000, 16), (500_000, 64)):
        weight = _randn(generator, rows, dim)
        for batch, pooling in ((16, 1), (256, 1), (256, 10), (2048, 1), (2048, 10)):
            yield from _lookups(weight, batch, pooling, generator)
    # Many lookups: their gradient rows no longer fit in a cache, nor in memory that is at hand.
    yield from _lookups(_randn(generator, 1_000_000, 64), 2048, 50, generator)


def _lookups(weight: Tensor, batch: int, pooling: int, generator: torch.Generator) -> Iterator[Bench]:
    rows, dim = weight.shape
    indices = torch.randint(rows, (batch * pooling,), generator=generator)
    offsets = torch.arange(0, batch * pooling, pooling)
    grad = _randn(generator, batch, dim)
    shape = (batch, rows, pooling, dim, 0.0, 4)
    saved = torch.ops.aten._embedding_bag(weight, indices, offsets, **BAG)[1:]

    def backward() -> Tensor:
        out: Tensor = torch.ops.aten._embedding_bag_backward(
            grad, indices, offsets, *saved, rows, **BAG, per_sample_weights=None
        )
        return out

    sparse = backward()
    yield Bench(
        k.EmbeddingForward(*shape),
        lambda: torch.ops.aten._embedding_bag(weight, indices, offsets, **BAG),
    )
    yield Bench(k.EmbeddingBackward(*shape), backward)
    yield Bench(k.SparseUpdate(batch * pooling, rows, dim, 0.0, 4), lambda: weight.add_(sparse, alpha=-1e-6))


def _updates(generator: torch.Generator) -> Iterator[Bench]:
    for count in (2, 8, 24):
        for elements in (64, 4096, 131_072):
            params = [_randn(generator, elements) for _ in range(count)]
            grads = [_randn(generator, elements) for _ in range(count)]
            yield Bench(
                k.MultiTensor("sgd", elements * count, count, 12.0),
                lambda p=params, g=grads: torch._foreach_add_(p, g, alpha=-1e-6),  # type: ignore[misc]
            )


def _randn(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator)
