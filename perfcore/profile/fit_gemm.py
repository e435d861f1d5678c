"""Fit matrix products: efficiency and floor of the roofline, then the learned correction.

bf16 labels are device times, the median over framework versions of a shape. fp32 labels are times of one eager op
between two events less what precedes the kernel (`perfcore.profile.fit_fp32`). Errors are reported on rows of at least
0.2 ms, in which that is little; shorter rows are fitted too, the less weight the larger its share, because a choice
of rows by their measured time would keep only the slow ones among short kernels.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from perfcore.cost.gemm import TILE_COLUMNS, GemmModel, GemmParams, analytic_us, features, product_roofline
from perfcore.cost.learned import Trees as FittedTrees
from perfcore.cost.model import Calibration
from perfcore.cost.roofline import GemmShapes, gemm_roofline
from perfcore.cost.simt import SimtTiles, median_tiles
from perfcore.design.hardware import Device
from perfcore.graph.kernels import DType
from perfcore.profile.fit_neighbours import fit_neighbours
from perfcore.profile.fit_pace import fit_pace
from perfcore.profile.fit_trees import SEED, Trees, grow

if TYPE_CHECKING:
    import pandas as pd

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]

FOLDS = 20  # of (n, k) pairs: 14 to fit, 3 to choose the number of trees, 3 to report
TRAIN_FOLDS = 14
MIN_FP32_US = 200.0
LARGE_US = 200.0
DLRM_MIN_M, DLRM_MAX_WIDTH = 1024, 2048
POOLED_ROWS_PER_DEVICE = 10_000
PLOTTED = 300  # points of a plot
INTERVAL = 0.9  # share of measurements that an interval holds


@dataclass(frozen=True, slots=True)
class Samples:
    """Measured products of one device.

    Attributes:
        device: that was measured.
        dtype: of the products.
        shapes: `(s,)` dims.
        us: `(s,)` device times.
        device_share: `(s,)`: part of the measured time that is device time; 1 without a launch gap.
        tiles: of the device's single-precision kernels, where they are known.
        shortest_us: below it, by the roofline, no sample of some operator is kept.
    """

    device: Device
    dtype: DType
    shapes: GemmShapes
    us: Array
    device_share: Array
    tiles: SimtTiles | None = None
    shortest_us: float = 0.0

    @property
    def reported(self) -> Mask:
        """`(s,)`: rows on which errors are reported."""
        return self.us / self.device_share >= (MIN_FP32_US if self.dtype is DType.FP32 else 0.0)

    def take(self, at: Any) -> Samples:
        """The samples at these places, or where this mask holds."""
        taken = (self.shapes.take(at), self.us[at], self.device_share[at])
        return Samples(self.device, self.dtype, *taken, self.tiles, self.shortest_us)


@dataclass(frozen=True, slots=True)
class GemmFit:
    """A fitted correction with its errors on the folds that were kept apart.

    Attributes:
        params: of the roofline, from all rows.
        model: the correction, from all rows.
        samples: rows.
        held_out: errors on unseen (n, k) pairs.
        points: `(p, 2)`: predicted and measured µs of some of the unseen rows, for a plot.
        coverage_pct: share of the measurements on those pairs inside the interval that the validation pairs gave.
        analytic: errors of the roofline alone on the same rows.
        dlrm_like: `held_out`, only rows with m ≥ 1024 and n, k ≤ 2048; `None` without any.
        single: `held_out` against every framework version apart; `None` where there is one.
    """

    params: GemmParams
    model: FittedTrees
    samples: int
    held_out: Errors
    analytic: Errors
    dlrm_like: Errors | None
    single: Errors | None
    coverage_pct: float
    points: Array


@dataclass(frozen=True, slots=True)
class Errors:
    """Relative errors in percent: geometric mean absolute, mean absolute, and mean signed."""

    n: int
    gmae_pct: float
    mape_pct: float
    bias_pct: float


def errors(predicted: Array, measured: Array) -> Errors:
    """Errors of `(s,)` predictions; GMAE is `exp(mean(ln(|pred/meas - 1| + 4e-4)))`, as published."""
    e = predicted / measured - 1.0
    gmae = float(np.exp(np.mean(np.log(np.abs(e) + 4e-4))))
    return Errors(len(e), 100 * gmae, 100 * float(np.mean(np.abs(e))), 100 * float(np.mean(e)))


def bf16_samples(frame: pd.DataFrame, device: Device) -> Samples:
    """Rows of one system of the bf16 table: the median time over framework versions of each shape."""
    label = frame.groupby(["m", "n", "k"], sort=True)["latency_ms"].median().reset_index()
    us = label["latency_ms"].to_numpy() * 1e3
    return _samples(label.assign(batch=1), device, DType.BF16, us, share=np.ones_like(us))


def bf16_versions(frame: pd.DataFrame, device: Device) -> Samples:
    """Rows of one system of the bf16 table, each framework version apart."""
    us = frame["latency_ms"].to_numpy() * 1e3
    return _samples(frame.assign(batch=1), device, DType.BF16, us, share=np.ones_like(us))


def roofline_params(samples: Samples, *, floor_us: float, basis: Calibration) -> GemmParams:
    """The pace of half-precision blocks, or the median share of the roofline of large products; the range of all."""
    half = samples.dtype is DType.BF16
    line = gemm_roofline(samples.shapes, samples.device, samples.dtype, samples.tiles)
    large = line.us >= LARGE_US
    share = 1.0 if half else float(np.median(line.us[large] / samples.us[large]))
    values = [samples.shapes.batch, samples.shapes.m, samples.shapes.n, samples.shapes.k]
    low, high = [float(v.min()) for v in values], [float(v.max()) for v in values]
    return GemmParams(
        efficiency=round(min(share, 1.0), 4),
        floor_us=round(floor_us, 3),
        low=(low[0], low[1], low[2], low[3]),
        high=(high[0], high[1], high[2], high[3]),
        basis=basis,
        correction_from_us=round(samples.shortest_us, 2),
        tiles=samples.tiles,
        pace=fit_pace([samples], floor_us=floor_us, seed=SEED) if half else None,
        widths=_widths([samples]) if half else (),
    )


def fit_gemm(
    samples: Samples,
    *,
    floor_us: float,
    trees: Trees,
    basis: Calibration,
    versions: Samples | None = None,
) -> GemmFit:
    """Choose the number of trees on validation pairs (n, k), report on test pairs, then fit on all.

    `versions` are the single measurements behind the labels; errors against them are reported beside. Shapes
    on a grid are also told by a table of their neighbours.
    """
    fold = nk_folds(samples.shapes)
    train, valid = fold < TRAIN_FOLDS, (fold >= TRAIN_FOLDS) & (fold < 17) & samples.reported
    test = (fold >= 17) & samples.reported
    params = roofline_params(samples.take(train), floor_us=floor_us, basis=basis)
    inputs, target = _inputs(samples, params)
    weight = samples.device_share**2
    told = fit_neighbours(samples.shapes.take(train), target[train])
    grown = grow(
        inputs[train],
        target[train],
        weight=weight[train],
        settings=trees,
        neighbours=told,
        unseen=(inputs[valid], target[valid]),
    )
    fitted = grown.trees
    shown, every = samples.take(test), samples if versions is None else versions
    base = analytic_us(product_roofline(shown.shapes, shown.device, shown.dtype, params), params)
    at = shown.shapes
    like_dlrm = (at.m >= DLRM_MIN_M) & (at.n <= DLRM_MAX_WIDTH) & (at.k <= DLRM_MAX_WIDTH)
    every_fold = nk_folds(every.shapes)
    chosen = every.take((every_fold >= TRAIN_FOLDS) & (every_fold < 17) & every.reported)
    unseen = every.take((every_fold >= 17) & every.reported)
    spread = log_error_90(predict_us(chosen, params, fitted), chosen.us)
    whole = replace(roofline_params(samples, floor_us=floor_us, basis=basis), log_error_90=spread)
    inputs, target = _inputs(samples, whole)
    told = fit_neighbours(samples.shapes, target)
    final = grow(inputs, target, weight=weight, settings=trees, neighbours=told, counts=grown.counts)
    return GemmFit(
        params=whole,
        model=final.trees,
        samples=len(samples.us),
        held_out=_errors(shown, params, fitted),
        analytic=errors(base, shown.us),
        dlrm_like=_errors(shown.take(like_dlrm), params, fitted) if like_dlrm.any() else None,
        single=None if versions is None else _errors(unseen, params, fitted),
        coverage_pct=coverage_pct(predict_us(unseen, params, fitted), unseen.us, spread),
        points=_points(shown, params, fitted),
    )


def _points(samples: Samples, params: GemmParams, model: FittedTrees) -> Array:
    """`(p, 2)`: predicted and measured times of at most `PLOTTED` samples, evenly through their order."""
    at = np.unique(np.linspace(0, len(samples.us) - 1, PLOTTED).round().astype(np.intp))
    return np.stack([predict_us(samples.take(at), params, model), samples.us[at]], axis=1)


def fit_pooled(
    sets: list[Samples], *, floor_us: float, trees: Trees | None
) -> tuple[GemmParams, FittedTrees | None, dict[str, Errors]]:
    """One roofline and correction for all devices by their numbers; errors of each when its generation is left out.

    Without settings of trees there is no correction.
    """
    thin = [_thinned(s) for s in sets]
    left_out, logs = {}, []
    for generation in sorted({s.device.compute_capability for s in thin}):
        rest = [s for s in thin if s.device.compute_capability != generation]
        p, model = _fit_union(rest, _pooled_params(rest, floor_us=floor_us), trees)
        for held in thin:
            if held.device.compute_capability == generation:
                shown = held.take(held.reported)
                us = predict_us(shown, p, model)
                left_out[held.device.name] = errors(us, shown.us)
                logs.append(np.log(us / shown.us))
    spread = round(float(np.quantile(np.abs(np.concatenate(logs)), INTERVAL)), 4)
    p, model = _fit_union(thin, _pooled_params(thin, floor_us=floor_us), trees)
    return replace(p, log_error_90=spread), model, left_out


def log_error_90(predicted: Array, measured: Array) -> float:
    """The 90 % quantile of |ln(predicted / measured)|."""
    return round(float(np.quantile(np.abs(np.log(predicted / measured)), INTERVAL)), 4)


def coverage_pct(predicted: Array, measured: Array, spread: float) -> float:
    """Share of the measurements within a factor `exp(spread)` of the prediction."""
    return 100.0 * float(np.mean(np.abs(np.log(predicted / measured)) <= spread))


def predict_us(samples: Samples, params: GemmParams, model: FittedTrees | None) -> Array:
    """`(s,)`: what the (corrected) roofline says of the samples' shapes."""
    corrections = {} if model is None else {samples.dtype: model}
    priced = GemmModel(samples.device, {samples.dtype: params}, corrections)
    return priced.price_us(samples.shapes, samples.dtype)


