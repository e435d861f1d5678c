"""Fit what needs no trees: pointwise rates, collectives, and the embedding points' errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from perfcore.cost.collective import SizeCurve, bytes_factor
from perfcore.design.hardware import Device
from perfcore.errors import ProfileError
from perfcore.graph.kernels import CollectiveKind
from perfcore.profile.fit_fp32 import least_relative_deviations
from perfcore.profile.fit_gemm import Errors, errors, log_error_90
from perfcore.profile.schema import Section
from perfcore.units import US_PER_S

if TYPE_CHECKING:
    import pandas as pd

Array = NDArray[np.float64]

MIN_VECTOR_MS = 0.2
VISIBLE = 0.6  # of the host's time, of rows that a gap is fitted on
HIDDEN_US = 1.0  # of transfer: far below what the host takes
HELD_EVERY = 5
ELEMENT_BYTES = 4
TENSORS = {"add": 3, "sub": 3, "mul": 3, "div": 3, "pow": 3}  # two in, one out; all others one in, one out
ATEN_NAMES = {
    "add": "add",
    "mul": "mul",
    "div": "div",
    "pow": "pow",
    "relu": "relu",
    "tanh": "tanh",
    "gelu": "gelu",
    "softmax": "softmax",
    "ln": "native_layer_norm",
}
COMMON = ("add", "mul", "relu")  # what unnamed pointwise functions are priced as
NCCL_KINDS = {
    "all_reduce": CollectiveKind.ALL_REDUCE,
    "alltoall": CollectiveKind.ALL_TO_ALL,
    "all_gather": CollectiveKind.ALL_GATHER,
    "reduce_scatter": CollectiveKind.REDUCE_SCATTER,
}
FIGURE_KINDS = {
    "all_reduce": CollectiveKind.ALL_REDUCE,
    "all_to_all": CollectiveKind.ALL_TO_ALL,
    "all_gather_base": CollectiveKind.ALL_GATHER,
    "reduce_scatter": CollectiveKind.REDUCE_SCATTER,
}


@dataclass(frozen=True, slots=True)
class VectorFit:
    """Share of the data sheet's bandwidth by aten name, and the errors of the rows that were held out."""

    efficiency: dict[str, float]
    samples: int
    held_out: Errors
    log_error_90: float

    @property
    def common(self) -> float:
        """Of functions without a rate of their own."""
        return round(float(np.median([self.efficiency[name] for name in COMMON])), 4)


def fit_vector(frame: pd.DataFrame, device: Device, *, floor_us: float) -> VectorFit:
    """Efficiency of each pointwise function from its long rows; every fifth row is held out.

    A gap lies before each kernel, the same share of the host's time for all (see `perfcore.profile.fit_fp32`): that which
    lies below the line of long rows over their bytes, the median over functions.

    Raises:
        ProfileError: fewer than five long rows of a function.
    """
    efficiency, predicted, measured, samples = {}, [], [], 0
    sorted_ = {op: frame[frame["op"] == op].sort_values(["rows", "cols"]) for op in ATEN_NAMES}
    share_us = gap_share(list(sorted_.items()), device)
    for op, name in ATEN_NAMES.items():
        rows = sorted_[op]
        gap_us = max(share_us * _host_us(rows, _ideal_us(op, rows, device)) - floor_us, 0.0)
        long = rows[rows["latency_ms"] >= MIN_VECTOR_MS]
        if len(long) < HELD_EVERY:
            raise ProfileError(
                f"{device.name}: five rows of {MIN_VECTOR_MS} ms or more are needed for {op!r}, but got {len(long)}."
            )
        us = long["latency_ms"].to_numpy() * 1e3 - gap_us
        ideal_us = _ideal_us(op, long, device)
        held = np.arange(len(us)) % HELD_EVERY == HELD_EVERY - 1
        share = float(np.median(ideal_us[~held] / (us[~held] - floor_us)))
        efficiency[name] = round(min(share, 1.0), 4)
        predicted.append(ideal_us[held] / efficiency[name] + floor_us)
        measured.append(us[held])
        samples += len(us)
    us, held_us = np.concatenate(predicted), np.concatenate(measured)
    return VectorFit(efficiency, samples, errors(us, held_us), log_error_90(us, held_us))


def gap_share(functions: list[tuple[str, pd.DataFrame]], device: Device) -> float:
    """Gap and floor over the host's time: the median over functions of where their lines meet no bytes.

    Of rows whose transfer outlasts what the host still does once the kernel runs, and that no cache holds.
    """
    shares = []
    for op, rows in functions:
        ideal_us = _ideal_us(op, rows, device)
        us, host_us = rows["latency_ms"].to_numpy(dtype=np.float64) * 1e3, _host_us(rows, ideal_us)
        cached_us = device.l2_bytes / device.hbm_bytes_per_s * US_PER_S
        shown = ideal_us > max(2 * cached_us, VISIBLE * host_us)
        if shown.sum() < HELD_EVERY:
            continue
        line = least_relative_deviations(np.stack([np.ones(shown.sum()), ideal_us[shown]], axis=1), us[shown])
        shares.append(float(np.clip(line[0] / host_us, 0.0, 1.0)))
    return float(np.median(shares or [0.0]))


