"""NVIDIA's DLRM example as changes to the iteration that PyTorch 2 runs.

`PyTorch/Recommendation/DLRM` of NVIDIA/DeepLearningExamples on one GPU: one fp32 matrix holds all tables, gathered by a kernel of its own; gradients of its
rows are sparse, and `torch.optim.SGD` adds them. What it launches was read in its source (`cuda_src/gather_gpu_fused.cu`, `nn/parts.py`,
`scripts/main.py`) and in PyTorch's (`add_out_dense_sparse_cuda`, `GradScaler`).

- Batches are copied ahead, on a stream of their own; indices become int64 on the device.
- Gathered rows and the bottom MLP's output are concatenated, in half precision under autocast, before the interaction, whose output is padded to a multiple of
  eight columns.
- The gradient of the rows, a slice, is made contiguous, then copied to fp32 as the values of a sparse tensor.
- Under autocast `GradScaler` reads and writes every gradient to unscale it, and the host waits for the flag that none overflowed.
- `SGD` multiplies the values by the learning rate into a new tensor, then adds its rows to the matrix.
- A CUDA graph holds forward and backward pass; the batch is copied into its inputs, and the updates follow it eagerly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from perfcore.design.training import Launches, Precision
from perfcore.graph import loss, optimizer
from perfcore.graph.dims import Structure
from perfcore.graph.groups import Group, batched_groups
from perfcore.graph.kernels import (
    Array,
    Concat,
    CopyKind,
    Dim,
    EmbeddingBackward,
    EmbeddingForward,
    FusedInteraction,
    Gemm,
    Memcpy,
    MultiTensor,
)
from perfcore.graph.ops import Launch, Op, Region, Stream
from perfcore.graph.parts import FP32_BYTES, INT64_BYTES, elementwise, storage_bytes, tiny
from perfcore.graph.sizes import TOP, Sizes

_PADDED_TO = 8.0
_SCALE_LAUNCHES = 4  # the scale's reciprocal in double precision, and a flag
_UPDATES = ("optimizer", "table_optimizer")


def rewritten(sizes: Sizes, structure: Structure, region: Region) -> tuple[Region, ...]:
    """What the example runs in place of a region."""
    rewrite = _REGIONS.get(region.name)
    if rewrite is not None:
        return (Region(region.name, rewrite(sizes, structure, region.ops)),)
    if region.name.startswith(TOP):
        return (Region(region.name, tuple(_padded(op) for op in region.ops)),)
    return (region,)


def eager_after_graph(region: Region) -> bool:
    """The region follows the captured part and is launched eagerly."""
    return region.name in _UPDATES


def _input(sizes: Sizes, structure: Structure, ops: tuple[Op, ...]) -> tuple[Op, ...]:
    """The next batch crosses the link; this one's indices are widened, and under a graph all is copied to its inputs."""
    ahead = tuple(
        replace(op, launches=tuple(replace(x, stream=Stream.COPY, blocks=False) for x in op.launches))
        for op in ops
    )
    indices = sizes.batch * sizes.total_pooling
    widened = [elementwise("copy", indices, read=float(structure.index_dtype.bytes), written=INT64_BYTES)]
    if structure.fusion.launches is Launches.CUDA_GRAPH:
        dense = sizes.batch * (sizes.dims.num_dense_features * FP32_BYTES)
        for size in (dense, indices * INT64_BYTES, sizes.batch * FP32_BYTES):
            widened.append(Launch(Memcpy(size, CopyKind.D2D)))
    here = tuple(Op("aten::to", (x,), phase="input", module="input") for x in widened)
    return (*ahead, *here)


def _tables(sizes: Sizes) -> Group:
    [group] = batched_groups(sizes, distributed=False)
    return group


def _values(group: Group) -> Array:
    """`(..., r)`: values of all gathered rows."""
    return np.asarray((group.batch * group.pooling * group.dim).sum(axis=-1))


def _lookup(sizes: Sizes, structure: Structure, ops: tuple[Op, ...]) -> tuple[Op, ...]:
    _, lookup = ops
    kernel = lookup.launches[0].kernel
    assert isinstance(kernel, EmbeddingForward)
    return (
        replace(lookup, name="LookupFunction", launches=(Launch(replace(kernel, index_bytes=INT64_BYTES)),)),
    )


