"""Where embedding tables live: a plan in TorchRec's words, and its shards as arrays."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeVar, assert_never

import numpy as np
from numpy.typing import NDArray

from perfcore.design.checks import check_choice
from perfcore.design.model import Model
from perfcore.errors import DesignError


class ShardingType(StrEnum):
    """TorchRec's sharding types."""

    TABLE_WISE = "table_wise"
    COLUMN_WISE = "column_wise"
    ROW_WISE = "row_wise"
    TABLE_ROW_WISE = "table_row_wise"
    DATA_PARALLEL = "data_parallel"
    GRID_SHARD = "grid_shard"
    TABLE_COLUMN_WISE = "table_column_wise"


class ComputeKernel(StrEnum):
    """TorchRec's compute kernels: where a table's rows lie, and who updates them.

    `FUSED`: in device memory, updated by the backward kernel itself. `DENSE`: in device memory, with a gradient of
    the table's size and a separate optimizer. `FUSED_UVM`: in the host's memory, read and written over the host's
    link. `FUSED_UVM_CACHING`: likewise, with a cache of rows in device memory.
    """

    FUSED = "fused"
    DENSE = "dense"
    FUSED_UVM = "fused_uvm"
    FUSED_UVM_CACHING = "fused_uvm_caching"


COLUMN_PIECES = frozenset({ShardingType.COLUMN_WISE, ShardingType.TABLE_COLUMN_WISE})
T = TypeVar("T", bound=np.generic)

FLAGS = ("pooled", "row_split", "replicated", "staged")
ON_HOST = frozenset({ComputeKernel.FUSED_UVM, ComputeKernel.FUSED_UVM_CACHING})


@dataclass(frozen=True, slots=True)
class TableSharding:
    """One table's placement.

    Attributes:
        table: the table's name.
        type: how it is split.
        ranks: holders of its shards, piece after piece:
            table_wise: one rank.
            column_wise: one rank per column piece, from the first columns on; a rank may hold several.
            table_column_wise: likewise, all of one machine.
            row_wise: the ranks among which rows are split, from the first rows on.
            table_row_wise: likewise, all ranks of one machine (in a world of one machine, any of them).
            grid_shard: for each column piece, from the first columns on, all ranks of the machine that holds it,
                in order: with two machines of two GPUs `(0, 1, 2, 3)` are two pieces, `(2, 3)` is one,
                `(0, 1, 0, 1)` are two on the first machine. Each piece is split by rows among its ranks.
            data_parallel: all ranks.
        kernel: its compute kernel; data_parallel tables compute as `dense` does, whatever it says.
        cache_ratio: share of the rows that the cache of `fused_uvm_caching` holds; `None` for other kernels.
    """

    table: str
    type: ShardingType
    ranks: tuple[int, ...]
    kernel: ComputeKernel = ComputeKernel.FUSED
    cache_ratio: float | None = None

    def __post_init__(self) -> None:
        """Refuse a placement without, or with repeated, ranks, and a kernel that cannot be."""
        check_choice("type", self.type, ShardingType)
        check_choice("kernel", self.kernel, ComputeKernel)
        if not self.ranks or min(self.ranks) < 0:
            raise DesignError(f"Table {self.table!r} needs ranks >= 0, but got ranks={self.ranks}.")
        if self.type is ShardingType.TABLE_WISE and len(self.ranks) != 1:
            raise DesignError(
                f"Table {self.table!r} is table_wise and needs exactly one rank, but got ranks={self.ranks}."
            )
        may_repeat = self.type in COLUMN_PIECES or self.type is ShardingType.GRID_SHARD
        if not may_repeat and len(set(self.ranks)) != len(self.ranks):
            raise DesignError(f"Table {self.table!r} names a rank twice: ranks={self.ranks}.")
        self._check_kernel()

    def _check_kernel(self) -> None:
        cached = self.kernel is ComputeKernel.FUSED_UVM_CACHING
        if cached and not (self.cache_ratio is not None and 0 < self.cache_ratio <= 1):
            raise DesignError(
                f"Table {self.table!r}: `0 < cache_ratio <= 1` must hold for fused_uvm_caching, but got "
                f"cache_ratio={self.cache_ratio}."
            )
        if not cached and self.cache_ratio is not None:
            raise DesignError(
                f"Table {self.table!r}: `cache_ratio` is for fused_uvm_caching alone, but the kernel is "
                f"{self.kernel}."
            )
        if self.type is ShardingType.DATA_PARALLEL and self.kernel in ON_HOST:
            raise DesignError(
                f"Table {self.table!r} is data_parallel, which needs its rows in device memory, but the kernel is "
                f"{self.kernel}."
            )


