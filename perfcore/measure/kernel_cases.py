"""Every kind of kernel at a grid of shapes: as a description, and as the torch call that runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from perfcore.graph import kernels as k
from perfcore.measure.source import TORCH_DTYPE, Source

Call = Callable[[], object]
Build = Callable[[Source], Call]


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """A kernel, and how to make a call that runs it on fresh data.

    Attributes:
        kernel: what is measured.
        build: makes the call.
        captured: the call can be part of a CUDA graph: it waits for nothing, and autograd has no share in it.
    """

    kernel: k.Kernel
    build: Build
    captured: bool = True


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest kernels of a sweep: what a device of this kind is used for.

    Attributes:
        flops: of a matrix product.
        bytes: of the tensors of one kernel.
        batch: rows of activations.
        width: columns of a layer.
        lookups: of one embedding kernel.
        table_bytes: of one table.
    """

    flops: float
    bytes: float
    batch: int
    width: int
    lookups: int
    table_bytes: float


CPU_LIMITS = Limits(1e9, 3e7, 4096, 1024, 100_000, 2.6e8)
CUDA_LIMITS = Limits(2e12, 2e9, 65_536, 4096, 4_000_000, 8e9)


def dense_cases(limits: Limits, *, tf32: bool) -> Iterator[Case]:
    """Matrix products and everything that streams through memory."""
    yield from _products(limits, tf32=tf32)
    yield from _batched_products(limits, tf32=tf32)
    yield from _pointwise(limits)
    yield from _streams(limits)
    yield from _interactions(limits)
    yield from _optimizers(limits)


def powers(low: int, high: int, step: int = 4) -> list[int]:
    """`low`, `low * step`, ... up to `high`, which is the last."""
    out = []
    while low < high:
        out.append(low)
        low *= step
    return [*out, high]


def _dtypes(*, tf32: bool) -> tuple[k.DType, ...]:
    return (k.DType.FP32, k.DType.BF16, *((k.DType.TF32,) if tf32 else ()))


def _products(limits: Limits, *, tf32: bool) -> Iterator[Case]:
    widths = [1, 13, *powers(16, limits.width)]
    for m, n, depth in product(powers(16, limits.batch), widths, [13, *powers(32, limits.width, 3)]):
        if 2.0 * m * n * depth > limits.flops:
            continue
        for dtype in _dtypes(tf32=tf32):
            yield Case(k.Gemm(m, n, depth, dtype), _linear(m, n, depth, dtype))
            if n > 1:
                grad = k.Gemm(m, depth, n, dtype, layout=k.GemmLayout.GRAD_INPUT)
                yield Case(grad, _grad_input(m, n, depth, dtype))
            weight = k.Gemm(n, depth, m, dtype, layout=k.GemmLayout.GRAD_WEIGHT)
            yield Case(weight, _grad_weight(m, n, depth, dtype))


def _linear(m: int, n: int, depth: int, dtype: k.DType) -> Build:
    def build(s: Source) -> Call:
        x, w, b = (s.randn(*shape, dtype=TORCH_DTYPE[dtype]) for shape in ((m, depth), (n, depth), (n,)))
        return lambda: torch.addmm(b, x, w.t())

    return build


def _grad_input(m: int, n: int, depth: int, dtype: k.DType) -> Build:
    def build(s: Source) -> Call:
        g, w = (s.randn(*shape, dtype=TORCH_DTYPE[dtype]) for shape in ((m, n), (n, depth)))
        return lambda: g.mm(w)

    return build


def _grad_weight(m: int, n: int, depth: int, dtype: k.DType) -> Build:
    def build(s: Source) -> Call:
        g, x = (s.randn(*shape, dtype=TORCH_DTYPE[dtype]) for shape in ((m, n), (m, depth)))
        return lambda: g.t().mm(x)

    return build


def _batched_products(limits: Limits, *, tf32: bool) -> Iterator[Case]:
    shapes = ((3, 16), (9, 16), (9, 64), (27, 16), (27, 64), (27, 128))
    for batch, (count, dim), dtype in product(powers(16, limits.batch), shapes, _dtypes(tf32=tf32)):
        if 4.0 * batch * count * (dim + count) > limits.bytes:
            continue
        yield Case(k.Gemm(count, count, dim, dtype, batch=batch), _bmm(batch, count, dim, dtype))
        weight = k.Gemm(dim, count, count, dtype, batch=batch, layout=k.GemmLayout.GRAD_WEIGHT)
        yield Case(weight, _bmm_grad(batch, count, dim, dtype, transposed=True))
        grad = k.Gemm(count, dim, count, dtype, batch=batch, layout=k.GemmLayout.GRAD_INPUT)
        yield Case(grad, _bmm_grad(batch, count, dim, dtype, transposed=False))


