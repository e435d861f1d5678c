"""Fit the pace of half-precision blocks: five constants, by least squares of the logarithm of time.

Small residuals count by their square, large ones by their size. Every generation of devices counts alike, in it every device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from perfcore.cost.paced import Pace, paced_roofline

if TYPE_CHECKING:
    from perfcore.profile.fit_gemm import Samples

Array = NDArray[np.float64]

# Where the search starts, and the least and largest value of each constant.
START = Pace(compute_share=0.8, hbm_share=0.75, fill_clocks=1000.0, step_clocks=200.0, reduction_us=2.5)
LEAST, MOST = Pace(0.05, 0.05, 0.0, 0.0, 0.0), Pace(1.0, 1.0, 1e5, 1e4, 1e2)
ROWS_PER_DEVICE = 3000
LARGE_RESIDUAL = 0.1  # from here on a residual counts by its size
EVALUATIONS = 30
STEP = 1e-3  # relative, of the differences that stand for derivatives
SIGNIFICANT = 4


def fit_pace(sets: Sequence[Samples], *, floor_us: float, seed: int) -> Pace:
    """The pace with which the roofline and a start-up of `floor_us` come closest to the samples' times."""
    from scipy.optimize import least_squares

    thin = [s.take(_some(len(s.us), seed)) for s in sets]
    generation = [s.device.compute_capability for s in thin]
    share = [1.0 / (generation.count(g) * len(s.us)) for g, s in zip(generation, thin, strict=True)]

    def weighed(scaled: Array) -> Array:
        pace = Pace(*(scaled * _START))
        each = [_log_error(s, pace, floor_us=floor_us) for s in thin]
        return np.concatenate([np.sqrt(w) * _damped(e) for w, e in zip(share, each, strict=True)])

    found = least_squares(
        weighed,
        np.ones(len(_START)),
        bounds=(np.array(astuple(LEAST)) / _START, np.array(astuple(MOST)) / _START),
        diff_step=np.full(len(_START), STEP),
        max_nfev=EVALUATIONS,
    )
    return Pace(*(float(f"{round(v, SIGNIFICANT):.{SIGNIFICANT}g}") for v in found.x * _START))


_START = np.array(astuple(START))


def _log_error(samples: Samples, pace: Pace, *, floor_us: float) -> Array:
    line = paced_roofline(samples.shapes, samples.device, samples.dtype, pace)
    return np.asarray(np.log((line.us + floor_us) / samples.us))


def _damped(residual: Array) -> Array:
    """What has half its square grow like the residual's square first and like its size later."""
    size = np.sqrt(2.0 * (np.sqrt(1.0 + (residual / LARGE_RESIDUAL) ** 2) - 1.0))
    return np.asarray(np.sign(residual) * LARGE_RESIDUAL * size)


def _some(count: int, seed: int) -> NDArray[np.intp]:
    if count <= ROWS_PER_DEVICE:
        return np.arange(count)
    return np.sort(np.random.default_rng(seed).choice(count, ROWS_PER_DEVICE, replace=False))
