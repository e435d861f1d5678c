"""The small parts that ops are made of: launches of common kernels, and number formats."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from perfcore.design.training import Precision
from perfcore.graph.kernels import Array, DType, Elementwise, Gemm, GemmLayout, Memset
from perfcore.graph.ops import Launch, Leaf, Op, Stream

Mask = NDArray[np.bool_]

FP32_BYTES = 4.0
BF16_BYTES = 2.0
INT64_BYTES = 8.0
# A compute stream's wait for all collectives launched so far.
AWAIT_COLLECTIVES = ((Stream.COMPUTE, Stream.COMMUNICATION),)

GEMM_DTYPE = {Precision.FP32: DType.FP32, Precision.TF32: DType.TF32, Precision.BF16: DType.BF16}


def storage_bytes(precision: Precision) -> float:
    """Bytes of one activation element of the dense part."""
    return BF16_BYTES if precision is Precision.BF16 else FP32_BYTES


def mask_of(condition: Mask) -> Mask | bool:
    """The condition, or plain True or False where it is the same everywhere."""
    if condition.size == 1:
        return bool(condition.item())
    if condition.all():
        return True
    return condition if condition.any() else False


def elementwise(
    function: str, elements: Array | float, *, read: float, written: float, present: Mask | bool = True
) -> Launch:
    """A pointwise kernel that moves `read` and `written` bytes per element."""
    return Launch(Elementwise(function, elements, elements * read, elements * written), present=present)


def tiny() -> Launch:
    """A kernel on counters or a scan's set-up: a few bytes, so a launch and nothing else."""
    return Launch(Memset(FP32_BYTES))


def on_cuda_only(launches: Iterable[Launch]) -> list[Launch]:
    """Launches that CUDA's implementation of an op needs beside those of every device."""
    return [Launch(x.kernel, x.stream, x.after, x.blocks, x.present, cuda_only=True) for x in launches]


def cast(elements: Array, *, to_bf16: bool) -> Launch:
    """`aten::_to_copy` between fp32 and bf16."""
    read, written = (FP32_BYTES, BF16_BYTES) if to_bf16 else (BF16_BYTES, FP32_BYTES)
    return elementwise("copy", elements, read=read, written=written)


def gemm(m: Array, n: Array, k: Array, precision: Precision, layout: GemmLayout, *, epilogue: bool) -> Launch:
    """One matrix product of a linear layer."""
    return Launch(Gemm(m, n, k, GEMM_DTYPE[precision], layout=layout, epilogue=epilogue))


def accumulate_grad(
    *shape: Array,
    distributed: bool,
    present: Mask | bool,
    module: str,
    leaves: tuple[Leaf, ...] | None = None,
) -> Op:
    """Autograd hands a dense gradient to its parameter; `DistributedDataParallel` scales it into its bucket.

    The gradient is a view of the bucket afterwards (`gradient_as_bucket_view=True`), as TorchRec sets it.
    """
    launches: tuple[Launch, ...] = ()
    if distributed:
        elements = shape[0] if len(shape) == 1 else shape[0] * shape[1]
        launches = (elementwise("mul", elements, read=FP32_BYTES, written=FP32_BYTES),)
    return Op(
        "torch::autograd::AccumulateGrad",
        launches,
        (Leaf("aten.detach", (shape,)),) if leaves is None else leaves,
        present=present,
        phase="backward",
        module=module,
    )
