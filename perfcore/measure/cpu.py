"""Prices kernels on this machine's CPU, from a quick calibration of this machine.

A CPU is a device whose kernels block the host: an iteration is the sum of its ops. A kernel's time is a
non-negative sum of its work (calls, flops, bytes, lookups), corrected by the residuals of nearby samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from perfcore.cost.model import Calibration, CostModel, KernelModel
from perfcore.errors import ProfileError
from perfcore.graph import kernels as k
from perfcore.graph.ops import Launch, Op, WorkloadGraph
from perfcore.measure.cpu_work import TABLE_KINDS, Work, parts, work_of

Array = NDArray[np.float64]

# Kernel smoothing of residuals over ln(work): a sample twice as large weighs 0.6, one 8 times as large 0.01.
BANDWIDTH = 0.7
PRIOR_WEIGHT = 0.2


@dataclass(frozen=True, slots=True, eq=False)
class Fit:
    """One kind of work, fitted.

    Attributes:
        weights_us: `(f,)` µs per unit of work, none negative.
        log_work: `(s, f)` ln(1 + work) of the samples.
        residuals: `(s,)` ln(measured / weighted sum).
        held_out_mape_pct: mean error of each sample when it is left out of the residuals.
    """

    weights_us: Array
    log_work: Array
    residuals: Array
    held_out_mape_pct: float

    def predict_us(self, work: Array) -> Array:
        """`(..., f)` work to `(...)` durations."""
        base = work @ self.weights_us
        correction = _smoothed(np.log1p(work), self.log_work, self.residuals)
        return np.asarray(base * np.exp(correction), dtype=np.float64)

    def covers(self, work: Array) -> bool:
        """The work lies inside the box of the samples."""
        logs = np.log1p(work)
        return bool(np.all((logs >= self.log_work.min(0) - 1e-9) & (logs <= self.log_work.max(0) + 1e-9)))


def fit(work: Array, durations_us: Array) -> Fit:
    """Fit one kind: `work` is `(s, f)`, `durations_us` `(s,)`; relative errors are made small."""
    weights = nonnegative_least_squares(work / durations_us[:, None], np.ones(len(work)))
    base = work @ weights
    residuals = np.log(durations_us / base)
    logs = np.log1p(work)
    left_out = [
        _smoothed(logs[i], np.delete(logs, i, axis=0), np.delete(residuals, i)) for i in range(len(work))
    ]
    errors = np.abs(base * np.exp(np.array(left_out)) / durations_us - 1)
    return Fit(weights, logs, residuals, float(100 * errors.mean()))


def nonnegative_least_squares(a: Array, b: Array, *, sweeps: int = 2000) -> Array:
    """`x >= 0` that minimises `|a x - b|`, by coordinate descent; `a` is `(s, f)`, `b` `(s,)`."""
    scale = np.maximum(np.linalg.norm(a, axis=0), np.finfo(np.float64).tiny)
    gram, target = (a / scale).T @ (a / scale), (a / scale).T @ b
    x = np.zeros(a.shape[1])
    for _ in range(sweeps):
        before = x.copy()
        for j in range(len(x)):
            x[j] = max(0.0, x[j] + (target[j] - gram[j] @ x) / max(gram[j, j], np.finfo(np.float64).tiny))
        if np.allclose(before, x, rtol=1e-10, atol=0):
            break
    return np.asarray(x / scale, dtype=np.float64)


class CpuKernels:
    """A `KernelModel` of every kind of kernel that one device runs."""

    def __init__(self, fits: Mapping[str, Fit]) -> None:
        self._fits = dict(fits)

    def predict_us(self, kernels: Sequence[k.Kernel]) -> list[Array]:
        """One array per kernel, of the broadcast shape of its dims (tables axis summed)."""
        return [np.asarray(sum(self._one(p) for p in parts(kernel)), dtype=np.float64) for kernel in kernels]

    def calibration(self, kernel: k.Kernel) -> Calibration:
        """Measured where all work lies inside the range of the samples."""
        inside = all(self._fit(w).covers(w.amounts) for w in map(work_of, parts(kernel)))
        return Calibration.MEASURED if inside else Calibration.EXTRAPOLATED

    def _one(self, kernel: k.Kernel) -> Array:
        work = work_of(kernel)
        us = np.where(work.present, self._fit(work).predict_us(work.amounts), 0.0)
        return us.sum(axis=-1) if isinstance(kernel, TABLE_KINDS) else us

    def _fit(self, work: Work) -> Fit:
        if work.kind not in self._fits:
            raise ProfileError(
                f"The CPU calibration holds {', '.join(sorted(self._fits))}, but a kernel of kind "
                f"{work.kind!r} is to be priced."
            )
        return self._fits[work.kind]


def cpu_cost_model(fits: Mapping[str, Fit]) -> CostModel:
    """The cost model in which one `CpuKernels` prices every kind."""
    model: KernelModel[k.Kernel] = CpuKernels(fits)
    return CostModel(dict.fromkeys(get_args(k.Kernel), model))


@dataclass(frozen=True, slots=True, eq=False)
class CpuProfile:
    """All that prices an iteration on this machine.

    Attributes:
        fits: by kind of work.
        scales: by group of kinds, how much longer kernels take inside a training loop, where caches are cold
            and memory is fresh, than one after the other.
        overheads_us: host time per op beside its kernels, by phase.
        default_overhead_us: of a phase that `overheads_us` lacks.
    """

    fits: Mapping[str, Fit]
    scales: Mapping[str, float]
    overheads_us: Mapping[str, float]
    default_overhead_us: float

    def iteration_us(self, graph: WorkloadGraph) -> float:
        """Iteration time of a graph of one design on one rank."""
        kernels = sum(us * self.scales[group] for group, us in kernels_us(graph, self.fits).items())
        overheads = (
            count * self.overheads_us.get(phase, self.default_overhead_us)
            for phase, count in ops_by_phase(graph).items()
        )
        return kernels + sum(overheads)


def group_of(kind: str) -> str:
    """Kinds that a training loop slows down alike: `gemm`, `lookup` or `memory`."""
    if kind.startswith(("gemm", "bmm")):
        return "gemm"
    return "lookup" if kind.startswith(("embedding", "sparse")) else "memory"


def kernels_us(graph: WorkloadGraph, fits: Mapping[str, Fit]) -> dict[str, float]:
    """Sum of the durations of all kernels that one design launches, by group."""
    model, sums = CpuKernels(fits), dict.fromkeys(("gemm", "lookup", "memory"), 0.0)
    for op in graph.ops():
        for launch in _launches(op) if np.any(op.present) else ():
            for part in parts(launch.kernel) if np.any(launch.present) else ():
                sums[group_of(work_of(part).kind)] += float(model.predict_us([part])[0].sum())
    return sums


def _launches(op: Op) -> Sequence[Launch]:
    """What a CPU runs of an op: `index_put` sorts its indices on CUDA alone."""
    scatters = [x for x in op.launches if isinstance(x.kernel, k.PairGather) and x.kernel.backward]
    return scatters or op.launches


def ops_by_phase(graph: WorkloadGraph) -> dict[str, int]:
    """How many ops one design runs in each phase."""
    counts: dict[str, int] = {}
    for op in graph.ops():
        counts[op.phase] = counts.get(op.phase, 0) + bool(np.any(op.present))
    return counts


def _smoothed(point: Array, points: Array, values: Array) -> Array:
    """Weighted mean of `values` at `points` `(s, f)` around `point` `(..., f)`, drawn to 0 far from all."""
    distance = ((point[..., None, :] - points) ** 2).sum(-1)
    weight = np.exp(-distance / (2 * BANDWIDTH**2))
    return np.asarray((weight * values).sum(-1) / (weight.sum(-1) + PRIOR_WEIGHT), dtype=np.float64)
