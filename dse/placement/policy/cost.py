"""What a shard costs the rank that holds it, in µs per iteration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from perfcore.design.hardware import System
from perfcore.design.sharding import ShardingType
from perfcore.design.training import Precision, Training
from perfcore.units import US_PER_S

Array: TypeAlias = NDArray[np.float64]

INDEX_BYTES, GRADIENT_BYTES = 8, 4  # int64 indices, fp32 gradients
_BINS = 48


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Shards of one sharding type, arrays of shape `(s,)`.

    Attributes:
        rows: rows of the whole table.
        dim: columns of the shard.
        pooling: mean lookups per sample in the whole table.
        skew: Zipf exponent of the row accesses.
        parts: pieces into which the table's rows are split; 1 where they are not.
    """

    rows: Array
    dim: Array
    pooling: Array
    skew: Array
    parts: Array


class ShardCost(Protocol):
    """Prices shards; a user's own measurements may stand behind it."""

    def __hash__(self) -> int:
        """Equal costs give equal prices: these are remembered for a while."""
        ...

    def load_us(self, kind: ShardingType, pieces: Pieces) -> Array:
        """`(s,)` µs per iteration, forward and backward, on a rank that holds the shard: finite, >= 0."""
        ...


@dataclass(frozen=True, slots=True)
class AnalyticCost:
    """Traffic over data-sheet bandwidths: a lower estimate that ranks placements.

    Lookups of rows that the last-level cache holds cost cache bandwidth, the others memory bandwidth; the
    backward pass reads and writes each distinct row once; exchanged bytes cross the links.

    Attributes:
        training: batch and number formats.
        system: bandwidths and ranks.
        kernel_us: time of an empty kernel, paid forward and backward by each shard; 0 when all shards of a
            rank share one table-batched kernel.
    """

    training: Training
    system: System
    kernel_us: float = 0.0

    def load_us(self, kind: ShardingType, pieces: Pieces) -> Array:
        """`(s,)` µs of lookup, update and exchange."""
        batch: float = self.training.global_batch
        if kind is ShardingType.DATA_PARALLEL:
            batch /= self.system.world_size
        return self._lookup_us(batch, pieces) + self._exchange_us(kind, pieces) + 2 * self.kernel_us

    def _lookup_us(self, batch: float, pieces: Pieces) -> Array:
        device = self.system.device
        lookups = batch * pieces.pooling / pieces.parts
        row_bytes = pieces.dim * self._element_bytes
        distinct = distinct_rows(lookups * pieces.parts, pieces.rows, pieces.skew) / pieces.parts
        held = np.minimum(1.0, device.l2_bytes / np.maximum(distinct * row_bytes, 1.0))
        missed = distinct + (lookups - distinct) * (1 - held)
        streamed = lookups * INDEX_BYTES + batch * (INDEX_BYTES + pieces.dim * GRADIENT_BYTES)
        forward = np.maximum(
            (missed * row_bytes + streamed) / device.hbm_bytes_per_s,
            (lookups * row_bytes + streamed) / device.l2_bytes_per_s,
        )
        update = (2 * distinct * row_bytes + 2 * lookups * INDEX_BYTES + streamed) / device.hbm_bytes_per_s
        total: Array = (forward + update) * US_PER_S
        return total

    def _exchange_us(self, kind: ShardingType, pieces: Pieces) -> Array:
        """Indices in, pooled rows out and their gradients back; a replica's gradient is all-reduced."""
        node, ranks, local = self.system.node, self.system.world_size, self.system.local_world_size
        if ranks == 1:
            return np.zeros(len(pieces.rows))
        inside, between = 1 / node.intra_bytes_per_s, 1 / node.inter_bytes_per_s
        s_per_byte = ((local - 1) * inside + (ranks - local) * between) / ranks
        outputs = 2 * self.training.global_batch * pieces.dim * self._element_bytes
        indices = self.training.global_batch * pieces.pooling / pieces.parts * INDEX_BYTES
        match kind:
            case ShardingType.DATA_PARALLEL:
                link = inside if ranks == local else between
                reduced = 2 * (ranks - 1) / ranks * pieces.rows * pieces.dim * GRADIENT_BYTES
                us = reduced * link
            case ShardingType.TABLE_ROW_WISE:
                summed = (
                    outputs * (local - 1) / local * inside
                    + outputs / local * (ranks - local) / ranks * between
                )
                us = summed + indices * s_per_byte
            case _:
                us = (outputs + indices) * s_per_byte
        return us * US_PER_S

    @property
    def _element_bytes(self) -> int:
        return 2 if self.training.table_precision is Precision.BF16 else 4


def distinct_rows(lookups: Array, rows: Array, skew: Array) -> Array:
    """Expected number of distinct rows among `lookups` independent draws from a Zipf law, all `(s,)`.

    Rows are gathered in bins of geometrically growing width, within which they count as equally likely:
    `sum over bins of width * (1 - exp(-lookups * probability))`.
    """
    edges = np.power(rows[:, None] + 1.0, np.linspace(0.0, 1.0, _BINS + 1))
    middle, width = np.sqrt(edges[:, 1:] * edges[:, :-1]), np.diff(edges, axis=1)
    weight = middle ** -skew[:, None]
    probability = weight / (weight * width).sum(axis=1, keepdims=True)
    expected: Array = (width * -np.expm1(-lookups[:, None] * probability)).sum(axis=1)
    return np.minimum(expected, np.minimum(lookups, rows))
