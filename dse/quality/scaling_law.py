"""A capacity law: more columns and more weights lose less, large batches lose a little.

    loss = a_e (D / 16)^-1/2 + a_b (weights_bottom / 10^5)^-1/4 + a_t (weights_top / 10^5)^-1/4
         + interaction + c max(0, log2(batch / 8192))

The constants and their sources are in `data/capacity_law.json`. The law says how much such choices tend to
matter, not which of two designs is better: its standard deviation is as large as what it predicts. On Criteo,
22 families of deep models lie within 0.7 % of loss of each other, and regularisation moves as much as width.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dse.errors import ConfigError
from dse.quality.protocol import Array, Quality, QualityFeatures, QualityModel

CONSTANTS = Path(__file__).parent / "data" / "capacity_law.json"


class CapacityLaw:
    """Relative loss by capacity; see the module."""

    def __init__(self, constants: Mapping[str, Any] | None = None) -> None:
        """Take the constants given, or the bundled ones."""
        self._constants = constants or json.loads(CONSTANTS.read_text(encoding="utf-8"))

    def predict(self, features: QualityFeatures) -> Quality:
        """Relative loss and uncertainty of n models."""
        terms = self.terms(features)
        loss = np.sum(list(terms.values()), axis=0)
        return Quality(loss, np.hypot(self._constants["seed_std"]["value"], loss))

    def terms(self, features: QualityFeatures) -> dict[str, Array]:
        """`(n,)` by name: what each part of the law adds."""
        c = self._constants
        bottom, top = mlp_weights(features)
        doublings = np.log2(features.global_batch / c["batch"]["above"])
        names, where = np.unique(features.interaction, return_inverse=True)
        return {
            "embedding": _power(features.embedding_dim, c["embedding"]),
            "bottom_mlp": _power(bottom, c["bottom_mlp"]),
            "top_mlp": _power(top, c["top_mlp"]),
            "interaction": np.array([c["interaction"][name] for name in names])[where],
            "batch": c["batch"]["per_doubling"] * np.maximum(doublings, 0.0),
        }


def quality_model(name: str) -> QualityModel | None:
    """The proxy of that name; `None` for `none`.

    Raises:
        ConfigError: there is no such proxy.
    """
    if name == "none":
        return None
    if name == "capacity_law":
        return CapacityLaw()
    raise ConfigError(f"The quality model must be capacity_law or none, but got {name!r}.")


def mlp_weights(features: QualityFeatures) -> tuple[Array, Array]:
    """`(n,)` weights (without biases) of the bottom and of the top MLP, the cross network left out."""
    dim, count = features.embedding_dim, features.num_tables + 1
    dot = dim + count * (count - 1) / 2
    joined = np.where(features.interaction == "dot", dot, dim * count)
    dense = np.full(dim.shape, float(features.num_dense_features))
    one = np.ones(dim.shape)
    return _weights(dense, features.bottom_hidden, dim), _weights(joined, features.top_hidden, one)


def _weights(first: Array, hidden: Array, last: Array) -> Array:
    """`(n,)`: products of consecutive widths, absent layers (0) skipped; layers fill from the first on."""
    total, before = np.zeros(first.shape), first
    for width in hidden.T:
        total = total + before * width
        before = np.where(width > 0, width, before)
    return np.asarray(total + before * last, dtype=np.float64)


def _power(value: Array, constants: Mapping[str, float]) -> Array:
    law = constants["amplitude"] * (value / constants["reference"]) ** -constants["exponent"]
    return np.asarray(law, dtype=np.float64)
