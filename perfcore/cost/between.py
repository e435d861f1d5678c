"""Corrections between the widths that a fit had: told by those at the widths around, so that no tile edge makes a jump.

`n` and `k` lie in a cell of the grid of widths. Its lower corner, its upper one and the corner on the point's side of the
diagonal carry weights that are linear in the logarithm of the widths and continuous from cell to cell.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perfcore.cost.roofline import GemmShapes

Array = NDArray[np.float64]
Ask = Callable[[GemmShapes], tuple[Array, Array]]


@dataclass(frozen=True, slots=True)
class Cell:
    """Where a value lies among widths: `(s,)` the width below, the one above (the same on a width), and the way between."""

    low: Array
    high: Array
    part: Array


def cell(values: Array, widths: Array) -> Cell:
    """The cells of `(s,)` values that lie among increasing widths."""
    above = np.minimum(np.searchsorted(widths, values), len(widths) - 1)
    high = widths[above]
    low = np.where(values < high, widths[np.maximum(above - 1, 0)], high)
    with np.errstate(invalid="ignore", divide="ignore"):
        part = np.where(low < high, np.log(values / low) / np.log(high / low), 0.0)
    return Cell(low, high, part)


def between(shapes: GemmShapes, widths: tuple[float, ...], ask: Ask) -> tuple[Array, Array]:
    """Corrections of products, and the most that each may take, in µs.

    Args:
        shapes: `(s,)`, dims inside the fitted range.
        widths: `n` and `k` of the fit, increasing; empty: the correction is asked at the shapes themselves.
        ask: products at widths of the fit to their corrections and corrected times, `(s,)` each.

    Returns:
        `(s,)` corrections of the logarithm of time; `(s,)` times of the products padded to the next widths, infinite on a width.
    """
    most = np.full(len(shapes.m), np.inf)
    if not widths:
        return ask(shapes)[0], most
    n, k = (cell(v, np.array(widths)) for v in (shapes.n, shapes.k))
    exponent = (1.0 - np.maximum(n.part, k.part)) * ask(GemmShapes(shapes.batch, shapes.m, n.low, k.low))[0]
    off = np.flatnonzero((n.part > 0) | (k.part > 0))
    padded, most[off] = ask(GemmShapes(shapes.batch, shapes.m, n.high, k.high).take(off))
    exponent[off] += (
        np.where((n.part > 0) & (k.part > 0), np.minimum(n.part, k.part), np.maximum(n.part, k.part))[off]
        * padded
    )
    side = np.flatnonzero((n.part > 0) & (k.part > 0) & (n.part != k.part))
    wide = n.part > k.part
    corner = GemmShapes(
        shapes.batch, shapes.m, np.where(wide, n.high, n.low), np.where(wide, k.low, k.high)
    ).take(side)
    exponent[side] += np.abs(n.part - k.part)[side] * ask(corner)[0]
    return exponent, most