@dataclass(frozen=True, slots=True)
class ShardingPlan:
    """The placement of every table, in the model's table order."""

    tables: tuple[TableSharding, ...]

    @classmethod
    def on_one_rank(cls, model: Model) -> ShardingPlan:
        """Every table whole on rank 0."""
        return cls(tuple(TableSharding(t.name, ShardingType.TABLE_WISE, (0,)) for t in model.tables))


def _nowhere() -> NDArray[np.bool_]:
    return np.zeros((1, 1), dtype=np.bool_)


@dataclass(frozen=True, slots=True, eq=False)
class Shards:
    """Shards as arrays; the last two axes are rank `r` and table `t`, leading axes are candidates.

    Every field broadcasts to `(..., r, t)`; a rank without a shard of a table has `rows == 0`. Pieces of one
    table on one rank are one shard. A table is of one of the kinds `pooled`, `row_split`, `staged`, `replicated`.

    Attributes:
        rows: rows of the table on that rank.
        dim: columns on that rank.
        pooling: mean lookups per sample that reach that rank.
        skew: Zipf exponent of the accesses.
        pooled: the shard's output goes through the forward all-to-all (table_wise, column_wise,
            table_column_wise).
        row_split: the shard's output is a partial sum of all ranks (row_wise; table_row_wise and grid_shard in a
            world of one machine).
        replicated: every rank holds the table and looks up its own samples (data_parallel).
        staged: the shard's output is a partial sum of the ranks of one machine, all of which hold a shard, and
            crosses machines when it is summed (table_row_wise and grid_shard among several machines).
        dense: the gradient has the table's size and a separate optimizer applies it (`dense`).
        host: the rows lie in the host's memory (`fused_uvm`, `fused_uvm_caching`).
        cache_ratio: share of the rows in device memory: 1 but for tables on the host.
    """

    rows: NDArray[np.float64]
    dim: NDArray[np.float64]
    pooling: NDArray[np.float64]
    skew: NDArray[np.float64]
    pooled: NDArray[np.bool_]
    row_split: NDArray[np.bool_]
    replicated: NDArray[np.bool_]
    staged: NDArray[np.bool_] = field(default_factory=_nowhere)
    dense: NDArray[np.bool_] = field(default_factory=_nowhere)
    host: NDArray[np.bool_] = field(default_factory=_nowhere)
    cache_ratio: NDArray[np.float64] = field(default_factory=lambda: np.ones((1, 1)))

    @property
    def present(self) -> NDArray[np.bool_]:
        """`(..., r, t)`: the rank holds a shard of the table."""
        return self.rows > 0


