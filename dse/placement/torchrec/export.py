"""A placement as a Python file that TorchRec runs."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from dse.errors import SpaceError
from perfcore.design.design import Design
from perfcore.design.sharding import ComputeKernel, ShardingType, TableSharding

_COMMON = "# --- from here on the same in every plan ---\n"
_WIDTH_STEP = 4  # FBGEMM's kernels read rows four values at a time
_ALL_RANKS = (ShardingType.ROW_WISE, ShardingType.DATA_PARALLEL)
_HEAD = '''"""TorchRec sharding plan of {tables} tables on {ranks} ranks. It needs torchrec, and nothing of dlrm-dse.

    from plan import sharding_plan

    model = DistributedModelParallel(
        module=model, device=device, plan=sharding_plan(model), sharders=[EmbeddingBagCollectionSharder()]
    )

The model holds the tables below in `EmbeddingBagCollection`s. `python plan.py` prints the plan as JSON.
`widths` are the columns of each piece; rows are cut as TorchRec cuts them.
"""

# ruff: noqa: T201 - an exported plan prints itself
from __future__ import annotations

from typing import Any

WORLD_SIZE = {ranks}
LOCAL_WORLD_SIZE = {local}
TABLES: dict[str, dict[str, Any]] = {{
{entries}
}}

'''


def export_plan(design: Design) -> str:
    """The source of a file with which `DistributedModelParallel` shards the design's tables as the design does.

    TorchRec cuts rows into equal blocks rounded up, and columns in fours; pieces may differ from the design's by so
    much. Column pieces that share a rank, or of a grid a machine, become one: TorchRec 1.8 cannot train a rank's
    pieces of one table when they differ in width.

    Raises:
        SpaceError: TorchRec has no such sharding: a table whose columns are no multiple of 4, more pieces than fours
            of columns, or rows split among other ranks than all, or all of one machine.
    """
    local = design.system.local_world_size
    tables = zip(design.model.tables, design.model.table_dims, design.sharding.tables, strict=True)
    entries = {
        placed.table: _entry(placed, table.num_embeddings, dim, design.system.world_size, local)
        for table, dim, placed in tables
    }
    head = _HEAD.format(
        tables=len(entries),
        ranks=design.system.world_size,
        local=local,
        entries="\n".join(f"    {name!r}: {entry!r}," for name, entry in entries.items()),
    )
    source = files("dse.placement.torchrec").joinpath("exported.py").read_text(encoding="utf-8")
    return head + _COMMON + source.split(_COMMON, 1)[1]


def _entry(placed: TableSharding, rows: int, columns: int, world: int, local: int) -> dict[str, Any]:
    if columns % _WIDTH_STEP:
        raise SpaceError(
            f"TorchRec's kernels need columns in multiples of {_WIDTH_STEP}, but table {placed.table!r} has {columns}.",
            hint=f"Widen it to {columns + -columns % _WIDTH_STEP} columns.",
        )
    kind, ranks, pieces = _torchrec_ranks(placed, world, local)
    replicated = kind is ShardingType.DATA_PARALLEL
    return {
        "rows": rows,
        "columns": columns,
        "type": kind.value,
        "kernel": ComputeKernel.DENSE.value if replicated else placed.kernel.value,
        "cache_load_factor": placed.cache_ratio,
        "widths": _widths(placed.table, columns, pieces),
        "ranks": None if kind in _ALL_RANKS else list(ranks),
    }


def _torchrec_ranks(
    placed: TableSharding, world: int, local: int
) -> tuple[ShardingType, tuple[int, ...], list[int]]:
    """TorchRec's type, the ranks of its shards, and how many of the design's pieces each column piece is."""
    kind, ranks = placed.type, placed.ranks
    if kind in (ShardingType.COLUMN_WISE, ShardingType.TABLE_COLUMN_WISE):
        pieces = {rank: ranks.count(rank) for rank in ranks}
        return kind, tuple(pieces), list(pieces.values())
    if kind is ShardingType.GRID_SHARD:
        hosts = [rank // local for rank in ranks[::local]]
        pieces = {host: hosts.count(host) for host in hosts}
        return kind, tuple(r for host in pieces for r in _ranks_of_host(host, local)), list(pieces.values())
    if kind in (ShardingType.ROW_WISE, ShardingType.TABLE_ROW_WISE):
        if len(ranks) == world:
            return ShardingType.ROW_WISE, ranks, [1]
        if tuple(sorted(ranks)) != _ranks_of_host(min(ranks) // local, local):
            raise SpaceError(
                f"TorchRec splits rows among all ranks, or all of one machine, but table {placed.table!r} is split "
                f"among ranks={ranks}."
            )
        return ShardingType.TABLE_ROW_WISE, tuple(sorted(ranks)), [1]
    return kind, ranks, [1]


def _ranks_of_host(host: int, local: int) -> tuple[int, ...]:
    return tuple(range(host * local, (host + 1) * local))


def _widths(table: str, columns: int, shares: list[int]) -> list[int]:
    """Columns of each piece: fours of columns dealt out to equal parts, of which a piece may have several."""
    parts, fours = sum(shares), columns // _WIDTH_STEP
    if parts > fours:
        raise SpaceError(
            f"TorchRec's column pieces need {_WIDTH_STEP} columns each, but table {table!r} has {columns} columns "
            f"in {parts} pieces."
        )
    each = [fours // parts + (i < fours % parts) for i in range(parts)]
    widths, at = [], 0
    for share in shares:
        widths.append(_WIDTH_STEP * sum(each[at : at + share]))
        at += share
    return widths
