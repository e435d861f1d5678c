"""Data that kernels are measured on: fresh for every copy, on the device, counted in bytes."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from perfcore.design.model import EmbeddingTable
from perfcore.graph.kernels import DType
from perfcore.measure.batch import zipf_rows

TORCH_DTYPE = {DType.FP32: torch.float32, DType.TF32: torch.float32, DType.BF16: torch.bfloat16}


class Source:
    """Makes tensors on one device and counts their bytes.

    Attributes:
        device: where the tensors lie.
        bytes: made since `start_copy`, shared tables left out.
    """

    def __init__(self, device: str, *, cache_bytes: float, seed: int = 0) -> None:
        self.device, self.bytes = device, 0.0
        self._cache_bytes, self._rng = cache_bytes, np.random.default_rng(seed)
        self._generator = torch.Generator(device).manual_seed(seed)
        self._tables: dict[tuple[int, int, torch.dtype], Tensor] = {}

    def start_copy(self) -> None:
        """Count from zero."""
        self.bytes = 0.0

    def forget(self) -> None:
        """Let shared tables go."""
        self._tables.clear()

    def randn(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Normal values."""
        return self._counted(torch.randn(*shape, device=self.device, generator=self._generator).to(dtype))

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Values that spoil any result they get into: what is not written stays a NaN."""
        return self._counted(torch.full(shape, torch.nan, device=self.device, dtype=dtype))

    def integers(self, high: int, count: int) -> Tensor:
        """`(count,)` int64 below `high`, uniform."""
        values = torch.randint(high, (count,), device=self.device, generator=self._generator)
        return self._counted(values)

    def table(self, rows: int, dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """An embedding table; one larger than the cache is shared by all copies."""
        size = rows * dim * dtype.itemsize
        if size <= self._cache_bytes:
            return self.randn(rows, dim, dtype=dtype)
        key = (rows, dim, dtype)
        if key not in self._tables:
            self._tables[key] = torch.randn(
                rows, dim, device=self.device, dtype=dtype, generator=self._generator
            )
        return self._tables[key]

    def lookups(self, rows: int, count: int, skew: float) -> Tensor:
        """`(count,)` int64 rows, Zipf-skewed."""
        table = EmbeddingTable("measured", rows, skew=skew)
        return self._counted(torch.from_numpy(zipf_rows(table, count, rng=self._rng)).to(self.device))

    def holds(self, size: float) -> None:
        """Count bytes that a copy has of its own and that this source did not make."""
        self.bytes += size

    def _counted(self, tensor: Tensor) -> Tensor:
        self.bytes += tensor.numel() * tensor.element_size()
        return tensor