def shards_of(
    plan: ShardingPlan, model: Model, *, world_size: int, local_world_size: int | None = None
) -> Shards:
    """The plan as arrays of shape `(r, t)`, r = `world_size`.

    Args:
        plan: a placement of each table.
        model: whose tables they are.
        world_size: ranks.
        local_world_size: ranks of one machine; all when not given.

    Raises:
        DesignError: the plan and the model disagree, a rank is outside the world, or a table that must stay on a
            machine does not.
    """
    local = local_world_size or world_size
    _check_plan(plan, model, world_size=world_size, local_world_size=local)
    placed, tables = plan.tables, model.tables
    counts = np.array([len(p.ranks) for p in placed])
    # One row for each entry of each table's `ranks`.
    t = np.repeat(np.arange(len(placed)), counts)
    r = np.array([rank for p in placed for rank in p.ranks])
    entry = np.arange(len(t)) - np.repeat(np.cumsum(counts) - counts, counts)
    at = r, t
    shape = (world_size, len(tables))

    row_parts = np.array([_row_parts(p, local) for p in placed])
    whole = np.array([table.num_embeddings for table in tables])
    rows = _piece(whole[t], row_parts[t], entry % row_parts[t])
    grid = np.array([p.type is ShardingType.GRID_SHARD for p in placed])
    pieces = np.array([_column_pieces(p, local) for p in placed])
    piece = np.where(grid[t], entry // local, entry) % pieces[t]
    dim = np.zeros(shape)
    np.add.at(dim, at, _piece(np.array(model.table_dims)[t], pieces[t], piece))

    flag = np.array([_flag(p.type, several=world_size > local) for p in placed])
    kinds = {name: _at(at, flag[t] == name, shape) for name in FLAGS}
    dense = np.array([p.kernel is ComputeKernel.DENSE for p in placed]) & (flag != "replicated")
    on_host = np.array([p.kernel in ON_HOST for p in placed])
    ratio = np.array([p.cache_ratio or 0.0 for p in placed])
    pooling = np.array([table.pooling_factor for table in tables])
    return Shards(
        rows=_at(at, rows, shape),
        dim=dim,
        pooling=_at(at, pooling[t] * rows / whole[t], shape),
        skew=np.broadcast_to(np.array([table.skew for table in tables]), shape),
        dense=_at(at, dense[t], shape),
        host=_at(at, on_host[t], shape),
        cache_ratio=np.broadcast_to(np.where(on_host, ratio, 1.0), shape),
        **kinds,
    )


def _at(
    at: tuple[NDArray[np.int64], NDArray[np.int64]], values: NDArray[T], shape: tuple[int, int]
) -> NDArray[T]:
    """`(r, t)`: the values at those places, nothing elsewhere."""
    out = np.zeros(shape, dtype=values.dtype)
    out[at] = values
    return out


def _flag(kind: ShardingType, *, several: bool) -> str:
    """The one of `FLAGS` that shards of a type have, on several machines or on one."""
    match kind:
        case ShardingType.TABLE_WISE | ShardingType.COLUMN_WISE | ShardingType.TABLE_COLUMN_WISE:
            return "pooled"
        case ShardingType.ROW_WISE:
            return "row_split"
        case ShardingType.TABLE_ROW_WISE | ShardingType.GRID_SHARD:
            return "staged" if several else "row_split"
        case ShardingType.DATA_PARALLEL:
            return "replicated"
        case _:
            assert_never(kind)


def _row_parts(placed: TableSharding, local_world_size: int) -> int:
    match placed.type:
        case ShardingType.ROW_WISE | ShardingType.TABLE_ROW_WISE:
            return len(placed.ranks)
        case ShardingType.GRID_SHARD:
            return local_world_size
    return 1


def _piece(
    total: NDArray[np.int64], parts: NDArray[np.int64], part: NDArray[np.int64]
) -> NDArray[np.float64]:
    """The sizes of those parts of totals that are split as evenly as whole numbers allow, larger parts first."""
    size: NDArray[np.float64] = (total // parts + (part < total % parts)).astype(np.float64)
    return size


def _check_plan(plan: ShardingPlan, model: Model, *, world_size: int, local_world_size: int) -> None:
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
        if placed.type is ShardingType.DATA_PARALLEL and len(placed.ranks) != world_size:
            raise DesignError(
                f"Table {placed.table!r} is data_parallel and needs all {world_size} ranks, but got "
                f"ranks={placed.ranks}."
            )
        _check_machines(placed, several=world_size > local_world_size, local_world_size=local_world_size)
        pieces = _column_pieces(placed, local_world_size)
        if pieces > dim:
            raise DesignError(f"Table {placed.table!r} has {dim} columns and cannot be split into {pieces}.")


def _column_pieces(placed: TableSharding, local_world_size: int) -> int:
    if placed.type is ShardingType.GRID_SHARD:
        return len(placed.ranks) // local_world_size
    return len(placed.ranks) if placed.type in COLUMN_PIECES else 1


def _check_machines(placed: TableSharding, *, several: bool, local_world_size: int) -> None:
    """Refuse a table that leaves a machine, or lacks ranks of it, where its sharding type does not allow it."""
    ranks, local = placed.ranks, local_world_size
    match placed.type:
        case ShardingType.TABLE_COLUMN_WISE if len({r // local for r in ranks}) > 1:
            rule = "keeps its column pieces on one machine"
        case ShardingType.TABLE_ROW_WISE if several and not _is_machine(ranks, local):
            rule = "splits its rows among all ranks of one machine"
        case ShardingType.GRID_SHARD if len(ranks) % local or not all(
            _is_machine(ranks[i : i + local], local) for i in range(0, len(ranks), local)
        ):
            rule = "names, for each column piece, all ranks of one machine in order"
        case _:
            return
    raise DesignError(
        f"Table {placed.table!r} is {placed.type}, which {rule} ({local} ranks each), but got ranks={ranks}."
    )


def _is_machine(ranks: tuple[int, ...], local_world_size: int) -> bool:
    first = ranks[0]
    return first % local_world_size == 0 and ranks == tuple(range(first, first + local_world_size))
