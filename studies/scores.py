"""How far predictions are off, as the field states it."""

from __future__ import annotations

import math
from collections.abc import Sequence

GMAE_FLOOR = 4e-4  # keeps a perfect prediction from a logarithm of zero


def gmae(errors_pct: Sequence[float]) -> float:
    """Geometric mean absolute error, percent."""
    logs = [math.log(abs(e) / 100 + GMAE_FLOOR) for e in errors_pct]
    return round(100 * math.exp(sum(logs) / len(logs)), 2)


def mape(errors_pct: Sequence[float]) -> float:
    """Mean absolute error, percent."""
    return round(sum(map(abs, errors_pct)) / len(errors_pct), 2)