def _errors(samples: Samples, params: GemmParams, model: FittedTrees) -> Errors:
    return errors(predict_us(samples, params, model), samples.us)


def nk_folds(shapes: GemmShapes) -> NDArray[np.int64]:
    """`(s,)`: the fold of each shape's (n, k) pair; all rows of a pair share one."""
    pairs = np.stack([shapes.n, shapes.k], axis=1).astype(np.int64)
    unique, inverse = np.unique(pairs, axis=0, return_inverse=True)
    folds = np.array([zlib.crc32(f"{n},{k}".encode()) % FOLDS for n, k in unique], dtype=np.int64)
    return folds[inverse.ravel()]


def _pooled_params(sets: list[Samples], *, floor_us: float) -> GemmParams:
    """The median efficiency of the devices, the union of their ranges."""
    each = [roofline_params(s, floor_us=floor_us, basis=Calibration.EXTRAPOLATED) for s in sets]
    low, high = np.min([p.low for p in each], axis=0), np.max([p.high for p in each], axis=0)
    return GemmParams(
        efficiency=round(float(np.median([p.efficiency for p in each])), 4),
        floor_us=each[0].floor_us,
        low=(float(low[0]), float(low[1]), float(low[2]), float(low[3])),
        high=(float(high[0]), float(high[1]), float(high[2]), float(high[3])),
        basis=Calibration.EXTRAPOLATED,
        correction_from_us=max(p.correction_from_us for p in each),
        tiles=median_tiles([p.tiles for p in each if p.tiles is not None]),
        pace=fit_pace(sets, floor_us=floor_us, seed=SEED) if each[0].pace is not None else None,
        widths=_widths(sets) if each[0].widths else (),
    )


