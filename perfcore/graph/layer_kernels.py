"""Kernel kinds of layers that DLRM lacks: convolution, normalisation, pooling, softmax, dropout."""

from __future__ import annotations

from dataclasses import dataclass

from perfcore.graph.dim_types import Dim, DType, GemmLayout


@dataclass(frozen=True, slots=True, eq=False)
class Convolution:
    """A convolution of `(batch, channels, height, width)` with `filters` filters of `(kernel_height, kernel_width)`.

    The result has `(height + 2 · padding_height − kernel_height) // stride + 1` rows, and columns likewise.
    `layout` says which product: the result, or the gradient of the input or of the weights from the result's.
    Each of the `groups` sees its share of the channels and makes its share of the filters.
    """

    batch: Dim
    channels: Dim
    height: Dim
    width: Dim
    filters: Dim
    kernel_height: Dim
    kernel_width: Dim
    dtype: DType
    stride: Dim = 1.0
    padding_height: Dim = 0.0
    padding_width: Dim = 0.0
    groups: Dim = 1.0
    layout: GemmLayout = GemmLayout.FORWARD


@dataclass(frozen=True, slots=True, eq=False)
class BatchNorm:
    """Batch normalisation in training of `channels` channels with `rows` values each (batch × positions)."""

    rows: Dim
    channels: Dim
    element_bytes: Dim
    backward: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Pooling:
    """Pooling of `inputs` values to `outputs`; `function` is `max`, which keeps where each maximum was, or `avg`."""

    function: str
    inputs: Dim
    outputs: Dim
    element_bytes: Dim
    backward: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class LayerNorm:
    """Layer normalisation of `rows` rows of `cols` values; `backward` is both of its kernels."""

    rows: Dim
    cols: Dim
    element_bytes: Dim
    backward: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Softmax:
    """Softmax, or its logarithm, of `rows` rows of `cols` values."""

    rows: Dim
    cols: Dim
    element_bytes: Dim
    backward: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Dropout:
    """Dropout of `elements` values; the mask takes a byte a value."""

    elements: Dim
    element_bytes: Dim
    backward: bool = False
