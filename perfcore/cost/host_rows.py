"""Rows of embedding tables in the host's memory, read and written over the host's link.

As FBGEMM's `SplitTableBatchedEmbeddingBagsCodegen` treats tables of `EmbeddingLocation.MANAGED_CACHING`: before a
lookup the distinct rows of the batch are found; those that the cache in device memory lacks are loaded into it, and
each writes the row that it replaces back to the host (`lru_cache_insert_kernel`). A row for which no slot is left is
read in place by the lookup, and read and written in place by the update. Optimizer state is not cached: one value a
row lies in device memory, full-width state on the host, where the update reads and writes each distinct row's.
`EmbeddingLocation.MANAGED` is a cache of no rows.

The cache is 32-way set-associative with the least recently used row of a set replaced (or the least frequently); it
counts here as a least-recently-used cache of all its rows (`perfcore.cost.access.new_rows`). Loading and writing back
take turns on the link. A row read in place counts once a batch, however often it is looked up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfcore.cost.access import distinct_rows, new_rows
from perfcore.cost.embedding import OPTIMIZER_STATE
from perfcore.cost.model import Calibration
from perfcore.cost.stacking import FormulaModel, Stacked, stack
from perfcore.design.hardware import Device
from perfcore.graph.kernels import CachePopulate, EmbeddingBackward, EmbeddingForward
from perfcore.units import US_PER_S

Array = NDArray[np.float64]

STATE_BYTES = 4.0  # optimizer state is fp32
READ_AND_WRITE = 2.0


@dataclass(frozen=True, slots=True)
class HostRows:
    """Time on the host's link; dims `(s,)`, one element a table.

    Attributes:
        device: bandwidth of its link to the host.
    """

    device: Device

    def populate(self, kernels: Sequence[CachePopulate], dims: Stacked) -> Array:
        """Rows into the cache, and as many out of it."""
        lookups = dims["batch"] * dims["pooling"]
        cached = dims["cache_ratio"] * dims["rows"]
        missing = new_rows(lookups, dims["rows"], dims["skew"], cached)
        loaded = np.maximum(missing - _without_slot(dims), 0.0)
        return self._us(READ_AND_WRITE * loaded * _row_bytes(dims))

    def lookup(self, kernels: Sequence[EmbeddingForward], dims: Stacked) -> Array:
        """Rows read in place."""
        return self._us(_without_slot(dims) * _row_bytes(dims))

    def update(self, kernels: Sequence[EmbeddingBackward], dims: Stacked) -> Array:
        """Rows read and written in place, and optimizer state."""
        lookups = np.where(dims["cache_ratio"] < 1, dims["batch"] * dims["pooling"], 0.0)
        touched = distinct_rows(lookups, dims["rows"], dims["skew"])
        moved = _without_slot(dims) * _row_bytes(dims) + touched * _state_bytes(kernels, dims)
        return self._us(READ_AND_WRITE * moved)

    def _us(self, bytes_: Array) -> Array:
        return np.asarray(bytes_ / self.device.h2d_bytes_per_s * US_PER_S)


@dataclass(frozen=True, slots=True)
class HostedModel:
    """Embedding kernels of which some read tables on the host: their time on the device, and on the host's link.

    Attributes:
        model: prices kernels as if all rows lay in device memory.
        link_us: time on the link, of kernels and their dims `(s,)`.
    """

    model: FormulaModel[Any]
    link_us: Callable[[Sequence[Any], Stacked], Array]

    def predict_us(self, kernels: Sequence[Any]) -> list[Array]:
        """One array per kernel, of the broadcast shape of its dims, tables summed."""
        out = self.model.predict_us(kernels)
        hosted = [i for i, kernel in enumerate(kernels) if _hosted(kernel)]
        if hosted:
            chosen = [kernels[i] for i in hosted]
            stacked = stack(chosen)
            link = stacked.split(self.link_us(chosen, stacked), sum_tables=self.model.sum_tables)
            for i, us in zip(hosted, link, strict=True):
                out[i] = out[i] + us
        return out

    def calibration(self, kernel: Any) -> Calibration:
        """On what the formula rests; a data sheet's link where the host takes part."""
        return Calibration.ANALYTIC if _hosted(kernel) else self.model.calibration(kernel)

    def log_error_90(self, kernel: Any) -> float:
        """As the device's share of it."""
        return self.model.log_error_90(kernel)


def _hosted(kernel: EmbeddingForward | EmbeddingBackward) -> bool:
    ratio = kernel.cache_ratio
    return ratio < 1 if isinstance(ratio, float) else bool(np.any(np.asarray(ratio) < 1))


def _without_slot(dims: Stacked) -> Array:
    """`(s,)`: distinct rows of the batch beyond what the cache can hold."""
    ratio = dims["cache_ratio"]
    lookups = np.where(ratio < 1, dims["batch"] * dims["pooling"], 0.0)
    return np.maximum(distinct_rows(lookups, dims["rows"], dims["skew"]) - ratio * dims["rows"], 0.0)


def _row_bytes(dims: Stacked) -> Array:
    return dims["dim"] * dims["element_bytes"]


def _state_bytes(kernels: Sequence[EmbeddingBackward], dims: Stacked) -> Array:
    """`(s,)`: full-width optimizer state of one row."""
    wide = dims.repeat([OPTIMIZER_STATE[k.optimizer][0] if k.optimizer else 0.0 for k in kernels])
    return np.asarray(wide * dims["dim"] * STATE_BYTES)
