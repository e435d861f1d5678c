"""Convolutions: products over patches, and where it pays Winograd's transforms; the fastest way counts.

A convolution is a product of patches with filters that no kernel ever writes down. Per group, of `P × Q` outputs, as `(m, n, k)`:

* forward: `(N·P·Q, K, C·R·S)`;
* gradient of the input: with a stride `s` each of `s²` phases of the input sees its share of the taps,
  `(N·P·Q·s², C, K·R·S / s²)`; where a filter has fewer taps than phases, only as many phases;
* gradient of the weights: `(K, C·R·S, N·P·Q)`.

Its time is the tiled roofline over the share that kernels of that product reach, and at least its tensors' time over
memory; weight gradients, whose sums are long and whose results small, also read their operands several times. Shares
were measured on one device; on another, and in other formats, they are smaller or larger as the shares of plain
products are (`ProductShares`).

A single-precision 3 × 3 convolution of stride 1 may go Winograd's way (Lavin and Gray 2016, arXiv 1509.09308): fused,
F(2×2, 3×3), with 2.25 times fewer multiplications; or by F(4×4, 3×3), with four times fewer, as transforms in memory
around 36 products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from perfcore.cost.gemm import GemmModel, at_clock_share
from perfcore.cost.model import Calibration
from perfcore.cost.roofline import GemmRoofline, GemmShapes, gemm_roofline
from perfcore.cost.stacking import Stacked, stack
from perfcore.design.hardware import Device
from perfcore.errors import DesignError, ProfileError
from perfcore.graph.kernels import Convolution, DType, GemmLayout
from perfcore.units import US_PER_S

Array = NDArray[np.float64]

FUSED_SAVING = 2.25  # multiplications of F(2×2, 3×3): 16 in place of 36
TILE = 4.0  # outputs of F(4×4, 3×3) along an axis
TILE_PRODUCTS = 36.0  # (4 + 3 − 1)² places of a transformed tile
TAPS = 3.0
_SHARES = (
    "forward",
    "grad_input",
    "grad_input_strided",
    "grad_weight",
    "winograd_fused",
    "winograd_products",
    "bandwidth",
    "product_share",
)
_ARITHMETIC = _SHARES[:6]
# Products whose shares of the roofline are compared, of sizes that convolutions are: (m, n, k).
_REFERENCE = np.array([(m, n, k) for m in (2048.0, 8192.0) for n in (256.0, 1024.0) for k in (512.0, 2048.0)])


@dataclass(frozen=True, slots=True)
class ConvolutionParams:
    """Constants of convolution kernels, each share in (0, 1].

    Attributes:
        forward: share of the tiled roofline that forward kernels reach.
        grad_input: likewise, gradients of inputs at stride 1.
        grad_input_strided: likewise, at larger strides.
        grad_weight: likewise, gradients of weights.
        winograd_fused: likewise, of fused Winograd kernels.
        winograd_products: likewise, of the products between transforms.
        bandwidth: share of the data sheet's memory bandwidth that tensors and transforms move at.
        weight_passes: times that a weight gradient's operands cross the memory bus, at the data sheet's bandwidth.
        floor_us: start-up of one kernel.
        product_share: share of the tiled roofline that plain products reach on the device of the shares above.
    """

    forward: float
    grad_input: float
    grad_input_strided: float
    grad_weight: float
    winograd_fused: float
    winograd_products: float
    bandwidth: float
    weight_passes: float
    floor_us: float
    product_share: float

    def __post_init__(self) -> None:
        """Refuse shares that no kernel reaches."""
        for name in _SHARES:
            share = getattr(self, name)
            if not 0 < share <= 1:
                raise ProfileError(f"`0 < {name} <= 1` must hold for convolutions, but got {share}.")
        if self.weight_passes < 0 or self.floor_us < 0:
            raise ProfileError(
                "`weight_passes >= 0` and `floor_us >= 0` must hold for convolutions, but got "
                f"{self.weight_passes} and {self.floor_us}."
            )

    def scaled(self, factor: float) -> ConvolutionParams:
        """With shares of arithmetic times a factor, none above 1."""
        return replace(self, **{name: min(1.0, factor * getattr(self, name)) for name in _ARITHMETIC})


class ProductShares:
    """Shares of the tiled roofline that a device's plain products reach, by format; found out when first asked."""

    def __init__(self, gemm: GemmModel) -> None:
        self._gemm = gemm
        self._found: dict[DType, float] = {}

    def __call__(self, dtype: DType) -> float:
        """The median over products of sizes that convolutions are."""
        if dtype not in self._found:
            shapes = GemmShapes(np.ones(len(_REFERENCE)), *_REFERENCE.T)
            device = at_clock_share(self._gemm.device, self.clock_share(dtype))
            ideal_us = gemm_roofline(shapes, device, dtype).us
            self._found[dtype] = float(np.median(ideal_us / self._gemm.price_us(shapes, dtype)))
        return self._found[dtype]

    def clock_share(self, dtype: DType) -> float:
        """Sustained over boost clock."""
        return self._gemm.params[dtype].clock_share


