"""The dense part's optimizer: the three implementations that `torch.optim` ships."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from perfcore.design.model import Interaction
from perfcore.design.training import Optimizer, OptimizerFusion
from perfcore.graph import cross
from perfcore.graph.kernels import Array, MultiTensor, Total
from perfcore.graph.ops import Launch, Leaf, Op, Shape
from perfcore.graph.parts import AWAIT_COLLECTIVES, FP32_BYTES, Mask, elementwise, tiny
from perfcore.graph.sizes import BOTTOM, TOP, Sizes

MODULE = "optimizer"
CLASS_NAME = {Optimizer.SGD: "SGD", Optimizer.ADAGRAD: "Adagrad", Optimizer.ADAM: "Adam"}


@dataclass(frozen=True, slots=True)
class Update:
    """One pointwise update of a parameter: `aten.<name>`.

    Attributes:
        name: with the underscore of the in-place form.
        tensors: tensor arguments of the for-loop form; 0 for the step counter, which lives on the host.
        values_read, values_written: per element.
    """

    name: str
    tensors: int
    values_read: int = 0
    values_written: int = 1


_COUNT, _READ_COUNT = Update("add_", 0), Update("_local_scalar_dense", 0)
_ROOT, _EPSILON, _APPLY = Update("sqrt", 1, 1), Update("add_", 1, 1), Update("addcdiv_", 3, 3)
_SQUARES = Update("addcmul_", 3, 2)

FOR_LOOP: dict[Optimizer, tuple[Update, ...]] = {
    Optimizer.SGD: (Update("add_", 2, 2),),
    Optimizer.ADAGRAD: (_COUNT, _READ_COUNT, _SQUARES, _ROOT, _EPSILON, _APPLY),
    Optimizer.ADAM: (
        _COUNT,
        Update("lerp_", 2, 2),
        Update("mul_", 1, 1),
        _SQUARES,
        _READ_COUNT,
        _ROOT,
        Update("div", 1, 1),
        _EPSILON,
        _APPLY,
    ),
}

_FOREACH: dict[Optimizer, tuple[Update, ...]] = {
    Optimizer.SGD: FOR_LOOP[Optimizer.SGD],
    Optimizer.ADAGRAD: (
        _COUNT,
        _READ_COUNT,
        _SQUARES,
        _ROOT,
        _EPSILON,
        Update("mul", 1, 1),
        _APPLY,
    ),
    Optimizer.ADAM: (
        _COUNT,
        Update("lerp_", 2, 2),
        Update("mul_", 1, 1),
        _SQUARES,
        _READ_COUNT,
        _READ_COUNT,
        _ROOT,
        Update("div_", 1, 1),
        _EPSILON,
        _APPLY,
    ),
}

# Tensor lists of the fused kernel, and values that it moves per element.
_FUSED = {
    Optimizer.SGD: Update("_fused_sgd_", 2, 2, 1),
    Optimizer.ADAGRAD: Update("_fused_adagrad_", 3, 3, 2),
    Optimizer.ADAM: Update("_fused_adam_", 4, 4, 3),
}


@dataclass(frozen=True, slots=True, eq=False)
class Parameter:
    """One dense parameter; a dim is 0 where a design lacks its layer."""

    shape: tuple[Array, ...]

    @property
    def elements(self) -> Array:
        """Number of values."""
        return self.shape[0] if len(self.shape) == 1 else self.shape[0] * self.shape[1]


def slots(sizes: Sizes, interaction: Interaction, cross_layers: int) -> list[tuple[str, int]]:
    """Modules and slots with parameters, in the order of `model.parameters()`; the cross network is one."""
    bottom = [(BOTTOM, j) for j in range(sizes.num_slots(BOTTOM))]
    top = [(TOP, j) for j in range(sizes.num_slots(TOP))]
    return [*bottom, *([(cross.MODULE, cross_layers)] if interaction is Interaction.DCN_V2 else []), *top]


def parameters(
    sizes: Sizes, module: str, slot: int, interaction: Interaction | None
) -> tuple[Parameter, ...]:
    """Weight and bias of an MLP slot; all factors of the cross network (`slot` layers of it)."""
    if module == cross.MODULE:
        width, rank = sizes.concat_width, sizes.dims.cross_rank
        down = [Parameter((rank, width))] * slot
        return (*down, *[Parameter((width, rank)), Parameter((width,))] * slot)
    layer = sizes.layer(module, slot, interaction)
    if not layer.variants:
        return ()
    return (Parameter((layer.outputs, layer.inputs)), Parameter((layer.outputs,)))


def for_loop(
    sizes: Sizes,
    optimizer: Optimizer,
    module: str,
    slot: int,
    interaction: Interaction | None,
    *,
    distributed: bool,
) -> tuple[Op, ...]:
    """One slot's share of `step()`, which the bottom MLP's first layer opens."""
    params = parameters(sizes, module, slot, interaction)
    launches = [
        elementwise(
            u.name.rstrip("_"),
            p.elements,
            read=u.values_read * FP32_BYTES,
            written=u.values_written * FP32_BYTES,
        )
        for p in params
        for u in FOR_LOOP[optimizer]
        if u.tensors
    ]
    leaves = [
        Leaf(f"aten.{u.name}", (p.shape,) * u.tensors or ((),)) for p in params for u in FOR_LOOP[optimizer]
    ]
    if module == cross.MODULE:
        return (_step(optimizer, launches, leaves, continues=True),)
    return tuple(
        _step(
            optimizer,
            launches,
            leaves,
            present=variant.present,
            continues=not opens,
            waits=opens and distributed,
        )
        for variant in sizes.layer(module, slot, interaction).variants
        for opens in (variant.first and module == BOTTOM,)
    )


def multi_tensor(
    sizes: Sizes,
    optimizer: Optimizer,
    fusion: OptimizerFusion,
    interaction: Interaction,
    cross_layers: int,
    *,
    distributed: bool,
) -> tuple[Op, ...]:
    """`step()` over all parameters at once; `tensors` counts absent layers too, and elements do not.

    Up to some twenty million elements fit into one launch (320 blocks of 65,536); a larger model is charged
    one launch as well, whose duration is that of the sum.
    """
    where = slots(sizes, interaction, cross_layers)
    by_slot = [parameters(sizes, m, s, _needed(sizes, m, s, interaction)) for m, s in where]
    params = [p for slot in by_slot for p in slot]
    # One term a slot: the bulk path adds up as few as it can.
    elements = Total(tuple(np.asarray(sum(p.elements for p in slot)) for slot in by_slot if slot))
    if fusion is OptimizerFusion.FOREACH:
        updates = _FOREACH[optimizer]
        leaves = [leaf for u in updates for leaf in _foreach_leaves(u, params)]
        launches = [_multi_tensor(u, elements, params) for u in updates if u.tensors]
    else:
        leaves, launches = _fused(optimizer, elements, params)
    return (_step(optimizer, launches, leaves, waits=distributed),)


def step_name(class_name: str) -> str:
    """As the profiler prints an optimizer's step."""
    return f"Optimizer.step#{class_name}.step"


