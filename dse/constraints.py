"""Constraints as margins: a candidate is feasible where every margin is at most 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dse.errors import SpaceError

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Constraint:
    """Limits on one metric; one of them at least.

    Attributes:
        metric: which.
        min: the metric may not be below it.
        max: the metric may not be above it.
    """

    metric: str
    min: float | None = None
    max: float | None = None

    def __post_init__(self) -> None:
        """Refuse a constraint that limits nothing, or everything."""
        if self.min is None and self.max is None:
            raise SpaceError(f"A constraint on {self.metric!r} needs `min` or `max`.")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise SpaceError(
                f"`min <= max` must hold for {self.metric!r}, but got {self.min} and {self.max}."
            )

    @property
    def labels(self) -> tuple[str, ...]:
        """One text for each margin."""
        lower = () if self.min is None else (f"{self.metric} >= {self.min:g}",)
        return lower + (() if self.max is None else (f"{self.metric} <= {self.max:g}",))


def fits(hbm_gib: float) -> Constraint:
    """The constraint that a search has where all GPUs are alike: the fullest rank fits into the device's memory."""
    return Constraint("hbm_gib", max=hbm_gib)


# The same where GPUs differ in memory: none has less than nothing left.
LEFT = Constraint("hbm_left_gib", min=0.0)


def labels_of(constraints: Sequence[Constraint]) -> tuple[str, ...]:
    """One text for each column of `margins_of`."""
    return tuple(label for c in constraints for label in c.labels)


def margins_of(constraints: Sequence[Constraint], metrics: Mapping[str, Array]) -> Array:
    """`(n, c)` margins, relative to the limit where that is not 0; a NaN metric gives an infinite margin.

    Args:
        constraints: each gives one column per limit, lower limit first.
        metrics: `(n,)` by name.
    """
    columns: list[Array] = []
    for c in constraints:
        value = metrics[c.metric]
        columns += [(c.min - value) / _scale(c.min)] if c.min is not None else []
        columns += [(value - c.max) / _scale(c.max)] if c.max is not None else []
    rows = len(next(iter(metrics.values())))
    margins = np.stack(columns, axis=1) if columns else np.empty((rows, 0))
    return np.where(np.isnan(margins), np.inf, margins)


def _scale(limit: float) -> float:
    return abs(limit) or 1.0
