"""DLRM's own training script as changes to the iteration that PyTorch 2 runs.

`dlrm_s_pytorch.py` of facebookresearch/dlrm under PyTorch 1.x, as published runs of 2021 and 2022 trained it: tables are
batched into kernels that update rows unsorted, and launches are those of public traces of it (DLRM_default and
DLRM_MLPerf on a V100, 2021; owensgroup/ml_perf_model).

- `.to(device)` without `non_blocking` waits for its copy, from pinned memory too; labels are copied after the forward pass.
- The interaction's pairs are listed on the host and copied, one list of rows and one of columns, every iteration.
- A bias is laid out by a kernel of its own before the product is added.
- `zero_grad` fills with zeros, and gradients are added to them.
- The gradient of the interaction's `[:]` is a copy, and its scatter lists indices in four more kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import reduce

import numpy as np

from perfcore.graph import loss, optimizer
from perfcore.graph.dims import Structure
from perfcore.graph.groups import batched_groups
from perfcore.graph.kernels import CopyKind, EmbeddingBackward, Gemm, Memcpy
from perfcore.graph.ops import Launch, Leaf, Op, Region
from perfcore.graph.parts import FP32_BYTES, INT64_BYTES, elementwise
from perfcore.graph.sizes import BOTTOM, TOP, Sizes

# Lookups of a table with so many rows a lookup hardly ever meet: each moves its row.
_UNREPEATED = 100.0


def rewritten(sizes: Sizes, structure: Structure, region: Region) -> tuple[Region, ...]:
    """What the script runs in place of a region."""
    if region.name == "zero_grad":
        return _zero_grad(sizes, structure, region)
    rewrite = _REGIONS.get(region.name, _layer)
    return (Region(region.name, rewrite(sizes, structure, region.ops)),)


def _input(sizes: Sizes, structure: Structure, ops: tuple[Op, ...]) -> tuple[Op, ...]:
    """Labels are copied later; the other copies are waited for."""
    return tuple(_waited(op) for op in ops[:-1])


def _loss(sizes: Sizes, structure: Structure, ops: tuple[Op, ...]) -> tuple[Op, ...]:
    _, sigmoid, *rest = ops
    return (sigmoid, _waited(loss.label_copy(sizes, pinned_input=structure.pinned_input)), *rest)


def _waited(op: Op) -> Op:
    return replace(op, launches=tuple(replace(x, blocks=True) for x in op.launches))


def _lookup(sizes: Sizes, structure: Structure, ops: tuple[Op, ...]) -> tuple[Op, ...]:
    """Indices and offsets are on the device already, which two `.to` find out."""
    already = Op("aten::to", phase="forward", module="embedding")
    lookups = tuple(replace(op, name="LookupFunction") for op in ops if "lookup" in op.name)
    return (already, already, *lookups)


def _lookup_backward(sizes: Sizes, structure: Structure, ops: tuple[Op, ...]) -> tuple[Op, ...]:
    """One kernel; the tables' parameter gets an empty gradient."""
    accumulate = Op("torch::autograd::AccumulateGrad", phase="backward", module="embedding")
    out: list[Op] = []
    for op, group in zip(ops, reversed(batched_groups(sizes, distributed=False)), strict=True):
        kernel = op.launches[-1].kernel
        assert isinstance(kernel, EmbeddingBackward)
        apart = np.maximum(group.rows, _UNREPEATED * group.batch * group.pooling * (group.rows > 0))
        unsorted = replace(kernel, rows=np.where(group.pooling > 1, apart, group.rows))
        lookup = replace(op, name="LookupFunctionBackward", launches=(Launch(unsorted),))
        out += [lookup, replace(accumulate, present=op.present)]
    return tuple(out)


