"""Fits measured kernels of one device: one fit a kind of work, with its error on samples left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from perfcore.cost.measured import Fit, family_of
from perfcore.cost.work import work_of
from perfcore.errors import ProfileError
from perfcore.measure.samples import KernelSample

Array = NDArray[np.float64]

FOLDS = 5
FEWEST = 4
GMAE_FLOOR = 4e-4
GROUPS = ("product", "lookup", "stream")


@dataclass(frozen=True, slots=True, eq=False)
class Fitted:
    """A fit and how well it predicts samples that it has not seen, in per cent; NaN where they are too few."""

    fit: Fit
    n: int
    gmae_pct: float
    mape_pct: float


def fit_kernels(samples: Sequence[KernelSample]) -> dict[str, Fitted]:
    """One fit a kind, and one a family of kinds, for its members without samples.

    Raises:
        ProfileError: there are no samples.
    """
    if not samples:
        raise ProfileError("A profile needs measured kernels, but the samples hold none.")
    groups: dict[str, list[tuple[Array, float]]] = {}
    for sample in samples:
        work = work_of(sample.kernel)
        row = (work.amounts.reshape(-1), sample.timing.median_us)
        for name in {work.kind, family_of(work.kind)}:
            groups.setdefault(name, []).append(row)
    return {kind: _fitted(rows) for kind, rows in sorted(groups.items())}


def _fitted(rows: Sequence[tuple[Array, float]]) -> Fitted:
    work, us = np.stack([w for w, _ in rows]), np.array([t for _, t in rows])
    if len(us) < FEWEST:
        return Fitted(fit(work, us), len(us), float("nan"), float("nan"))
    predicted = np.empty(len(us))
    # Samples of one shape, warm and cold, are left out together.
    _, shapes = np.unique(work, axis=0, return_inverse=True)
    for fold in range(FOLDS):
        held = shapes.reshape(-1) % FOLDS == fold
        if held.any() and not held.all():
            predicted[held] = fit(work[~held], us[~held]).predict_us(work[held])
        else:
            predicted[held] = us[held]
    errors = np.abs(predicted / us - 1)
    gmae = float(100 * np.exp(np.mean(np.log(errors + GMAE_FLOOR))))
    spread = float(np.quantile(np.abs(np.log(predicted / us)), 0.9))
    return Fitted(replace(fit(work, us), log_error_90=spread), len(us), gmae, float(100 * errors.mean()))


def fit(work: Array, durations_us: Array) -> Fit:
    """Fit one kind: `work` is `(s, f)`, `durations_us` `(s,)`; relative errors are made small."""
    weights = nonnegative_least_squares(work / durations_us[:, None], np.ones(len(work)))
    base = np.maximum(work @ weights, np.finfo(np.float64).tiny)
    return Fit(weights, np.log1p(work), np.log(durations_us / base))


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


def with_scales(fits: Mapping[str, Fitted], scales: Mapping[str, float]) -> dict[str, Fitted]:
    """The fits with each group's slow-down inside a training loop."""
    return {kind: replace(f, fit=replace(f.fit, scale=scales[group_of(kind)])) for kind, f in fits.items()}


def group_of(kind: str) -> str:
    """Kinds that a training loop slows down alike: `product`, `lookup` or `stream`."""
    if kind.startswith(("gemm", "bmm")):
        return "product"
    return "lookup" if kind.startswith(("embedding", "sparse")) else "stream"
