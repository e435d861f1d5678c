"""From codes to designs: one by one, or as the grid that the bulk path folds into tables.

Both take a placement from the same cached solver, asked for the same combination of settings, so that what
is priced in bulk is what is exported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from dse.errors import NoFeasibleCandidateError
from dse.schema import Policy
from dse.space import Axis, Codes, SearchSpace, Value
from perfcore.design.design import Design
from perfcore.design.hardware import System
from perfcore.design.model import Interaction, Loss, Model
from perfcore.design.sharding import ShardingPlan, ShardingType, TableSharding
from perfcore.design.training import (
    Communication,
    EmbeddingFusion,
    Fusion,
    IndexType,
    InteractionFusion,
    Launches,
    MlpFusion,
    Optimizer,
    OptimizerFusion,
    Precision,
    Training,
)

Place: TypeAlias = Callable[[Model, Training, System, str, Fusion], ShardingPlan]
Request: TypeAlias = tuple[Model, Training, System, str, Fusion]
Settings: TypeAlias = "Mapping[str, Value]"


@runtime_checkable
class PlacesAhead(Protocol):
    """A solver that would rather know early what it will be asked."""

    def ahead(self, requests: Sequence[Request]) -> None:
        """Place all of them together; later calls find the plans."""


# Settings on which a placement may depend: they decide its bytes and its lookups. All else the solver sees at
# one value for the whole space (`reference_settings`), so that a plan serves every design that shares these.
PLACEMENT_SETTINGS = (
    "system.world_size",
    "training.global_batch",
    "model.embedding_dim",
    "sharding.policy",
    "training.table_precision",
    "training.table_optimizer",
    "fusion.embedding",
)


def settings_at(space: SearchSpace, row: Codes) -> dict[str, Value]:
    """Every setting of one candidate, fixed ones included; an axis that does not matter is at its first value.

    Args:
        space: the space.
        row: `(a,)` codes.
    """
    (codes,) = space.canonical(np.asarray(row, dtype=np.int16)[None, :])
    return dict(space.fixed) | {a.name: a.values[c] for a, c in zip(space.axes, codes, strict=True)}


def values_of(space: SearchSpace, name: str) -> tuple[Value, ...]:
    """Values that a setting has in the space; one if it is fixed."""
    return space.axes[space.position(name)].values if name in space else (space.fixed[name],)


def column(space: SearchSpace, codes: Codes, name: str) -> NDArray[Any]:
    """`(n,)` values of one setting over `(n, a)` codes."""
    if name in space:
        i = space.position(name)
        return np.array(space.axes[i].values)[codes[:, i]]
    return np.full(len(codes), space.fixed[name])


def design_of(space: SearchSpace, row: Codes, place: Place) -> Design:
    """The design that a row of `(a,)` codes stands for.

    Raises:
        DesignError, HardwareError: the combination is no design (see `SearchSpace.allowed`).
    """
    settings = settings_at(space, row)
    return Design(
        model=model_of(space, settings),
        training=training_of(settings),
        fusion=fusion_of(settings),
        sharding=plan_of(space, settings, place),
        system=space.system(int(settings["system.world_size"])),
    )


def model_of(space: SearchSpace, settings: Settings) -> Model:
    """The model of a candidate's settings."""
    return Model(
        num_dense_features=int(settings["model.num_dense_features"]),
        tables=space.tables,
        embedding_dim=int(settings["model.embedding_dim"]),
        bottom_hidden=_widths(settings, "model.bottom_hidden"),
        top_hidden=_widths(settings, "model.top_hidden"),
        interaction=Interaction(str(settings["model.interaction"])),
        cross_layers=int(settings["model.cross_layers"]),
        cross_rank=int(settings["model.cross_rank"]),
        loss=Loss(str(settings["model.loss"])),
    )


def training_of(settings: Settings) -> Training:
    """The training settings of a candidate."""
    return Training(
        global_batch=int(settings["training.global_batch"]),
        precision=Precision(str(settings["training.precision"])),
        optimizer=Optimizer(str(settings["training.optimizer"])),
        table_optimizer=Optimizer(str(settings["training.table_optimizer"])),
        table_precision=Precision(str(settings["training.table_precision"])),
        pinned_input=bool(settings["training.pinned_input"]),
        read_loss=bool(settings["training.read_loss"]),
        synchronize=bool(settings["training.synchronize"]),
        index_dtype=IndexType(str(settings["training.index_dtype"])),
    )


def fusion_of(settings: Settings) -> Fusion:
    """The fusion choices of a candidate."""
    return Fusion(
        embedding=EmbeddingFusion(str(settings["fusion.embedding"])),
        mlp=MlpFusion(str(settings["fusion.mlp"])),
        interaction=InteractionFusion(str(settings["fusion.interaction"])),
        optimizer=OptimizerFusion(str(settings["fusion.optimizer"])),
        launches=Launches(str(settings["fusion.launches"])),
        communication=Communication(str(settings["fusion.communication"])),
    )


