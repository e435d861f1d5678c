"""The grid of a space: each axis its own dimension, so that the bulk path folds each region over few axes.

Axis letters: `n` candidates, `g` grid axes, `r` ranks, `t` tables.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dse.candidate import (
    PLACEMENT_SETTINGS,
    Place,
    column,
    even_plan,
    fusion_of,
    model_of,
    place_ahead,
    plan_of,
    reference_settings,
    request_of,
    settings_at,
    training_of,
    values_of,
)
from dse.errors import SpaceError
from dse.schema import Policy
from dse.space import Codes, SearchSpace, Value
from perfcore.design.model import Interaction, Loss
from perfcore.design.sharding import ShardingPlan, Shards, shards_of
from perfcore.graph.dims import Dims, Structure, structure_for

Array = NDArray[np.float64]
SWITCHES = (
    "model.interaction",
    "model.cross_layers",
    "training.precision",
    "training.optimizer",
    "training.table_optimizer",
    "training.table_precision",
    "training.pinned_input",
    "training.read_loss",
    "training.synchronize",
    "training.index_dtype",
    "fusion.",
)
HIDDEN = ("model.bottom_hidden", "model.top_hidden")


@dataclass(frozen=True, slots=True)
class GridAxis:
    """One dimension of the grid: a setting, or a slot of an MLP whose value 0 is an absent layer."""

    name: str
    values: tuple[Value, ...]


@dataclass(frozen=True, eq=False)
class Grid:
    """A space's designs of one kind (on one rank, or on many) for the bulk path.

    Attributes:
        space: the space.
        distributed: whether the designs have several ranks.
        axes: the grid's `g` dimensions.
        structures: what the switch axes amount to.
    """

    space: SearchSpace
    distributed: bool
    axes: tuple[GridAxis, ...]
    structures: tuple[Structure, ...]
    _structure_at: NDArray[np.int64]
    _worlds: tuple[int, ...]
    _place: Place

    @cached_property
    def dims(self) -> Dims:
        """Arrays over the grid, `(c_1, ..., c_g, r)`; size 1 where they do not depend on an axis.

        Made when first asked for: the placements of a large space take seconds.
        """
        return _dims(self.space, self.axes, self._worlds, self._place)

    @cached_property
    def slowness(self) -> Array | None:
        """The ranks' factors on the grid, `(c_1, ..., c_g, r)`; `None` where all ranks are as the device is.

        Ranks that a smaller world lacks hold no shard; they are as quick as its quickest, so they decide nothing.
        """
        systems = [self.space.system(w) for w in self._worlds]
        if not any(s.slowness for s in systems):
            return None
        return self._by_rank([s.slowness or (1.0,) * s.world_size for s in systems], min)

    @cached_property
    def hbm_bytes(self) -> Array | None:
        """Memory of the ranks' GPUs on the grid, likewise; what is not there is as large as the largest."""
        if not self.space.unequal_memory:
            return None
        return self._by_rank([self.space.system(w).rank_hbm_bytes for w in self._worlds], max)

    def _by_rank(
        self, values: Sequence[Sequence[float]], missing: Callable[[Sequence[float]], float]
    ) -> Array:
        """Values of each world's ranks along its axis, those that a world lacks made up."""
        ranks = max(self._worlds)
        table = np.array([[*v, *[missing(v)] * (ranks - len(v))] for v in values])
        shape = [len(a.values) if a.name == "system.world_size" else 1 for a in self.axes]
        return table.reshape(*shape, ranks)

    def locate(self, codes: Codes) -> tuple[NDArray[np.int64], NDArray[np.int16]]:
        """Where candidates lie.

        Args:
            codes: `(n, a)` canonical codes of candidates of this kind (`covers`).

        Returns:
            `(n,)` index into `structures`, and `(n, g)` codes on the grid's axes.

        Raises:
            SpaceError: a candidate is of the other kind.
        """
        if not self.covers(codes).all():
            kind = "several ranks" if self.distributed else "one rank"
            raise SpaceError(f"This grid holds designs with {kind}, but a candidate has another world_size.")
        index = self._structure_at[tuple(codes[:, i] for i in _switch_columns(self.space))]
        grid = np.empty((len(codes), len(self.axes)), dtype=np.int16)
        slots = {name: _slot_codes(self.space, codes, name) for name in HIDDEN}
        for position, axis in enumerate(self.axes):
            name, _, slot = axis.name.rpartition(".slot")
            if name:
                lowest = 0 if axis.values[0] == 0 else 1
                grid[:, position] = slots[name][:, int(slot)] - lowest
            else:
                values = codes[:, self.space.position(axis.name)]
                grid[:, position] = _shift(self.space, axis)[values]
        return np.broadcast_to(index, len(codes)).astype(np.int64), grid

    def covers(self, codes: Codes) -> NDArray[np.bool_]:
        """`(n,)`: which candidates are of this kind."""
        return np.asarray(
            (column(self.space, codes, "system.world_size") > 1) == self.distributed, dtype=np.bool_
        )


