"""The contract of accuracy proxies, and the only features that they see.

Sharding, fusion, launches, number of GPUs and number format are no features: they leave the mathematics
alone (the number format within what measured runs can tell apart), so no proxy can tell designs apart by them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dse.candidate import column
from dse.space import Codes, SearchSpace

Array: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class QualityFeatures:
    """What decides the quality of n models.

    Attributes:
        num_dense_features: width of the dense input.
        num_tables: embedding tables.
        embedding_dim: `(n,)` columns.
        bottom_hidden: `(n, layers)` hidden widths from the first layer on, 0 where there is none.
        top_hidden: likewise.
        interaction: `(n,)` names.
        cross_layers: `(n,)`; 0 without a cross network.
        cross_rank: `(n,)`.
        global_batch: `(n,)` samples.
    """

    num_dense_features: int
    num_tables: int
    embedding_dim: Array
    bottom_hidden: Array
    top_hidden: Array
    interaction: NDArray[np.str_]
    cross_layers: Array
    cross_rank: Array
    global_batch: Array


@dataclass(frozen=True, slots=True, eq=False)
class Quality:
    """Relative loss of n models, and how uncertain it is.

    Attributes:
        loss: `(n,)` relative loss above the best that the proxy knows (0.001 is 0.1 % more loss).
        std: `(n,)` standard deviation of it.
    """

    loss: Array
    std: Array


class QualityModel(Protocol):
    """Prices the quality of models; pure, finite, many at once equal one by one.

    Monotone in every width, whatever the others: the best of a space's networks then has all widths at one end.
    """

    def predict(self, features: QualityFeatures) -> Quality:
        """Relative loss and uncertainty of n models."""
        ...


def features_of(space: SearchSpace, codes: Codes) -> QualityFeatures:
    """The features of `(n, a)` candidates."""

    def numbers(name: str) -> Array:
        return column(space, codes, name).astype(np.float64)

    interaction = column(space, codes, "model.interaction").astype(np.str_)
    return QualityFeatures(
        num_dense_features=int(space.fixed["model.num_dense_features"]),
        num_tables=len(space.tables),
        embedding_dim=numbers("model.embedding_dim"),
        bottom_hidden=_hidden(space, codes, "model.bottom_hidden"),
        top_hidden=_hidden(space, codes, "model.top_hidden"),
        interaction=interaction,
        cross_layers=np.where(interaction == "dcn_v2", numbers("model.cross_layers"), 0.0),
        cross_rank=numbers("model.cross_rank"),
        global_batch=numbers("training.global_batch"),
    )


def _hidden(space: SearchSpace, codes: Codes, name: str) -> Array:
    depth: NDArray[Any] = column(space, codes, f"{name}.depth").astype(np.int64)
    widths = [
        np.where(depth >= layer, column(space, codes, f"{name}.{layer}"), 0.0)
        for layer in range(1, int(depth.max(initial=0)) + 1)
    ]
    return np.stack(widths, axis=1) if widths else np.zeros((len(codes), 0))
