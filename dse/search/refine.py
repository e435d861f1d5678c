"""Bulk work on candidates: sampling, local search and expansion of a front, as pure tasks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dse.search.found import Found
from dse.search.protocol import Array, Codes, Evaluation, Evaluator, Space

LONG_AXIS = 16
INFEASIBLE = 1e6


@dataclass(frozen=True, slots=True)
class Sample:
    """Prices `count` candidates drawn over the whole space."""

    seed: tuple[int, ...]
    count: int

    def __call__(self, space: Space, evaluator: Evaluator, /) -> Found:
        """What the sample holds."""
        codes = space.canonical(space.sample(np.random.default_rng(self.seed), self.count))
        return Found.among(codes, evaluator.evaluate(codes))


@dataclass(frozen=True, slots=True, eq=False)
class Price:
    """Prices given candidates: `(n, a)` codes."""

    codes: Codes

    def __call__(self, space: Space, evaluator: Evaluator, /) -> Evaluation:
        """Their evaluation."""
        return evaluator.evaluate(space.canonical(self.codes))


@dataclass(frozen=True, slots=True, eq=False)
class Expand:
    """Prices every coordinate move, and some random pairs of moves, of `(s, a)` candidates."""

    codes: Codes
    pairs: int
    seed: tuple[int, ...]

    def __call__(self, space: Space, evaluator: Evaluator, /) -> Found:
        """What the neighbourhoods hold."""
        moved = neighbours(space, self.codes, pairs=self.pairs, rng=np.random.default_rng(self.seed))
        flat = moved.reshape(-1, self.codes.shape[1])
        flat = flat[space.allowed(flat)]
        return Found.among(flat, evaluator.evaluate(flat))


@dataclass(frozen=True, slots=True, eq=False)
class Goal:
    """What a local search minimises: one augmented Chebyshev scalarisation per start.

    Attributes:
        weights: `(s, m)`, non-negative, rows sum to one.
        ideal: `(m,)` best value of each objective so far.
        span: `(m,)` distance from there to the front's worst; positive.
    """

    weights: Array
    ideal: Array
    span: Array

    def of(self, starts: slice) -> Goal:
        """The goal of some of the starts."""
        return Goal(self.weights[starts], self.ideal, self.span)

    def score(self, evaluation: Evaluation, starts: NDArray[np.intp]) -> Array:
        """`(n,)`: smaller is better; any feasible candidate is better than any infeasible one.

        Args:
            evaluation: of n candidates.
            starts: `(n,)` the start to which each belongs.
        """
        violation = evaluation.violation
        scaled = self.weights[starts] * ((evaluation.objectives - self.ideal) / self.span)
        value = scaled.max(axis=1) + 0.05 * scaled.sum(axis=1)
        # Bounded to (-1, 1), so that no objective, however large, can outweigh feasibility.
        bounded = value / (1.0 + np.abs(value))
        return np.where(violation <= 0.0, bounded, INFEASIBLE + violation)


def spread_goal(found: Found, count: int, *, rng: np.random.Generator) -> Goal:
    """A goal of `count` starts, with weights over the whole simplex, its corners among them."""
    objectives = found.objectives.shape[1]
    weights = rng.dirichlet(np.ones(objectives), size=count)
    corners = min(objectives, count)
    weights[:corners] = np.eye(objectives)[:corners]
    if not len(found.objectives):
        return Goal(weights, np.zeros(objectives), np.ones(objectives))
    ideal = found.objectives.min(axis=0)
    span = found.objectives.max(axis=0) - ideal
    return Goal(weights, ideal, np.where(span > 0, span, np.maximum(np.abs(ideal), 1.0)))


@dataclass(frozen=True, slots=True, eq=False)
class Refined:
    """The end of a local search from s starts: codes `(s, a)`, their evaluation, all that was met."""

    codes: Codes
    evaluation: Evaluation
    found: Found


@dataclass(frozen=True, slots=True, eq=False)
class Refine:
    """Steepest descent over coordinate moves and random pairs of them, from `(s, a)` starts."""

    codes: Codes
    goal: Goal
    rounds: int
    pairs: int
    seed: tuple[int, ...]

    def __call__(self, space: Space, evaluator: Evaluator, /) -> Refined:
        """Never worse than the starts under the goal."""
        rng = np.random.default_rng(self.seed)
        codes = space.canonical(self.codes)
        starts = np.arange(len(codes))
        evaluation = evaluator.evaluate(codes)
        score, found = self.goal.score(evaluation, starts), Found.among(codes, evaluation)
        active = starts
        for _ in range(self.rounds):
            moved = neighbours(space, codes[active], pairs=self.pairs, rng=rng)
            moved = _allowed_or_stay(space, moved, codes[active])
            best, best_score, met = _best_moves(moved, active, self.goal, evaluator)
            found += met
            better = best_score < score[active]
            codes[active[better]], score[active[better]] = best[better], best_score[better]
            active = active[better]
            if not len(active):
                break
        return Refined(codes, evaluator.evaluate(codes), found)


def _allowed_or_stay(space: Space, moved: Codes, starts: Codes) -> Codes:
    """`(s, k, a)` moves, those that are no candidates replaced by their starts `(s, a)`."""
    fine = space.allowed(moved.reshape(-1, moved.shape[2])).reshape(moved.shape[:2])
    return np.where(fine[:, :, None], moved, starts[:, None, :])


def repair(space: Space, codes: Codes, *, seed: tuple[int, ...]) -> Codes:
    """`(n, a)`: canonical candidates; a row that is none becomes its first allowed neighbour, or a random one."""
    codes = space.canonical(codes)
    bad = np.flatnonzero(~space.allowed(codes))
    if not len(bad):
        return codes
    rng = np.random.default_rng(seed)
    moved = neighbours(space, codes[bad], pairs=64, rng=rng)
    fine = space.allowed(moved.reshape(-1, moved.shape[2])).reshape(moved.shape[:2])
    near = moved[np.arange(len(bad)), fine.argmax(axis=1)]
    codes[bad] = np.where(fine.any(axis=1, keepdims=True), near, space.sample(rng, len(bad)))
    return codes


def _best_moves(
    moved: Codes, starts: NDArray[np.intp], goal: Goal, evaluator: Evaluator
) -> tuple[Codes, Array, Found]:
    """Of `(s, k, a)` moves the best of each start, its score, and all that was met."""
    count, moves, axes = moved.shape
    flat = moved.reshape(-1, axes)
    evaluation = evaluator.evaluate(flat)
    score = goal.score(evaluation, np.repeat(starts, moves)).reshape(count, moves)
    pick = score.argmin(axis=1)
    rows = np.arange(count)
    return moved[rows, pick], score[rows, pick], Found.among(flat, evaluation)


def neighbours(space: Space, codes: Codes, *, pairs: int, rng: np.random.Generator) -> Codes:
    """`(s, k, a)` canonical neighbours of `(s, a)` codes: all single moves, then `pairs` random double moves.

    A short axis is moved to each of its other values, a long one by powers of two in both directions. Two
    moves at once reach what a conditional axis hides: one more layer, and its width.
    """
    sizes = np.array([len(axis.values) for axis in space.axes])
    axis, shift = _moves(sizes)
    count, columns = codes.shape
    single = np.broadcast_to(codes[:, None, :], (count, len(axis), columns)).astype(np.int64)
    single[:, np.arange(len(axis)), axis] += shift
    double = np.broadcast_to(codes[:, None, :], (count, pairs if len(axis) else 0, columns)).astype(np.int64)
    s, k = np.ogrid[: double.shape[0], : double.shape[1]]
    for _ in range(2):
        pick: NDArray[np.int64] = rng.integers(max(len(axis), 1), size=double.shape[:2])
        double[s, k, axis[pick] if len(axis) else pick] += shift[pick] if len(axis) else 0
    moved = (np.concatenate([single, double], axis=1) % sizes).astype(np.int16)
    return space.canonical(moved.reshape(-1, columns)).reshape(moved.shape)


def _moves(sizes: NDArray[np.intp]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Axis and cyclic shift of every single move, `(k,)` each."""
    shifts = [_shifts(int(size)) for size in sizes]
    axis = np.repeat(np.arange(len(sizes)), [len(s) for s in shifts])
    return axis, np.concatenate([*shifts, np.empty(0, np.intp)]).astype(np.intp)


def _shifts(size: int) -> NDArray[np.intp]:
    if size <= LONG_AXIS:
        return np.arange(1, size)
    powers = 2 ** np.arange(int(np.log2(size)))
    return np.unique(np.concatenate([powers, size - powers]))
