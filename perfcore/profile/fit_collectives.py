"""Measured collectives as the curves of a profile, with the error of each inner size predicted from the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from perfcore.cost.collective import SizeCurve, bytes_factor
from perfcore.graph.kernels import Collective, CollectiveKind
from perfcore.measure.samples import KernelSample
from perfcore.profile.schema import KnownError

FEWEST_SIZES = 2
FEWEST_TO_JUDGE = 4
GMAE_FLOOR = 4e-4
SIGNIFICANT = 5
FILE = "collectives.json"

Points = Sequence[tuple[float, float]]  # bytes, µs; bytes increase


def collective_curves(samples: Sequence[KernelSample], *, source: str) -> dict[str, Any] | None:
    """The file of curves, `None` where no collective was measured at two sizes."""
    curves = {key: points for key, points in _points(samples).items() if len(points) >= FEWEST_SIZES}
    if not curves:
        return None
    errors = np.concatenate([_left_out(key, points) for key, points in curves.items()])
    spread = float(np.quantile(np.abs(np.log1p(errors)), 0.9)) if len(errors) else 0.0
    return {
        "basis": "measured",
        "source": source,
        "log_error_90": round(spread, 4),
        "curves": [
            {
                "kind": kind.value,
                "num_gpus": world,
                "bytes": [size for size, _ in points],
                "us": [float(f"{us:.{SIGNIFICANT}g}") for _, us in points],
            }
            for (kind, world), points in curves.items()
        ],
    }


def collective_errors(samples: Sequence[KernelSample], *, source: str) -> list[KnownError]:
    """One entry a kind with at least four sizes."""
    found = []
    for (kind, world), points in _points(samples).items():
        errors = np.abs(_left_out((kind, world), points))
        if len(errors):
            gmae, mape = np.exp(np.mean(np.log(errors + GMAE_FLOOR))), errors.mean()
            found.append(
                KnownError(
                    collective_name(kind, world),
                    len(errors),
                    round(float(100 * gmae), 3),
                    round(float(100 * mape), 3),
                    "each inner size from the others",
                    source,
                )
            )
    return found


def collective_name(kind: CollectiveKind, world_size: int) -> str:
    """What a profile's errors call a collective."""
    return f"{kind.value} of {world_size} ranks"


def _points(samples: Sequence[KernelSample]) -> Mapping[tuple[CollectiveKind, int], Points]:
    """Medians by size; of a size that was measured again, the median of its medians."""
    sums: dict[tuple[CollectiveKind, int], dict[float, list[float]]] = {}
    for sample in samples:
        kernel = sample.kernel
        assert isinstance(kernel, Collective)
        key = (kernel.kind, int(np.max(np.asarray(kernel.world_size))))
        size = float(np.max(np.asarray(kernel.bytes)))
        sums.setdefault(key, {}).setdefault(size, []).append(sample.timing.median_us)
    return {
        key: [(size, float(np.median(us))) for size, us in sorted(by_size.items())]
        for key, by_size in sorted(sums.items())
    }


def _left_out(key: tuple[CollectiveKind, int], points: Points) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Signed relative error of each inner size from a curve through the others."""
    if len(points) < FEWEST_TO_JUDGE:
        return np.empty(0)
    errors = []
    for i in range(1, len(points) - 1):
        rest = [p for j, p in enumerate(points) if j != i]
        curve = SizeCurve([b for b, _ in rest], [us for _, us in rest], bytes_factor=bytes_factor(*key))
        size, us = points[i]
        errors.append(float(curve.us(np.array([size]))[0]) / us - 1)
    return np.array(errors)