def _lookup_backward(sizes: Sizes, structure: Structure, ops: tuple[Op, ...]) -> tuple[Op, ...]:
    """The indices of a sparse gradient and its values."""
    [op], group, size = ops, _tables(sizes), storage_bytes(structure.precision)
    launches = (
        elementwise("clone", _values(group), read=size, written=size),
        elementwise("add", group.lookups, read=INT64_BYTES, written=INT64_BYTES),
        elementwise("copy", _values(group), read=size, written=FP32_BYTES),
    )
    accumulate = Op("torch::autograd::AccumulateGrad", phase="backward", module="embedding")
    return (replace(op, name="LookupFunctionBackward", launches=launches), accumulate)


def _interaction(sizes: Sizes, structure: Structure, ops: tuple[Op, ...]) -> tuple[Op, ...]:
    size = storage_bytes(structure.precision)
    joined = Launch(Concat(sizes.batch * sizes.concat_width * size, 2.0))
    return (
        Op("aten::cat", (joined,), phase="forward", module="interaction"),
        *(_of_size(op, size) for op in ops),
    )


def _interaction_backward(sizes: Sizes, structure: Structure, ops: tuple[Op, ...]) -> tuple[Op, ...]:
    size = storage_bytes(structure.precision)
    return (*(_of_size(op, size) for op in ops), Op("CatBackward0", phase="backward", module="interaction"))


def _of_size(op: Op, size: float) -> Op:
    [launch] = op.launches
    assert isinstance(launch.kernel, FusedInteraction)
    return replace(op, launches=(replace(launch, kernel=replace(launch.kernel, element_bytes=size)),))


def _optimizer(sizes: Sizes, structure: Structure, ops: tuple[Op, ...]) -> tuple[Op, ...]:
    [step] = ops
    kernel = step.launches[-1].kernel
    assert isinstance(kernel, MultiTensor)
    unscale = Launch(replace(kernel, function="unscale", bytes_per_element=2 * FP32_BYTES))
    return (*_unscaled(structure, unscale), *(loss.read(sizes) if _scaled(structure) else ()), step)


def _table_optimizer(sizes: Sizes, structure: Structure, ops: tuple[Op, ...]) -> tuple[Op, ...]:
    group = _tables(sizes)
    values = _values(group)
    added = EmbeddingBackward(
        group.batch,
        group.rows,
        group.pooling,
        group.dim,
        group.skew,
        FP32_BYTES,
        batched=True,
        optimizer=structure.table_optimizer.value,
        index_bytes=INT64_BYTES,
    )
    name = optimizer.step_name(optimizer.CLASS_NAME[structure.optimizer])
    step = Op(
        name,
        (elementwise("mul", values, read=FP32_BYTES, written=FP32_BYTES), Launch(added)),
        phase="optimizer",
        module="optimizer",
    )
    return (*_unscaled(structure, elementwise("unscale", values, read=FP32_BYTES, written=FP32_BYTES)), step)


def _scaled(structure: Structure) -> bool:
    return structure.precision is Precision.BF16


def _unscaled(structure: Structure, launch: Launch) -> tuple[Op, ...]:
    if not _scaled(structure):
        return ()
    name = "aten::_amp_foreach_non_finite_check_and_unscale_"
    scale = tuple(
        Op("aten::mul", (tiny(),), phase="optimizer", module="optimizer") for _ in range(_SCALE_LAUNCHES)
    )
    return (*scale, Op(name, (launch,), phase="optimizer", module="optimizer"))


def _padded(op: Op) -> Op:
    """Products of the top MLP's first layer see the padded columns; other widths are multiples already, or one."""

    def columns(dim: Dim) -> Dim:
        widths = np.asarray(dim, dtype=np.float64)
        return np.where(widths > _PADDED_TO, np.ceil(widths / _PADDED_TO) * _PADDED_TO, widths)

    def launched(x: Launch) -> Launch:
        k = x.kernel
        return replace(x, kernel=replace(k, n=columns(k.n), k=columns(k.k))) if isinstance(k, Gemm) else x

    return replace(op, launches=tuple(launched(x) for x in op.launches))


_REGIONS: dict[str, Callable[[Sizes, Structure, tuple[Op, ...]], tuple[Op, ...]]] = {
    "input": _input,
    "embedding": _lookup,
    "embedding_backward": _lookup_backward,
    "interaction": _interaction,
    "interaction_backward": _interaction_backward,
    "optimizer": _optimizer,
    "table_optimizer": _table_optimizer,
}
