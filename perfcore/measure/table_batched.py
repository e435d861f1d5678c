"""All tables in one lookup: FBGEMM's, fused with the row updates, where it is installed."""

from __future__ import annotations

import functools
import importlib.util
import warnings
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from perfcore.design.design import Design
from perfcore.design.training import EmbeddingFusion, Optimizer, Precision
from perfcore.measure.optimizers import LEARNING_RATE, ROWWISE_EPS


def uses_fbgemm(design: Design) -> bool:
    """The design's tables are batched, and FBGEMM can hold them here (it is asked for fp32 tables only)."""
    return (
        design.fusion.embedding is EmbeddingFusion.TABLE_BATCHED
        and design.training.table_precision is Precision.FP32
        and has_fbgemm()
    )


@functools.cache
def has_fbgemm() -> bool:
    """FBGEMM is installed and fits this torch."""
    if importlib.util.find_spec("fbgemm_gpu") is None:
        return False
    try:
        _fbgemm()
    except (ImportError, OSError):
        return False
    return True


class FusedTables(nn.Module):
    """FBGEMM's table-batched bags; the backward pass updates the rows, so no optimizer sees them.

    Indices are each table's own, table by table; offsets are `(t b + 1,)`.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, int]],
        *,
        optimizer: Optimizer,
        device: str,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        tbe = _fbgemm()
        on_cuda = device.startswith("cuda")
        place = tbe.EmbeddingLocation.DEVICE if on_cuda else tbe.EmbeddingLocation.HOST
        compute = tbe.ComputeDevice.CUDA if on_cuda else tbe.ComputeDevice.CPU
        self.bags = tbe.SplitTableBatchedEmbeddingBagsCodegen(
            embedding_specs=[(rows, dim, place, compute) for rows, dim in shapes],
            optimizer=getattr(tbe.OptimType, _OPTIMIZERS[optimizer]),
            learning_rate=LEARNING_RATE,
            eps=ROWWISE_EPS,
            pooling_mode=tbe.PoolingMode.SUM,
            device=torch.device(device),
        )
        draw_tables(self.bags.split_embedding_weights(), generator=generator)

    def forward(self, indices: Tensor, offsets: Tensor) -> Tensor:
        """`(l,)` indices and `(t b + 1,)` offsets to `(b, t d)`."""
        out: Tensor = self.bags(indices, offsets)
        return out


def draw_tables(tables: Sequence[Tensor], *, generator: torch.Generator) -> None:
    """Fill tables in order, uniform within `rows ** -0.5` of 0, as DLRM initialises them."""
    for table in tables:
        bound = len(table) ** -0.5
        table.detach().uniform_(-bound, bound, generator=generator)


_OPTIMIZERS = {
    Optimizer.SGD: "EXACT_SGD",
    Optimizer.ADAGRAD: "EXACT_ADAGRAD",
    Optimizer.ROWWISE_ADAGRAD: "EXACT_ROWWISE_ADAGRAD",
    Optimizer.ADAM: "ADAM",
}


def _fbgemm() -> Any:
    with warnings.catch_warnings():  # it warns about variants that its build leaves out
        warnings.simplefilter("ignore")
        from fbgemm_gpu import split_table_batched_embeddings_ops_training as tbe  # type: ignore[import-not-found]
        from fbgemm_gpu.split_embedding_configs import EmbOptimType  # type: ignore[import-not-found]
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import (  # type: ignore[import-not-found]
            EmbeddingLocation,
            PoolingMode,
        )
    return SimpleNamespace(
        SplitTableBatchedEmbeddingBagsCodegen=tbe.SplitTableBatchedEmbeddingBagsCodegen,
        OptimType=EmbOptimType,
        EmbeddingLocation=EmbeddingLocation,
        PoolingMode=PoolingMode,
        ComputeDevice=tbe.ComputeDevice,
    )