def _interaction(sizes: Sizes, structure: Structure, ops: tuple[Op, ...]) -> tuple[Op, ...]:
    at = next(n for n, op in enumerate(ops) if op.name == "aten::index")

    def on_host(name: str, *launches: Launch) -> Op:
        return Op(name, launches, phase="forward", module="interaction")

    size = np.full((1, 1), sizes.pairs * INT64_BYTES)
    copy = on_host("aten::to", Launch(Memcpy(size, CopyKind.H2D_PAGEABLE), blocks=True))
    listed = [on_host("aten::to"), on_host("aten::detach_")]
    return (*ops[:at], *listed, *listed, on_host("aten::slice"), copy, copy, *ops[at:])


def _interaction_backward(sizes: Sizes, structure: Structure, ops: tuple[Op, ...]) -> tuple[Op, ...]:
    """Wrapped indices (twice a remainder) and linear ones (twice a product) are tensors of their own."""
    at = next(n for n, op in enumerate(ops) if op.name == "IndexBackward0")
    memset, *rest = ops[at].launches
    listed = [
        elementwise(f, sizes.pairs, read=INT64_BYTES, written=INT64_BYTES)
        for f in ("remainder", "remainder", "mul", "mul")
    ]
    index = replace(ops[at], launches=(memset, *listed, *rest))
    products = sizes.batch * sizes.features * sizes.features
    whole = Op(
        "SliceBackward0",
        (
            elementwise("fill", products, read=0.0, written=FP32_BYTES),
            Launch(Memcpy(products * FP32_BYTES, CopyKind.D2D)),
        ),
        (Leaf("aten.slice_backward", ((sizes.batch, sizes.features, sizes.features),)),),
        phase="backward",
        module="interaction",
    )
    return (*ops[:at], index, whole, *ops[at + 1 :])


def _layer(sizes: Sizes, structure: Structure, ops: tuple[Op, ...]) -> tuple[Op, ...]:
    changes = {"aten::linear": _with_bias_kernel, "torch::autograd::AccumulateGrad": _accumulating}
    return tuple(changes.get(op.name, _same)(op) for op in ops)


def _same(op: Op) -> Op:
    return op


def _with_bias_kernel(op: Op) -> Op:
    product = op.launches[-1]
    kernel = product.kernel
    assert isinstance(kernel, Gemm)
    (outputs,), (batch, _), _ = op.leaves[-1].shapes
    bias = elementwise("copy", batch * outputs, read=0.0, written=FP32_BYTES)
    return replace(op, launches=(bias, replace(product, kernel=replace(kernel, epilogue=False))))


def _accumulating(op: Op) -> Op:
    [shape] = op.leaves[0].shapes
    elements = reduce(np.multiply, shape[1:], np.asarray(shape[0]))
    return replace(op, launches=(elementwise("add", elements, read=2 * FP32_BYTES, written=FP32_BYTES),))


def _zero_grad(sizes: Sizes, structure: Structure, region: Region) -> tuple[Region, ...]:
    """A fill for every parameter, one region for each layer."""
    [op] = region.ops
    regions = []
    for module, slot in optimizer.slots(sizes, structure.interaction, structure.cross_layers):
        kind = structure.interaction if module == TOP and sizes.reads_module_input(module, slot) else None
        layer = sizes.layer(module, slot, kind)
        fills = tuple(
            elementwise("fill", p.elements, read=0.0, written=FP32_BYTES)
            for p in optimizer.parameters(sizes, module, slot, kind)
        )
        ops = tuple(
            replace(op, launches=fills, present=v.present, continues=not (v.first and module == BOTTOM))
            for v in layer.variants
        )
        regions.append(Region(f"zero_grad/{module}/{slot}", ops))
    return tuple(regions)


_REGIONS: dict[str, Callable[[Sizes, Structure, tuple[Op, ...]], tuple[Op, ...]]] = {
    "input": _input,
    "loss": _loss,
    "embedding": _lookup,
    "embedding_backward": _lookup_backward,
    "interaction": _interaction,
    "interaction_backward": _interaction_backward,
}
