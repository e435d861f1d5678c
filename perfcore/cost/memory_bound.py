"""Kernels that move memory: bytes over a share of the data sheet's bandwidth, plus start-up.

Every kind has a `Rate(efficiency, floor_us)` in the profile: `time = floor + bytes / (efficiency × bandwidth)`.
An efficiency never exceeds 1, so no such kernel is faster than the data sheet's bandwidth allows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perfcore.cost.stacking import Stacked
from perfcore.design.hardware import Device
from perfcore.errors import ProfileError
from perfcore.graph.kernels import (
    Concat,
    CopyKind,
    Elementwise,
    FusedInteraction,
    Memcpy,
    Memset,
    MultiTensor,
    PairGather,
    Reduction,
    Sort,
    Transpose,
)
from perfcore.units import US_PER_S

Array = NDArray[np.float64]

SECTOR_BYTES = 32.0  # smallest transfer between cache and memory
INDEX_BYTES = 8.0  # torch.int64
RADIX_BITS = 8.0  # of one pass of a device radix sort
WARP_SIZE = 32.0


@dataclass(frozen=True, slots=True)
class Rate:
    """Speed of one kind of kernel.

    Attributes:
        efficiency: share of the data sheet's bandwidth, in (0, 1].
        floor_us: time of a kernel that moves next to nothing.
    """

    efficiency: float
    floor_us: float

    def __post_init__(self) -> None:
        """Refuse shares that no kernel reaches."""
        if not 0 < self.efficiency <= 1:
            raise ProfileError(f"`0 < efficiency <= 1` must hold, but got efficiency={self.efficiency}.")
        if not 0 <= self.floor_us < 1e6:
            raise ProfileError(f"`0 <= floor_us < 1e6` must hold, but got floor_us={self.floor_us}.")

    def us(self, bytes_: Array, bytes_per_s: float) -> Array:
        """`(s,)`: floor plus transfer; 0 where there are no bytes."""
        transfer = bytes_ / (self.efficiency * bytes_per_s) * US_PER_S
        return np.where(bytes_ > 0, self.floor_us + transfer, 0.0)


@dataclass(frozen=True, slots=True)
class MemoryBoundFormulas:
    """Formulas of all bandwidth-bound kinds on one device; each takes kernels and dims `(s,)` to µs `(s,)`.

    Attributes:
        device: bandwidths, multiprocessors, peak.
        rates: by kind name (`elementwise`, `reduction`, `concat`, ...).
        function_rates: by aten name, for pointwise functions measured apart.
        scatter_us_per_element: of `index_put_` with accumulation, times multiprocessors times clock in GHz.
        pageable_share: speed of a pageable copy over that of a pinned one.
    """

    device: Device
    rates: Mapping[str, Rate]
    function_rates: Mapping[str, Rate]
    scatter_cycles_per_element: float
    pageable_share: float

    def elementwise(self, kernels: Sequence[Elementwise], dims: Stacked) -> Array:
        """Bytes read and written, at the function's own rate where there is one."""
        bytes_ = dims["bytes_read"] + dims["bytes_written"]
        rates = [self.function_rates.get(k.function, self.rates["elementwise"]) for k in kernels]
        efficiency, floor_us = (dims.repeat([getattr(r, name) for r in rates]) for name in Rate.__slots__)
        transfer_us = bytes_ / (efficiency * self.device.hbm_bytes_per_s) * US_PER_S
        return np.where(bytes_ > 0, floor_us + transfer_us, 0.0)

    def reduction(self, kernels: Sequence[Reduction], dims: Stacked) -> Array:
        """The input read once, the result written once."""
        whole = dims.repeat([k.axis is None for k in kernels])
        kept = np.where(whole, np.minimum(dims["cols"], 1.0), dims["cols"])
        bytes_ = (dims["rows"] * dims["cols"] + kept * np.minimum(dims["rows"], 1.0)) * dims["element_bytes"]
        return self._us("reduction", bytes_)

    def concat(self, kernels: Sequence[Concat], dims: Stacked) -> Array:
        """Bytes read and as many written."""
        return self._us("concat", 2.0 * dims["bytes"])

    def transpose(self, kernels: Sequence[Transpose], dims: Stacked) -> Array:
        """Read along rows, written along columns; rows narrower than a sector waste the rest of it."""
        element = dims["element_bytes"]
        count = dims["batch"] * dims["m"] * dims["n"]
        waste = [np.maximum(1.0, SECTOR_BYTES / np.maximum(dims[d] * element, 1.0)) for d in ("m", "n")]
        return self._us("transpose", count * element * (waste[0] + waste[1]))

    def pair_gather(self, kernels: Sequence[PairGather], dims: Stacked) -> Array:
        """Forward: gathered reads and the result. Backward: `index_put_` accumulates element by element."""
        count = dims["batch"] * dims["pairs"] * np.minimum(dims["features"], 1.0)
        square = dims["batch"] * dims["features"] ** 2
        read = np.minimum(square, count * SECTOR_BYTES / np.maximum(dims["element_bytes"], 1.0))
        bytes_ = np.where(
            count > 0, (read + count) * dims["element_bytes"] + dims["pairs"] * 2 * INDEX_BYTES, 0.0
        )
        forward = self._us("pair_gather", bytes_)
        cycles = count * self.scatter_cycles_per_element
        scatter = cycles / (self.device.sm_count * self.device.clock_hz) * US_PER_S
        return np.where(dims.repeat([k.backward for k in kernels]), forward + scatter, forward)

    def fused_interaction(self, kernels: Sequence[FusedInteraction], dims: Stacked) -> Array:
        """Features in, dim plus pairs out (backward: also the gradient in); arithmetic on FP32 lanes."""
        features, batch, dim = dims["features"], dims["batch"], dims["dim"]
        pairs = features * np.maximum(features - 1.0, 0.0) / 2.0
        sides = dims.repeat([2.0 if k.backward else 1.0 for k in kernels])
        row = features * dim * sides + dim + pairs
        flops = sides * 2.0 * batch * features**2 * dim
        work = batch * features * dim
        bytes_ = np.where(work > 0, batch * row * dims["element_bytes"], 0.0)
        rate = self.rates["fused_interaction"]
        arithmetic = flops / (rate.efficiency * self.device.fp32_flops_per_s) * US_PER_S
        return np.maximum(self._us("fused_interaction", bytes_), np.where(work > 0, arithmetic, 0.0))

    def sort(self, kernels: Sequence[Sort], dims: Stacked) -> Array:
        """One pass per radix digit, each reads and writes keys (and 8-byte values); small sorts take one launch."""
        value_bytes = dims.repeat([INDEX_BYTES if k.pairs else 0.0 for k in kernels])
        passes = dims["key_bytes"] * 8.0 / RADIX_BITS
        rate = self.rates["sort"]
        moved = 2.0 * dims["keys"] * (dims["key_bytes"] + value_bytes) * passes
        transfer = moved / (rate.efficiency * self.device.hbm_bytes_per_s) * US_PER_S
        return np.where(moved > 0, rate.floor_us + transfer, 0.0)

    def multi_tensor(self, kernels: Sequence[MultiTensor], dims: Stacked) -> Array:
        """Bytes of all tensors; each tensor's tail keeps one multiprocessor busy for a floor's share."""
        bytes_ = dims["elements"] * dims["bytes_per_element"]
        rate = self.rates["multi_tensor"]
        tails = rate.floor_us * dims["tensors"] / self.device.sm_count
        return np.where(bytes_ > 0, self._us("multi_tensor", bytes_) + tails, 0.0)

    def memcpy(self, kernels: Sequence[Memcpy], dims: Stacked) -> Array:
        """Over the host link, or inside device memory (read and written)."""
        us = np.zeros_like(dims["bytes"])
        kinds = dims.repeat([str(k.kind) for k in kernels])
        for kind in {k.kind for k in kernels}:
            at = kinds == str(kind)
            us[at] = self._copy_us(kind, dims["bytes"][at])
        return us

    def memset(self, kernels: Sequence[Memset], dims: Stacked) -> Array:
        """Bytes written."""
        return self._us("memset", dims["bytes"])

    def _copy_us(self, kind: CopyKind, bytes_: Array) -> Array:
        if kind is CopyKind.D2D:
            return self.rates["memcpy"].us(2.0 * bytes_, self.device.hbm_bytes_per_s)
        share = self.pageable_share if kind in (CopyKind.H2D_PAGEABLE, CopyKind.D2H) else 1.0
        return self.rates["memcpy_host"].us(bytes_, share * self.device.h2d_bytes_per_s)

    def _us(self, kind: str, bytes_: Array) -> Array:
        return self.rates[kind].us(bytes_, self.device.hbm_bytes_per_s)