@dataclass(frozen=True, slots=True)
class Geometry:
    """Convolutions of one product and format: `(s,)` each, all positive.

    Attributes:
        batch: samples.
        channels: of the input.
        pixels: of the input.
        filters: channels of the result.
        taps: of a filter.
        outputs: pixels of the result.
        stride: along both axes.
        groups: channels and filters are split into.
        tiles: 4 × 4 tiles of the larger of input and result.
        square: 3 × 3 taps, stride 1, one group: what Winograd's way is for.
    """

    batch: Array
    channels: Array
    pixels: Array
    filters: Array
    taps: Array
    outputs: Array
    stride: Array
    groups: Array
    tiles: Array
    square: NDArray[np.bool_]

    def take(self, at: NDArray[np.intp]) -> Geometry:
        """The convolutions at these places."""
        return Geometry(*(getattr(self, f.name)[at] for f in fields(self)))

    def products(self, layout: GemmLayout) -> GemmShapes:
        """The matrix products that a convolution is, `groups` of them."""
        made, inputs = self.filters / self.groups, self.channels / self.groups
        rows = self.batch * self.outputs
        match layout:
            case GemmLayout.FORWARD:
                return GemmShapes(self.groups, rows, made, inputs * self.taps)
            case GemmLayout.GRAD_INPUT:
                phases = np.minimum(self.stride**2, self.taps)
                return GemmShapes(self.groups, rows * phases, inputs, made * self.taps / phases)
            case GemmLayout.GRAD_WEIGHT:
                return GemmShapes(self.groups, made, inputs * self.taps, rows)

    def winograd_products(self, layout: GemmLayout) -> GemmShapes:
        """The products between the transforms of F(4×4, 3×3)."""
        places, tiles = np.full_like(self.tiles, TILE_PRODUCTS), self.batch * self.tiles
        match layout:
            case GemmLayout.FORWARD:
                return GemmShapes(places, tiles, self.filters, self.channels)
            case GemmLayout.GRAD_INPUT:
                return GemmShapes(places, tiles, self.channels, self.filters)
            case GemmLayout.GRAD_WEIGHT:
                return GemmShapes(places, self.filters, self.channels, tiles)

    @property
    def values(self) -> Array:
        """`(s,)`: elements of input, weights and result."""
        weights = self.filters * self.channels / self.groups * self.taps
        return self.batch * (self.channels * self.pixels + self.filters * self.outputs) + weights

    @property
    def transformed(self) -> Array:
        """`(s,)`: elements of input, weights and result as F(4×4, 3×3) transforms them."""
        tiles = self.batch * self.tiles * (self.channels + self.filters)
        return TILE_PRODUCTS * (tiles + self.channels * self.filters)


@dataclass(frozen=True, slots=True)
class ConvolutionModel:
    """Prices `Convolution` kernels of every format on one device.

    Attributes:
        device: its peaks and bandwidths.
        params: shares.
        basis: on what single-precision durations rest; other formats were never measured.
        error: nine in ten measurements lie within a factor `exp(error)`.
        products: shares of this device's products, and its clocks; `None`: those of the device of `params`, at boost clock.
    """

    device: Device
    params: ConvolutionParams
    basis: Calibration
    error: float
    products: ProductShares | None = None

    def predict_us(self, kernels: Sequence[Convolution]) -> list[Array]:
        """One array per kernel, of the broadcast shape of its dims."""
        if not kernels:
            return []
        stacked = stack(kernels)
        geometry, present = geometry_of(stacked)
        codes = stacked.repeat([f"{k.dtype} {k.layout}" for k in kernels])
        us = np.zeros(len(codes))
        for dtype, layout in {(k.dtype, k.layout) for k in kernels}:
            at = np.flatnonzero((codes == f"{dtype} {layout}") & present)
            us[at] = self.price_us(geometry.take(at), dtype, layout)
        return stacked.split(us)

    def price_us(self, geometry: Geometry, dtype: DType, layout: GemmLayout) -> Array:
        """`(s,)` durations of convolutions of one product and format: the fastest way to do them."""
        p, device = self.params, self.device
        if self.products is not None:
            p = p.scaled(self.products(dtype) / p.product_share)
            device = at_clock_share(device, self.products.clock_share(dtype))
        memory_us = geometry.values * dtype.bytes / device.hbm_bytes_per_s * US_PER_S
        us = _implicit_us(p, geometry, device, dtype, layout, memory_us)
        if dtype is not DType.FP32 or not geometry.square.any():
            return us
        at = np.flatnonzero(geometry.square)
        square = geometry.take(at)
        ways = [us[at], _transformed_us(p, square, device, layout, memory_us[at])]
        if layout is not GemmLayout.GRAD_WEIGHT:
            ways.append(_fused_us(p, square, device, layout, memory_us[at]))
        us[at] = np.min(ways, axis=0)
        return us

    def calibration(self, kernel: Convolution) -> Calibration:
        """The basis for single precision in one group; nothing else was measured."""
        if kernel.dtype is not DType.FP32:
            return Calibration.ANALYTIC
        alone = bool(np.all(np.asarray(kernel.groups, dtype=np.float64) <= 1))
        return self.basis if alone or self.basis is Calibration.ANALYTIC else Calibration.EXTRAPOLATED

    def log_error_90(self, kernel: Convolution) -> float:
        """Nine in ten measurements lie within a factor `exp` of it of the duration; the same for every shape."""
        return self.error