def _bmm(batch: int, count: int, dim: int, dtype: k.DType) -> Build:
    def build(s: Source) -> Call:
        x = s.randn(batch, count, dim, dtype=TORCH_DTYPE[dtype])
        return lambda: torch.bmm(x, x.transpose(1, 2))

    return build


def _bmm_grad(batch: int, count: int, dim: int, dtype: k.DType, *, transposed: bool) -> Build:
    def build(s: Source) -> Call:
        x = s.randn(batch, count, dim, dtype=TORCH_DTYPE[dtype])
        g = s.randn(batch, count, count, dtype=TORCH_DTYPE[dtype])
        if transposed:
            return lambda: torch.bmm(x.transpose(1, 2), g)
        return lambda: torch.bmm(g, x)

    return build


# What each pointwise function of the builder is: values read and written an element, and the call.
_POINTWISE: dict[str, tuple[int, Callable[[Tensor, Tensor], object]]] = {
    "relu": (1, lambda x, _: torch.relu(x)),
    "threshold_backward": (2, lambda x, y: torch.ops.aten.threshold_backward(x, y, 0)),
    "add": (2, lambda x, y: x + y),
    "mul": (2, lambda x, y: x * y),
    "sigmoid": (1, lambda x, _: torch.sigmoid(x)),
    "sigmoid_backward": (2, lambda x, y: torch.ops.aten.sigmoid_backward(x, y)),
    "div": (1, lambda x, _: x / 3.0),
    "fill": (0, lambda x, _: torch.ones_like(x)),
    "sqrt": (1, lambda x, _: torch.sqrt(x)),
    "mse_loss": (2, lambda x, y: torch.ops.aten.mse_loss(x, y, 0)),
    "mse_loss_backward": (2, lambda x, y: torch.ops.aten.mse_loss_backward(x, x, y, 1)),
}


def _pointwise(limits: Limits) -> Iterator[Case]:
    for elements in powers(256, int(limits.bytes // 16), 16):
        for name, (reads, call) in _POINTWISE.items():
            kernel = k.Elementwise(name, elements, 4.0 * reads * elements, 4.0 * elements)
            yield Case(kernel, _pointwise_build(elements, call))
        for read, written in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)):
            sizes = (float(read.itemsize * elements), float(written.itemsize * elements))
            yield Case(k.Elementwise("copy", elements, *sizes), _cast_build(elements, read, written))
        for name in ("binary_cross_entropy", "binary_cross_entropy_backward"):
            kernel = k.Elementwise(name, elements, 8.0 * elements, 4.0 * elements)
            yield Case(kernel, _bce_build(elements, backward=name.endswith("backward")))


def _pointwise_build(elements: int, call: Callable[[Tensor, Tensor], object]) -> Build:
    def build(s: Source) -> Call:
        x, y = s.randn(elements).abs_(), s.randn(elements)  # a root is taken of x
        return lambda: call(x, y)

    return build


def _cast_build(elements: int, read: torch.dtype, written: torch.dtype) -> Build:
    def build(s: Source) -> Call:
        x = s.randn(elements, dtype=read)
        return lambda: x.to(written)

    return build


def _bce_build(elements: int, *, backward: bool) -> Build:
    aten = torch.ops.aten

    def build(s: Source) -> Call:
        x, y = torch.sigmoid(s.randn(elements)), (s.randn(elements) > 0).float()
        if backward:
            return lambda: aten.binary_cross_entropy_backward(x, x, y, None, 1)
        return lambda: aten.binary_cross_entropy(x, y, None, 0)

    return build


