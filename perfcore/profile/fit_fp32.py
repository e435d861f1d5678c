"""Single-precision products from times of eager operators: what hides in them, and the tiles behind them.

Two events surround one operator on an idle device. The time between them is the longer of what the host needs until it
records the second event and of *gap* (until the kernel starts) plus kernel. Short kernels therefore all show the host's
time, some tens of µs, and say nothing of the device; of longer ones the gap is subtracted. The gap is where the line
through the longer ones meets no work: for each kernel, time over rounds of blocks and over rounds times depth.

The table names each row's kernel and grid, so that every tile's share of the peak is known: work of the busiest
multiprocessor over time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from perfcore.cost.roofline import GemmShapes, gemm_roofline
from perfcore.cost.simt import SIMT_STEP, SIMT_TILES, SimtTiles
from perfcore.design.hardware import Device
from perfcore.graph.kernels import DType
from perfcore.profile.fit_gemm import TRAIN_FOLDS, Samples, nk_folds
from perfcore.units import US_PER_S

if TYPE_CHECKING:
    import pandas as pd

Array = NDArray[np.float64]

FIRST_SESSION = 64  # largest batch of the first of two sessions
HIDDEN_US = 3.0  # of work: far below what the host takes
VISIBLE = (0.5, 5.0)  # work over the host's time, of rows that a gap is fitted on
FEWEST_ROWS = 30  # of one kernel, for a gap
FEWEST_LONG = 10  # of one tile, for its efficiency
LARGEST_SCATTER = 0.1  # median relative residual of a line that means something
LONG_US = 100.0  # of work, of rows that an efficiency is taken from
SERVES = 0.02  # share of an operator's rows, of tiles that serve it
REWEIGHTINGS = 50
LEAST_RESIDUAL = 1e-4


@dataclass(frozen=True, slots=True)
class Timing:
    """Of one session on one GPU, in µs: the host's time, and what precedes the kernel; `None` where it is not told."""

    host_us: float
    gap_us: float | None


def timings(frame: pd.DataFrame, device: Device, *, launch_us: float) -> dict[str, Timing]:
    """Host time and gap of each session of one GPU's rows; a kernel without work takes `launch_us`."""
    rows = with_work(frame, device)
    out = {}
    for session, of in rows.groupby(sessions(frame)):
        short = of["us"][of["work_us"] < HIDDEN_US]
        host_us = float(short.median() if len(short) else of["us"].min())
        low, high = (v * host_us for v in VISIBLE)
        shown = (of["work_us"] > low) & (of["work_us"] < high) & (2 * of["hbm_us"] < of["work_us"])
        out[str(session)] = Timing(host_us, _gap_us(of[shown], host_us, launch_us=launch_us))
    return out


def sessions(frame: pd.DataFrame) -> pd.Series[str]:
    """`(s,)`: operator, and for batches which of two sessions: on the V100 the host of one was a fifth faster."""
    return frame["op"] + np.where(frame["batch"] <= FIRST_SESSION, "", f", batch > {FIRST_SESSION}")


def filled(timed: Mapping[str, Mapping[str, Timing]]) -> dict[str, dict[str, Timing]]:
    """Gaps that no line told are the median share of the host's time in that session on the other GPUs."""
    out: dict[str, dict[str, Timing]] = {}
    for gpu, of_gpu in timed.items():
        out[gpu] = {}
        for session, t in of_gpu.items():
            told = [(o[session].gap_us, o[session].host_us) for o in timed.values() if session in o]
            shares = [gap / host for gap, host in told if gap is not None]
            gap_us = t.host_us * float(np.median(shares or [0.0])) if t.gap_us is None else t.gap_us
            out[gpu][session] = Timing(t.host_us, gap_us)
    return out


def fp32_samples(
    frame: pd.DataFrame,
    device: Device,
    timed: Mapping[str, Timing],
    *,
    floor_us: float,
    memory_efficiency: float = 1.0,
) -> Samples:
    """Rows of one GPU of the fp32 table whose kernels are long enough to be seen, the gap subtracted.

    Which rows those are is told by the roofline, not by the measured time: that would keep the slow ones among short
    kernels. `memory_efficiency` is the share of the device's bandwidth that pointwise kernels reach.
    """
    session = sessions(frame)
    gap_us = session.map({s: t.gap_us for s, t in timed.items()}).to_numpy(dtype=np.float64)
    host_us = session.map({s: t.host_us for s, t in timed.items()}).to_numpy(dtype=np.float64)
    latency_us = frame["latency_ms"].to_numpy(dtype=np.float64) * 1e3
    us = latency_us - gap_us
    shapes = _shapes(frame)
    tiles = fit_tiles(frame, device, us, memory_efficiency=memory_efficiency)
    line_us = gemm_roofline(shapes, device, DType.FP32, tiles).us
    hidden_us = np.maximum(host_us - gap_us - floor_us, 0.0)
    samples = Samples(device, DType.FP32, shapes, us, us / latency_us, tiles, float(hidden_us.max()))
    return samples.take((us > 0) & (line_us >= hidden_us))