def _implicit_us(
    p: ConvolutionParams,
    geometry: Geometry,
    device: Device,
    dtype: DType,
    layout: GemmLayout,
    memory_us: Array,
) -> Array:
    """As products over patches. A group of few channels fills no tile: its kernels go without."""
    shapes = geometry.products(layout)
    tiled_us = gemm_roofline(shapes, device, dtype).tiled_us
    plain_us = shapes.flops / device.fp32_flops_per_s * US_PER_S
    tiled_us = np.where(geometry.groups > 1, np.minimum(tiled_us, plain_us), tiled_us)
    if layout is GemmLayout.GRAD_WEIGHT:
        us = tiled_us / p.grad_weight + p.weight_passes * memory_us
    else:
        strided = np.where(geometry.stride > 1, p.grad_input_strided, p.grad_input)
        us = tiled_us / (p.forward if layout is GemmLayout.FORWARD else strided)
    return np.maximum(us, memory_us / p.bandwidth) + p.floor_us


def _fused_us(
    p: ConvolutionParams, geometry: Geometry, device: Device, layout: GemmLayout, memory_us: Array
) -> Array:
    """By F(2×2, 3×3), after a small kernel that transforms the filters."""
    s = geometry.products(layout)
    line = gemm_roofline(GemmShapes(s.batch, s.m, s.n, s.k / FUSED_SAVING), device, DType.FP32)
    return np.maximum(line.tiled_us / p.winograd_fused, memory_us / p.bandwidth) + 2 * p.floor_us


def _transformed_us(
    p: ConvolutionParams, geometry: Geometry, device: Device, layout: GemmLayout, memory_us: Array
) -> Array:
    """By F(4×4, 3×3): two operands are transformed, multiplied, and the result transformed back."""
    line = gemm_roofline(geometry.winograd_products(layout), device, DType.FP32)
    moved = geometry.transformed * DType.FP32.bytes / device.hbm_bytes_per_s * US_PER_S
    transforms_us = (memory_us + moved) / p.bandwidth
    return _products_us(p, line, layout) + transforms_us + 4 * p.floor_us


def _products_us(p: ConvolutionParams, line: GemmRoofline, layout: GemmLayout) -> Array:
    if layout is GemmLayout.GRAD_WEIGHT:
        return line.tiled_us / p.winograd_products + p.weight_passes * line.hbm_us
    return line.us / p.winograd_products


def geometry_of(dims: Stacked) -> tuple[Geometry, NDArray[np.bool_]]:
    """The convolutions that dims describe, and which of them have work.

    Raises:
        DesignError: a stride or number of groups is below 1, or a filter is larger than its padded input.
    """
    rows = _outputs(dims, "height")
    columns = _outputs(dims, "width")
    named = ("batch", "channels", "height", "width", "filters", "kernel_height", "kernel_width")
    present = np.all([dims[d] > 0 for d in named], axis=0)
    smallest = np.minimum(rows, columns)
    if bool(np.any(present & (smallest < 1))):
        raise DesignError("A Convolution's filter must not be larger than its padded input.")
    groups, stride = dims["groups"], dims["stride"]
    tiles = [
        np.ceil(np.maximum(out, dims[axis]) / TILE) for out, axis in ((rows, "height"), (columns, "width"))
    ]
    square = (dims["kernel_height"] == TAPS) & (dims["kernel_width"] == TAPS) & (stride == 1) & (groups == 1)
    geometry = Geometry(
        batch=dims["batch"],
        channels=dims["channels"],
        pixels=dims["height"] * dims["width"],
        filters=dims["filters"],
        taps=dims["kernel_height"] * dims["kernel_width"],
        outputs=rows * columns,
        stride=stride,
        groups=groups,
        tiles=tiles[0] * tiles[1],
        square=square,
    )
    return geometry, present


def _outputs(dims: Stacked, axis: str) -> Array:
    """`(s,)`: extent of the result along an axis."""
    for name in ("stride", "groups"):
        if bool(np.any(dims[name] < 1)):
            raise DesignError(f"`{name} >= 1` must hold for a Convolution, but got {dims[name].min():g}.")
    free = dims[axis] + 2 * dims[f"padding_{axis}"] - dims[f"kernel_{axis}"]
    return np.floor(free / dims["stride"]) + 1
