"""Embedding kernels: traffic of lookups through cache and device memory.

Forward, a bag: its offsets, its indices, its rows, one output row; rows rounded up to 32-byte sectors. Offsets and
indices lie one after another: device memory moves their bytes once, the cache serves whole sectors to each bag. Rows
that the cache holds (`perfcore.cost.access`) cost cache bandwidth only; the launch is bound by the slower of device
memory and cache. Backward reads an output gradient per lookup (cached like a table of `batch` rows) and, fused with
the optimizer, reads and writes every distinct row and its state once, at a share of the bandwidth that depends on the
row's width; unfused it writes one row per lookup.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perfcore.cost.access import distinct_rows, hit_rate
from perfcore.cost.memory_bound import INDEX_BYTES, SECTOR_BYTES, Rate
from perfcore.cost.stacking import Stacked
from perfcore.design.hardware import Device
from perfcore.errors import ProfileError
from perfcore.graph.kernels import EmbeddingBackward, EmbeddingForward, SparseUpdate
from perfcore.units import US_PER_S

Array = NDArray[np.float64]

OFFSETS = 2.0  # a bag's begin and end
OFFSET_SECTORS_BYTES = 96.0  # what the cache serves for them: table offsets (32) and offsets (64)

# State rows read and written beside the weight row: full-width rows, and bytes of one scalar per row.
OPTIMIZER_STATE = {
    "sgd": (0.0, 0.0),
    "adagrad": (1.0, 0.0),
    "rowwise_adagrad": (0.0, 4.0),
    "adam": (2.0, 0.0),
}


@dataclass(frozen=True, slots=True)
class EmbeddingFormulas:
    """Formulas of embedding kernels on one device; dims `(s,)`, one element a table.

    Attributes:
        device: bandwidths and cache size.
        lookup: rate of gathered reads; the floor is that of a launch, shared by its tables.
        update: rate of read-modify-write rows.
        l2_share: part of the cache that rows can hold.
        update_widths: bytes of a row and the efficiency of its update, increasing; between them in the logarithm,
            beyond them the nearest. Empty: `update.efficiency` whatever the width.
        repeated: the launch before was the same one, as in a micro-benchmark: a forward finds in the cache what fits.
    """

    device: Device
    lookup: Rate
    update: Rate
    l2_share: float = 1.0
    update_widths: tuple[tuple[float, float], ...] = ()
    repeated: bool = False

    def forward(self, kernels: Sequence[EmbeddingForward], dims: Stacked) -> Array:
        """Offsets, indices, rows through the cache, output."""
        bags = _bags(dims)
        row = _sectors(dims["dim"] * dims["element_bytes"])
        lookups = bags * dims["pooling"]
        hits = hit_rate(lookups, dims["rows"], dims["skew"], self._cached(row))
        indices = dims["index_bytes"] * dims["pooling"]
        streamed = bags * (OFFSETS * dims["index_bytes"] + indices + row)
        served = bags * (OFFSET_SECTORS_BYTES + _sectors(indices) + row)
        work = bags * row
        hbm = np.where(work > 0, streamed + lookups * row * (1.0 - hits), 0.0)
        if self.repeated:
            distinct = distinct_rows(lookups, dims["rows"], dims["skew"]) * row
            kept = dims.over_tables(distinct + lookups * dims["index_bytes"])
            hbm = np.where(kept <= self.l2_share * self.device.l2_bytes, 0.0, hbm)
        cache = np.where(work > 0, served + lookups * row, 0.0)
        return self._us(hbm / self.lookup.efficiency, cache, _floor(dims, self.lookup, work > 0))

    def backward(self, kernels: Sequence[EmbeddingBackward], dims: Stacked) -> Array:
        """Gradient rows in; rows and optimizer state once per distinct row, or one sparse gradient row a lookup."""
        bags = _bags(dims)
        row = _sectors(dims["dim"] * dims["element_bytes"])
        lookups = bags * dims["pooling"]
        hits = hit_rate(lookups, bags, np.zeros_like(bags), self._cached(row))
        read = lookups * row * (1.0 - hits) + (lookups + bags * OFFSETS) * dims["index_bytes"]
        state = [_state(k.optimizer) for k in kernels]
        fused = dims.repeat([k.optimizer is not None for k in kernels])
        rows_touched = distinct_rows(lookups, dims["rows"], dims["skew"])
        wide, narrow = dims.repeat([s[0] for s in state]), dims.repeat([s[1] for s in state])
        update = 2.0 * rows_touched * (row * (1.0 + wide) + np.where(narrow > 0, SECTOR_BYTES, 0.0))
        work = bags * row * dims["pooling"]
        hbm = read / self.lookup.efficiency + np.where(
            fused, update / self._update_efficiency(row), lookups * row / self.lookup.efficiency
        )
        hbm = np.where(work > 0, hbm, 0.0)
        cache = np.where(work > 0, lookups * 2.0 * row + bags * row, 0.0)
        return self._us(hbm, cache, _floor(dims, self.update, work > 0))

    def sparse_update(self, kernels: Sequence[SparseUpdate], dims: Stacked) -> Array:
        """Gradient rows streamed in; every distinct row read and written, repeats inside the cache."""
        row = _sectors(dims["dim"] * dims["element_bytes"])
        lookups = dims["lookups"] * np.minimum(dims["rows"], 1.0)
        hits = hit_rate(lookups, dims["rows"], dims["skew"], self._cached(row))
        streamed = lookups * (row + INDEX_BYTES)
        updated = 2.0 * lookups * row * (1.0 - hits)
        hbm = streamed / self.lookup.efficiency + updated / self._update_efficiency(row)
        floor = np.where(lookups * row > 0, self.update.floor_us, 0.0)
        return self._us(np.where(row > 0, hbm, 0.0), 3.0 * lookups * row, floor)

    def _cached(self, row_bytes: Array) -> Array:
        return self.l2_share * self.device.l2_bytes / np.maximum(row_bytes, SECTOR_BYTES)

    def _update_efficiency(self, row_bytes: Array) -> Array:
        """`(s,)`: share of the bandwidth at which rows of that width are read, changed and written."""
        if not self.update_widths:
            return np.full(row_bytes.shape, self.update.efficiency)
        widths, efficiencies = np.array(self.update_widths).T
        found = np.interp(np.log2(np.maximum(row_bytes, 1.0)), np.log2(widths), efficiencies)
        return np.asarray(found, dtype=np.float64)

    def _us(self, hbm_bytes: Array, cache_bytes: Array, floor_us: Array) -> Array:
        seconds = np.maximum(
            hbm_bytes / self.device.hbm_bytes_per_s,
            cache_bytes / (self.device.l2_bytes_per_s),
        )
        return floor_us + seconds * US_PER_S


def _bags(dims: Stacked) -> Array:
    return dims["batch"] * np.minimum(dims["rows"], 1.0)


def _floor(dims: Stacked, rate: Rate, present: NDArray[np.bool_]) -> Array:
    """`(s,)`: the launch's floor divided among the tables of one kernel that have work."""
    here = present.astype(np.float64)
    return np.asarray(here * rate.floor_us / np.maximum(dims.over_tables(here), 1.0))


def _sectors(bytes_: Array) -> Array:
    return SECTOR_BYTES * np.ceil(bytes_ / SECTOR_BYTES)


def _state(optimizer: str | None) -> tuple[float, float]:
    if optimizer is None:
        return (0.0, 0.0)
    if optimizer not in OPTIMIZER_STATE:
        known = ", ".join(OPTIMIZER_STATE)
        raise ProfileError(f"`optimizer` of a fused backward must be one of {known}, but got {optimizer!r}.")
    return OPTIMIZER_STATE[optimizer]