def fit_tiles(frame: pd.DataFrame, device: Device, us: Array, *, memory_efficiency: float) -> SimtTiles:
    """Each tile's share of the peak, and the tiles that serve batches.

    Medians over the long rows of the (n, k) pairs that the trees are grown on.
    """
    rows = with_work(frame, device).assign(device_us=us)
    trained = nk_folds(_shapes(frame)) < TRAIN_FOLDS
    long = rows[trained & (rows["work_us"] >= LONG_US) & (rows["work_us"] > 2 * rows["hbm_us"])]
    batches = rows.loc[rows["op"] == "bmm", "tile"].value_counts(normalize=True)
    efficiency = []
    for tile in range(len(SIMT_TILES)):
        of_tile = long[long["tile"] == tile]
        share = (of_tile["work_us"] / of_tile["device_us"]).median() if len(of_tile) >= FEWEST_LONG else 0.0
        efficiency.append(round(min(float(share), 1.0), 3))
    serves = [batches.get(tile, 0.0) >= SERVES for tile in range(len(SIMT_TILES))]
    return SimtTiles(
        tuple(efficiency),
        tuple(bool(s and e > 0) for s, e in zip(serves, efficiency, strict=True)),
        round(memory_efficiency, 3),
    )


def with_work(frame: pd.DataFrame, device: Device) -> pd.DataFrame:
    """The rows with their `us`, number of the `tile` (-1: none that is known), rounds, depth, `work_us` and `hbm_us`.

    Work is that of the busiest multiprocessor at its peak.
    """
    numbers = frame["kernel"].str.extract(r"(\d+)x(\d+)").astype(float)
    sliced = frame["kernel"].str.contains(r"sliced1x4|\d+x\d+x32", regex=True)
    cols, rows, slices = numbers[0], numbers[1], np.where(sliced, 4, 1)
    blocks = frame["grid_x"] * frame["grid_y"] * frame["grid_z"]
    whole = np.ceil(frame["n"] / cols) * np.ceil(frame["m"] / rows) * frame["batch"]
    step = SIMT_STEP * slices
    depth = np.ceil(frame["k"] / (np.maximum(blocks / whole, 1.0) * step)) * step
    rounds = np.ceil(blocks / device.sm_count)
    names = {tile: number for number, tile in enumerate(SIMT_TILES)}
    keys = zip(rows.fillna(0), cols.fillna(0), slices, strict=True)
    lanes = device.fp32_flops_per_s / 2 / device.sm_count
    return frame.assign(
        us=frame["latency_ms"] * 1e3,
        tile=[names.get((int(r), int(c), int(s)), -1) for r, c, s in keys],
        rounds=rounds,
        depth=depth,
        work_us=rounds * rows * cols * depth / lanes * US_PER_S,
        hbm_us=_shapes(frame).hbm_bytes(DType.FP32.bytes) / device.hbm_bytes_per_s * US_PER_S,
    )


def _shapes(frame: pd.DataFrame) -> GemmShapes:
    return GemmShapes(*(frame[c].to_numpy(dtype=np.float64) for c in ("batch", "m", "n", "k")))


def _gap_us(rows: pd.DataFrame, host_us: float, *, launch_us: float) -> float | None:
    """Where the line through the rows of each kernel meets no work, less a kernel without work."""
    counts = rows["kernel"].value_counts()
    kernels = sorted(counts.index[counts >= FEWEST_ROWS])
    rows = rows[rows["kernel"].isin(kernels)]
    if not len(rows):
        return None
    of = [(rows["kernel"] == name).to_numpy() for name in kernels]
    rounds, depth = (rows[c].to_numpy(dtype=np.float64) for c in ("rounds", "depth"))
    parts = np.stack(
        [np.ones(len(rows)), *(o * rounds for o in of), *(o * rounds * depth for o in of)], axis=1
    )
    us = rows["us"].to_numpy(dtype=np.float64)
    found = least_relative_deviations(parts, us)
    if float(np.median(np.abs(parts @ found - us) / us)) > LARGEST_SCATTER:
        return None
    return float(np.clip(found[0] - launch_us, 0.0, host_us - launch_us))


def least_relative_deviations(parts: Array, us: Array) -> Array:
    """Coefficients with the least sum of |parts · x / us - 1|, by least squares with ever new weights."""
    scaled = parts / us[:, None]
    weight: Array = np.ones(len(us))
    found: Array = np.zeros(parts.shape[1])
    for _ in range(REWEIGHTINGS):
        root = np.sqrt(weight)
        found = np.asarray(np.linalg.lstsq(scaled * root[:, None], root, rcond=None)[0], dtype=np.float64)
        weight = 1.0 / np.maximum(np.abs(scaled @ found - 1.0), LEAST_RESIDUAL)
    return found
