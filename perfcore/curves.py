"""Durations as a function of one sum: piecewise linear on a grid of octaves.

A grid point is `2**e * (1 + k / points)`, so the place of a value follows from its exponent and mantissa.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numba
import numpy as np
from numpy.typing import NDArray

from perfcore.cost.model import CostModel
from perfcore.graph.kernels import Kernel, with_dims

Array = NDArray[np.float64]

TOLERANCE = 5e-4
MAX_POINTS = 1024


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """Durations over a sum, one row per combination of the kernel's other dims.

    Attributes:
        exponent: of the first octave.
        points: per octave.
        us: `(e, g)`, g = octaves * points + 1.
    """

    exponent: int
    points: int
    us: Array


def price_curve(kernel: Kernel, name: str, *, span: tuple[float, float], cost: CostModel) -> Curve:
    """The durations of a kernel over its summed dim.

    Args:
        kernel: its other dims are numbers or `(e, 1)` arrays.
        name: of the summed dim.
        span: smallest positive and largest value of the sum.
        cost: prices the kernel; the grid is refined until linear interpolation is within `TOLERANCE` of it
            midway between points, or has `MAX_POINTS` an octave.
    """
    low, high = (math.frexp(s)[1] - 1 for s in span)
    points = 8
    while True:
        nodes = octave_grid(low, high, 2 * points)
        us = cost.predict_us([with_dims(kernel, **{name: nodes[None, :]})])[0]
        us = np.ascontiguousarray(np.broadcast_to(us, (us.shape[0], len(nodes))))
        middle = (us[:, :-2:2] + us[:, 2::2]) / 2
        # Midpoints of the finer grid bound the error of the finer grid itself from above.
        if np.all(np.abs(middle - us[:, 1::2]) <= TOLERANCE * us[:, 1::2]) or 2 * points >= MAX_POINTS:
            return Curve(low, 2 * points, us)
        points *= 2


def octave_grid(low: int, high: int, points: int) -> Array:
    """`(g,)`: the points of octaves `low` to `high`, and the end of the last."""
    octaves = 2.0 ** np.arange(low, high + 1)
    inside = octaves[:, None] * (1 + np.arange(points) / points)
    return np.append(inside.ravel(), 2.0 ** (high + 1))


@numba.njit(cache=True, inline="always")
def at(us: Array, start: int, exponent: int, points: int, value: float) -> float:
    """The curve whose row begins at `us[start]`, read at a positive value within its span."""
    mantissa, power = math.frexp(value)
    place = (power - 1 - exponent + (2.0 * mantissa - 1.0)) * points
    index = int(place)
    below, above = us[start + index], us[start + index + 1]
    return float(below + (place - index) * (above - below))
