"""The analytic floor under every kernel: work over rate, and the tiled roofline of a matrix product.

A matrix product runs as blocks of one tile each, spread over the streaming multiprocessors in waves; a
block is bound by arithmetic or by the cache that feeds it, the whole by device memory. The library
picks among tiles and splits of `k`; the fastest is taken, so time grows with every dim by construction.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perfcore.cost.simt import SIMT_SPLITS, SIMT_TILES, SimtTiles, simt_seconds
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

_ROWS = np.array([t[0] for t in TILES for _ in K_SPLITS], dtype=np.float64)
_COLS = np.array([t[1] for t in TILES for _ in K_SPLITS], dtype=np.float64)
_SPLIT = np.array([s for _ in TILES for s in K_SPLITS], dtype=np.float64)
_CHUNK = 1024  # rows whose candidates fit in a core's cache
MOST_OCTAVES = 8.0  # of a tile that a library lacks
_NOTHING = (np.empty(0), np.empty(0, dtype=np.intp), np.empty(0), np.empty((0, len(TILES))))


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

    def take(self, at: slice | NDArray[np.intp] | NDArray[np.bool_]) -> GemmShapes:
        """The products at these places."""
        return GemmShapes(self.batch[at], self.m[at], self.n[at], self.k[at])

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
        tile_octaves: `(s, tiles)`: how many times twice as long each tile takes as the best, at its best split.
    """

    tiled_us: Array
    hbm_us: Array
    choice: NDArray[np.intp]
    waves: Array
    tile_octaves: Array

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


def gemm_roofline(
    shapes: GemmShapes, device: Device, dtype: DType, tiles: SimtTiles | None = None
) -> GemmRoofline:
    """The tiled roofline of products on a device.

    Args:
        shapes: `(s,)` dims, all positive.
        device: its peak, cache and memory bandwidth, number of multiprocessors.
        dtype: arithmetic.
        tiles: the single-precision tiles that its library has; without, all of `TILES` at the peak.

    Returns:
        The parts, `(s,)` each, without any launch or start-up time.
    """
    size = len(shapes.m)
    chunks = [shapes.take(slice(at, at + _CHUNK)) for at in range(0, size, _CHUNK)]
    parts = [_tiled(c, device, dtype) if tiles is None else _simt(c, device, tiles) for c in chunks]
    seconds, choice, waves, octaves = (
        (np.concatenate(p) for p in zip(*parts, strict=True)) if parts else _NOTHING
    )
    hbm_us = shapes.hbm_bytes(dtype.bytes) / device.hbm_bytes_per_s * US_PER_S
    return GemmRoofline(
        tiled_us=seconds * US_PER_S,
        hbm_us=hbm_us if tiles is None else hbm_us / tiles.memory_efficiency,
        choice=choice,
        waves=waves,
        tile_octaves=octaves,
    )


def _tiled(shapes: GemmShapes, device: Device, dtype: DType) -> tuple[Array, NDArray[np.intp], Array, Array]:
    """Seconds, choice and waves of the best tile, `(s,)` each; octaves of all, `(s, tiles)`."""
    step = K_STEP[dtype]
    m, n, k, batch = (x[:, None] for x in (shapes.m, shapes.n, shapes.k, shapes.batch))
    depth = np.ceil(k / (_SPLIT * step)) * step
    waves = batch * np.ceil(m / _ROWS) * np.ceil(n / _COLS) * _SPLIT / device.sm_count
    compute = 2.0 * _ROWS * _COLS * depth * device.sm_count / peak_flops_per_s(device, dtype)
    feed = (_ROWS + _COLS) * depth * dtype.bytes / (SM_BYTES_PER_CLOCK * device.clock_hz)
    merge = (_SPLIT > 1) * 2.0 * _SPLIT * ACCUMULATOR_BYTES * batch * m * n / device.l2_bytes_per_s
    seconds = np.ceil(waves) * np.maximum(compute, feed) + merge
    best = np.argmin(seconds, axis=1)
    at = np.arange(len(best))
    fastest = seconds[at, best]
    by_tile = seconds.reshape(len(best), len(TILES), len(K_SPLITS)).min(axis=2)
    return fastest, best, waves[at, best], np.log2(by_tile / fastest[:, None])


def _simt(
    shapes: GemmShapes, device: Device, tiles: SimtTiles
) -> tuple[Array, NDArray[np.intp], Array, Array]:
    """As `_tiled`, of the tiles that a library has."""
    seconds, waves = simt_seconds(
        (shapes.batch[:, None], shapes.m[:, None], shapes.n[:, None], shapes.k[:, None]), device, tiles
    )
    best = np.argmin(seconds, axis=1)
    at = np.arange(len(best))
    fastest = seconds[at, best]
    by_tile = seconds.reshape(len(best), len(SIMT_TILES), len(SIMT_SPLITS)).min(axis=2)
    octaves = np.minimum(np.log2(by_tile / fastest[:, None]), MOST_OCTAVES)
    return fastest, best, waves[at, best], octaves
