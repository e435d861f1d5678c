"""Where embedding tables live: a plan in TorchRec's words, and its shards as arrays."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfcore.design.model import Model
from perfcore.errors import DesignError


class ShardingType(StrEnum):
    """TorchRec's sharding types."""

    TABLE_WISE = "table_wise"
    COLUMN_WISE = "column_wise"
    ROW_WISE = "row_wise"
    TABLE_ROW_WISE = "table_row_wise"
    DATA_PARALLEL = "data_parallel"


@dataclass(frozen=True, slots=True)
class TableSharding:
    """One table's placement.

    Attributes:
        table: the table's name.
        type: how it is split.
        ranks: holders of its shards: one for table_wise; one per column piece for column_wise (a rank may
            hold several); the ranks among which rows are split for row_wise and table_row_wise; all for
            data_parallel.
    """

    table: str
    type: ShardingType
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        """Refuse a placement without, or with repeated, ranks."""
        if not self.ranks or min(self.ranks) < 0:
            raise DesignError(f"Table {self.table!r} needs ranks >= 0, but got ranks={self.ranks}.")
        if self.type is ShardingType.TABLE_WISE and len(self.ranks) != 1:
            raise DesignError(
                f"Table {self.table!r} is table_wise and needs exactly one rank, but got ranks={self.ranks}."
            )
        if self.type is not ShardingType.COLUMN_WISE and len(set(self.ranks)) != len(self.ranks):
            raise DesignError(f"Table {self.table!r} names a rank twice: ranks={self.ranks}.")


@dataclass(frozen=True, slots=True)
class ShardingPlan:
    """The placement of every table, in the model's table order."""

    tables: tuple[TableSharding, ...]

    @classmethod
    def on_one_rank(cls, model: Model) -> ShardingPlan:
        """Every table whole on rank 0."""
        return cls(tuple(TableSharding(t.name, ShardingType.TABLE_WISE, (0,)) for t in model.tables))


@dataclass(frozen=True, slots=True, eq=False)
class Shards:
    """Shards as arrays; the last two axes are rank `r` and table `t`, leading axes are candidates.

    Every field broadcasts to `(..., r, t)`; a rank without a shard of a table has `rows == 0`.

    Attributes:
        rows: rows of the table on that rank.
        dim: columns on that rank.
        pooling: mean lookups per sample that reach that rank.
        skew: Zipf exponent of the accesses.
        pooled: the shard's output goes through the forward all-to-all (table_wise, column_wise).
        row_split: the shard's output is a partial sum (row_wise, table_row_wise).
        replicated: every rank holds the table and looks up its own samples (data_parallel).
    """

    rows: NDArray[np.float64]
    dim: NDArray[np.float64]
    pooling: NDArray[np.float64]
    skew: NDArray[np.float64]
    pooled: NDArray[np.bool_]
    row_split: NDArray[np.bool_]
    replicated: NDArray[np.bool_]

    @property
    def present(self) -> NDArray[np.bool_]:
        """`(..., r, t)`: the rank holds a shard of the table."""
        return self.rows > 0


def shards_of(plan: ShardingPlan, model: Model, *, world_size: int) -> Shards:
    """The plan as arrays of shape `(r, t)`, r = `world_size`.

    Raises:
        DesignError: the plan and the model disagree, or a rank is outside the world.
    """
    _check_plan(plan, model, world_size=world_size)
    shape = (world_size, len(model.tables))
    fields: dict[str, NDArray[Any]] = {name: np.zeros(shape) for name in ("rows", "dim", "pooling")}
    kinds = {name: np.zeros(shape, dtype=bool) for name in ("pooled", "row_split", "replicated")}
    for t, (table, dim, placed) in enumerate(zip(model.tables, model.table_dims, plan.tables, strict=True)):
        split = len(placed.ranks)
        ranks = list(placed.ranks)
        match placed.type:
            case ShardingType.TABLE_WISE | ShardingType.COLUMN_WISE:
                fields["rows"][ranks, t] = table.num_embeddings
                np.add.at(fields["dim"], (ranks, t), _pieces(dim, split))
                fields["pooling"][ranks, t] = table.pooling_factor
                kinds["pooled"][ranks, t] = True
            case ShardingType.ROW_WISE | ShardingType.TABLE_ROW_WISE:
                rows = _pieces(table.num_embeddings, split)
                fields["rows"][ranks, t] = rows
                fields["dim"][ranks, t] = dim
                fields["pooling"][ranks, t] = table.pooling_factor * rows / table.num_embeddings
                kinds["row_split"][ranks, t] = True
            case ShardingType.DATA_PARALLEL:
                fields["rows"][:, t] = table.num_embeddings
                fields["dim"][:, t] = dim
                fields["pooling"][:, t] = table.pooling_factor
                kinds["replicated"][:, t] = True
    skew = np.array([table.skew for table in model.tables])
    return Shards(**fields, **kinds, skew=np.broadcast_to(skew, shape))


def _pieces(total: int, parts: int) -> NDArray[np.float64]:
    """`(parts,)` near-equal integers that sum to `total`, the larger ones first."""
    return np.array([total // parts + (p < total % parts) for p in range(parts)], dtype=np.float64)


def _check_plan(plan: ShardingPlan, model: Model, *, world_size: int) -> None:
    planned, known = [p.table for p in plan.tables], [t.name for t in model.tables]
    if planned != known:
        missing = sorted(set(known) - set(planned)) or sorted(set(planned) - set(known)) or known
        raise DesignError(
            f"The sharding plan must place the model's tables in their order, but {missing[0]!r} is "
            f"missing, unknown or out of order."
        )
    for placed, dim in zip(plan.tables, model.table_dims, strict=True):
        if max(placed.ranks) >= world_size:
            raise DesignError(
                f"`rank < world_size` must hold, but table {placed.table!r} has ranks={placed.ranks} "
                f"and {world_size=}."
            )
        if placed.type is ShardingType.COLUMN_WISE and len(placed.ranks) > dim:
            raise DesignError(
                f"Table {placed.table!r} has {dim} columns and cannot be split into {len(placed.ranks)}."
            )
        if placed.type is ShardingType.DATA_PARALLEL and len(placed.ranks) != world_size:
            raise DesignError(
                f"Table {placed.table!r} is data_parallel and needs all {world_size} ranks, but got "
                f"ranks={placed.ranks}."
            )
