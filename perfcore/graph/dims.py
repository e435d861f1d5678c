"""Designs as arrays: what varies (`Dims`) and what decides which ops exist (`Structure`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perfcore.design.design import Design
from perfcore.design.model import Interaction, Loss
from perfcore.design.sharding import Shards, shards_of
from perfcore.design.training import Fusion, IndexType, Optimizer, Precision, Program, Training

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Structure:
    """What decides which ops exist; designs of one structure differ in `Dims` only. Hashable."""

    interaction: Interaction
    cross_layers: int
    loss: Loss
    precision: Precision
    optimizer: Optimizer
    table_optimizer: Optimizer
    table_precision: Precision
    pinned_input: bool
    read_loss: bool
    synchronize: bool
    index_dtype: IndexType
    program: Program
    distributed: bool
    fusion: Fusion


@dataclass(frozen=True, slots=True, eq=False)
class Dims:
    """n designs of one or of many structures, as arrays that broadcast to `(..., r)`.

    Leading axes are candidates: `(n, 1)` for a list of designs, `(c_1, ..., c_k, 1)` for a grid in which
    each search axis has its own dimension (so that a dim's shape tells on which axes it depends).

    Attributes:
        global_batch: samples per iteration.
        world_size: ranks; at most `r`.
        local_world_size: ranks on one machine.
        num_dense_features: width of the dense input.
        embedding_dim: width of the bottom MLP's output.
        bottom_hidden: hidden widths by slot, right-aligned: the last slot is the last hidden layer, and a
            layer that a shallower design lacks has width 0. So a layer depends on its neighbours alone.
        top_hidden: likewise.
        cross_rank: rank of a DCNv2 layer's factors.
        shards: the tables' shards, `(..., r, t)`.
    """

    global_batch: Array
    world_size: Array
    local_world_size: Array
    num_dense_features: int
    embedding_dim: Array
    bottom_hidden: tuple[Array, ...]
    top_hidden: tuple[Array, ...]
    cross_rank: Array
    shards: Shards

    @property
    def local_batch(self) -> Array:
        """Samples per rank."""
        return self.global_batch / self.world_size

    @property
    def num_ranks(self) -> int:
        """Size of the rank axis."""
        return int(self.shards.rows.shape[-2])

    @property
    def num_tables(self) -> int:
        """Size of the table axis."""
        return int(self.shards.rows.shape[-1])


def structure_of(design: Design) -> Structure:
    """The structure of one design."""
    model = design.model
    return structure_for(
        design.training,
        design.fusion,
        interaction=model.interaction,
        cross_layers=model.cross_layers,
        loss=model.loss,
        distributed=design.system.world_size > 1,
    )


def structure_for(
    training: Training,
    fusion: Fusion,
    *,
    interaction: Interaction,
    cross_layers: int,
    loss: Loss,
    distributed: bool,
) -> Structure:
    """The structure of designs with these settings; `cross_layers` counts for DCNv2 alone."""
    return Structure(
        interaction=interaction,
        cross_layers=cross_layers if interaction is Interaction.DCN_V2 else 0,
        loss=loss,
        precision=training.precision,
        optimizer=training.optimizer,
        table_optimizer=training.table_optimizer,
        table_precision=training.table_precision,
        pinned_input=training.pinned_input,
        read_loss=training.read_loss,
        synchronize=training.synchronize,
        index_dtype=training.index_dtype,
        program=training.program,
        distributed=distributed,
        fusion=fusion,
    )


def dims_of(designs: Sequence[Design]) -> Dims:
    """Arrays of shape `(n, 1)`, shards `(n, r, t)`; all designs have the same tables and world size."""
    first = designs[0]

    def column(values: list[float]) -> Array:
        return np.array(values, dtype=np.float64)[:, None]

    shards = [
        shards_of(
            d.sharding,
            d.model,
            world_size=d.system.world_size,
            local_world_size=d.system.local_world_size,
        )
        for d in designs
    ]
    names = Shards.__dataclass_fields__
    return Dims(
        global_batch=column([d.training.global_batch for d in designs]),
        world_size=column([d.system.world_size for d in designs]),
        local_world_size=column([d.system.local_world_size for d in designs]),
        num_dense_features=first.model.num_dense_features,
        embedding_dim=column([d.model.embedding_dim for d in designs]),
        bottom_hidden=_slots([d.model.bottom_hidden for d in designs]),
        top_hidden=_slots([d.model.top_hidden for d in designs]),
        cross_rank=column([d.model.cross_rank for d in designs]),
        shards=Shards(**{name: np.stack([getattr(s, name) for s in shards]) for name in names}),
    )


def _slots(widths: Sequence[tuple[int, ...]]) -> tuple[Array, ...]:
    depth = max(map(len, widths))
    aligned = [(0,) * (depth - len(w)) + w for w in widths]
    return tuple(np.array(slot, dtype=np.float64)[:, None] for slot in zip(*aligned, strict=True))
