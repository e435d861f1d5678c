"""Half-precision products: the tiled roofline at the pace of a library's blocks.

A block fills its pipeline, then takes one step of `k` after another, none faster than a step's latency; sums of split `k`
take a pass of their own. Devices before Hopper (compute capability 9.0) step by 32 and write what a block made after its
arithmetic; since then copies run beside the arithmetic and a step is 64 deep. Arithmetic and loads slow each other
down where both take long.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perfcore.cost.roofline import (
    ACCUMULATOR_BYTES,
    K_SPLITS,
    K_STEP,
    TILES,
    GemmRoofline,
    GemmShapes,
    peak_flops_per_s,
)
from perfcore.design.hardware import Device
from perfcore.graph.kernels import DType
from perfcore.units import US_PER_S

Array = NDArray[np.float64]

ASYNCHRONOUS_FROM = (
    9.0  # compute capability of the first devices with bulk copies beside arithmetic (Hopper white paper)
)
STEP_DEPTH, EARLY_STEP_DEPTH = (
    64.0,
    32.0,
)  # along k, as names of library kernels state them (128x128x64, stages_32x5)
CONTENTION = 3.0  # exponent of the norm that joins arithmetic and loads; without contention infinite

_ROWS, _COLS, _SPLIT = (
    np.array(v, dtype=np.float64) for v in zip(*((r, c, s) for r, c in TILES for s in K_SPLITS), strict=True)
)
_CHUNK = 1024  # rows whose candidates fit in a core's cache


@dataclass(frozen=True, slots=True)
class Pace:
    """What a library's blocks reach of a data sheet.

    Attributes:
        compute_share: of the arithmetic peak, inside a long block.
        hbm_share: of the bandwidth of device memory.
        fill_clocks: from a block's start to its first step, and from the last to its end.
        step_clocks: least time of one step along `k`.
        reduction_us: added where `k` is split.
    """

    compute_share: float
    hbm_share: float
    fill_clocks: float
    step_clocks: float
    reduction_us: float


@dataclass(frozen=True, slots=True)
class PacedRoofline(GemmRoofline):
    """As the roofline; `paced_us`: `(s,)`, arithmetic, loads and stores together."""

    paced_us: Array

    @property
    def us(self) -> Array:
        """`(s,)`: the time without start-up."""
        return self.paced_us


def paced_roofline(shapes: GemmShapes, device: Device, dtype: DType, pace: Pace) -> PacedRoofline:
    """The parts of products' times on a device, `(s,)` each, without start-up.

    Args:
        shapes: `(s,)` dims, all positive.
        device: its numbers; compute capability 0 counts as new.
        dtype: arithmetic.
        pace: of the library's blocks.
    """
    size = len(shapes.m)
    chunks = [shapes.take(slice(at, at + _CHUNK)) for at in range(0, max(size, 1), _CHUNK)]
    parts = [_blocks(chunk, device, dtype, pace) for chunk in chunks]
    seconds, choice, waves, octaves = (np.concatenate(p) for p in zip(*parts, strict=True))
    rate = device.hbm_bytes_per_s * pace.hbm_share / US_PER_S
    store_us = dtype.bytes * shapes.batch * shapes.m * shapes.n / rate
    hbm_us, tiled_us = shapes.hbm_bytes(dtype.bytes) / rate, seconds * US_PER_S
    late_us = store_us if early(device) else np.zeros(size)
    beside_us = hbm_us - late_us
    return PacedRoofline(
        tiled_us=tiled_us,
        hbm_us=hbm_us,
        choice=choice,
        waves=waves,
        tile_octaves=octaves,
        paced_us=(tiled_us**CONTENTION + beside_us**CONTENTION) ** (1.0 / CONTENTION) + late_us,
    )


def early(device: Device) -> bool:
    """Whether its blocks write after their arithmetic."""
    return 0 < device.compute_capability < ASYNCHRONOUS_FROM


def _blocks(
    shapes: GemmShapes, device: Device, dtype: DType, pace: Pace
) -> tuple[Array, NDArray[np.intp], Array, Array]:
    """Seconds, choice and waves of the best tile, `(s,)` each; octaves of all, `(s, tiles)`."""
    m, n, k, batch = (x[:, None] for x in (shapes.m, shapes.n, shapes.k, shapes.batch))
    depth = np.ceil(k / (_SPLIT * K_STEP[dtype])) * K_STEP[dtype]
    waves = batch * np.ceil(m / _ROWS) * np.ceil(n / _COLS) * _SPLIT / device.sm_count
    flops_per_s = pace.compute_share * peak_flops_per_s(device, dtype) / device.sm_count
    steps = np.ceil(depth / (EARLY_STEP_DEPTH if early(device) else STEP_DEPTH))
    latency = steps * (pace.step_clocks / device.clock_hz)
    block = (
        np.maximum(2.0 * _ROWS * _COLS * depth / flops_per_s, latency) + pace.fill_clocks / device.clock_hz
    )
    sums = 2.0 * _SPLIT * ACCUMULATOR_BYTES * batch * m * n / device.l2_bytes_per_s
    seconds = np.ceil(waves) * block + (_SPLIT > 1) * (sums + pace.reduction_us / US_PER_S)
    best = np.argmin(seconds, axis=1)
    at = np.arange(len(best))
    fastest = seconds[at, best]
    by_tile = seconds.reshape(len(best), len(TILES), len(K_SPLITS)).min(axis=2)
    return fastest, best, waves[at, best], np.log2(by_tile / fastest[:, None])
