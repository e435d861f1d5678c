"""The recommendation model that is trained: dense part, embedding tables, interaction, loss."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

from perfcore.design.checks import check_choice, check_int
from perfcore.errors import DesignError

MAX_WIDTH = 1_000_000
MAX_NUM_EMBEDDINGS = 10**12


class Interaction(StrEnum):
    """How the bottom MLP's output meets the pooled embeddings."""

    DOT = "dot"
    CAT = "cat"
    DCN_V2 = "dcn_v2"


class Loss(StrEnum):
    """The training loss; `BCE` is `BCELoss` after a sigmoid, as DLRM trains."""

    BCE = "bce"
    MSE = "mse"


@dataclass(frozen=True, slots=True)
class EmbeddingTable:
    """One embedding table.

    Attributes:
        name: unique within a model.
        num_embeddings: rows.
        pooling_factor: mean number of lookups per sample (a bag's length).
        skew: Zipf exponent of the row accesses; 0 is uniform.
        embedding_dim: columns; `None` takes the model's `embedding_dim`.
    """

    name: str
    num_embeddings: int
    pooling_factor: float = 1.0
    skew: float = 0.0
    embedding_dim: int | None = None

    def __post_init__(self) -> None:
        """Refuse impossible sizes, naming the table."""
        check_int(f"table {self.name!r}: num_embeddings", self.num_embeddings, low=1, high=MAX_NUM_EMBEDDINGS)
        if self.embedding_dim is not None:
            check_int(f"table {self.name!r}: embedding_dim", self.embedding_dim, low=1, high=MAX_WIDTH)
        if not (math.isfinite(self.pooling_factor) and 0 <= self.pooling_factor <= 1e6):
            raise DesignError(
                f"table {self.name!r}: `0 <= pooling_factor <= 1e6` must hold, but got "
                f"pooling_factor={self.pooling_factor}."
            )
        if not (math.isfinite(self.skew) and 0 <= self.skew <= 5):
            raise DesignError(f"table {self.name!r}: `0 <= skew <= 5` must hold, but got skew={self.skew}.")


@dataclass(frozen=True, slots=True)
class Model:
    """A DLRM and its kin.

    The bottom MLP is `num_dense_features -> *bottom_hidden -> embedding_dim`, the top MLP
    `interaction output -> *top_hidden -> 1`; ReLU after every layer, the bottom MLP's last one included,
    but for the top MLP's last, which has a sigmoid (as in facebookresearch/dlrm). So the output widths
    always agree with the interaction, by construction.

    Attributes:
        num_dense_features: width of the dense input.
        tables: embedding tables, in feature order.
        embedding_dim: columns of every table that names none of its own.
        bottom_hidden: hidden widths of the bottom MLP.
        top_hidden: hidden widths of the top MLP.
        interaction: dot, concatenation or DCNv2 cross network.
        cross_layers: number of low-rank cross layers (`dcn_v2` only).
        cross_rank: rank of a cross layer's two factors (`dcn_v2` only).
        loss: training loss.
    """

    num_dense_features: int
    tables: tuple[EmbeddingTable, ...]
    embedding_dim: int
    bottom_hidden: tuple[int, ...]
    top_hidden: tuple[int, ...]
    interaction: Interaction = Interaction.DOT
    cross_layers: int = 3
    cross_rank: int = 512
    loss: Loss = Loss.BCE

    def __post_init__(self) -> None:
        """Refuse models that cannot be built."""
        check_choice("interaction", self.interaction, Interaction)
        check_choice("loss", self.loss, Loss)
        check_int("num_dense_features", self.num_dense_features, low=1, high=MAX_WIDTH)
        check_int("embedding_dim", self.embedding_dim, low=1, high=MAX_WIDTH)
        for where, widths in (("bottom_hidden", self.bottom_hidden), ("top_hidden", self.top_hidden)):
            for position, width in enumerate(widths):
                check_int(f"{where}[{position}]", width, low=1, high=MAX_WIDTH)
        if self.interaction is Interaction.DCN_V2:
            check_int("cross_layers", self.cross_layers, low=1, high=100)
            check_int("cross_rank", self.cross_rank, low=1, high=MAX_WIDTH)
        _check_tables(self)

    @property
    def table_dims(self) -> tuple[int, ...]:
        """Columns of each table."""
        return tuple(t.embedding_dim or self.embedding_dim for t in self.tables)


def _check_tables(model: Model) -> None:
    if not model.tables:
        raise DesignError("A model needs at least one embedding table, but `tables` is empty.")
    repeated = [name for name, count in Counter(t.name for t in model.tables).items() if count > 1]
    if repeated:
        raise DesignError(f"Table names must be unique, but {repeated[0]!r} occurs more than once.")
    if model.interaction is not Interaction.CAT:
        for table, dim in zip(model.tables, model.table_dims, strict=True):
            if dim != model.embedding_dim:
                raise DesignError(
                    f"The {model.interaction} interaction needs one embedding_dim for all tables, but "
                    f"table {table.name!r} has {dim} and the model {model.embedding_dim}.",
                    hint="Use the `cat` interaction, or drop the table's own embedding_dim.",
                )
