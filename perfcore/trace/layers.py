"""Convolution, normalisation, pooling, softmax and dropout of a trace: several launches of one call are one layer.

A forward convolution's inputs tell input and filters, its backward's the gradient and one or both of these; strides and
paddings are not recorded: they follow from the extents of input and result, which the next layer's input or the
gradient tells. The first launch of a call stands for all of them, the others take no time of their own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from perfcore.graph.kernels import (
    BatchNorm,
    Convolution,
    Dropout,
    DType,
    EmbeddingBackward,
    GemmLayout,
    Kernel,
    LayerNorm,
    MeasuredKernel,
    Pooling,
    Softmax,
)
from perfcore.trace.leaf_types import dtype_of, element_bytes
from perfcore.trace.link import Launched
from perfcore.trace.records import LeafCall

Shape: TypeAlias = tuple[int, ...]

_BOTH = "aten::convolution_backward"
_CONVOLUTIONS = {
    "aten::cudnn_convolution": GemmLayout.FORWARD,
    "aten::_conv_depthwise2d": GemmLayout.FORWARD,
    "aten::cudnn_convolution_backward_input": GemmLayout.GRAD_INPUT,
    "aten::cudnn_convolution_backward_weight": GemmLayout.GRAD_WEIGHT,
    _BOTH: GemmLayout.GRAD_WEIGHT,
}
_BATCH_NORMS = ("aten::cudnn_batch_norm", "aten::native_batch_norm")
_POOLINGS = {
    "aten::max_pool2d_with_indices": "max",
    "aten::avg_pool2d": "avg",
    "aten::_adaptive_avg_pool2d": "avg",
}
_SOFTMAXES = ("aten::_softmax", "aten::_log_softmax")
_DROPOUTS = ("aten::native_dropout", "aten::_fused_dropout")
_LAYER_NORM = "aten::native_layer_norm"
_BACKWARD = "_backward"
_LAYERS = (*_BATCH_NORMS, *_POOLINGS, *_SOFTMAXES, *_DROPOUTS, _LAYER_NORM)
# What a weight gradient's kernels are called, where one op computes both gradients.
_WEIGHT_KERNELS = ("wgrad", "cudnn_train", "splitk")
_SUMS_PARTS = "reduce_wgrad"  # sums the parts of the product launched just before it
_FILLS = ("Memset", "FillBuffer")
_LOOK_AHEAD = 8
_STANDS_FOR_OTHERS = (EmbeddingBackward, Convolution, BatchNorm, Pooling, LayerNorm, Softmax, Dropout)


@dataclass(frozen=True, slots=True)
class LayerCall:
    """Launches of one layer's forward or backward call.

    Attributes:
        name: of the op.
        layout: which product, of a convolution; `None` for other layers.
        launches: indices, increasing.
        leaf: the op's inputs.
        piece: that it is launched in.
    """

    name: str
    layout: GemmLayout | None
    launches: tuple[int, ...]
    leaf: LeafCall
    piece: int


def layer_calls(launched: Sequence[Launched]) -> list[LayerCall]:
    """The layers' calls of a step in program order; an op that computes both gradients of a convolution is two."""
    runs: list[tuple[LeafCall, int, list[int]]] = []
    for index, x in enumerate(launched):
        leaf = x.call.leaf
        if leaf is None or not _is_layer(leaf.name):
            continue
        last = runs[-1] if runs else None
        if last and last[2][-1] == index - 1 and last[0] == leaf and last[1] == x.piece:
            last[2].append(index)
        else:
            runs.append((leaf, x.piece, [index]))
    calls = []
    for leaf, piece, at in runs:
        parts: list[tuple[GemmLayout | None, list[int]]] = [(_CONVOLUTIONS.get(leaf.name), at)]
        if leaf.name == _BOTH:
            parts = _gradients([launched[i].kernel.name for i in at], at)
        calls += [LayerCall(leaf.name, layout, tuple(own), leaf, piece) for layout, own in parts if own]
    return calls


def layers_of(launched: Sequence[Launched]) -> Mapping[int, Kernel]:
    """By launch: kernels of the layers whose sizes are known, and kernels without time for what they stand for."""
    calls = layer_calls(launched)
    found: dict[int, Kernel] = {}
    convolutions = _convolutions(launched, calls)
    for number, call in enumerate(calls):
        kernel = convolutions.get(number) if call.layout else _layer(launched, call)
        if kernel is None:
            continue
        found[call.launches[0]] = kernel
        found |= {i: MeasuredKernel(launched[i].kernel.name, 0.0) for i in call.launches[1:]}
    return found


def stands_for(launched: Sequence[Launched], kernels: Sequence[Kernel]) -> list[int]:
    """By launch: the launch whose kernel stands for it; itself as a rule."""
    out, owner = [], -1
    for index, kernel in enumerate(kernels):
        if isinstance(kernel, _STANDS_FOR_OTHERS):
            owner = index
        part = isinstance(kernel, MeasuredKernel) and kernel.us == 0.0
        same = owner >= 0 and launched[owner].piece == launched[index].piece
        out.append(owner if part and same else index)
    return out


def _is_layer(name: str) -> bool:
    return name in _CONVOLUTIONS or name.removesuffix("_data").removesuffix(_BACKWARD) in _LAYERS


def _gradients(names: Sequence[str], at: list[int]) -> list[tuple[GemmLayout | None, list[int]]]:
    """Launches of both gradients, the input's first; all are the weights' where the first one is theirs."""
    lower = [name.lower() for name in names]
    first = next((i for i, n in enumerate(lower) if any(w in n for w in _WEIGHT_KERNELS)), None)
    if first is None:
        # A product alone is told from its layout: the transposed second factor is the weights' gradient.
        first = len(at) - 1 if len(at) > 1 and "_nt" in lower[-1] else None
    elif _SUMS_PARTS in lower[first]:
        first = max(0, first - 1)
    if first is None:
        return []
    if all(n.startswith(_FILLS) for n in names[:first]):
        first = 0  # what is filled is the weights' gradient
    return [(GemmLayout.GRAD_INPUT, at[:first]), (GemmLayout.GRAD_WEIGHT, at[first:])]


