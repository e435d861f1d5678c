"""What a traced kernel computes, read from its name and the shapes of the op that launched it.

Where either does not tell, the kernel stays a `MeasuredKernel`: its recorded duration is all that is known.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from perfcore.graph.kernels import (
    CopyKind,
    Elementwise,
    EmbeddingForward,
    Gemm,
    GemmLayout,
    Kernel,
    MeasuredKernel,
    Memcpy,
    Memset,
    Reduction,
    Transpose,
)
from perfcore.trace.layers import layers_of
from perfcore.trace.leaf_types import dtype_of, element_bytes
from perfcore.trace.link import Launched, is_collective
from perfcore.trace.lookups import backwards_of, lookup_of
from perfcore.trace.records import LeafCall

_COPIES = {
    "HtoD (Pinned": CopyKind.H2D_PINNED,
    "HtoD (Pageable": CopyKind.H2D_PAGEABLE,
    "HtoD": CopyKind.H2D_PINNED,
    "HostToDevice": CopyKind.H2D_PINNED,
    "DtoH": CopyKind.D2H,
    "DeviceToHost": CopyKind.D2H,
    "DtoD": CopyKind.D2D,
    "DeviceToDevice": CopyKind.D2D,
}
_GEMM_OPS = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1}  # place of the first factor
_GEMM = re.compile(r"gemm|cutlass|gemv|_cublas|sm\d\d_xmma", re.IGNORECASE)
_LAYOUTS = {"_nn": GemmLayout.GRAD_INPUT, "_nt": GemmLayout.GRAD_WEIGHT, "_tn": GemmLayout.FORWARD}
_STRIDED = "::elementwise_kernel<"  # as against the vectorized one, which needs contiguous tensors
_LOOKUP = "split_embedding_codegen_lookup"


def kernels_of(launched: Sequence[Launched]) -> list[Kernel]:
    """The kernels of a step as a graph holds them."""
    kernels = [kernel_of(x) for x in launched]
    lookups = [k for k in kernels if isinstance(k, EmbeddingForward)]
    for at, kernel in {**layers_of(launched), **backwards_of(launched, lookups)}.items():
        kernels[at] = kernel
    return kernels


def kernel_of(launched: Launched) -> Kernel:
    """The kernel as a graph holds it."""
    kernel, leaf = launched.kernel, launched.call.leaf
    measured = MeasuredKernel(kernel.name, kernel.duration_us)
    if kernel.name.startswith(("Memcpy", "CopyHost", "CopyDevice")) and kernel.bytes > 0:
        kind = next((v for k, v in _COPIES.items() if k in kernel.name), None)
        return Memcpy(kernel.bytes, kind) if kind else measured
    if kernel.name.startswith(("Memset", "FillBuffer")) and kernel.bytes > 0:
        return Memset(kernel.bytes)
    if leaf is None or is_collective(kernel.name):
        return measured
    return _of_leaf(kernel.name, leaf) or measured


def _of_leaf(name: str, leaf: LeafCall) -> Kernel | None:
    tensors = _tensors(leaf)
    if leaf.name in _GEMM_OPS and _GEMM.search(name):
        return _gemm(name, leaf)
    if not tensors:
        return None
    if leaf.name in ("aten::copy_", "aten::clone") and _STRIDED in name and _same_matrices(tensors):
        shape, size = tensors[0]
        return Transpose(math.prod(shape[:-2]), shape[-2], shape[-1], size)
    if "elementwise_kernel" in name:
        return _elementwise(leaf, tensors)
    if "reduce_kernel" in name and leaf.name in ("aten::sum", "aten::mean"):
        shape, size = tensors[0]
        columns = shape[-1] if len(shape) > 1 else 1
        return Reduction(max(1.0, math.prod(shape) / max(1, columns)), columns, size)
    if _LOOKUP in leaf.name and "forward" in name:
        return lookup_of(leaf)
    return None


def _tensors(leaf: LeafCall) -> list[tuple[tuple[int, ...], int]]:
    """Shape and element size of every tensor among the inputs."""
    pairs = zip(leaf.shapes, leaf.types, strict=False)
    return [(s, size) for s, kind in pairs if s and (size := element_bytes(kind))]


def _same_matrices(tensors: Sequence[tuple[tuple[int, ...], int]]) -> bool:
    """One shape of two dimensions at least, and one type: copied by strides, because the layouts differ."""
    return len(set(tensors)) == 1 and len(tensors[0][0]) > 1


def _gemm(name: str, leaf: LeafCall) -> Kernel | None:
    at = _GEMM_OPS[leaf.name]
    if len(leaf.shapes) < at + 2 or len(leaf.types) <= at:
        return None
    a, b = leaf.shapes[at], leaf.shapes[at + 1]
    if len(a) != len(b) or len(a) not in (2, 3):
        return None
    layout = next((v for k, v in _LAYOUTS.items() if k in name), GemmLayout.FORWARD)
    batch = float(a[0]) if len(a) == 3 else 1.0
    return Gemm(a[-2], b[-1], a[-1], dtype_of(name, leaf.types[at]), batch, layout, epilogue=at == 1)


def _elementwise(leaf: LeafCall, tensors: Sequence[tuple[tuple[int, ...], int]]) -> Kernel:
    """Every input is read and the result written; a copy reads its source alone, a fill nothing."""
    function = leaf.name.removeprefix("aten::").rstrip("_")
    largest = max(tensors, key=lambda t: math.prod(t[0]))
    elements = math.prod(largest[0])
    sizes = [math.prod(s) * size for s, size in tensors]
    if function == "copy" and len(sizes) > 1:
        return Elementwise("copy", elements, sizes[1], sizes[0])
    if function in ("fill", "zero"):
        return Elementwise(function, elements, 0, sizes[0])
    return Elementwise(function, elements, sum(sizes), elements * largest[1])
