"""Errors of a written profile on published V100 kernels that no fit has seen."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from perfcore.cost.model import CostModel
from perfcore.graph.kernels import DType, EmbeddingBackward, EmbeddingForward, Gemm, Kernel
from perfcore.profile.fit_gemm import Errors, errors

if TYPE_CHECKING:
    import pandas as pd

LONG_US = 200.0
UNREPEATED = 1e4  # rows a lookup, of tables in which hardly any row is looked up twice
GEMM_FILE = "gemm_kernel_times_v100.csv"
EMBEDDING_FILE = "embedding_lookup_v100_measured_vs_heuristic.csv"


def published_kernel_errors(
    paper: Path, costs: CostModel, *, mlperf_rows: list[float]
) -> list[tuple[str, Errors]]:
    """Errors on the matrix products and embedding kernels of the published V100 tables, by kind.

    Args:
        paper: folder of the tables.
        costs: of the V100 whose clock was locked as in the tables.
        mlperf_rows: rows of the 26 tables that one of the workloads has.
    """
    import pandas as pd

    products = pd.read_csv(paper / GEMM_FILE)
    long = products["mean_us"] >= LONG_US
    points = pd.read_csv(paper / EMBEDDING_FILE)
    backward = points["sample"].str.contains("backward|bwd")
    traced = points["sample"].str.contains("trace")
    rows = np.array(mlperf_rows)
    return [
        ("gemm_fp32 (traces, 200 us and more)", _errors(products[long], _gemm, costs, rows)),
        ("gemm_fp32 (traces, below 200 us)", _errors(products[~long], _gemm, costs, rows)),
        ("embedding_lookup (sweep)", _errors(points[~backward & ~traced], _embedding, costs, rows)),
        ("embedding_lookup (traces)", _errors(points[~backward & traced], _embedding, costs, rows)),
        ("embedding_update (sweep)", _errors(points[backward & ~traced], _embedding, costs, rows)),
        ("embedding_update (traces)", _errors(points[backward & traced], _embedding, costs, rows)),
    ]


def _errors(frame: pd.DataFrame, kernel: Any, costs: CostModel, rows: NDArray[np.float64]) -> Errors:
    records = frame.to_dict("records")
    predicted = costs.predict_us([kernel(r, rows) for r in records])
    measured = [r["mean_us"] if "mean_us" in r else r["measured_kernel_us"] for r in records]
    return errors(np.array([float(p) for p in predicted]), np.array(measured, dtype=np.float64))


def _gemm(record: dict[str, Any], rows: NDArray[np.float64]) -> Kernel:
    m, n, k, batch = (float(record[d]) for d in ("M", "N", "K", "batch"))
    return Gemm(m, n, k, DType.FP32, batch=batch)


def _embedding(record: dict[str, Any], mlperf_rows: NDArray[np.float64]) -> Kernel:
    sample = str(record["sample"])
    rows = mlperf_rows if "MLPerf" in sample else np.full(int(record["T"]), float(record["E"]))
    batch, pooling, dim = (float(record[d]) for d in ("B", "L", "D"))
    if "backward" in sample or "bwd" in sample:
        # That kernel adds each lookup's gradient to its row, unsorted: its counters show two rows of traffic a lookup.
        unrepeated = np.maximum(rows, UNREPEATED * batch * pooling)
        return EmbeddingBackward(batch, unrepeated, pooling, dim, 0.0, 4.0, batched=True, optimizer="sgd")
    return EmbeddingForward(batch, rows, pooling, dim, 0.0, 4.0, batched=True)
