"""Linear layers with ReLU, forward and backward, as `nn.Linear` and autograd run them."""

from __future__ import annotations

import numpy as np

from perfcore.design.model import Interaction
from perfcore.design.training import MlpFusion, Precision
from perfcore.graph.kernels import Array, GemmLayout, Reduction
from perfcore.graph.ops import Launch, Leaf, Op, Stream
from perfcore.graph.parts import Mask, accumulate_grad, cast, elementwise, gemm, storage_bytes
from perfcore.graph.sizes import BOTTOM, Layer, LayerVariant, Sizes

Waits = tuple[tuple[Stream, Stream], ...]


def forward(
    sizes: Sizes,
    module: str,
    slot: int,
    precision: Precision,
    fusion: MlpFusion,
    interaction: Interaction | None,
) -> tuple[Op, ...]:
    """One slot's `linear` and `relu`; `interaction` is needed where the top MLP may begin here."""
    layer = sizes.layer(module, slot, interaction)
    ops: list[Op] = []
    for variant in layer.variants:
        casts_input = variant.first and reads_fp32(module, precision, interaction)
        if fusion is MlpFusion.FUSED and not layer.last:
            ops.append(_addmm_activation(sizes, module, layer, variant, precision, casts_input=casts_input))
            continue
        ops.append(_linear(sizes, module, layer, variant, precision, casts_input=casts_input))
        if not layer.last:
            ops.append(_relu(sizes, module, layer, variant, precision))
    return tuple(ops)


def backward(
    sizes: Sizes,
    module: str,
    slot: int,
    precision: Precision,
    fusion: MlpFusion,
    interaction: Interaction | None,
    *,
    distributed: bool,
    waits: Waits,
) -> tuple[Op, ...]:
    """One slot's backward; its first op executes `waits`.

    Fused: cuBLASLt's epilogues. The GEMM that makes a layer's output gradient also applies that layer's
    ReLU mask, and the weight's GEMM sums the bias gradient; only the bottom MLP's output layer, whose
    gradient comes from the interaction, masks in a kernel of its own.
    """
    layer = sizes.layer(module, slot, interaction)
    fused = fusion is MlpFusion.FUSED
    masks = not layer.last and not (fused and slot < sizes.num_slots(module) - 1)
    ops: list[Op] = []
    for variant in layer.variants:
        first_op_waits = waits
        if masks:
            ops.append(_relu_backward(sizes, module, layer, variant, precision, waits=waits))
            first_op_waits = ()
        ops.append(
            _addmm_backward(
                sizes.batch,
                layer.inputs,
                layer.outputs,
                precision,
                module=module,
                present=variant.present,
                input_gradient=not (variant.first and module == BOTTOM),
                fused=fused,
                waits=first_op_waits,
            )
        )
        casts_input = variant.first and module != BOTTOM and reads_fp32(module, precision, interaction)
        ops += parameter_gradients(
            sizes.batch,
            layer.inputs,
            layer.outputs,
            precision,
            module=module,
            present=variant.present,
            casts_input=casts_input,
            distributed=distributed,
        )
    return tuple(ops)


def reads_fp32(module: str, precision: Precision, interaction: Interaction | None) -> bool:
    """Whether autocast casts the MLP's input: the batch, or features that promoted to fp32."""
    return precision is Precision.BF16 and (module == BOTTOM or interaction is not Interaction.DOT)


def weight_casts(
    batch: Array, inputs: Array, outputs: Array, *, bias: bool, casts_input: bool
) -> tuple[list[Launch], list[Leaf]]:
    """Autocast's casts of a linear layer's arguments, in its order: bias, weight, input."""
    shapes = [*([(outputs,)] if bias else []), (outputs, inputs), *([(batch, inputs)] if casts_input else [])]
    elements = [s[0] if len(s) == 1 else s[0] * s[1] for s in shapes]
    launches = [cast(e, to_bf16=True) for e in elements]
    return launches, [Leaf("aten._to_copy", (shape,)) for shape in shapes]


def linear_leaves(batch: Array, inputs: Array, outputs: Array, *, name: str) -> list[Leaf]:
    """`t` of the weight, then the product: `addmm` with a bias, `mm` without."""
    shapes = ((batch, inputs), (inputs, outputs))
    return [
        Leaf("aten.t", ((outputs, inputs),)),
        Leaf(name, shapes if name == "aten.mm" else ((outputs,), *shapes)),
    ]


def _linear(
    sizes: Sizes, module: str, layer: Layer, variant: LayerVariant, precision: Precision, *, casts_input: bool
) -> Op:
    batch, k, n = sizes.batch, layer.inputs, layer.outputs
    launches: list[Launch] = []
    leaves: list[Leaf] = []
    if precision is Precision.BF16:
        launches, leaves = weight_casts(batch, k, n, bias=True, casts_input=casts_input)
    if layer.last:
        # cuBLASLt's bias epilogue needs more than one output column; else the bias is copied first.
        launches.append(elementwise("copy", batch * n, read=0.0, written=storage_bytes(precision)))
    launches.append(gemm(batch, n, k, precision, GemmLayout.FORWARD, epilogue=not layer.last))
    leaves += linear_leaves(batch, k, n, name="aten.addmm")
    return Op(
        "aten::linear",
        tuple(launches),
        tuple(leaves),
        present=variant.present,
        phase="forward",
        module=module,
    )