def grid_of(space: SearchSpace, place: Place, *, distributed: bool) -> Grid | None:
    """The grid of a space's designs on one rank, or on several; `None` if the space has none of that kind.

    Args:
        space: the space.
        place: solves a placement; asked once for each combination of the axes on which placements depend.
        distributed: several ranks.
    """
    worlds = [int(w) for w in values_of(space, "system.world_size") if (int(w) > 1) == distributed]
    if not worlds:
        return None
    axes = _grid_axes(space, worlds, distributed=distributed)
    structures, structure_at = _structures(space, distributed=distributed)
    return Grid(space, distributed, axes, structures, structure_at, tuple(worlds), place)


def _grid_axes(space: SearchSpace, worlds: Sequence[int], *, distributed: bool) -> tuple[GridAxis, ...]:
    axes = [GridAxis("system.world_size", tuple(worlds))] if "system.world_size" in space else []
    names = ["training.global_batch", "model.embedding_dim", "model.cross_rank"]
    if distributed:
        names += ["sharding.policy", "training.table_precision", "training.table_optimizer"]
        if Policy.AUTO in values_of(space, "sharding.policy"):  # the only one that looks at the fusion
            names.append("fusion.embedding")
    axes += [GridAxis(n, values_of(space, n)) for n in names if n in space]
    for name in HIDDEN:
        axes += [GridAxis(f"{name}.slot{s}", values) for s, values in enumerate(_slot_values(space, name))]
    return tuple(a for a in axes if len(a.values) > 1 or a.name in space)


def _shift(space: SearchSpace, axis: GridAxis) -> NDArray[np.int16]:
    """Grid code of each code of the space's axis, of which the grid may hold a part."""
    where = {v: i for i, v in enumerate(axis.values)}
    return np.array([where.get(v, -1) for v in values_of(space, axis.name)], dtype=np.int16)


def _slot_values(space: SearchSpace, name: str) -> list[tuple[int, ...]]:
    """Widths that each right-aligned slot may have, in order; 0 first where the layer may be absent."""
    depths = [int(d) for d in values_of(space, f"{name}.depth")]
    deepest = max(depths)
    widths = _all_widths(space, name)
    return [((0,) if deepest - slot > min(depths) else ()) + widths for slot in range(deepest)]


def _all_widths(space: SearchSpace, name: str) -> tuple[int, ...]:
    deepest = max(int(d) for d in values_of(space, f"{name}.depth"))
    return tuple(sorted({int(w) for k in range(1, deepest + 1) for w in values_of(space, f"{name}.{k}")}))


def _slot_codes(space: SearchSpace, codes: Codes, name: str) -> NDArray[np.int16]:
    """`(n, slots)`: 1 + position of the width in `_all_widths`, 0 where the slot has no layer."""
    widths = np.array(_all_widths(space, name))
    depth = column(space, codes, f"{name}.depth").astype(np.int64)
    deepest = max((int(d) for d in values_of(space, f"{name}.depth")), default=0)
    by_layer = np.zeros((len(codes), deepest + 1), dtype=np.int16)  # column 0 stands for an absent layer
    for layer in range(1, deepest + 1):
        found = np.searchsorted(widths, np.array(values_of(space, f"{name}.{layer}")))
        i = (
            codes[:, space.position(f"{name}.{layer}")]
            if f"{name}.{layer}" in space
            else np.zeros(len(codes), int)
        )
        by_layer[:, layer] = found[i] + 1
    layer_of_slot = np.clip(depth[:, None] - deepest + 1 + np.arange(deepest), 0, None)
    return np.take_along_axis(by_layer, layer_of_slot, axis=1)


def _switch_columns(space: SearchSpace) -> list[int]:
    return [i for i, a in enumerate(space.axes) if a.name.startswith(SWITCHES)]


def _structures(space: SearchSpace, *, distributed: bool) -> tuple[tuple[Structure, ...], NDArray[np.int64]]:
    """Distinct structures, and for each combination of the switch axes' codes which of them it is (-1: none)."""
    columns = _switch_columns(space)
    rules = [e for e in space.exclusions if all(name.startswith(SWITCHES) for name in e.axes)]
    sizes = [len(space.axes[i].values) for i in columns]
    index = np.full(sizes, -1, dtype=np.int64)
    known: dict[Structure, int] = {}
    row = np.zeros(len(space.axes), dtype=np.int16)
    if "system.world_size" in space:
        # Any world of this kind: conditions on it ask only whether there are several ranks.
        row[space.position("system.world_size")] = [
            (int(w) > 1) == distributed for w in values_of(space, "system.world_size")
        ].index(True)
    for combination in itertools.product(*map(range, sizes)):
        row[columns] = combination
        if not all(space.permits(rule, row[None])[0] for rule in rules):
            continue
        structure = _structure(settings_at(space, row), distributed=distributed)
        index[combination] = known.setdefault(structure, len(known))
    return tuple(known), index


