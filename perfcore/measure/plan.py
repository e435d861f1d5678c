"""Which kernel to measure next: where a model of what was measured is least certain.

A kind's uncertainty is the error with which its samples predict one another; a shape's is its distance from
the kind's samples, in the logarithm of its work.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from perfcore.cost.measured import BANDWIDTH
from perfcore.cost.work import work_of
from perfcore.graph.kernels import Kernel

Array = NDArray[np.float64]

UNKNOWN_ERROR = 1.0
# Below this many samples a kind goes before all others.
FEW = 3
# With so many samples, an error counts half and not knowing it the other half.
SAMPLES_TO_TRUST = 10
# How much of an iteration kernels of a kind take, roughly; the rest counts 1.
IMPORTANCE = {"gemm": 8.0, "bmm": 4.0, "embedding": 4.0, "sparse": 4.0, "pair": 2.0, "concat": 2.0}


class Plan:
    """Chooses among cases, and learns from what was measured.

    Args:
        kernels: what could be measured.
    """

    def __init__(self, kernels: Sequence[Kernel]) -> None:
        works = [work_of(kernel) for kernel in kernels]
        self._kinds = np.array([w.kind for w in works])
        self._weights = np.array([_importance(w.kind) for w in works])
        self._logs = [np.log1p(w.amounts.reshape(-1)) for w in works]
        self._open = np.ones(len(works), dtype=bool)
        self._distance = np.full(len(works), np.inf)
        self._measured: dict[str, list[tuple[Array, float]]] = {}
        self._errors: dict[str, float] = {}

    def next(self) -> int | None:
        """Index of the kernel to measure, `None` when all are."""
        if not self._open.any():
            return None
        errors = np.array([self._errors.get(kind, UNKNOWN_ERROR) for kind in self._kinds])
        counts = np.array([len(self._measured.get(kind, ())) for kind in self._kinds])
        novelty = 1 - np.exp(-(np.minimum(self._distance, 1e3) ** 2) / (2 * BANDWIDTH**2))
        # A kind with many samples gains less from one more; farther is better also where all are far.
        gain = self._weights * errors * novelty / np.sqrt(counts + 1)
        score = gain * (1 + 0.1 * np.minimum(self._distance, 1e3)) + np.maximum(FEW - counts, 0) * 1e6
        return int(np.argmax(np.where(self._open, score, -1.0)))

    @property
    def has_every_kind(self) -> bool:
        """Nothing is left of any kind that has fewer than two samples: a small one and a large one."""
        return all(len(self._measured.get(kind, ())) >= 2 for kind in set(self._kinds[self._open]))

    def learn(self, kernel: Kernel, us: float, *, index: int | None = None) -> None:
        """Take in a measurement, of the case `index` where it is one."""
        work = work_of(kernel)
        point = np.log1p(work.amounts.reshape(-1))
        kin = np.flatnonzero(self._kinds == work.kind)
        for i in kin:
            self._distance[i] = min(self._distance[i], float(np.linalg.norm(self._logs[i] - point)))
        self._open[kin[self._distance[kin] < 1e-9]] = False
        if index is not None:
            self._open[index] = False
        points = self._measured.setdefault(work.kind, [])
        points.append((point, float(np.log(us))))
        trust = len(points) / (len(points) + SAMPLES_TO_TRUST)
        self._errors[work.kind] = trust * _error(points) + (1 - trust) * UNKNOWN_ERROR

    def refuse(self, index: int) -> None:
        """The case cannot be measured here."""
        self._open[index] = False


def _importance(kind: str) -> float:
    return next((weight for prefix, weight in IMPORTANCE.items() if kind.startswith(prefix)), 1.0)


def _error(samples: Sequence[tuple[Array, float]]) -> float:
    """How far each sample is from a plane through the others and its neighbours' residuals, on average."""
    points, values = np.stack([p for p, _ in samples]), np.array([v for _, v in samples])
    design = np.hstack([np.ones((len(points), 1)), points[:, 1:]])
    ridge = 1e-3 * np.eye(design.shape[1])
    residuals = values - design @ np.linalg.solve(design.T @ design + ridge, design.T @ values)
    weight = np.exp(-((points[:, None] - points) ** 2).sum(-1) / (2 * BANDWIDTH**2))
    np.fill_diagonal(weight, 0.0)
    left_out = residuals - (weight @ residuals) / (weight.sum(1) + 0.2)
    return float(np.clip(np.abs(left_out).mean(), 0.01, UNKNOWN_ERROR))
