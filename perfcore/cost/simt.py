"""Tiles of single-precision products on ordinary (not tensor) cores, each at the share of the peak that it reaches.

A library's kernel computes one tile of `C` a block and steps along `k` by eight; a *sliced* kernel deals each block's
`k` out over four groups of warps, so that it steps by 32. Padded lanes compute nothing useful but take their time. What
share of the peak a full block reaches depends on the tile, hardly on the device: small tiles load more for each
multiplication. Batched products get kernels that neither split nor slice `k`, out of few tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perfcore.design.hardware import Device
from perfcore.errors import ProfileError

Array = NDArray[np.float64]

# Rows (of `m`) and columns (of `n`) of a block, and groups of warps that share its `k`.
SIMT_TILES = (
    (128, 128, 1),
    (64, 128, 1),
    (128, 64, 1),
    (64, 64, 1),
    (32, 128, 1),
    (128, 32, 1),
    (32, 128, 4),
    (32, 64, 4),
    (64, 32, 4),
    (32, 32, 4),
)
SIMT_STEP = 8
SIMT_SPLITS = (1, 4, 16)
ACCUMULATOR_BYTES = 4

_ROWS, _COLS, _SLICES = (np.repeat([float(t[i]) for t in SIMT_TILES], len(SIMT_SPLITS)) for i in range(3))
_SPLIT = np.tile(np.array(SIMT_SPLITS, dtype=np.float64), len(SIMT_TILES))


@dataclass(frozen=True, slots=True)
class SimtTiles:
    """What a device's library has, and how well its kernels do.

    Attributes:
        efficiency: of each tile of `SIMT_TILES`, the share of the peak that its full blocks reach; 0: not there.
        batched: of each, whether batched products are served with it.
        memory_efficiency: share of the device's memory bandwidth that products reach.
    """

    efficiency: tuple[float, ...]
    batched: tuple[bool, ...]
    memory_efficiency: float = 1.0

    def __post_init__(self) -> None:
        """Refuse what prices nothing, or faster than the peak."""
        count = len(SIMT_TILES)
        if len(self.efficiency) != count or len(self.batched) != count:
            raise ProfileError(
                f"Efficiencies of {count} tiles are needed, and as many marks of batched ones, "
                f"but got {len(self.efficiency)} and {len(self.batched)}."
            )
        if not all(0 <= e <= 1 for e in (*self.efficiency, self.memory_efficiency)):
            raise ProfileError(
                f"Efficiencies of tiles and memory must lie in [0, 1], but got {self.efficiency} "
                f"and {self.memory_efficiency}."
            )
        plain = [e > 0 and t[2] == 1 for e, t in zip(self.efficiency, SIMT_TILES, strict=True)]
        served = [p and b for p, b in zip(plain, self.batched, strict=True)]
        if self.memory_efficiency <= 0 or not any(served):
            raise ProfileError("A tile that is not sliced must serve batched products, at some bandwidth.")


def simt_seconds(
    dims: tuple[Array, Array, Array, Array], device: Device, tiles: SimtTiles
) -> tuple[Array, Array]:
    """Seconds and waves of each tile and split.

    Args:
        dims: `batch`, `m`, `n`, `k`, `(s, 1)` each.
        device: its peak, clock, multiprocessors and cache.
        tiles: which there are; others take infinitely long.

    Returns:
        `(s, tiles · splits)` each.
    """
    batch, m, n, k = dims
    efficiency = np.repeat(tiles.efficiency, len(SIMT_SPLITS))
    step = SIMT_STEP * _SLICES
    depth = np.ceil(k / (_SPLIT * step)) * step
    waves = batch * np.ceil(m / _ROWS) * np.ceil(n / _COLS) * _SPLIT / device.sm_count
    block = 2.0 * _ROWS * _COLS * depth * device.sm_count / device.fp32_flops_per_s
    merge = (_SPLIT > 1) * 2.0 * _SPLIT * ACCUMULATOR_BYTES * batch * m * n / device.l2_bytes_per_s
    seconds = np.ceil(waves) * block / np.where(efficiency > 0, efficiency, 1.0) + merge
    plain = (_SPLIT == 1) & (_SLICES == 1) & np.repeat(tiles.batched, len(SIMT_SPLITS))
    there = (efficiency > 0) & (plain | (batch <= 1))
    return np.where(there, seconds, np.inf), waves


def median_tiles(each: Sequence[SimtTiles]) -> SimtTiles | None:
    """Of several devices: the median efficiency of each tile over those that have it; `None` of none.

    Which tiles serve batches is a library's own choice: of another library, any that is not sliced may.
    """
    if not each:
        return None
    shares = zip(*(t.efficiency for t in each), strict=True)
    efficiency = [round(float(np.median([s for s in of_tile if s > 0] or [0.0])), 3) for of_tile in shares]
    return SimtTiles(
        tuple(efficiency),
        tuple(e > 0 and t[2] == 1 for e, t in zip(efficiency, SIMT_TILES, strict=True)),
        round(float(np.median([t.memory_efficiency for t in each])), 3),
    )
