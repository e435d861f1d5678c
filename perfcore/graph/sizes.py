"""Sizes that several parts of the graph need, computed once from `Dims`."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfcore.design.model import Interaction
from perfcore.design.sharding import Shards
from perfcore.graph.dims import Dims
from perfcore.graph.kernels import Array
from perfcore.graph.parts import Mask, mask_of

BOTTOM, TOP = "bottom_mlp", "top_mlp"


@dataclass(frozen=True, slots=True, eq=False)
class LayerVariant:
    """A linear layer as its MLP's first layer, or not.

    Attributes:
        first: it reads the MLP's input (for the bottom MLP: no gradient leaves it).
        present: where this variant is the one that runs, broadcasting to `(..., r)`.
    """

    first: bool
    present: Mask | bool


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """One MLP slot: `(..., 1)` widths, 0 where a design lacks the layer.

    Attributes:
        inputs: columns of its input.
        outputs: columns of its output.
        last: no ReLU follows (the top MLP's last layer).
        variants: mutually exclusive; none where no design has the layer.
    """

    inputs: Array
    outputs: Array
    last: bool
    variants: tuple[LayerVariant, ...]

    @property
    def parameters(self) -> Array:
        """`(..., 1)`: weights and biases."""
        return self.outputs * (self.inputs + 1.0)


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """One embedding table on every rank; fields `(..., r)`, `sharded` kinds are masks.

    Attributes:
        rows, dim, pooling, skew: of the rank's shard.
        batch: bags that the rank looks up.
        lookups: `batch * pooling`.
        sharded: the rank holds a shard that no other rank has, with a sparse gradient.
        dense: likewise, with a gradient of the shard's size.
        replicated: every rank holds the table, and its gradient is dense and all-reduced.
    """

    rows: Array
    dim: Array
    pooling: Array
    skew: Array
    batch: Array
    lookups: Array
    sharded: Mask | bool
    dense: Mask | bool
    replicated: Mask | bool


def whole_dims(dims: Dims) -> Array:
    """`(..., 1, t)`: columns of each whole table: the sum over the ranks that split its columns.

    All ranks of a machine hold the same columns of a staged table.
    """
    shards = dims.shards
    held = shards.dim * shards.present
    whole = np.where(_some(shards.pooled, shards), held.sum(axis=-2, keepdims=True), _largest(held))
    if not shards.staged.any():
        return np.asarray(whole)
    pieces = held.sum(axis=-2, keepdims=True) / dims.local_world_size[..., None]
    return np.where(_some(shards.staged, shards), np.rint(pieces), whole)


def whole_poolings(dims: Dims) -> Array:
    """`(..., 1, t)`: lookups per sample of each whole table: the sum over the ranks that split its rows.

    Ranks that hold other columns of a staged table look up the same rows: they count by their columns' share.
    """
    shards = dims.shards
    held = shards.pooling * shards.present
    whole = np.where(_some(shards.row_split, shards), held.sum(axis=-2, keepdims=True), _largest(held))
    if not shards.staged.any():
        return np.asarray(whole)
    share = shards.dim / np.maximum(whole_dims(dims), 1.0)
    return np.where(_some(shards.staged, shards), (held * share).sum(axis=-2, keepdims=True), whole)


def _some(flags: Mask, shards: Shards) -> Mask:
    return np.asarray((flags & shards.present).any(axis=-2, keepdims=True))


def _largest(values: Array) -> Array:
    return np.asarray(values.max(axis=-2, keepdims=True))


class Sizes:
    """Derived arrays, each broadcasting to `(..., r)`; nothing is expanded over axes it does not depend on."""

    def __init__(self, dims: Dims) -> None:
        self.dims = dims
        self.batch: Array = dims.local_batch
        self.global_batch: Array = dims.global_batch
        self.embedding_dim: Array = dims.embedding_dim
        self.num_tables = dims.num_tables
        self.features = float(dims.num_tables + 1)
        self.pairs = self.features * (self.features - 1.0) / 2.0
        self.layer = cache(self._layer)
        self.tables = cache(self._tables)
        self.holds = cache(self._holds)
        self.columns_held = cache(self._columns_held)
        self.memo: dict[Hashable, Any] = {}  # what modules of the graph derive, under their own names

    def num_slots(self, module: str) -> int:
        """Slots of an MLP, its output layer included."""
        return len(self.dims.bottom_hidden if module == BOTTOM else self.dims.top_hidden) + 1

    @cached_property
    def table_dims(self) -> tuple[Array, ...]:
        """Columns of each whole table, `(..., 1)`: the sum over the ranks that split its columns."""
        return _columns(whole_dims(self.dims)[..., 0, :])

    @cached_property
    def table_poolings(self) -> tuple[Array, ...]:
        """Mean lookups per sample of each whole table, `(..., 1)`: the sum over the ranks that split its rows."""
        return _columns(whole_poolings(self.dims)[..., 0, :])

    @cached_property
    def concat_width(self) -> Array:
        """`(..., 1)`: columns of all features side by side."""
        return np.asarray(sum(self.table_dims, start=self.embedding_dim))

    def interaction_width(self, interaction: Interaction) -> Array:
        """`(..., 1)`: columns of the interaction's output."""
        return self.embedding_dim + self.pairs if interaction is Interaction.DOT else self.concat_width

    @cached_property
    def total_pooling(self) -> Array:
        """`(..., 1)`: lookups per sample over all tables."""
        return np.asarray(sum(self.table_poolings))

    def _holds(self, kind: str, *, anywhere: bool = False) -> Mask | bool:
        """Where a rank (or, `anywhere`, some rank) holds a shard of a kind: a flag of `Shards`."""
        flags = (getattr(self.dims.shards, kind) & self.dims.shards.present).any(axis=-1)
        return mask_of(flags.any(axis=-1, keepdims=True) if anywhere else flags)

    def _columns_held(self, kind: str) -> Array:
        """`(..., r)`: columns of a rank's shards of a kind, summed over tables."""
        shards = self.dims.shards
        return np.asarray((shards.dim * (getattr(shards, kind) & shards.present)).sum(axis=-1))

    def _layer(self, module: str, slot: int, interaction: Interaction | None) -> Layer:
        hidden = self.dims.bottom_hidden if module == BOTTOM else self.dims.top_hidden
        outputs: Array = (*hidden, self.embedding_dim if module == BOTTOM else _ONE)[slot]
        before = hidden[slot - 1] if slot else _ZERO
        variants = tuple(
            LayerVariant(first, present)
            for first, present in (
                (False, mask_of((outputs > 0) & (before > 0))),
                (True, mask_of((outputs > 0) & (before == 0))),
            )
            if present is not False
        )
        inputs = before
        if any(v.first for v in variants):
            inputs = np.where(before > 0, before, self._module_input(module, interaction))
        return Layer(inputs, outputs, module == TOP and slot == len(hidden), variants)

    def _module_input(self, module: str, interaction: Interaction | None) -> Array:
        if module == BOTTOM:
            return np.full((1, 1), float(self.dims.num_dense_features))
        assert interaction is not None, "the first layer of the top MLP depends on the interaction"
        return self.interaction_width(interaction)

    def reads_module_input(self, module: str, slot: int) -> bool:
        """Whether some design's MLP begins at that slot."""
        hidden = self.dims.bottom_hidden if module == BOTTOM else self.dims.top_hidden
        return slot == 0 or bool((hidden[slot - 1] == 0).any())

    def _tables(self, *, distributed: bool) -> tuple[Table, ...]:
        shards = self.dims.shards
        present = shards.present
        local, everyone = self.batch[..., None], self.global_batch[..., None]
        batch, replicated = (everyone if distributed else local), np.zeros_like(present)
        if distributed and (shards.replicated & present).any():
            replicated = shards.replicated & present
            batch = np.where(replicated, local, everyone)
        owned, lookups = present & ~replicated, batch * shards.pooling
        sharded, dense = owned & ~shards.dense, owned & shards.dense
        if batch.shape[-1] == 1:
            batch = np.broadcast_to(batch, (*batch.shape[:-1], self.num_tables))
        kinds = {
            "sharded": _by_table(sharded),
            "dense": _by_table(dense),
            "replicated": _by_table(replicated),
        }
        return tuple(
            Table(
                rows=shards.rows[..., t],
                dim=shards.dim[..., t],
                pooling=shards.pooling[..., t],
                skew=shards.skew[..., t],
                batch=batch[..., t],
                lookups=lookups[..., t],
                **{kind: masks[t] for kind, masks in kinds.items()},
            )
            for t in range(self.num_tables)
        )


_ONE, _ZERO = np.ones((1, 1)), np.zeros((1, 1))


def _by_table(mask: Mask) -> list[Mask | bool]:
    """`(..., t)` as a mask for each table, plain where it is the same everywhere."""
    rest = tuple(range(mask.ndim - 1))
    everywhere: list[bool] = np.asarray(mask.all(axis=rest)).tolist()
    somewhere: list[bool] = np.asarray(mask.any(axis=rest)).tolist()
    return [
        True if every else mask[..., t] if some else False
        for t, (every, some) in enumerate(zip(everywhere, somewhere, strict=True))
    ]


def _columns(values: NDArray[np.float64]) -> tuple[Array, ...]:
    """`(..., t)` as t arrays `(..., 1)`."""
    return tuple(values[..., t : t + 1] for t in range(values.shape[-1]))