def plan_of(space: SearchSpace, settings: Settings, place: Place) -> ShardingPlan:
    """The placement of a candidate.

    Where the solver finds none that fits, the tables are split evenly under the same policy: the memory model
    then says by how much that design does not fit.
    """
    model, training, system, policy, fusion = request_of(space, settings)
    if system.world_size == 1:
        return ShardingPlan.on_one_rank(model)
    try:
        return place(model, training, system, policy, fusion)
    except NoFeasibleCandidateError:
        return even_plan(
            model, policy=policy, world_size=system.world_size, local_world_size=system.local_world_size
        )


def place_ahead(place: object, requests: Sequence[Request]) -> None:
    """Let a solver that wants to place all of them together do so; any other is asked one by one later."""
    if isinstance(place, PlacesAhead):
        place.ahead(requests)


def request_of(space: SearchSpace, settings: Settings) -> Request:
    """What the solver is asked for the placement of a candidate."""
    reference = reference_settings(space) | {k: settings[k] for k in PLACEMENT_SETTINGS}
    system = space.system(int(settings["system.world_size"]))
    policy = str(settings["sharding.policy"])
    return model_of(space, reference), training_of(reference), system, policy, _reference_fusion(reference)


def _reference_fusion(settings: Settings) -> Fusion:
    """The embeddings' own choice; all others at their defaults, which go with any."""
    return Fusion(embedding=EmbeddingFusion(str(settings["fusion.embedding"])))


def even_plan(
    model: Model, *, policy: str, world_size: int, local_world_size: int | None = None
) -> ShardingPlan:
    """Tables spread without regard to memory: large ones first, each to the emptiest ranks; rows or columns evenly."""
    everyone, local = tuple(range(world_size)), local_world_size or world_size
    bytes_on = [0] * world_size
    by_name: dict[str, TableSharding] = {}
    sizes = {t.name: t.num_embeddings * d for t, d in zip(model.tables, model.table_dims, strict=True)}
    dims = {t.name: d for t, d in zip(model.tables, model.table_dims, strict=True)}
    for name in sorted(sizes, key=lambda n: -sizes[n]):
        emptiest = min(everyone, key=lambda r: bytes_on[r])
        match Policy(policy):
            case Policy.ROW_WISE:
                by_name[name] = TableSharding(name, ShardingType.ROW_WISE, everyone)
            case Policy.TABLE_ROW_WISE:
                machine = tuple(r for r in everyone if r // local == emptiest // local)
                by_name[name] = TableSharding(name, ShardingType.TABLE_ROW_WISE, machine)
                for rank in machine:
                    bytes_on[rank] += sizes[name] // local
            case Policy.DATA_PARALLEL:
                by_name[name] = TableSharding(name, ShardingType.DATA_PARALLEL, everyone)
            case Policy.COLUMN_WISE if dims[name] >= world_size:
                by_name[name] = TableSharding(name, ShardingType.COLUMN_WISE, everyone)
            case _:
                by_name[name] = TableSharding(name, ShardingType.TABLE_WISE, (emptiest,))
                bytes_on[emptiest] += sizes[name]
    return ShardingPlan(tuple(by_name[t.name] for t in model.tables))


def remembered(place: Place) -> Place:
    """The same solver, asked once for each problem; plans and refusals are both remembered.

    Only the policy `auto` looks at the fusion.
    """
    known: dict[tuple[Any, ...], ShardingPlan | NoFeasibleCandidateError] = {}

    def cached(model: Model, training: Training, system: System, policy: str, fusion: Fusion) -> ShardingPlan:
        key = (model, training, system, policy, fusion if policy == Policy.AUTO else None)
        if key not in known:
            try:
                known[key] = place(model, training, system, policy, fusion)
            except NoFeasibleCandidateError as err:
                known[key] = err
        found = known[key]
        if isinstance(found, NoFeasibleCandidateError):
            raise found
        return found

    return cached


def reference_settings(space: SearchSpace) -> dict[str, Value]:
    """One value of each setting: the largest of a number, so that a plan leaves room for the widest network."""
    return dict(space.fixed) | {a.name: _largest(a) for a in space.axes}


def _largest(axis: Axis) -> Value:
    return max(axis.values, key=lambda v: float(v)) if axis.ordered else axis.values[0]


def _widths(settings: Settings, name: str) -> tuple[int, ...]:
    layers: Sequence[int] = range(1, int(settings[f"{name}.depth"]) + 1)
    return tuple(int(settings[f"{name}.{layer}"]) for layer in layers)
