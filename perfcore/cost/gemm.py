"""Matrix products: the tiled roofline over an efficiency, plus start-up, times a learned correction.

`time = (roofline / efficiency + floor) × exp(residual(clamped shape))`. The residual sees shapes clamped to the
range on which it was fitted, the roofline sees the shape itself: outside the range the correction
stands still at its edge and the roofline carries the trend. Where nothing near was measured (kernels shorter than
those of the fit, a dim that the fit did not vary) the correction fades to none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from perfcore.cost.between import between
from perfcore.cost.model import Calibration
from perfcore.cost.paced import Pace, paced_roofline
from perfcore.cost.roofline import TILES, GemmRoofline, GemmShapes, gemm_roofline, peak_flops_per_s
from perfcore.cost.simt import SimtTiles
from perfcore.cost.stacking import stack
from perfcore.design.hardware import Device
from perfcore.graph.kernels import DType, Gemm, GemmLayout
from perfcore.units import US_PER_S

Array = NDArray[np.float64]
Correction = Callable[[NDArray[np.float32]], Array]
FADE_OCTAVES = 2.0
_TAIL_TILES = ((256, 128), (128, 128), (128, 64), (64, 64))
_PADS = (64, 128, 256)  # extents that libraries' tiles are multiples of
_BEFORE_TILES = 11 + 2 * len(_TAIL_TILES)
# Of the features: how tiles compare, and padding.
TILE_COLUMNS = slice(_BEFORE_TILES, _BEFORE_TILES + len(TILES) + 4 * len(_PADS) + 4)


@dataclass(frozen=True, slots=True)
class GemmParams:
    """Constants of one device and format.

    Attributes:
        efficiency: share of the roofline that large products reach, in (0, 1].
        floor_us: start-up of the smallest product.
        low: smallest fitted `(batch, m, n, k)`.
        high: largest fitted `(batch, m, n, k)`.
        basis: measured on this device, or carried over.
        correction_from_us: shortest roofline time in the fit; the correction fades out below it.
        log_error_90: nine in ten measurements lie within a factor `exp` of it; of shapes like those of the fit.
        log_error_90_outside: likewise of other shapes.
        batched_efficiency: likewise of products in batches, which libraries serve with other kernels; 0: as one product.
        batched_floor_us: likewise.
        clock_share: sustained (or locked) clock over the data sheet's boost clock.
        tiles: single-precision tiles of the device's library; `None`: any tile, at the peak.
        vector_floor_us: start-up of a product one of whose dims is 1, which libraries serve with kernels without tiles.
        vector_efficiency: share of the memory bandwidth that they reach; 0: such products are priced as others.
        pace: of the library's blocks, which then makes the roofline; `None`: blocks run at the peak.
        widths: `n` and `k` that the fit had, increasing; between two of them the correction is interpolated. Empty: it is asked.
    """

    efficiency: float
    floor_us: float
    low: tuple[float, float, float, float] = (1.0, 1.0, 1.0, 1.0)
    high: tuple[float, float, float, float] = (1.0, 1.0, 1.0, 1.0)
    basis: Calibration = Calibration.ANALYTIC
    correction_from_us: float = 0.0
    clock_share: float = 1.0
    batched_efficiency: float = 0.0
    batched_floor_us: float = 0.0
    log_error_90: float = 0.0
    log_error_90_outside: float = 0.0
    tiles: SimtTiles | None = None
    vector_floor_us: float = 0.0
    vector_efficiency: float = 0.0
    pace: Pace | None = None
    widths: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class GemmModel:
    """Prices `Gemm` kernels of every format on one device."""

    device: Device
    params: Mapping[DType, GemmParams]
    corrections: Mapping[DType, Correction]

    def predict_us(self, kernels: Sequence[Gemm]) -> list[Array]:
        """One array per kernel, of the broadcast shape of its dims."""
        if not kernels:
            return []
        stacked = stack(kernels)
        codes = stacked.repeat([str(k.dtype) for k in kernels])
        us = np.zeros(len(codes))
        shapes = GemmShapes(*(stacked[d] for d in ("batch", "m", "n", "k")))
        for dtype in {k.dtype for k in kernels}:
            at = np.flatnonzero((codes == str(dtype)) & (shapes.flops > 0))
            us[at] = self.price_us(shapes.take(at), dtype)
        return stacked.split(us)

    def price_us(self, shapes: GemmShapes, dtype: DType) -> Array:
        """`(s,)` durations of products whose dims are all positive."""
        params = self.params[dtype]
        us = self._tiled_us(shapes, dtype)
        if params.vector_efficiency > 0:
            vector = np.minimum(np.minimum(shapes.m, shapes.n), shapes.k) == 1
            us = np.where(vector, np.minimum(us, vector_us(shapes, self.device, dtype, params)), us)
        return us

    def _tiled_us(self, shapes: GemmShapes, dtype: DType) -> Array:
        params = self.params[dtype]
        device = at_clock_share(self.device, params.clock_share)
        line = product_roofline(shapes, device, dtype, params)
        us = analytic_us(line, params)
        if params.batched_efficiency > 0:
            batched = line.us / params.batched_efficiency + params.batched_floor_us
            us = np.where(shapes.batch > 1, batched, us)
        if dtype not in self.corrections or not us.size:
            return us
        inside = clamp(shapes, params)

        def ask(at: GemmShapes) -> tuple[Array, Array]:
            own = line if _same(at, shapes) else product_roofline(at, device, dtype, params)
            exponent = self.corrections[dtype](features(at, own, device, dtype, params))
            return exponent, analytic_us(own, params) * np.exp(exponent)

        exponent, padded_us = between(inside, params.widths, ask)
        corrected = us * np.exp(exponent * trust(shapes, line, params))
        return np.where(_equal(inside, shapes), np.minimum(corrected, padded_us), corrected)

    def log_error_90(self, kernel: Gemm) -> float:
        """Nine in ten measurements lie within a factor `exp` of it of the duration."""
        params = self.params[kernel.dtype]
        outside = self.calibration(kernel) is not params.basis
        return params.log_error_90_outside if outside else params.log_error_90

    def calibration(self, kernel: Gemm) -> Calibration:
        """`MEASURED` inside the fitted range of a measured device, forward layout only."""
        params = self.params[kernel.dtype]
        if params.basis is not Calibration.MEASURED:
            return params.basis
        values = stack([kernel])
        ranges = zip(("batch", "m", "n", "k"), params.low, params.high, strict=True)
        inside = all(bool(np.all((values[d] >= lo) & (values[d] <= hi))) for d, lo, hi in ranges)
        forward = kernel.layout is GemmLayout.FORWARD
        return Calibration.MEASURED if inside and forward else Calibration.EXTRAPOLATED


def at_clock_share(device: Device, share: float) -> Device:
    """The device at a share of its clock: multiprocessors slow down, memory does not."""
    if share == 1.0:
        return device
    return replace(
        device,
        clock_hz=device.clock_hz * share,
        fp32_flops_per_s=device.fp32_flops_per_s * share,
        tf32_flops_per_s=device.tf32_flops_per_s * share,
        bf16_flops_per_s=device.bf16_flops_per_s * share,
    )


def product_roofline(shapes: GemmShapes, device: Device, dtype: DType, params: GemmParams) -> GemmRoofline:
    """The roofline that these constants belong to."""
    if params.pace is not None:
        return paced_roofline(shapes, device, dtype, params.pace)
    return gemm_roofline(shapes, device, dtype, params.tiles)


def analytic_us(roofline: GemmRoofline, params: GemmParams) -> Array:
    """`(s,)`: the roofline at the efficiency of large products, plus start-up."""
    return roofline.us / params.efficiency + params.floor_us


def vector_us(shapes: GemmShapes, device: Device, dtype: DType, params: GemmParams) -> Array:
    """`(s,)`: products by a vector or of two vectors, bound by memory.

    In training `A` was just written and `C` is about to be read: they move at the cache's rate while they fill no more
    than half of it, and from device memory once they exceed it, of which a least recently used cache keeps nothing.
    `B` (weights, or for weight gradients the stored input) comes from device memory.
    """
    warm = shapes.batch * shapes.m * (shapes.k + shapes.n) * dtype.bytes
    cold = shapes.batch * shapes.k * shapes.n * dtype.bytes
    beyond = np.clip(2.0 * warm / device.l2_bytes - 1.0, 0.0, 1.0)
    from_memory = (cold + beyond * warm) / (params.vector_efficiency * device.hbm_bytes_per_s)
    from_cache = (1.0 - beyond) * warm / device.l2_bytes_per_s
    return np.asarray(params.vector_floor_us + (from_memory + from_cache) * US_PER_S, dtype=np.float64)


def clamp(shapes: GemmShapes, params: GemmParams) -> GemmShapes:
    """The nearest shapes inside the fitted range."""
    values = (shapes.batch, shapes.m, shapes.n, shapes.k)
    return GemmShapes(
        *(np.clip(v, lo, hi) for v, lo, hi in zip(values, params.low, params.high, strict=True))
    )


def _same(a: GemmShapes, b: GemmShapes) -> bool:
    """Whether all are the same products."""
    return len(a.m) == len(b.m) and bool(_equal(a, b).all())


def _equal(a: GemmShapes, b: GemmShapes) -> NDArray[np.bool_]:
    """`(s,)`: whether these are the same products."""
    same: NDArray[np.bool_] = (a.batch == b.batch) & (a.m == b.m) & (a.n == b.n) & (a.k == b.k)
    return same


def trust(shapes: GemmShapes, line: GemmRoofline, params: GemmParams) -> Array:
    """`(s,)` in [0, 1]: weight of the correction, 1 wherever the fit had kernels alike."""
    weight: Array = np.ones(len(shapes.m))
    if params.correction_from_us > 0:
        octaves = np.log2(line.us / params.correction_from_us)
        weight = np.clip(1.0 + octaves / FADE_OCTAVES, 0.0, 1.0)
    values = (shapes.batch, shapes.m, shapes.n, shapes.k)
    for value, low, high in zip(values, params.low, params.high, strict=True):
        if low == high:
            weight = np.where(value == low, weight, 0.0)
    return weight


def features(
    shapes: GemmShapes, line: GemmRoofline, device: Device, dtype: DType, params: GemmParams
) -> NDArray[np.float32]:
    """`(s, f)`: shape, roofline and device numbers that the correction may look at."""
    bytes_ = shapes.hbm_bytes(dtype.bytes)
    columns = [
        np.log2(shapes.batch),
        np.log2(shapes.m),
        np.log2(shapes.n),
        np.log2(shapes.k),
        np.log2(shapes.flops),
        np.log2(bytes_ / device.l2_bytes),
        np.log2(dtype.bytes * shapes.k * shapes.n / device.l2_bytes),
        np.log2(analytic_us(line, params)),
        np.log2(line.tiled_us / line.hbm_us),
        np.log2(line.waves),
        line.choice.astype(np.float64),
        *_tails(shapes, device),
        *line.tile_octaves.T,
        *_padding(shapes),
        *(np.full(len(shapes.m), v) for v in _device_numbers(device, dtype)),
    ]
    return np.array(columns, dtype=np.float32).T  # column order is what CatBoost reads fastest


def _tails(shapes: GemmShapes, device: Device) -> list[Array]:
    """Share of the last wave that is used, and waves, for common tiles."""
    columns = []
    for rows, cols in _TAIL_TILES:
        blocks = shapes.batch * np.ceil(shapes.m / rows) * np.ceil(shapes.n / cols)
        waves = blocks / device.sm_count
        columns += [waves / np.ceil(waves), np.minimum(waves, 64.0)]
    return columns


def _padding(shapes: GemmShapes) -> list[Array]:
    """Share of a padded extent that is used, whether an extent is aligned, and how oblong the matrices are."""
    m, n, k = shapes.m, shapes.n, shapes.k
    columns = [v / (np.ceil(v / pad) * pad) for pad in _PADS for v in (m, n)]
    columns += [(v % pad == 0).astype(np.float64) for pad in _PADS for v in (n, k)]
    return [*columns, np.log2(m / n), np.log2(n * k), np.log2(m * k), np.log2(m * n)]


def _device_numbers(device: Device, dtype: DType) -> tuple[float, ...]:
    peak = peak_flops_per_s(device, dtype)
    return (
        np.log2(device.sm_count),
        np.log2(device.clock_hz),
        np.log2(peak / device.sm_count / device.clock_hz),
        np.log2(peak / device.hbm_bytes_per_s),
        np.log2(peak / device.l2_bytes_per_s),
        np.log2(device.l2_bytes),
    )