def _structure(settings: dict[str, Value], *, distributed: bool) -> Structure:
    return structure_for(
        training_of(settings),
        fusion_of(settings),
        interaction=Interaction(str(settings["model.interaction"])),
        cross_layers=int(settings["model.cross_layers"]),
        loss=Loss(str(settings["model.loss"])),
        distributed=distributed,
    )


def _dims(space: SearchSpace, axes: Sequence[GridAxis], worlds: Sequence[int], place: Place) -> Dims:
    names = [a.name for a in axes]

    def along(name: str) -> Array:
        """`(1, ..., c, ..., 1, 1)`: the setting's values on its own axis; rank last."""
        if name not in names:
            return np.full([1] * len(axes) + [1], float(space.fixed[name]))
        i = names.index(name)
        values = np.array(axes[i].values, dtype=np.float64)
        return values.reshape([1] * i + [len(values)] + [1] * (len(axes) - i))

    def slots(name: str) -> tuple[Array, ...]:
        return tuple(
            along(f"{name}.slot{s}")
            if f"{name}.slot{s}" in names
            else np.full([1] * len(axes) + [1], float(v[-1]))
            for s, v in enumerate(_slot_values(space, name))
        )

    world_size = along("system.world_size")
    return Dims(
        global_batch=along("training.global_batch"),
        world_size=world_size,
        local_world_size=np.minimum(world_size, space.node.gpus),
        num_dense_features=int(space.fixed["model.num_dense_features"]),
        embedding_dim=along("model.embedding_dim"),
        bottom_hidden=slots("model.bottom_hidden"),
        top_hidden=slots("model.top_hidden"),
        cross_rank=along("model.cross_rank"),
        shards=_shards(space, axes, place, num_ranks=max(worlds)),
    )


def _shards(space: SearchSpace, axes: Sequence[GridAxis], place: Place, *, num_ranks: int) -> Shards:
    """Shards over the grid, `(c_1, ..., c_g, r, t)`; an axis on which a field does not depend has size 1."""
    varied = [a for a in axes if a.name in PLACEMENT_SETTINGS]
    combinations = list(itertools.product(*(a.values for a in varied)))
    names = [a.name for a in varied]
    chosen = [reference_settings(space) | dict(zip(names, c, strict=True)) for c in combinations]
    if num_ranks > 1:
        place_ahead(place, [request_of(space, s) for s in chosen if _is_design(s)])
    spread = lru_cache(maxsize=None)(partial(_spread, space, num_ranks))  # fusions often share a plan
    solved = [spread(*_plan_at(space, s, place)) for s in chosen]
    lead = [len(a.values) if a in varied else 1 for a in axes]
    fields = Shards.__dataclass_fields__
    return Shards(
        **{
            f: _collapse(
                np.stack([getattr(s, f) for s in solved]).reshape(*lead, num_ranks, len(space.tables))
            )
            for f in fields
        }
    )


def _plan_at(
    space: SearchSpace, settings: Mapping[str, Value], place: Place
) -> tuple[ShardingPlan, int, int]:
    """A placement, its columns and its ranks, for one combination of the settings on which it depends."""
    dim, world_size = int(settings["model.embedding_dim"]), int(settings["system.world_size"])
    if _is_design(settings):
        return plan_of(space, settings, place), dim, world_size
    # No design, but the grid has a place for it.
    local, policy = min(world_size, space.node.gpus), str(settings["sharding.policy"])
    plan = even_plan(model_of(space, settings), policy=policy, world_size=world_size, local_world_size=local)
    return plan, dim, world_size


def _spread(space: SearchSpace, num_ranks: int, plan: ShardingPlan, dim: int, world_size: int) -> Shards:
    """`(r, t)`: a plan's shards on its ranks, the other ranks empty."""
    model = model_of(space, reference_settings(space) | {"model.embedding_dim": dim})
    own = shards_of(plan, model, world_size=world_size, local_world_size=min(world_size, space.node.gpus))
    if world_size == num_ranks:
        return own
    values: dict[str, NDArray[Any]] = {}
    for name in Shards.__dataclass_fields__:
        known = getattr(own, name)
        values[name] = np.zeros((num_ranks, known.shape[1]), dtype=known.dtype)
        values[name][:world_size] = known
    return Shards(**values)


def _is_design(settings: Mapping[str, Value]) -> bool:
    return int(settings["training.global_batch"]) % int(settings["system.world_size"]) == 0


def _collapse(values: NDArray[Any]) -> NDArray[Any]:
    """The array with size 1 on every leading axis along which it is constant; ranks and tables are kept."""
    for axis in range(values.ndim - 2):
        first = np.take(values, [0], axis=axis)
        if (values == first).all():
            values = first
    return values
