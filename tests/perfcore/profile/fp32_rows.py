"""Synthetic rows of the single-precision table: eager operators between events, with their kernels and grids."""

from __future__ import annotations

import numpy as np
import pandas as pd

from perfcore.profile import fit_fp32

HOST_US, GAP_US, LAUNCH_US, ROUND_US = 65.0, 42.0, 2.0, 1.5
# Operator, kernel, columns and rows of a block, share of the peak.
KERNELS = (
    ("linear", "volta_sgemm_128x64_tn", 128, 64, 0.9),
    ("linear", "volta_sgemm_32x32_sliced1x4_tn", 32, 32, 0.6),
    ("bmm", "volta_sgemm_64x64_nn", 64, 64, 0.8),
)
FASTER = 0.8  # of batches beyond the first session


def fp32_rows(device, *, rows_each: int = 400, seed: int = 0) -> pd.DataFrame:
    """Products whose time is the longer of the host's and of gap, launch, rounds and work."""
    rng = np.random.default_rng(seed)
    parts = []
    for op, kernel, cols, rows, share in KERNELS:
        count = rows_each * (4 if op == "bmm" else 1)
        dims = {name: (2.0 ** rng.uniform(3, 13, count)).astype(int) for name in ("m", "n", "k")}
        batch = (2.0 ** rng.uniform(1, 9, count)).astype(int) if op == "bmm" else np.ones(count, dtype=int)
        if op == "bmm":
            dims = {name: np.minimum(v, 600) for name, v in dims.items()}
        grid = {
            "grid_x": np.ceil(dims["n"] / cols).astype(int),
            "grid_y": np.ceil(dims["m"] / rows).astype(int),
            "grid_z": batch,
        }
        frame = pd.DataFrame({"op": op, "kernel": kernel, "batch": batch, **dims, **grid, "latency_ms": 1.0})
        work = fit_fp32.with_work(frame, device)
        kernel_us = np.maximum(work["work_us"] / share + ROUND_US * work["rounds"], work["hbm_us"] / 0.9)
        speed = np.where(frame["batch"] > fit_fp32.FIRST_SESSION, FASTER, 1.0)
        us = np.maximum(HOST_US * speed, GAP_US * speed + LAUNCH_US + kernel_us)
        parts.append(frame.assign(latency_ms=us / 1e3))
    return pd.concat(parts, ignore_index=True)
