"""Learned corrections: CatBoost on log(measured / analytic), loaded when first asked.

CatBoost is imported on first use only; without a correction file nothing of it is needed.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfcore.errors import MissingPackageError, ProfileError

Array = NDArray[np.float64]


class Residual:
    """`features -> log(measured / analytic)`, read from CatBoost's own file format."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, features: NDArray[np.float32]) -> Array:
        """`(s, f)` features to `(s,)` corrections of the logarithm."""
        return np.asarray(self._model.predict(features, thread_count=1), dtype=np.float64)

    @cached_property
    def _model(self) -> Any:
        try:
            from catboost import CatBoostError, CatBoostRegressor
        except ImportError as err:
            raise MissingPackageError(
                "A fitted kernel model needs CatBoost.", hint="pip install catboost"
            ) from err
        model = CatBoostRegressor()
        try:
            model.load_model(str(self.path), format="cbm")
        except CatBoostError as err:
            reason = str(err).splitlines()[0]
            raise ProfileError(
                f"{self.path}: a CatBoost model is needed, but it cannot be read: {reason}"
            ) from None
        return model

    def __reduce__(self) -> tuple[object, ...]:
        """Send the path alone to other processes."""
        return (Residual, (self.path,))
