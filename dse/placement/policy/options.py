"""How each table may be split, as arrays: the instance that the solver solves."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from dse.placement.capacity import rank_capacity_bytes, without_tables
from dse.placement.policy.cost import Pieces, ShardCost
from dse.placement.solver.problem import Where
from perfcore.design.design import Design
from perfcore.design.model import Model
from perfcore.design.sharding import ShardingType, Shards
from perfcore.graph.dims import Dims
from perfcore.memory import embedding_bytes

T = TypeVar("T", bound=np.generic)
Array: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]

_REMEMBERED = 256  # settings of a space, for each of which several policies are asked
ALL_KINDS: frozenset[ShardingType] = frozenset(ShardingType)


class Policy(StrEnum):
    """Which sharding types a placement may use.

    The first five treat every table alike; one with fewer rows than ranks, or with one column, cannot be
    split and stays whole. `DATA_PARALLEL_SMALL` replicates the tables whose replicas cost all ranks
    together less than the whole table costs one, and keeps the others whole. `AUTO` chooses per table.
    """

    TABLE_WISE = "table_wise"
    COLUMN_WISE = "column_wise"
    ROW_WISE = "row_wise"
    TABLE_ROW_WISE = "table_row_wise"
    DATA_PARALLEL = "data_parallel"
    DATA_PARALLEL_SMALL = "data_parallel_small"
    AUTO = "auto"


@dataclass(frozen=True, slots=True, eq=False)
class Instance:
    """Options of every table; all shards of an option are equal. Letters: t tables, o options.

    Attributes:
        kinds: `(o,)` sharding type of each option.
        first: `(t + 1,)` options of table `t` are `first[t]` to `first[t + 1] - 1`.
        where: `(o,)` a `Where`.
        count: `(o,)` shards.
        load_us: `(o,)` µs per iteration that one shard adds to its rank.
        bytes: `(o,)` memory that one shard adds to its rank.
        capacity_bytes: `(r,)` what each rank can give to tables; may be negative.
        slowness: `(r,)` factor on the loads of each rank.
        num_ranks: ranks.
        ranks_per_host: ranks of a machine.
    """

    kinds: tuple[ShardingType, ...]
    first: Ints
    where: Ints
    count: Ints
    load_us: Array
    bytes: Array
    capacity_bytes: Array
    slowness: Array
    num_ranks: int
    ranks_per_host: int

    @property
    def num_tables(self) -> int:
        """Tables to place."""
        return len(self.first) - 1


@dataclass(frozen=True, slots=True)
class _Split:
    table: int
    kind: ShardingType
    count: int


_Ways: TypeAlias = tuple[list[_Split], list[_Split], list[_Split], list[_Split], list[_Split]]


def instance_of(
    design: Design, policy: Policy, cost: ShardCost, *, kinds: Set[ShardingType] = ALL_KINDS
) -> Instance:
    """The options that a policy leaves to each table of a design; the design's own plan does not matter.

    `kinds` are those that `AUTO` may use beside whole tables; `cost` is hashable.
    """
    ranks, local = design.system.world_size, design.system.local_world_size
    splits = [s for ways in _every_split(design) for s in _splits(design, ways, policy, kinds)]
    known = _prices(design, cost)
    prices = np.array([known[s] for s in splits]).reshape(-1, 2)
    if policy is Policy.DATA_PARALLEL_SMALL and ranks > 1:
        keep = _cheaper_of_two(splits, prices[:, 0], ranks)
        splits, prices = [splits[i] for i in keep], prices[keep]
    tables = np.array([s.table for s in splits])
    return Instance(
        kinds=tuple(s.kind for s in splits),
        first=np.searchsorted(tables, np.arange(len(design.model.tables) + 1)).astype(np.int64),
        where=np.array([_where(s.kind) for s in splits], dtype=np.int64),
        count=np.array([s.count for s in splits], dtype=np.int64),
        load_us=np.ascontiguousarray(prices[:, 0]),
        bytes=np.ascontiguousarray(prices[:, 1]),
        capacity_bytes=rank_capacity_bytes(design),
        slowness=np.array(design.system.slowness or np.ones(ranks)),
        num_ranks=ranks,
        ranks_per_host=local,
    )


def _splits(design: Design, ways: _Ways, policy: Policy, kinds: Set[ShardingType]) -> list[_Split]:
    whole, columns, row_wise, on_host, copies = ways
    if design.system.world_size == 1:
        return whole
    match policy:
        case Policy.TABLE_WISE:
            return whole
        case Policy.COLUMN_WISE:
            return columns or whole
        case Policy.ROW_WISE:
            return row_wise or whole
        case Policy.TABLE_ROW_WISE:
            return on_host or whole
        case Policy.DATA_PARALLEL:
            return copies
        case Policy.DATA_PARALLEL_SMALL:
            return [*whole, *copies]
        case Policy.AUTO:
            # On one machine table_row_wise is row_wise.
            several = design.system.world_size > design.system.local_world_size
            others = [*columns, *row_wise, *(on_host if several else []), *copies]
            return [*whole, *(s for s in others if s.kind in kinds)]


@lru_cache(maxsize=_REMEMBERED)
def _every_split(design: Design) -> tuple[_Ways, ...]:
    """Each table whole, by columns, by rows, by rows on a machine, replicated; as far as it can be split so."""
    ranks, local = design.system.world_size, design.system.local_world_size
    return tuple(
        (
            [_Split(t, ShardingType.TABLE_WISE, 1)],
            [_Split(t, ShardingType.COLUMN_WISE, k) for k in _halvings(min(ranks, dim))],
            [_Split(t, ShardingType.ROW_WISE, ranks)] if table.num_embeddings >= ranks else [],
            [_Split(t, ShardingType.TABLE_ROW_WISE, local)] if table.num_embeddings >= local > 1 else [],
            [_Split(t, ShardingType.DATA_PARALLEL, ranks)],
        )
        for t, (table, dim) in enumerate(zip(design.model.tables, design.model.table_dims, strict=True))
    )


@lru_cache(maxsize=_REMEMBERED)
def _prices(design: Design, cost: ShardCost) -> dict[_Split, tuple[float, float]]:
    """µs and bytes of one shard of every split: policies, asked for one after another, share most of them."""
    every = [s for ways in _every_split(design) for way in ways for s in way]
    loads, held = _loads(design.model, every, cost), _bytes(design, every)
    return dict(zip(every, zip(loads.tolist(), held.tolist(), strict=True), strict=True))


def _halvings(most: int) -> list[int]:
    """`most`, half of it, and so on down to 2."""
    counts = []
    while most >= 2:
        counts.append(most)
        most //= 2
    return counts


def _where(kind: ShardingType) -> Where:
    if kind in (ShardingType.ROW_WISE, ShardingType.DATA_PARALLEL):
        return Where.ALL
    return Where.HOST if kind is ShardingType.TABLE_ROW_WISE else Where.ANY


def _loads(model: Model, splits: list[_Split], cost: ShardCost) -> Array:
    """`(o,)` µs of one shard of each option, priced type by type."""
    loads = np.zeros(len(splits))
    for kind in ShardingType:
        at = [i for i, s in enumerate(splits) if s.kind is kind]
        if at:
            loads[at] = cost.load_us(kind, _pieces(model, [splits[i] for i in at]))
    return loads


def _pieces(model: Model, splits: list[_Split]) -> Pieces:
    tables, dims = [model.tables[s.table] for s in splits], model.table_dims
    by_row = [_where(s.kind) is not Where.ANY and s.kind is not ShardingType.DATA_PARALLEL for s in splits]
    return Pieces(
        rows=np.array([float(t.num_embeddings) for t in tables]),
        dim=np.array([float(_columns(dims[s.table], s)) for s in splits]),
        pooling=np.array([t.pooling_factor for t in tables]),
        skew=np.array([t.skew for t in tables]),
        parts=np.array([float(s.count) if b else 1.0 for s, b in zip(splits, by_row, strict=True)]),
    )


def _columns(dim: int, split: _Split) -> int:
    """Columns of the widest shard of a table of `dim` columns."""
    return -(-dim // split.count) if split.kind is ShardingType.COLUMN_WISE else dim


def _bytes(design: Design, splits: list[_Split]) -> Array:
    """`(o,)` bytes of the largest shard of each option, by the account of `perfcore.memory`."""
    pieces = _pieces(design.model, splits)
    kinds = np.array([s.kind for s in splits])
    rows = np.ceil(pieces.rows / pieces.parts)

    on_machine = kinds == ShardingType.TABLE_ROW_WISE
    several = design.system.world_size > design.system.local_world_size
    row_split = (kinds == ShardingType.ROW_WISE) | (on_machine & (not several))
    replicated = kinds == ShardingType.DATA_PARALLEL
    shards = Shards(
        rows=_alone(rows),
        dim=_alone(pieces.dim),
        pooling=_alone(pieces.pooling * rows / pieces.rows),
        skew=_alone(pieces.skew),
        pooled=_alone(~row_split & ~on_machine & ~replicated),
        row_split=_alone(row_split),
        staged=_alone(on_machine & several),
        replicated=_alone(replicated),
    )
    dims, structure, _ = without_tables(design.model, design.training, design.fusion, design.system)
    names = {name: getattr(dims, name) for name in Dims.__dataclass_fields__}
    one_each = Dims(**names | {"shards": shards})
    return embedding_bytes(one_each, structure)[:, 0]


def _alone(values: NDArray[T]) -> NDArray[T]:
    """`(o, 1, 1)`: each option a candidate of one rank and one table."""
    return values[:, None, None]


def _cheaper_of_two(splits: list[_Split], loads: Array, ranks: int) -> list[int]:
    """Of each table's pair (whole, replicas) the index of the one that costs all ranks together less."""
    pairs = range(0, len(splits), 2)
    return [i + int(loads[i + 1] * ranks < loads[i]) for i in pairs]
