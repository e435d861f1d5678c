"""Fronts: which designs nothing beats, how much of the plane they cover, and where the bend is.

Axis letters: `n` candidates, `m` objectives; everything is minimised.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[np.float64]
MAX_BLOCK = 2048


def pareto_mask(values: Array) -> NDArray[np.bool_]:
    """The rows that no other row beats.

    A row beats another if it is nowhere worse and somewhere better; so of equal rows on the front all are kept.

    Args:
        values: `(n, m)` objective values, all minimised; a row with NaN is never on the front.

    Returns:
        `(n,)` mask.
    """
    values = np.asarray(values, dtype=np.float64)
    known = _unbeaten_by_pivots(values, np.flatnonzero(~np.isnan(values).any(axis=1)))
    mask = np.zeros(len(values), dtype=np.bool_)
    if len(known) == 0:
        return mask
    # Equal rows stand or fall together, so only one of each is compared.
    distinct, back = _distinct(values[known])
    match distinct.shape[1]:
        case 0:
            kept = np.ones(len(distinct), dtype=np.bool_)
        case 1:
            kept = distinct[:, 0] == distinct[0, 0]
        case 2:
            kept = _mask_2d(distinct)
        case _:
            kept = _mask_sorted(distinct)
    mask[known] = kept[back]
    return mask


def _unbeaten_by_pivots(values: Array, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Indices without most of the rows that a few good ones beat: a million rows become a few thousand."""
    count = values.shape[1]
    for weights in 0.1 + 0.9 * np.concatenate([np.ones((1, count)), np.eye(count)]):
        part = values[rows]
        finite = np.isfinite(part).all(axis=1)
        if len(rows) <= MAX_BLOCK or not finite.any():
            break
        low, high = part[finite].min(axis=0), part[finite].max(axis=0)
        score = ((part - low) / np.where(high > low, high - low, 1.0)) @ weights
        pivot = part[np.argmin(np.where(finite, score, np.inf))]
        rows = rows[~((pivot <= part).all(axis=1) & (pivot < part).any(axis=1))]
    return rows


def _distinct(rows: Array) -> tuple[Array, NDArray[np.int64]]:
    """Distinct rows in lexicographic order, and `(n,)` which of them each row is (`np.unique`, but fast)."""
    order = np.lexsort(rows.T[::-1]) if rows.shape[1] else np.arange(len(rows))
    ordered = rows[order]
    first = np.ones(len(rows), dtype=np.bool_)
    first[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    back = np.empty(len(rows), dtype=np.int64)
    back[order] = np.cumsum(first) - 1
    return ordered[first], back


def _mask_2d(rows: Array) -> NDArray[np.bool_]:
    """Rows sorted by the first objective, then the second: one survives if its second is a new minimum."""
    best_before = np.concatenate([[np.inf], np.minimum.accumulate(rows[:, 1])[:-1]])
    kept = rows[:, 1] < best_before
    kept[0] = True  # infinite second objectives included: nothing comes before the first row
    return np.asarray(kept, dtype=np.bool_)


def _mask_sorted(rows: Array) -> NDArray[np.bool_]:
    """Any number of objectives; lexicographically sorted distinct rows can only be beaten by earlier ones.

    Blocks are compared with the front so far, then among themselves: n x front work.
    """
    front = rows[:0]
    kept = np.zeros(len(rows), dtype=np.bool_)
    for start in range(0, len(rows), MAX_BLOCK):
        block = rows[start : start + MAX_BLOCK]
        alive = np.flatnonzero(~_beaten(block, front))
        inner = alive[~_beaten(block[alive], block[alive])]
        kept[start + inner] = True
        front = np.concatenate([front, block[inner]])
    return kept


def _beaten(rows: Array, others: Array) -> NDArray[np.bool_]:
    """`(n,)`: some row of `others` is nowhere worse and not the same."""
    beaten = np.zeros(len(rows), dtype=np.bool_)
    for start in range(0, len(others), MAX_BLOCK):
        part = others[start : start + MAX_BLOCK]
        left = np.flatnonzero(~beaten)
        no_worse = np.ones((len(left), len(part)), dtype=np.bool_)
        better = np.zeros_like(no_worse)
        for j in range(rows.shape[1]):
            mine, theirs = rows[left, j, None], part[None, :, j]
            no_worse &= theirs <= mine
            better |= theirs < mine
        beaten[left] = (no_worse & better).any(axis=1)
    return beaten


def hypervolume(values: Array, reference: Array) -> float:
    """Volume that the rows dominate, up to a reference point; exact for one to three objectives.

    Args:
        values: `(n, m)`, all minimised; rows with NaN, or nowhere below the reference, add nothing.
        reference: `(m,)` worst corner.

    Raises:
        ValueError: more than three objectives.
    """
    values, reference = np.asarray(values, dtype=np.float64), np.asarray(reference, dtype=np.float64)
    if not 1 <= values.shape[1] <= 3:
        raise ValueError(f"`1 <= m <= 3` must hold for the hypervolume, but got m={values.shape[1]}.")
    rows = values[(values < reference).all(axis=1)]
    rows, _ = _distinct(rows[pareto_mask(rows)])
    if len(rows) == 0:
        return 0.0
    match values.shape[1]:
        case 1:
            return float(reference[0] - rows[:, 0].min())
        case 2:
            return _area(rows, reference)
        case _:
            return _volume(rows, reference)


def _area(rows: Array, reference: Array) -> float:
    """Rows of a 2-D front sorted by the first objective: steps of a staircase."""
    ends = np.concatenate([rows[1:, 0], reference[:1]])
    return float(((ends - rows[:, 0]) * (reference[1] - rows[:, 1])).sum())


def _volume(rows: Array, reference: Array) -> float:
    """Slices along the third objective, the area of the first two in each."""
    rows = rows[np.argsort(rows[:, 2], kind="stable")]
    ends = np.concatenate([rows[1:, 2], reference[2:]])
    total = 0.0
    front = rows[:0, :2]
    for row, depth in zip(rows, ends - rows[:, 2], strict=True):
        front = np.concatenate([front, row[None, :2]])
        front, _ = _distinct(front[pareto_mask(front)])
        total += _area(front, reference[:2]) * float(depth)
    return total


def knee_point(values: Array) -> int | None:
    """The row of the front where giving up a little of one objective stops buying much of another.

    Objectives are scaled to 0..1 over the front; the knee has the smallest sum, so with two objectives it lies
    farthest below the line through the front's ends. Ties go to the first row.

    Args:
        values: `(n, m)`, all minimised.

    Returns:
        A row's index; `None` if no row is finite.
    """
    values = np.asarray(values, dtype=np.float64)
    finite = np.isfinite(values).all(axis=1)
    rows = np.flatnonzero(finite)
    rows = rows[pareto_mask(values[rows])]
    if len(rows) == 0:
        return None
    front = values[rows]
    low, span = front.min(axis=0), np.ptp(front, axis=0)
    scaled = (front - low) / np.where(span > 0, span, 1.0)
    return int(rows[np.argmin(scaled.sum(axis=1))])
