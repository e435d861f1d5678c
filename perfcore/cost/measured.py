"""Prices kernels from this device's own measurements.

A kernel's time is a non-negative sum of its work (calls, flops, bytes, lookups), corrected by the residuals of
nearby samples. No data sheet is needed, so that a CPU is priced as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perfcore.cost.model import Calibration
from perfcore.cost.work import Work, work_of
from perfcore.errors import ProfileError
from perfcore.graph import kernels as k

Array = NDArray[np.float64]

# Kernel smoothing of residuals over ln(work): a sample twice as large weighs 0.6, one 8 times as large 0.01.
BANDWIDTH = 0.7
PRIOR_WEIGHT = 0.2
ANY = "*"
# Work that costs nothing where the fit has no samples: on a CPU the input is there already.
_FREE = tuple(f"memcpy_{kind}" for kind in (k.CopyKind.H2D_PINNED, k.CopyKind.H2D_PAGEABLE, k.CopyKind.D2H))
_CHUNK = 4096


@dataclass(frozen=True, slots=True, eq=False)
class Fit:
    """One kind of work, fitted.

    Attributes:
        weights_us: `(f,)` µs per unit of work, none negative.
        log_work: `(s, f)` ln(1 + work) of the samples.
        residuals: `(s,)` ln(measured / weighted sum).
        scale: how much longer the kernel takes inside a training loop than measured alone.
        log_error_90: nine in ten samples left out of the fit lie within a factor `exp` of it of what it says.
    """

    weights_us: Array
    log_work: Array
    residuals: Array
    scale: float = 1.0
    log_error_90: float = 0.0

    def predict_us(self, work: Array) -> Array:
        """`(n, f)` work to `(n,)` durations."""
        base = work @ self.weights_us * self.scale
        logs = np.log1p(work)
        chunks = [
            smoothed(logs[at : at + _CHUNK], self.log_work, self.residuals)
            for at in range(0, len(logs), _CHUNK)
        ]
        return np.asarray(base * np.exp(np.concatenate(chunks or [np.empty(0)])), dtype=np.float64)

    def covers(self, work: Array) -> bool:
        """The work lies inside the box of the samples."""
        logs = np.log1p(work)
        return bool(np.all((logs >= self.log_work.min(0) - 1e-9) & (logs <= self.log_work.max(0) + 1e-9)))


def smoothed(point: Array, points: Array, values: Array) -> Array:
    """Weighted mean of `values` at `points` `(s, f)` around `point` `(..., f)`, drawn to 0 far from all."""
    distance = ((point[..., None, :] - points) ** 2).sum(-1)
    weight = np.exp(-distance / (2 * BANDWIDTH**2))
    return np.asarray((weight * values).sum(-1) / (weight.sum(-1) + PRIOR_WEIGHT), dtype=np.float64)


class MeasuredModel:
    """A `KernelModel` of every kind of kernel that one device runs, from fits by kind of work.

    Kinds are looked up whole (`elementwise_relu`), then by family (`elementwise_*`).
    """

    def __init__(self, fits: Mapping[str, Fit]) -> None:
        self._fits = dict(fits)

    def predict_us(self, kernels: Sequence[k.Kernel]) -> list[Array]:
        """One array per kernel, of the broadcast shape of its dims (tables axis summed)."""
        works = [work_of(kernel) for kernel in kernels]
        out: list[Array] = [np.empty(0)] * len(works)
        for kind in {w.kind for w in works}:
            at = [i for i, w in enumerate(works) if w.kind == kind]
            for i, us in zip(at, self._priced([works[i] for i in at]), strict=True):
                out[i] = us
        return out

    def calibration(self, kernel: k.Kernel) -> Calibration:
        """Measured where all work lies inside the range of the samples."""
        work = work_of(kernel)
        fit = self._fit(work.kind)
        if fit is None:
            return Calibration.MEASURED
        inside = fit.covers(work.amounts.reshape(-1, work.amounts.shape[-1])[work.present.reshape(-1)])
        return Calibration.MEASURED if inside else Calibration.EXTRAPOLATED

    def log_error_90(self, kernel: k.Kernel) -> float:
        """Nine in ten measurements lie within a factor `exp` of it of the duration."""
        fit = self._fit(work_of(kernel).kind)
        return 0.0 if fit is None else fit.log_error_90

    def _priced(self, works: Sequence[Work]) -> Iterator[Array]:
        """Durations of works of one kind, each of its own shape."""
        fit = self._fit(works[0].kind)
        if fit is None:
            yield from (np.zeros(w.present.shape) for w in works)
            return
        flat = np.concatenate([w.amounts.reshape(-1, w.amounts.shape[-1]) for w in works])
        rows, back = np.unique(flat, axis=0, return_inverse=True)
        us, at = fit.predict_us(rows)[back.reshape(-1)], 0
        for work in works:
            part = us[at : at + work.present.size].reshape(work.present.shape)
            at += work.present.size
            yield np.asarray(np.where(work.present, part, 0.0))

    def _fit(self, kind: str) -> Fit | None:
        for name in (kind, family_of(kind)):
            if name in self._fits:
                return self._fits[name]
        if kind in _FREE:
            return None
        raise ProfileError(
            f"The profile's measurements hold {', '.join(sorted(self._fits))}, but a kernel of kind {kind!r} is to be priced.",
            hint="Measure with a larger --budget, and fit again.",
        )


def family_of(kind: str) -> str:
    """`elementwise_relu` and `elementwise_add` are of the family `elementwise_*`."""
    for name in ("elementwise", "multi_tensor", "embedding_backward"):
        if kind.startswith(f"{name}_"):
            return f"{name}_{ANY}"
    return kind
