"""DCNv2's low-rank cross layer: `x <- x0 * (W (V x) + b) + x`."""

from __future__ import annotations

from perfcore.design.training import Precision
from perfcore.graph.kernels import Array, GemmLayout, Reduction
from perfcore.graph.mlp import linear_leaves, parameter_gradients, to_copy_backward, weight_casts
from perfcore.graph.ops import Launch, Leaf, Op
from perfcore.graph.parts import FP32_BYTES, accumulate_grad, elementwise, gemm, storage_bytes
from perfcore.graph.sizes import Sizes

MODULE = "interaction"


def forward(sizes: Sizes, precision: Precision) -> tuple[Op, ...]:
    """One layer; the features stay fp32, the products run in `precision`."""
    batch, width, rank = sizes.batch, sizes.concat_width, sizes.dims.cross_rank
    shape, mixed = (batch, width), _mixed_read(precision)
    return (
        _product(batch, width, rank, precision, bias=False),
        _product(batch, rank, width, precision, bias=True),
        _forward("aten::mul", _pointwise("mul", shape, read=mixed), Leaf("aten.mul", (shape, shape))),
        _forward("aten::add", _pointwise("add", shape), Leaf("aten.add", (shape, shape))),
    )


def backward(
    sizes: Sizes, precision: Precision, *, first: bool, last: bool, distributed: bool
) -> tuple[Op, ...]:
    """One layer's gradient; `first` and `last` in the order of the forward pass.

    Gradients of the features add up where they meet: at the first layer's input, which every layer's
    product reads, and at each layer's own input.
    """
    batch, width, rank = sizes.batch, sizes.concat_width, sizes.dims.cross_rank
    shape = (batch, width)
    add = (Leaf("aten.add", (shape, shape)),)
    meets_residual, meets_product = first and not last, first or not last
    ops = [
        _backward("AddBackward0", *_accumulated(shape, add, adds=meets_residual)),
        _mul_backward(shape, precision, adds=meets_product),
        _product_backward(batch, rank, width, precision, bias=True),
        *parameter_gradients(batch, rank, width, precision, module=MODULE, distributed=distributed),
    ]
    if precision is not Precision.BF16:
        ops.append(_product_backward(batch, width, rank, precision, bias=False, then=add))
        ops.append(_backward("TBackward0", (), Leaf("aten.t", ((width, rank),))))
    else:
        ops.append(_product_backward(batch, width, rank, precision, bias=False))
        ops.append(_backward("TBackward0", (), Leaf("aten.t", ((width, rank),))))
        copy = to_copy_backward(batch, width, to_bf16=False, module=MODULE, then=add)
        launches = (*copy.launches, *_pointwise("add", shape))
        ops.append(Op(copy.name, launches, copy.leaves, phase=copy.phase, module=MODULE))
        ops.append(to_copy_backward(rank, width, to_bf16=False, module=MODULE))
    ops.append(accumulate_grad(rank, width, distributed=distributed, present=True, module=MODULE))
    return tuple(ops)


def parameters(sizes: Sizes) -> Array:
    """`(..., 1)`: weights and biases of one layer."""
    return sizes.concat_width * (2.0 * sizes.dims.cross_rank + 1.0)


def _product(batch: Array, k: Array, n: Array, precision: Precision, *, bias: bool) -> Op:
    launches: list[Launch] = []
    leaves: list[Leaf] = []
    if precision is Precision.BF16:
        launches, leaves = weight_casts(batch, k, n, bias=bias, casts_input=not bias)
    launches.append(gemm(batch, n, k, precision, GemmLayout.FORWARD, epilogue=bias))
    leaves += linear_leaves(batch, k, n, name="aten.addmm" if bias else "aten.mm")
    return _forward("aten::linear", tuple(launches), *leaves)


def _product_backward(
    batch: Array, k: Array, n: Array, precision: Precision, *, bias: bool, then: tuple[Leaf, ...] = ()
) -> Op:
    """`addmm` computes the input's gradient first, `mm` the weight's."""
    grad_input = gemm(batch, k, n, precision, GemmLayout.GRAD_INPUT, epilogue=False)
    grad_weight = gemm(n, k, batch, precision, GemmLayout.GRAD_WEIGHT, epilogue=False)
    input_leaves = [Leaf("aten.t", ((k, n),)), Leaf("aten.mm", ((batch, n), (n, k)))]
    weight_leaves = [
        Leaf("aten.t", ((batch, n),)),
        Leaf("aten.mm", ((n, batch), (batch, k))),
        Leaf("aten.t", ((n, k),)),
    ]
    if not bias:
        launches = (grad_weight, grad_input, *(_pointwise("add", (batch, k)) if then else ()))
        return _backward("MmBackward0", launches, *weight_leaves, *input_leaves, *then)
    bias_gradient = Launch(Reduction(batch, n, storage_bytes(precision)))
    sums = [Leaf("aten.sum", ((batch, n),)), Leaf("aten.view", ((1.0, n),))]
    return _backward(
        "AddmmBackward0", (grad_input, grad_weight, bias_gradient), *input_leaves, *weight_leaves, *sums
    )


def _mul_backward(shape: tuple[Array, Array], precision: Precision, *, adds: bool) -> Op:
    """Gradients of both factors; autocast's factor takes a cast back to bf16."""
    leaves = [Leaf("aten.mul", (shape, shape))] * 2
    launches = [*_pointwise("mul", shape), *_pointwise("mul", shape, read=_mixed_read(precision))]
    if precision is Precision.BF16:
        leaves.append(Leaf("aten._to_copy", (shape,)))
        launches += _pointwise("copy", shape, read=FP32_BYTES, written=storage_bytes(precision))
    if adds:
        leaves.append(Leaf("aten.add", (shape, shape)))
        launches += _pointwise("add", shape)
    return _backward("MulBackward0", tuple(launches), *leaves)


def _accumulated(
    shape: tuple[Array, Array], add: tuple[Leaf, ...], *, adds: bool
) -> tuple[tuple[Launch, ...], *tuple[Leaf, ...]]:
    return (_pointwise("add", shape), *add) if adds else ((),)


def _mixed_read(precision: Precision) -> float:
    """Bytes read per element by a product of an fp32 feature with a linear layer's output."""
    return FP32_BYTES + storage_bytes(precision)


def _pointwise(
    function: str, shape: tuple[Array, Array], *, read: float = 2 * FP32_BYTES, written: float = FP32_BYTES
) -> tuple[Launch, ...]:
    return (elementwise(function, shape[0] * shape[1], read=read, written=written),)


def _forward(name: str, launches: tuple[Launch, ...], *leaves: Leaf) -> Op:
    return Op(name, launches, leaves, phase="forward", module=MODULE)


def _backward(name: str, launches: tuple[Launch, ...], *leaves: Leaf) -> Op:
    return Op(name, launches, leaves, phase="backward", module=MODULE)