def _convolutions(launched: Sequence[Launched], calls: Sequence[LayerCall]) -> dict[int, Convolution]:
    """By number of the call: convolutions whose extents are all known."""
    known = {i: _sides(launched, call) for i, call in enumerate(calls) if call.layout}
    by_piece: dict[int, list[_Sides]] = {}
    for i, sides in known.items():
        by_piece.setdefault(calls[i].piece, []).append(sides)
    forward = [s for i, s in known.items() if calls[i].layout is GemmLayout.FORWARD]
    found = {}
    for i, sides in known.items():
        call = calls[i]
        whole = sides.completed([*by_piece[call.piece], *forward])
        names = " ".join(launched[at].kernel.name for at in call.launches)
        kind = next((t for t in call.leaf.types if element_bytes(t)), "")
        assert call.layout is not None, "chosen by it"
        kernel = (
            convolution_of(whole.input, whole.filters, whole.result, dtype_of(names, kind), call.layout)
            if kind
            else None
        )
        if kernel is not None:
            found[i] = kernel
    return found


@dataclass(frozen=True, slots=True)
class _Sides:
    """Shapes of a convolution's input, filters and result; empty where a call does not tell."""

    input: Shape
    filters: Shape
    result: Shape

    def completed(self, others: Sequence[_Sides]) -> _Sides:
        """With what the first of the others tells that agrees in all that both tell."""
        for other in others:
            pairs = (
                (self.input, other.input),
                (self.filters, other.filters),
                (self.result, other.result),
            )
            if all(a == b for a, b in pairs if a and b) and sum(bool(a and b) for a, b in pairs):
                merged = _Sides(*(a or b for a, b in pairs))
                if merged.input and merged.filters and merged.result:
                    return merged
        return self


def convolution_of(
    input_: Shape, filters_: Shape, result: Shape, dtype: DType, layout: GemmLayout
) -> Convolution | None:
    """A convolution by its shapes; `None` where one is not known, or no stride and padding give the result's extents."""
    if not all(len(s) == 4 for s in (input_, filters_, result)):
        return None
    batch, channels, height, width = input_
    filters, inputs, tall, wide = filters_
    rows, columns = result[2:]
    stride = max(1, round(height / max(1, rows)), round(width / max(1, columns)))
    down = _padding(height, tall, rows, stride)
    across = _padding(width, wide, columns, stride)
    if down is None or across is None or inputs < 1 or channels % inputs:
        return None
    return Convolution(
        batch,
        channels,
        height,
        width,
        filters,
        tall,
        wide,
        dtype,
        stride,
        down,
        across,
        groups=channels // inputs,
        layout=layout,
    )


def _padding(extent: int, taps: int, made: int, stride: int) -> int | None:
    """The padding that makes so many results along an axis; `None` where none does."""
    padding = max(0, math.ceil(((made - 1) * stride + taps - extent) / 2))
    return padding if (extent + 2 * padding - taps) // stride + 1 == made else None


def _sides(launched: Sequence[Launched], call: LayerCall) -> _Sides:
    shapes = (*call.leaf.shapes, (), (), ())[:3]
    if call.name == _BOTH:
        result, input_, filters = shapes
        return _Sides(input_, filters, result)
    match call.layout:
        case GemmLayout.GRAD_INPUT:
            return _Sides((), shapes[2], shapes[1])
        case GemmLayout.GRAD_WEIGHT:
            return _Sides(shapes[2], (), shapes[1])
        case _:
            channels = shapes[1][0] if shapes[1] else 0
            result = _result(launched, call, channels) if shapes[0] else ()
            return _Sides(shapes[0], shapes[1], result)


def _result(launched: Sequence[Launched], call: LayerCall, channels: int) -> Shape:
    """The first input of the next calls that may be this one's result: of its samples and channels."""
    after = call.launches[-1] + 1
    for x in launched[after : after + _LOOK_AHEAD]:
        shapes = x.call.leaf.shapes if x.call.leaf else ()
        if shapes and len(shapes[0]) == 4 and shapes[0][:2] == (call.leaf.shapes[0][0], channels):
            return shapes[0]
    return ()


def _layer(launched: Sequence[Launched], call: LayerCall) -> Kernel | None:
    """A layer other than a convolution."""
    tensors = [
        (s, size)
        for s, kind in zip(call.leaf.shapes, call.leaf.types, strict=False)
        if s and (size := element_bytes(kind))
    ]
    if not tensors:
        return None
    backward = _BACKWARD in call.name
    name = call.name.removesuffix("_data").removesuffix(_BACKWARD)
    shape, size = tensors[0]
    values = math.prod(shape)
    if name in _BATCH_NORMS and len(shape) > 1:
        return BatchNorm(values / max(1, shape[1]), shape[1], size, backward)
    if name in _POOLINGS and len(shape) == 4:
        other = tensors[1][0] if backward and len(tensors) > 1 else _result(launched, call, shape[1])
        small, large = sorted((values, math.prod(other))) if other else (0, values)
        return Pooling(_POOLINGS[name], large, small, size, backward) if other else None
    if name in _SOFTMAXES:
        return Softmax(values / max(1, shape[-1]), shape[-1], size, backward)
    if name in _DROPOUTS:
        return Dropout(values, size, backward)
    if name == _LAYER_NORM:
        return LayerNorm(values / max(1, shape[-1]), shape[-1], size, backward)
    return None