def _ideal_us(op: str, rows: pd.DataFrame, device: Device) -> Array:
    bytes_ = ELEMENT_BYTES * TENSORS.get(op, 2) * (rows["rows"] * rows["cols"]).to_numpy(dtype=np.float64)
    return np.asarray(bytes_ / device.hbm_bytes_per_s * US_PER_S, dtype=np.float64)


def _host_us(rows: pd.DataFrame, ideal_us: Array) -> float:
    """What a row without work takes."""
    return float(rows["latency_ms"][ideal_us < HIDDEN_US].median()) * 1e3


@dataclass(frozen=True, slots=True)
class CurvePoints:
    """Measured times of one collective among `num_gpus` over sizes."""

    kind: CollectiveKind
    num_gpus: int
    bytes: list[float]
    us: list[float]

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"kind": self.kind.value, "num_gpus": self.num_gpus, "bytes": self.bytes, "us": self.us}


def nccl_curves(frame: pd.DataFrame) -> list[CurvePoints]:
    """Curves of one system: the median over library versions and element types at each size."""
    known = frame[frame["collective"].isin(NCCL_KINDS)]
    return [
        _points(NCCL_KINDS[str(name)], int(gpus), rows.groupby("bytes")["latency_ms"].median() * 1e3)
        for name, gpus, rows in _groups(known, "num_gpus")
    ]


def figure_curves(frame: pd.DataFrame) -> list[CurvePoints]:
    """Curves read off the published figure (4 GPUs)."""
    known = frame[frame["collective"].isin(FIGURE_KINDS)].dropna(subset=["latency_us(read off)"])
    return [
        _points(FIGURE_KINDS[str(name)], int(gpus), rows.set_index("size_bytes")["latency_us(read off)"])
        for name, gpus, rows in _groups(known, "n_gpus")
    ]


def published_fit_curves(frame: pd.DataFrame, *, num_gpus: int) -> list[CurvePoints]:
    """Curves of the published three-region fit, taken at powers of two.

    With `x = log2(bytes)`: the overhead up to `ln_p`; `bytes × factor / BW(x)` with
    `BW = 10^(L / (1 + exp(-k (x - x0))) + b)` GB/s between; `overhead + bytes × factor / max_bw` beyond `sats_p`.
    """
    out = []
    for row in frame[frame["n_gpus"] == num_gpus].to_dict("records"):
        kind = CollectiveKind.ALL_REDUCE if row["collective"] == "all_reduce" else CollectiveKind.ALL_TO_ALL
        x = np.arange(8, 31, dtype=np.float64)
        moved = 2.0**x * bytes_factor(kind, num_gpus)
        ramp = 10.0 ** (row["sig_L"] / (1 + np.exp(-row["sig_k"] * (x - row["sig_x0"]))) + row["sig_b"])
        middle = moved / ramp / 1e3
        large = moved / row["max_bus_bw_GBps"] / 1e3 + row["overhead_us"]
        us = np.where(
            x <= row["ln_p_log2bytes"],
            row["overhead_us"],
            np.where(x > row["sats_p_log2bytes"], large, middle),
        )
        us = np.maximum(us, row["overhead_us"])
        out.append(CurvePoints(kind, num_gpus, [float(2.0**v) for v in x], _rounded(us)))
    return out


def curve_errors(curves: list[CurvePoints]) -> Errors:
    """Each inner size predicted from the others."""
    return errors(*_left_out(curves))


def curve_spread(curves: list[CurvePoints]) -> float:
    """The 90 % quantile of |ln(predicted / measured)| of the same."""
    return log_error_90(*_left_out(curves))


def curves_left_out(curves: list[Section]) -> Array:
    """`(p, 2)`: each inner size of a profile's curves predicted from the others, and measured."""
    points = [
        CurvePoints(
            CollectiveKind(c.text("kind")), int(c.number("num_gpus")), c.numbers("bytes"), c.numbers("us")
        )
        for c in curves
    ]
    return np.stack(_left_out(points), axis=1)


def _left_out(curves: list[CurvePoints]) -> tuple[Array, Array]:
    predicted, measured = [], []
    for c in curves:
        factor = bytes_factor(c.kind, c.num_gpus)
        for i in range(1, len(c.bytes) - 1):
            rest = SizeCurve(c.bytes[:i] + c.bytes[i + 1 :], c.us[:i] + c.us[i + 1 :], bytes_factor=factor)
            predicted.append(float(rest.us(np.array([c.bytes[i]]))[0]))
            measured.append(c.us[i])
    return np.array(predicted), np.array(measured)


def _groups(frame: pd.DataFrame, gpus: str) -> list[tuple[str, int, pd.DataFrame]]:
    grouped = frame.groupby(["collective", gpus])
    return [(str(name), int(str(count)), rows) for (name, count), rows in grouped]


def _points(kind: CollectiveKind, gpus: int, series: Any) -> CurvePoints:
    ordered = series.sort_index()
    return CurvePoints(kind, gpus, [float(b) for b in ordered.index], _rounded(ordered.to_numpy()))


def _rounded(values: Any) -> list[float]:
    return [float(f"{v:.5g}") for v in values]
