"""Synthetic input: dense floats, Zipf-skewed lookups in bags, labels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from perfcore.design.design import Design
from perfcore.design.model import EmbeddingTable
from perfcore.design.training import EmbeddingFusion, IndexType
from perfcore.measure.table_batched import uses_fbgemm

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Batch:
    """One iteration's input, on the host until a step copies it.

    Attributes:
        dense: `(b, n)` float32.
        indices: per table `(l,)`, of the design's `index_dtype`; one tensor for all tables where they are batched.
        offsets: per table `(b,)` likewise, the start of each bag; one tensor where tables are batched
            (`(t b,)`, sample by sample; for FBGEMM `(t b + 1,)`, table by table). Of several ranks the
            lengths of the bags, `(t b,)` table by table, with all tables' indices in one tensor.
        labels: `(b, 1)` float32, 0 or 1.
        pinned: the tensors lie in pinned memory.
    """

    dense: Tensor
    indices: tuple[Tensor, ...]
    offsets: tuple[Tensor, ...]
    labels: Tensor
    pinned: bool = False

    def map(self, function: Callable[[Tensor], Tensor], *, pinned: bool = False) -> Batch:
        """The batch with every tensor replaced, in the order dense, indices, offsets, labels."""
        return Batch(
            function(self.dense),
            tuple(function(t) for t in self.indices),
            tuple(function(t) for t in self.offsets),
            function(self.labels),
            pinned,
        )

    def to(self, device: torch.device | str) -> Batch:
        """The batch on a device, one copy a tensor; pinned memory is copied without blocking the host."""
        return self.map(lambda t: t.to(device, non_blocking=self.pinned))


def make_batch(design: Design, *, rng: np.random.Generator, device: str = "cpu") -> Batch:
    """One rank's batch on the host, pinned when the design says so and `device` is a CUDA device.

    Bags of a table with pooling factor p have `floor(p)` or `ceil(p)` lookups, `round(b p)` in all.
    """
    size, model = design.local_batch, design.model
    dense = torch.from_numpy(rng.random((size, model.num_dense_features), dtype=np.float32))
    lengths = [bag_lengths(t.pooling_factor, size) for t in model.tables]
    rows = [zipf_rows(t, int(n.sum()), rng=rng) for t, n in zip(model.tables, lengths, strict=True)]
    labels = torch.from_numpy(rng.integers(0, 2, (size, 1)).astype(np.float32))
    if design.system.world_size > 1:
        bags = [(np.concatenate(rows), np.concatenate(lengths))]
    elif uses_fbgemm(design):
        bags = [(np.concatenate(rows), np.append(0, np.cumsum(np.concatenate(lengths))))]
    elif design.fusion.embedding is EmbeddingFusion.TABLE_BATCHED:
        bags = [_batched(model.tables, rows, lengths)]
    else:
        bags = [(r, _starts(n)) for r, n in zip(rows, lengths, strict=True)]
    dtype = torch.int32 if design.training.index_dtype is IndexType.INT32 else torch.int64
    batch = Batch(
        dense,
        tuple(torch.from_numpy(indices).to(dtype) for indices, _ in bags),
        tuple(torch.from_numpy(offsets).to(dtype) for _, offsets in bags),
        labels,
    )
    if device.startswith("cuda") and design.training.pinned_input:
        return batch.map(lambda t: t.pin_memory(), pinned=True)
    return batch


def bag_lengths(pooling_factor: float, bags: int) -> Ints:
    """`(bags,)` lengths, as even as integers allow, that sum to `round(bags * pooling_factor)`."""
    ends = np.round(np.arange(bags + 1) * pooling_factor).astype(np.int64)
    return np.diff(ends)


def zipf_rows(table: EmbeddingTable, lookups: int, *, rng: np.random.Generator) -> Ints:
    """`(lookups,)` rows whose frequency falls as `rank ** -skew`; row 0 is the hottest, skew 0 is uniform.

    Draws by the inverse of the continuous distribution function on [1, rows + 1).
    """
    end, u, exponent = table.num_embeddings + 1.0, rng.random(lookups), 1.0 - table.skew
    if abs(exponent) < np.finfo(np.float32).eps:
        ranks = end**u
    else:
        ranks = (1.0 + u * (end**exponent - 1.0)) ** (1.0 / exponent)
    rows: Ints = np.minimum(ranks.astype(np.int64) - 1, table.num_embeddings - 1)
    return rows


def _starts(lengths: Ints) -> Ints:
    return np.cumsum(lengths) - lengths


def _batched(tables: tuple[EmbeddingTable, ...], rows: list[Ints], lengths: list[Ints]) -> tuple[Ints, Ints]:
    """Indices into the concatenated tables and bag starts, sample by sample (table varies fastest)."""
    bases = np.cumsum([0] + [t.num_embeddings for t in tables[:-1]])
    sample = np.concatenate([np.repeat(np.arange(len(n)), n) for n in lengths])
    order = np.argsort(sample, kind="stable")
    indices = np.concatenate([r + base for r, base in zip(rows, bases, strict=True)])[order]
    return indices, _starts(np.stack(lengths, axis=1).reshape(-1))
