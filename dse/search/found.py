"""What a search has found so far: a value that adds up over chunks, whatever their order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dse.pareto import pareto_mask
from dse.search.protocol import Array, Codes, Evaluation


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """Non-dominated feasible candidates, the nearest infeasible one, and counts.

    Addition is commutative and associative: of candidates with equal objectives the one with the
    lexicographically smallest code stays, and rows are kept in the order of their objectives.

    Attributes:
        codes: `(k, a)` of the front.
        objectives: `(k, m)` of the front.
        worst: `(m,)` largest value of each objective over all feasible candidates; -inf without one.
        nearest: `(0 or 1, a)` the infeasible candidate with the smallest violation.
        nearest_violation: its sum of positive margins; infinite without one.
        evaluated: candidates priced, repeats included.
        feasible: how many of them were feasible.
    """

    codes: Codes
    objectives: Array
    worst: Array
    nearest: Codes
    nearest_violation: float
    evaluated: int
    feasible: int

    @classmethod
    def nothing(cls, *, axes: int, objectives: int) -> Found:
        """The neutral element."""
        return cls(
            np.empty((0, axes), np.int16),
            np.empty((0, objectives)),
            np.full(objectives, -np.inf),
            np.empty((0, axes), np.int16),
            np.inf,
            0,
            0,
        )

    @classmethod
    def among(cls, codes: Codes, evaluation: Evaluation) -> Found:
        """What is found among `(n, a)` priced candidates."""
        violation = evaluation.violation
        good = violation <= 0.0
        objectives = evaluation.objectives[good]
        nearest, distance = _nearest(codes[~good], violation[~good])
        worst = objectives.max(axis=0) if len(objectives) else np.full(objectives.shape[1], -np.inf)
        front = _front(codes[good], objectives)
        return cls(*front, worst, nearest, distance, len(codes), int(good.sum()))

    def __add__(self, other: Found) -> Found:
        codes = np.concatenate([self.codes, other.codes])
        front = _front(codes, np.concatenate([self.objectives, other.objectives]))
        nearest, distance = _nearest(
            np.concatenate([self.nearest, other.nearest]),
            np.repeat(
                [self.nearest_violation, other.nearest_violation], [len(self.nearest), len(other.nearest)]
            ),
        )
        return Found(
            *front,
            np.maximum(self.worst, other.worst),
            nearest,
            distance,
            self.evaluated + other.evaluated,
            self.feasible + other.feasible,
        )


def _front(codes: Codes, objectives: Array) -> tuple[Codes, Array]:
    rows = _not_beaten_by_a_few(objectives)
    codes, objectives = codes[rows], objectives[rows]
    order = _lexicographic(objectives, codes)
    codes, objectives = codes[order], objectives[order]
    fresh = np.ones(len(codes), dtype=bool)
    fresh[1:] = (objectives[1:] != objectives[:-1]).any(axis=1)
    codes, objectives = codes[fresh], objectives[fresh]
    kept = pareto_mask(objectives)
    return codes[kept], objectives[kept]


def _not_beaten_by_a_few(objectives: Array, *, judges: int = 32) -> NDArray[np.intp]:
    """Rows that none of a few good ones dominates; cheap, and leaves little for the exact filter."""
    alive = np.arange(len(objectives))
    if len(objectives) <= 4 * judges:
        return alive
    low = objectives.min(axis=0)
    span = np.maximum(objectives.max(axis=0) - low, np.finfo(float).tiny)
    total = ((objectives - low) / span).sum(axis=1)
    best = np.argpartition(total, judges)[:judges]
    for judge in objectives[best[np.argsort(total[best])]]:
        rest = objectives[alive]
        alive = alive[(rest < judge).any(axis=1) | (rest == judge).all(axis=1)]
    return alive


def _lexicographic(objectives: Array, codes: Codes) -> NDArray[np.intp]:
    keys = [*codes.T[::-1], *objectives.T[::-1]]
    return np.lexsort(keys) if len(objectives) else np.empty(0, np.intp)


def _nearest(codes: Codes, violation: Array) -> tuple[Codes, float]:
    if not len(codes):
        return codes[:0], float("inf")
    smallest = float(violation.min())
    ties = codes[violation == smallest]
    return ties[np.lexsort(ties.T[::-1])[:1]], smallest


def contained(rows: Codes, among: Codes) -> NDArray[np.bool_]:
    """`(n,)`: which rows of `(n, a)` codes occur in `(k, a)` codes."""
    known = {row.tobytes() for row in np.ascontiguousarray(among)}
    return np.array([row.tobytes() in known for row in np.ascontiguousarray(rows)], dtype=np.bool_)
