"""The analytic floor under every kernel: work over rate, and the tiled roofline of a matrix product.

A matrix product runs as blocks of one tile each, spread over the streaming multiprocessors in waves; a
block is bound by arithmetic or by the cache that feeds it, the whole by device memory. The library
picks among tiles and splits of `k`; the fastest is taken, so time grows with every dim by construction.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perfcore.design.hardware import Device
from perfcore.graph.kernels import DType
from perfcore.units import US_PER_S

Array = NDArray[np.float64]


# Tile shapes that BLAS libraries ship (rows, columns), and ways to cut `k` over blocks.
TILES = (
    (256, 128),
    (128, 256),
    (128, 128),
    (128, 64),
    (64, 128),
    (64, 64),
    (64, 32),
    (32, 64),
    (32, 32),
    (16, 16),
)
K_SPLITS = (1, 4, 16)
K_STEP = {DType.FP32: 4, DType.TF32: 8, DType.BF16: 16}  # depth of one multiply-accumulate step
ACCUMULATOR_BYTES = 4
SM_BYTES_PER_CLOCK = 64.0  # from cache into one multiprocessor, since Volta (architecture white papers)


@dataclass(frozen=True, slots=True)
class GemmShapes:
    """Products `C[m, n] = A[m, k] · B[k, n]`, `batch` times: `(s,)` each."""

    batch: Array
    m: Array
    n: Array
    k: Array

    @property
    def flops(self) -> Array:
        """`(s,)`: multiply and add."""
        return 2.0 * self.batch * self.m * self.n * self.k

    def hbm_bytes(self, element_bytes: float) -> Array:
        """`(s,)`: each operand read once, the product written once."""
        return element_bytes * self.batch * (self.m * self.k + self.k * self.n + self.m * self.n)


@dataclass(frozen=True, slots=True)
class GemmRoofline:
    """Parts of the analytic time of products, `(s,)` each.

    Attributes:
        tiled_us: waves of the best tile, bound by arithmetic or cache.
        hbm_us: device memory traffic.
        choice: index of the best (tile, split) pair.
        waves: its number of waves, not rounded up.
    """

    tiled_us: Array
    hbm_us: Array
    choice: NDArray[np.intp]
    waves: Array

    @property
    def us(self) -> Array:
        """`(s,)`: the larger of the two."""
        return np.maximum(self.tiled_us, self.hbm_us)


def peak_flops_per_s(device: Device, dtype: DType) -> float:
    """The device's arithmetic peak in that format."""
    peaks = {
        DType.FP32: device.fp32_flops_per_s,
        DType.TF32: device.tf32_flops_per_s,
        DType.BF16: device.bf16_flops_per_s,
    }
    return peaks[dtype]


def gemm_roofline(shapes: GemmShapes, device: Device, dtype: DType) -> GemmRoofline:
    """The tiled roofline of products on a device.

    Args:
        shapes: `(s,)` dims, all positive.
        device: its peak, cache and memory bandwidth, number of multiprocessors.
        dtype: arithmetic.

    Returns:
        The parts, `(s,)` each, without any launch or start-up time.
    """
    rows = np.array([t[0] for t in TILES for _ in K_SPLITS], dtype=np.float64)
    cols = np.array([t[1] for t in TILES for _ in K_SPLITS], dtype=np.float64)
    split = np.array([s for _ in TILES for s in K_SPLITS], dtype=np.float64)
    step = K_STEP[dtype]
    m, n, k, batch = (x[:, None] for x in (shapes.m, shapes.n, shapes.k, shapes.batch))
    depth = np.ceil(k / (split * step)) * step
    waves = batch * np.ceil(m / rows) * np.ceil(n / cols) * split / device.sm_count
    compute = 2.0 * rows * cols * depth * device.sm_count / peak_flops_per_s(device, dtype)
    feed = (rows + cols) * depth * dtype.bytes / (SM_BYTES_PER_CLOCK * device.clock_hz)
    merge = (split > 1) * 2.0 * split * ACCUMULATOR_BYTES * batch * m * n / device.l2_bytes_per_s
    seconds = np.ceil(waves) * np.maximum(compute, feed) + merge
    best = np.argmin(seconds, axis=1)
    at = np.arange(len(best))
    return GemmRoofline(
        tiled_us=seconds[at, best] * US_PER_S,
        hbm_us=shapes.hbm_bytes(dtype.bytes) / device.hbm_bytes_per_s * US_PER_S,
        choice=best,
        waves=waves[at, best],
    )
