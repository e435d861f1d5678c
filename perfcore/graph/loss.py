"""Input copies, the loss with its gradient, and `zero_grad`."""

from __future__ import annotations

import numpy as np

from perfcore.design.model import Loss
from perfcore.design.training import EmbeddingFusion, IndexType, Precision
from perfcore.graph.kernels import Array, CopyKind, Memcpy, Reduction
from perfcore.graph.ops import Launch, Leaf, Op, Shape, Stream
from perfcore.graph.parts import FP32_BYTES, cast, elementwise
from perfcore.graph.sizes import Sizes

MODULE = "loss"


def input_copies(
    sizes: Sizes,
    embedding: EmbeddingFusion,
    index_dtype: IndexType,
    *,
    pinned_input: bool,
    distributed: bool,
    ahead: bool = False,
) -> tuple[Op, ...]:
    """`.to(device)` of each host tensor: dense, indices, offsets, labels.

    Lookups come in one tensor a table, or in one for all tables where these are batched or exchanged. A batch that is
    copied `ahead` is on a stream of its own.
    """
    stream = Stream.COPY if ahead else Stream.COMPUTE
    batch = sizes.batch
    lookups: list[tuple[Array, Array]] = [(batch * p, batch) for p in sizes.table_poolings]
    if distributed or embedding is EmbeddingFusion.TABLE_BATCHED:
        lookups = [(batch * sizes.total_pooling, batch * float(sizes.num_tables))]
    dense: Shape = (batch, float(sizes.dims.num_dense_features))
    return (
        _copy(
            dense, batch * (sizes.dims.num_dense_features * FP32_BYTES), pinned=pinned_input, stream=stream
        ),
        *(_copy((n,), n * index_dtype.bytes, pinned=pinned_input, stream=stream) for n, _ in lookups),
        *(_copy((n,), n * index_dtype.bytes, pinned=pinned_input, stream=stream) for _, n in lookups),
        label_copy(sizes, pinned_input=pinned_input, stream=stream),
    )


def label_copy(sizes: Sizes, *, pinned_input: bool, stream: Stream = Stream.COMPUTE) -> Op:
    """`.to(device)` of the labels."""
    return _copy((sizes.batch, 1.0), sizes.batch * FP32_BYTES, pinned=pinned_input, stream=stream)


def forward(sizes: Sizes, loss: Loss, precision: Precision) -> tuple[Op, ...]:
    """The sigmoid and the loss run in fp32; a mean loss is an elementwise kernel and a reduction."""
    shape = (sizes.batch, 1.0)
    to_fp32 = ((cast(sizes.batch, to_bf16=False),), (Leaf("aten._to_copy", (shape,)),))
    launches, leaves = to_fp32 if precision is Precision.BF16 else ((), ())
    name = "binary_cross_entropy" if loss is Loss.BCE else "mse_loss"
    sigmoid = elementwise("sigmoid", sizes.batch, read=FP32_BYTES, written=FP32_BYTES)
    mean = Launch(Reduction(sizes.batch, np.ones((1, 1)), FP32_BYTES, axis=None))
    each = elementwise(name, sizes.batch, read=2 * FP32_BYTES, written=FP32_BYTES)
    broadcast = () if loss is Loss.BCE else (Op("aten::broadcast_tensors", phase="forward", module=MODULE),)
    # A mean of `binary_cross_entropy` is written into the tensor of single losses; `mse_loss` reduces in place.
    copied = (Launch(Memcpy(FP32_BYTES, CopyKind.D2D)),) if loss is Loss.BCE else ()
    return (
        Op("aten::to", launches, leaves, phase="forward", module=MODULE),
        Op(
            "aten::sigmoid",
            (sigmoid,),
            (Leaf("aten.sigmoid", (shape,)), Leaf("aten.detach", (shape,))),
            phase="forward",
            module=MODULE,
        ),
        *broadcast,
        Op(
            f"aten::{name}",
            (each, mean, *copied),
            (Leaf(f"aten.{name}", (shape, shape)),),
            phase="forward",
            module=MODULE,
        ),
    )


def read(sizes: Sizes) -> tuple[Op, ...]:
    """`loss.item()`: the host waits for the scalar."""
    copy = Launch(Memcpy(FP32_BYTES, CopyKind.D2H), blocks=True)
    leaf = Leaf("aten._local_scalar_dense", ((),))
    return (Op("aten::item", (copy,), (leaf,), phase="forward", module=MODULE),)


def synchronize(sizes: Sizes, *, several_streams: bool) -> tuple[Op, ...]:
    """`torch.cuda.synchronize()`: the host waits for every stream."""
    streams = tuple(Stream) if several_streams else (Stream.COMPUTE,)
    return (Op("cudaDeviceSynchronize", blocks_on=streams, phase="optimizer", module="synchronize"),)


def backward(sizes: Sizes, loss: Loss, precision: Precision) -> tuple[Op, ...]:
    """From the root gradient to the logits'."""
    batch, shape = sizes.batch, (sizes.batch, 1.0)
    name = "binary_cross_entropy" if loss is Loss.BCE else "mse_loss"
    node = "BinaryCrossEntropyBackward0" if loss is Loss.BCE else "MseLossBackward0"
    launches = [elementwise(f"{name}_backward", batch, read=2 * FP32_BYTES, written=FP32_BYTES)]
    if loss is Loss.BCE:  # the mean's divisor is applied afterwards
        launches.append(elementwise("div", batch, read=FP32_BYTES, written=FP32_BYTES))
    else:  # into a tensor of zeros
        launches.insert(0, elementwise("fill", batch, read=0.0, written=FP32_BYTES))
    ops = [
        _backward(
            "aten::ones_like",
            (elementwise("fill", np.ones((1, 1)), read=0.0, written=FP32_BYTES),),
            Leaf("aten.ones_like", ((),)),
        ),
        _backward(node, tuple(launches), Leaf(f"aten.{name}_backward", ((), shape, shape))),
        _backward(
            "SigmoidBackward0",
            (elementwise("sigmoid_backward", batch, read=2 * FP32_BYTES, written=FP32_BYTES),),
            Leaf("aten.detach", (shape,)),
            Leaf("aten.sigmoid_backward", (shape, shape)),
        ),
    ]
    if precision is Precision.BF16:
        ops.append(
            _backward("ToCopyBackward0", (cast(batch, to_bf16=True),), Leaf("aten._to_copy", (shape,)))
        )
    return tuple(ops)


def zero_grad(sizes: Sizes, optimizers: tuple[str, ...]) -> tuple[Op, ...]:
    """`zero_grad(set_to_none=True)` of each optimizer: the host drops references, nothing is launched."""
    return tuple(
        Op(f"Optimizer.zero_grad#{name}.zero_grad", phase="optimizer", module="optimizer")
        for name in optimizers
    )


def _copy(shape: Shape, size: Array, *, pinned: bool, stream: Stream) -> Op:
    kind = CopyKind.H2D_PINNED if pinned else CopyKind.H2D_PAGEABLE
    launch = Launch(Memcpy(size, kind), stream, blocks=not pinned)
    return Op("aten::to", (launch,), (Leaf("aten._to_copy", (shape,)),), phase="input", module="input")


def _backward(name: str, launches: tuple[Launch, ...], *leaves: Leaf) -> Op:
    return Op(name, launches, leaves, phase="backward", module=MODULE)
