"""Errors of a written profile on published V100 kernels that no fit has seen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from perfcore.cost.embedding import EmbeddingFormulas
from perfcore.cost.model import CostModel
from perfcore.cost.stacking import FormulaModel
from perfcore.graph.kernels import DType, EmbeddingBackward, EmbeddingForward, Gemm, Kernel
from perfcore.profile.fit_gemm import Errors, errors

if TYPE_CHECKING:
    import pandas as pd

LONG_US = 200.0
TILE = 32
UNREPEATED = 1e4  # rows a lookup, of tables in which hardly any row is looked up twice
GEMM_FILE = "gemm_kernel_times_v100.csv"
EMBEDDING_FILE = "embedding_lookup_v100_measured_vs_heuristic.csv"
CHOSEN_ON = "pooling 16 and DLRM_default chose the update's efficiencies"
# What each group of embedding points has had to do with the constants.
EMBEDDING_SPLITS = {
    "embedding_lookup (sweep)": "never fitted on; launches repeated on a warm cache",
    "embedding_lookup (traces)": "never fitted on",
    "embedding_update (sweep, pooling 32 to 128)": f"unseen: {CHOSEN_ON}",
    "embedding_update (DLRM_MLPerf)": f"unseen: {CHOSEN_ON}",
    "embedding_update (sweep, pooling 16; DLRM_default)": "the update's efficiencies chosen on these",
}


def published_kernel_errors(
    paper: Path, costs: CostModel, formulas: EmbeddingFormulas, *, mlperf_rows: list[float]
) -> list[tuple[str, Errors]]:
    """Errors on the matrix products and embedding kernels of the published V100 tables, by kind.

    Args:
        paper: folder of the tables.
        costs: of the V100 whose clock was locked as in the tables.
        formulas: of its embedding kernels.
        mlperf_rows: rows of the 26 tables that one of the workloads has.
    """
    import pandas as pd

    products = pd.read_csv(paper / GEMM_FILE)
    long = products["mean_us"] >= LONG_US
    points = pd.read_csv(paper / EMBEDDING_FILE)
    rows = np.array(mlperf_rows)
    warm = FormulaModel(replace(formulas, repeated=True).forward, sum_tables=True)
    predict = {True: warm.predict_us, False: costs.predict_us}
    return [
        ("gemm_fp32 (traces, 200 us and more)", _errors(products[long], _gemm, costs.predict_us, rows)),
        ("gemm_fp32 (traces, below 200 us)", _errors(products[~long], _gemm, costs.predict_us, rows)),
        *(
            (name, _errors(points[at], _embedding, predict[name == "embedding_lookup (sweep)"], rows))
            for name, at in _embedding_groups(points).items()
        ),
    ]


def awkward_products(paper: Path) -> list[dict[str, float]]:
    """Published fp32 products with a dim that no tile divides, the mean over those of one shape."""
    import pandas as pd

    products = pd.read_csv(paper / GEMM_FILE)
    dims = ["batch", "M", "N", "K"]
    awkward = products[(products[dims[1:]] % TILE != 0).any(axis=1)]
    means = awkward.groupby(dims)["mean_us"].mean().reset_index()
    return [
        {
            "batch": float(r["batch"]),
            **{d.lower(): float(r[d]) for d in dims[1:]},
            "us": round(r["mean_us"], 2),
        }
        for r in means.to_dict("records")
    ]


def _embedding_groups(points: pd.DataFrame) -> Mapping[str, Any]:
    """Masks of the rows of each group of `EMBEDDING_SPLITS`."""
    backward = points["sample"].str.contains("backward|bwd")
    traced, mlperf = points["sample"].str.contains("trace"), points["sample"].str.contains("MLPerf")
    chosen = backward & ((traced & ~mlperf) | (~traced & (points["L"] == 16)))
    masks = (
        ~backward & ~traced,
        ~backward & traced,
        backward & ~traced & ~chosen,
        backward & traced & ~chosen,
        chosen,
    )
    return dict(zip(EMBEDDING_SPLITS, masks, strict=True))


def _errors(
    frame: pd.DataFrame,
    kernel: Callable[..., Any],
    predict: Callable[..., Any],
    rows: NDArray[np.float64],
) -> Errors:
    records = frame.to_dict("records")
    predicted = predict([kernel(r, rows) for r in records])
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
        # That kernel adds each lookup's gradient to its row, unsorted: its counters show two rows of traffic a lookup
        # of tables that the cache cannot hold. Of the others, and without pooling, a row is hardly moved twice.
        if pooling > 1:
            rows = np.maximum(rows, UNREPEATED * batch * pooling)
        return EmbeddingBackward(batch, rows, pooling, dim, 0.0, 4.0, batched=True, optimizer="sgd")
    return EmbeddingForward(batch, rows, pooling, dim, 0.0, 4.0, batched=True)