def _needed(sizes: Sizes, module: str, slot: int, interaction: Interaction) -> Interaction | None:
    return interaction if module == TOP and sizes.reads_module_input(module, slot) else None


def _step(
    optimizer: Optimizer,
    launches: Sequence[Launch],
    leaves: Sequence[Leaf],
    *,
    present: Mask | bool = True,
    continues: bool = False,
    waits: bool = False,
) -> Op:
    return Op(
        step_name(CLASS_NAME[optimizer]),
        tuple(launches),
        tuple(leaves),
        waits=AWAIT_COLLECTIVES if waits else (),
        present=present,
        continues=continues,
        phase="optimizer",
        module=MODULE,
    )


def _foreach_leaves(update: Update, params: Sequence[Parameter]) -> list[Leaf]:
    """One call on lists; step counters are host scalars, read one by one."""
    if update is _COUNT:
        return [Leaf("aten.lift_fresh", ((),)), Leaf("aten._foreach_add_", ((),) * (len(params) + 1))]
    if update is _READ_COUNT:
        return [Leaf("aten._local_scalar_dense", ((),))] * len(params)
    return [Leaf(f"aten._foreach_{update.name}", _shapes(params) * update.tensors)]


def _fused(
    optimizer: Optimizer, elements: Total, params: Sequence[Parameter]
) -> tuple[list[Leaf], list[Launch]]:
    update = _FUSED[optimizer]
    counts: tuple[Shape, ...] = ((),) * len(params)
    leaves = [Leaf(f"aten.{update.name}", _shapes(params) * update.tensors)]
    launches = [_multi_tensor(update, elements, params)]
    if optimizer is Optimizer.SGD:
        return leaves, launches
    # The step counters live on the device here.
    leaves = [
        Leaf("aten._foreach_add_", counts),
        Leaf(f"aten.{update.name}", leaves[0].shapes + counts),
    ]
    return leaves, [tiny(), *launches]


def _shapes(params: Sequence[Parameter]) -> tuple[Shape, ...]:
    return tuple(p.shape for p in params)


def _multi_tensor(update: Update, elements: Total, params: Sequence[Parameter]) -> Launch:
    moved = (update.values_read + update.values_written) * FP32_BYTES
    return Launch(MultiTensor(update.name.strip("_"), elements, float(len(params)), moved))