def _addmm_activation(
    sizes: Sizes, module: str, layer: Layer, variant: LayerVariant, precision: Precision, *, casts_input: bool
) -> Op:
    batch, k, n = sizes.batch, layer.inputs, layer.outputs
    launches: list[Launch] = []
    leaves: list[Leaf] = []
    if precision is Precision.BF16:
        launches, leaves = weight_casts(batch, k, n, bias=True, casts_input=casts_input)
    launches.append(gemm(batch, n, k, precision, GemmLayout.FORWARD, epilogue=True))
    leaves += linear_leaves(batch, k, n, name="aten._addmm_activation")
    return Op(
        "aten::_addmm_activation",
        tuple(launches),
        tuple(leaves),
        present=variant.present,
        phase="forward",
        module=module,
    )


def _relu(sizes: Sizes, module: str, layer: Layer, variant: LayerVariant, precision: Precision) -> Op:
    shape, size = (sizes.batch, layer.outputs), storage_bytes(precision)
    return Op(
        "aten::relu",
        (elementwise("relu", shape[0] * shape[1], read=size, written=size),),
        (Leaf("aten.relu", (shape,)), Leaf("aten.detach", (shape,))),
        present=variant.present,
        phase="forward",
        module=module,
    )


def _relu_backward(
    sizes: Sizes, module: str, layer: Layer, variant: LayerVariant, precision: Precision, *, waits: Waits
) -> Op:
    shape, size = (sizes.batch, layer.outputs), storage_bytes(precision)
    return Op(
        "ReluBackward0",
        (elementwise("threshold_backward", shape[0] * shape[1], read=2 * size, written=size),),
        (Leaf("aten.detach", (shape,)), Leaf("aten.threshold_backward", (shape, shape))),
        waits=waits,
        present=variant.present,
        phase="backward",
        module=module,
    )


def _addmm_backward(
    batch: Array,
    k: Array,
    n: Array,
    precision: Precision,
    *,
    module: str,
    present: Mask | bool,
    input_gradient: bool = True,
    fused: bool = False,
    waits: Waits = (),
) -> Op:
    launches: list[Launch] = []
    leaves: list[Leaf] = []
    if input_gradient:
        launches.append(gemm(batch, k, n, precision, GemmLayout.GRAD_INPUT, epilogue=fused))
        leaves += [Leaf("aten.t", ((k, n),)), Leaf("aten.mm", ((batch, n), (n, k)))]
    launches.append(gemm(n, k, batch, precision, GemmLayout.GRAD_WEIGHT, epilogue=fused))
    leaves += [
        Leaf("aten.t", ((batch, n),)),
        Leaf("aten.mm", ((n, batch), (batch, k))),
        Leaf("aten.t", ((n, k),)),
    ]
    if not fused:
        launches.append(Launch(Reduction(batch, n, storage_bytes(precision))))
        leaves += [Leaf("aten.sum", ((batch, n),)), Leaf("aten.view", ((_ONE, n),))]
    return Op(
        "AddmmBackward0",
        tuple(launches),
        tuple(leaves),
        waits=waits,
        present=present,
        phase="backward",
        module=module,
    )


def parameter_gradients(
    batch: Array,
    k: Array,
    n: Array,
    precision: Precision,
    *,
    module: str,
    present: Mask | bool = True,
    casts_input: bool = False,
    distributed: bool,
) -> list[Op]:
    """What autograd runs between a linear layer's products and the layer below.

    Nodes run in the reverse order of their creation: autocast casts the bias first, so it comes last.
    """
    tag = {"present": present, "module": module}
    transpose = Op("TBackward0", (), (Leaf("aten.t", ((k, n),)),), phase="backward", **tag)  # type: ignore[arg-type]
    bias = accumulate_grad(n, distributed=distributed, present=present, module=module)
    weight = accumulate_grad(n, k, distributed=distributed, present=present, module=module)
    if precision is not Precision.BF16:
        return [bias, transpose, weight]
    ops = [transpose]
    if casts_input:
        ops.append(to_copy_backward(batch, k, to_bf16=False, present=present, module=module))
    ops += [to_copy_backward(n, k, to_bf16=False, present=present, module=module), weight]
    return [*ops, to_copy_backward(n, to_bf16=False, present=present, module=module), bias]


def to_copy_backward(
    *shape: Array, to_bf16: bool, module: str, present: Mask | bool = True, then: tuple[Leaf, ...] = ()
) -> Op:
    """The gradient of a cast: a cast back; `then` are leaves that accumulate the result."""
    elements = shape[0] if len(shape) == 1 else shape[0] * shape[1]
    return Op(
        "ToCopyBackward0",
        (cast(elements, to_bf16=to_bf16),),
        (Leaf("aten._to_copy", (shape,)), *then),
        present=present,
        phase="backward",
        module=module,
    )


_ONE: Array = np.ones((1, 1))
