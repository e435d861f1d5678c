"""A conditional space and an evaluator whose front a brute-force loop finds."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass

import numpy as np

from dse.search.protocol import Codes, Evaluation


@dataclass(frozen=True)
class ToyAxis:
    name: str
    values: tuple


@dataclass(frozen=True)
class ToySpace:
    """`depth` decides how many of the three widths matter; `mode` is a named axis; one pair is excluded."""

    widths: int = 5
    batches: int = 6

    @property
    def axes(self):
        widths = tuple(64 * (i + 1) for i in range(self.widths))
        return (
            ToyAxis("depth", (1, 2, 3)),
            *(ToyAxis(f"width.{i}", widths) for i in (1, 2, 3)),
            ToyAxis("batch", tuple(2**i for i in range(self.batches))),
            ToyAxis("mode", ("eager", "fused", "graph")),
        )

    @property
    def size(self):
        w, allowed = self.widths, 3 * self.batches - 1
        return (w + w**2 + w**3) * allowed

    def sample(self, rng, n):
        sizes = [len(a.values) for a in self.axes]
        codes = rng.integers(0, sizes, size=(4 * n + 64, len(sizes))).astype(np.int16)
        return self.canonical(codes[self.allowed(codes)][:n])

    def canonical(self, codes):
        codes = codes.copy()
        for layer in (2, 3):
            codes[:, layer] = np.where(codes[:, 0] + 1 >= layer, codes[:, layer], 0)
        return codes

    def allowed(self, codes):
        return ~((codes[:, 4] == 0) & (codes[:, 5] == 2))


@dataclass(frozen=True)
class ToyEvaluator:
    """Two objectives that pull apart, and one limit; the front is not a straight line."""

    delay_s: float = 0.0
    limit: float = 1.0
    objectives: int = 2

    def evaluate(self, codes: Codes) -> Evaluation:
        if self.delay_s:
            time.sleep(self.delay_s)
        c = codes.astype(np.float64)
        present = c[:, 1:4] * (np.arange(3) < (c[:, 0] + 1)[:, None]) + (
            np.arange(3) < (c[:, 0] + 1)[:, None]
        )
        capacity = np.sqrt(present).sum(axis=1) + 0.1 * np.sin(3 * c[:, 2])
        cost = (1 + present.sum(axis=1) + 0.5 * present[:, 0] * present[:, 2]) * (
            1.3 - 0.2 * c[:, 5]
        ) + 20 / (1 + c[:, 4])
        quality = -capacity + 0.15 * c[:, 4]
        memory = (present.sum(axis=1) * (1 + c[:, 4])) / 60 / self.limit
        columns = [cost, quality, memory][: self.objectives]
        return Evaluation(np.stack(columns, axis=1), memory[:, None] - 1.0, {"capacity": capacity})


def toy_evaluator() -> ToyEvaluator:
    return ToyEvaluator()


def brute_force(space, evaluator):
    """Codes and objectives of the front by a plain double loop; of equal objectives the smallest code."""
    rows = [np.array([r], np.int16) for r in itertools.product(*(range(len(a.values)) for a in space.axes))]
    best = {}
    for row in rows:
        if (space.canonical(row) != row).any() or not space.allowed(row)[0]:
            continue
        price = evaluator.evaluate(row)
        if (price.margins <= 0).all():
            key = tuple(price.objectives[0])
            best[key] = min(best.get(key, tuple(row[0])), tuple(row[0]))
    return {
        key: code
        for key, code in best.items()
        if not any(all(o <= k for o, k in zip(other, key, strict=True)) and other != key for other in best)
    }