def _streams(limits: Limits) -> Iterator[Case]:
    """Reductions, concatenations, transposes, sorts and fills."""
    for rows, cols in product(powers(16, limits.batch), [1, *powers(16, limits.width)]):
        size = 4.0 * rows * cols
        if size > limits.bytes:
            continue
        yield Case(k.Reduction(rows, cols, 4.0), _one(rows, cols, lambda x: x.sum(0)))
        yield Case(k.Transpose(1.0, rows, cols, 4.0), _one(rows, cols, lambda x: x.t().contiguous()))
    for rows, cols, count in product(powers(16, limits.batch), (16, 64), (2, 3, 9, 27)):
        size = 4.0 * rows * cols * count
        if 2 * size > limits.bytes:
            continue
        yield Case(k.Concat(size, float(count)), _concat(rows, cols, count))
        yield Case(k.Concat(size, float(count), split=True), _split(rows, cols, count))
    for keys in powers(64, min(limits.lookups, int(limits.bytes // 16))):
        yield Case(k.Sort(keys, 8.0), _sort(keys))
    for size in powers(64, int(limits.bytes), 16):
        yield Case(k.Memset(float(size)), _one(size // 4, 1, lambda x: x.zero_()))


def _one(rows: int, cols: int, call: Callable[[Tensor], object]) -> Build:
    def build(s: Source) -> Call:
        x = s.randn(rows, cols)
        return lambda: call(x)

    return build


def _concat(rows: int, cols: int, count: int) -> Build:
    def build(s: Source) -> Call:
        parts = [s.randn(rows, cols) for _ in range(count)]
        return lambda: torch.cat(parts, 1)

    return build


def _split(rows: int, cols: int, count: int) -> Build:
    def build(s: Source) -> Call:
        whole = s.randn(rows, cols * count)
        return lambda: [part.contiguous() for part in torch.split(whole, cols, 1)]

    return build


def _sort(keys: int) -> Build:
    def build(s: Source) -> Call:
        values = s.integers(1 << 30, keys)
        return lambda: torch.sort(values)

    return build


def _interactions(limits: Limits) -> Iterator[Case]:
    for batch, count, dtype in product(
        powers(16, limits.batch), (3, 9, 18, 27), (torch.float32, torch.bfloat16)
    ):
        pairs, size = count * (count - 1) // 2, dtype.itemsize
        if 2.0 * size * batch * count * count > limits.bytes:
            continue
        for backward in (False, True):
            kernel = k.PairGather(batch, count, pairs, size, backward=backward)
            yield Case(kernel, _pairs(batch, count, dtype, backward=backward))
    for batch, count, dim in product(powers(16, limits.batch), (3, 9, 27), (16, 64)):
        if 8.0 * batch * count * (count + dim) > limits.bytes:
            continue
        for backward in (False, True):
            fused = k.FusedInteraction(batch, count, dim, 4.0, backward=backward)
            yield Case(fused, _fused(batch, count, dim, backward=backward))


def _pairs(batch: int, count: int, dtype: torch.dtype, *, backward: bool) -> Build:
    def build(s: Source) -> Call:
        x = s.randn(batch, count, count, dtype=dtype)
        rows, columns = torch.tril_indices(count, count, -1, device=s.device)
        if not backward:
            return lambda: x[:, rows, columns]
        grad, index = x[:, rows, columns], [None, rows, columns]
        # As autograd does: new zeros, and an accumulating `index_put`.
        return lambda: torch.ops.aten.index_put(grad.new_zeros(x.shape), index, grad, accumulate=True)

    return build


def _fused(batch: int, count: int, dim: int, *, backward: bool) -> Build:
    from perfcore.measure.layers import DotInteraction, pair_products_gradient

    def build(s: Source) -> Call:
        layer = DotInteraction(count, device=s.device, fused=True)
        dense, pooled = s.randn(batch, dim), s.randn(batch, dim * (count - 1))
        if not backward:
            return lambda: layer(dense, [pooled])
        grad = s.randn(batch, dim + count * (count - 1) // 2)
        features = torch.cat([dense, pooled], 1).view(batch, count, dim)
        return lambda: pair_products_gradient(features, layer.rows, layer.columns, grad)

    return build


# Values moved an element by the foreach kernels, and the call on parameters, gradients and state.
_FOREACH: dict[str, tuple[float, Callable[[list[Tensor], list[Tensor]], object]]] = {
    "add": (12.0, lambda p, g: torch._foreach_add_(p, g, alpha=-1e-6)),
    "addcmul": (12.0, lambda p, g: torch._foreach_addcmul_(p, g, g, 1e-6)),
    "addcdiv": (16.0, lambda p, g: torch._foreach_addcdiv_(p, g, g, 1e-6)),
    "sqrt": (8.0, lambda p, g: torch._foreach_sqrt(g)),
    "mul": (8.0, lambda p, g: torch._foreach_mul(p, 0.5)),
    "lerp": (12.0, lambda p, g: torch._foreach_lerp_(p, g, 0.1)),
    "fused_sgd": (
        12.0,
        lambda p, g: torch._fused_sgd_(
            p,
            g,
            [],
            weight_decay=0.0,
            momentum=0.0,
            lr=1e-6,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=True,
        ),
    ),
}


def _optimizers(limits: Limits) -> Iterator[Case]:
    for count, each in product((2, 6, 16), powers(64, int(limits.bytes // 12 // 16), 8)):
        for name, (size, call) in _FOREACH.items():
            kernel = k.MultiTensor(name, float(count * each), float(count), size)
            yield Case(kernel, _foreach(count, each, call))


def _foreach(count: int, each: int, call: Callable[[list[Tensor], list[Tensor]], object]) -> Build:
    def build(s: Source) -> Call:
        params = [s.randn(each).abs_().add_(1.0) for _ in range(count)]
        grads = [s.randn(each).abs_().add_(1.0) for _ in range(count)]
        return lambda: call(params, grads)

    return build
