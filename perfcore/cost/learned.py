"""Learned corrections: oblivious trees on log(measured / analytic), loaded when first asked.

A tree asks the same `depth` questions of every row (`feature > border`); the answers are the bits of its leaf's
number. A file holds borders by feature, questions as (feature, number of the border), and leaves in half
precision. CatBoost grows such trees; nothing of it is needed to ask them. A file may also hold a table of neighbours
(`perfcore.cost.neighbours`), whose columns the trees see after the features.
"""

from __future__ import annotations

import zipfile
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfcore.cost.neighbours import Neighbours, neighbours_from
from perfcore.errors import ProfileError

Array = NDArray[np.float64]
NEVER = 255  # a border's number that no value lies beyond: at most 254 borders a feature
_ARRAYS = ("borders", "starts", "features", "numbers", "leaves", "bias")


class Trees:
    """A sum of oblivious trees."""

    def __init__(
        self,
        *,
        borders: NDArray[np.float32],
        starts: NDArray[np.int64],
        features: NDArray[np.uint8],
        numbers: NDArray[np.uint8],
        leaves: NDArray[np.float32],
        bias: float,
        neighbours: Neighbours | None = None,
    ) -> None:
        """Borders `(b,)` of feature `f` at `starts[f]:starts[f + 1]`; questions `(t, d)`; leaves `(t, 2^d)`.

        With a table of neighbours, its columns follow the features that the trees are given.
        """
        self.borders, self.starts, self.bias = borders, starts, bias
        self.features, self.numbers, self.leaves = features, numbers, leaves
        self.neighbours = neighbours

    def __call__(self, features: NDArray[np.float32]) -> Array:
        """`(s, f)` features to `(s,)` sums of leaves."""
        from perfcore.cost.trees_kernel import add_trees, fill_bins

        if self.neighbours is not None:
            features = self.neighbours.beside(features)
        bins = np.empty((features.shape[1], len(features)), dtype=np.uint8)
        fill_bins(np.ascontiguousarray(features.T), self.borders, self.starts, bins)
        total = np.full(len(features), self.bias)
        add_trees(bins, self.features, self.numbers, self.leaves, total)
        return total

    def save(self, path: Path) -> None:
        """Write one compressed file; equal trees give equal bytes."""
        arrays: dict[str, Any] = {
            "borders": self.borders,
            "starts": self.starts.astype(np.int32),
            "features": self.features,
            "numbers": self.numbers,
            "leaves": self.leaves.astype(np.float16),
            "bias": np.array(self.bias),
        }
        if self.neighbours is not None:
            arrays |= self.neighbours.arrays()
        np.savez_compressed(path, **arrays)


def load_trees(path: Path) -> Trees:
    """The trees of a file.

    Raises:
        ProfileError: it cannot be read, or is no such file.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            values = {name: file[name] for name in _ARRAYS}
            neighbours = neighbours_from(file) if "grid" in file else None
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as err:
        reason = str(err).splitlines()[0]
        raise ProfileError(f"{path}: a file of trees is needed, but it cannot be read: {reason}") from None
    if values["leaves"].shape != (len(values["features"]), 1 << values["features"].shape[1]):
        raise ProfileError(f"{path}: `leaves` must be (trees, 2^depth), but is {values['leaves'].shape}.")
    return Trees(
        borders=values["borders"],
        starts=values["starts"].astype(np.int64),
        features=values["features"],
        numbers=values["numbers"],
        leaves=values["leaves"].astype(np.float32),
        bias=float(values["bias"]),
        neighbours=neighbours,
    )


class Residual:
    """`features -> log(measured / analytic)`, read from a file of trees."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, features: NDArray[np.float32]) -> Array:
        """`(s, f)` features to `(s,)` corrections of the logarithm."""
        return self._trees(features)

    @cached_property
    def _trees(self) -> Trees:
        return load_trees(self.path)

    def __reduce__(self) -> tuple[object, ...]:
        """Send the path alone to other processes."""
        return (Residual, (self.path,))
