"""Fit batched half-precision products: efficiency and start-up of their roofline, from shapes of attention layers.

The data are the two products around latent attention: (tokens × 128) · (128 × 512) and (tokens × 512) · (512 × 128),
one for each head. They say how long a batched launch takes to start and what it sustains; no tile of theirs is as small
as an interaction's, so that no correction is learned from them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from perfcore.cost.gemm import GemmParams, product_roofline
from perfcore.cost.roofline import GemmShapes
from perfcore.design.hardware import Device
from perfcore.graph.kernels import DType
from perfcore.profile.fit_gemm import Errors, errors
from perfcore.profile.fit_kernels import nonnegative_least_squares

if TYPE_CHECKING:
    import pandas as pd

Array = NDArray[np.float64]

SPLIT = "unseen numbers of heads"
_WIDTHS = {"mla_gen_pre": (512.0, 128.0), "mla_gen_post": (128.0, 512.0)}  # n and k


@dataclass(frozen=True, slots=True)
class BatchedFit:
    """Constants of one device, the errors on the heads that were left out, and those of single products' constants."""

    efficiency: float
    floor_us: float
    held_out: Errors
    plain: Errors


def fit_batched(frame: pd.DataFrame, device: Device, params: GemmParams) -> BatchedFit:
    """Fit one system's rows: numbers of heads of an even power of two (rounded), the others are held out.

    Args:
        frame: `op_name`, `num_heads`, `num_tokens`, `latency` (ms); repeats are framework versions, the median counts.
        device: that was measured.
        params: of single products, for comparison.
    """
    rows = frame[frame["num_heads"] > 1].groupby(["op_name", "num_heads", "num_tokens"])["latency"].median()
    label = rows.reset_index()
    n, k = np.array([_WIDTHS[op] for op in label["op_name"]]).T
    heads, tokens = (label[c].to_numpy(dtype=np.float64) for c in ("num_heads", "num_tokens"))
    us = label["latency"].to_numpy() * 1e3
    line_us = product_roofline(GemmShapes(heads, tokens, n, k), device, DType.BF16, params).us
    fitted = np.log2(heads).round() % 2 == 0
    parts = np.stack([line_us, np.ones_like(us)], axis=1)[fitted] / us[fitted, None]
    slope, floor_us = nonnegative_least_squares(parts, np.ones(len(parts)))
    efficiency, floor_us = round(1.0 / slope, 4), round(float(floor_us), 3)
    shown, measured = line_us[~fitted], us[~fitted]
    return BatchedFit(
        efficiency,
        floor_us,
        errors(shown / efficiency + floor_us, measured),
        errors(shown / params.efficiency + params.floor_us, measured),
    )