def _widths(sets: list[Samples]) -> tuple[float, ...]:
    """Every `n` and `k` of the samples."""
    values = np.concatenate([d for s in sets for d in (s.shapes.n, s.shapes.k)])
    return tuple(float(v) for v in np.unique(values))


def _fit_union(
    sets: list[Samples], params: GemmParams, trees: Trees | None
) -> tuple[GemmParams, FittedTrees | None]:
    if trees is None:
        return params, None
    parts = [(without_tiles(x), y) for x, y in (_inputs(s, params) for s in sets)]
    weight = np.concatenate([s.device_share**2 for s in sets])
    inputs, target = (np.concatenate(p) for p in zip(*parts, strict=True))
    return params, grow(inputs, target, weight=weight, settings=trees).trees


def _inputs(samples: Samples, params: GemmParams) -> tuple[NDArray[np.float32], Array]:
    line = product_roofline(samples.shapes, samples.device, samples.dtype, params)
    inputs = features(samples.shapes, line, samples.device, samples.dtype, params)
    return inputs, np.log(samples.us / analytic_us(line, params))


def without_tiles(inputs: NDArray[np.float32]) -> NDArray[np.float32]:
    """The inputs with what tells tiles apart held constant, so that no tree asks it.

    One device's choice among tiles says little of another's: with these columns, devices left out are predicted worse.
    """
    columns = np.arange(inputs.shape[1])
    told = (columns >= TILE_COLUMNS.start) & (columns < TILE_COLUMNS.stop)
    return np.where(told, np.float32(0.0), inputs)


def _thinned(samples: Samples) -> Samples:
    count = len(samples.us)
    if count <= POOLED_ROWS_PER_DEVICE:
        return samples
    rng = np.random.default_rng(SEED)
    return samples.take(np.sort(rng.choice(count, POOLED_ROWS_PER_DEVICE, replace=False)))


def _samples(frame: pd.DataFrame, device: Device, dtype: DType, us: Array, *, share: Array) -> Samples:
    columns = [frame[c].to_numpy(dtype=np.float64) for c in ("batch", "m", "n", "k")]
    return Samples(device, dtype, GemmShapes(*columns), np.asarray(us, dtype=np.float64), share)
