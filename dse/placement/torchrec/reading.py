"""TorchRec's plans as placements of a design."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dse.errors import SpaceError
from dse.placement.torchrec.exported import plan_as_json
from perfcore.design.design import Design
from perfcore.design.sharding import ComputeKernel, ShardingPlan, ShardingType, TableSharding

_SHARD_FIELDS = 5  # first row, first column, rows, columns, rank
_LOAD_FACTOR = 0.2  # what FBGEMM's caches have when a plan names none
_NEAR = 4  # TorchRec's kernels need pieces of whole fours of columns, so equal pieces may differ by four


def plan_of_torchrec(plan: Any, design: Design) -> ShardingPlan:
    """The placement that a `torchrec.distributed.types.ShardingPlan` is.

    Raises:
        SpaceError: as `plan_of_json`.
        DesignError: as `plan_of_json`.
    """
    return plan_of_json(plan_as_json(plan), design)


def read_plan(path: Path, design: Design) -> ShardingPlan:
    """The placement in a file: JSON as `python plan.py` prints it, or as `plan_as_json` of an exported plan gives it.

    Raises:
        SpaceError: the file cannot be read, or is no plan for the design's tables.
        DesignError: as `plan_of_json`.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as err:
        raise SpaceError(f"{path.name} is no plan in JSON: {err}.") from None
    return plan_of_json(data, design)


def plan_of_json(data: Any, design: Design) -> ShardingPlan:
    """The placement in plain values: `tables`, by name, each with `type`, `kernel`, `ranks` and `shards`.

    A shard is `[first row, first column, rows, columns, rank]`. `shards` may be missing or null; `ranks` then has a
    rank for each.

    Raises:
        SpaceError: tables are missing or unknown, a type or kernel is unknown, column pieces are no multiples of one width.
        DesignError: the design cannot hold such a placement, e.g. a rank outside its world.
    """
    tables = data.get("tables") if isinstance(data, Mapping) else None
    if not isinstance(tables, Mapping):
        raise SpaceError("A TorchRec plan needs the key `tables`, a mapping by name, but it is missing.")
    known = [table.name for table in design.model.tables]
    strange = sorted(set(known) ^ set(tables))
    if strange:
        raise SpaceError(
            f"A plan must place the design's tables, but {strange[0]!r} is only in "
            f"{'the design' if strange[0] in known else 'the plan'}."
        )
    return ShardingPlan(tuple(_placed(name, tables[name], design) for name in known))


def _placed(name: str, entry: Any, design: Design) -> TableSharding:
    if not isinstance(entry, Mapping) or not {"type", "kernel"} <= entry.keys():
        raise SpaceError(f"A table of a plan needs `type` and `kernel`, but one is missing for {name!r}.")
    kind = _member(ShardingType, entry["type"], name)
    shards = _shards(name, entry.get("shards"))
    ranks = _ranks(name, kind, entry.get("ranks"), shards, design)
    if kind is ShardingType.DATA_PARALLEL:
        return TableSharding(name, kind, ranks)
    kernel = _member(ComputeKernel, entry["kernel"], name)
    cached = kernel is ComputeKernel.FUSED_UVM_CACHING
    given = entry.get("cache_load_factor")
    return TableSharding(
        name, kind, ranks, kernel, (_LOAD_FACTOR if given is None else given) if cached else None
    )


def _shards(name: str, data: Any) -> list[list[int]]:
    shards = data or []
    if not isinstance(shards, Sequence) or any(
        not isinstance(s, Sequence) or len(s) != _SHARD_FIELDS or any(type(v) is not int for v in s)
        for s in shards
    ):
        raise SpaceError(
            f"A shard is a list of {_SHARD_FIELDS} integers, but those of table {name!r} are not."
        )
    return [list(s) for s in shards]


def _ranks(
    name: str, kind: ShardingType, given: Any, shards: list[list[int]], design: Design
) -> tuple[int, ...]:
    world = design.system.world_size
    if kind is ShardingType.DATA_PARALLEL:
        return tuple(range(world))
    if shards:
        return _ranks_of_shards(name, kind, shards, design.system.local_world_size)
    ranks = range(world) if kind is ShardingType.ROW_WISE else given
    if not isinstance(ranks, Sequence) or any(type(r) is not int for r in ranks):
        raise SpaceError(f"A plan needs the ranks of table {name!r}, but has neither `ranks` nor `shards`.")
    return tuple(ranks)


def _ranks_of_shards(name: str, kind: ShardingType, shards: list[list[int]], local: int) -> tuple[int, ...]:
    """The shards' ranks; one that holds a multiple of the narrowest piece is named as often."""
    ranks = [s[-1] for s in shards]
    if kind not in (ShardingType.COLUMN_WISE, ShardingType.TABLE_COLUMN_WISE, ShardingType.GRID_SHARD):
        return tuple(ranks)
    each = local if kind is ShardingType.GRID_SHARD else 1
    shares = _shares(name, [s[3] for s in shards[::each]])
    return tuple(r for i, share in enumerate(shares) for r in ranks[i * each : (i + 1) * each] * share)


def _shares(name: str, widths: list[int]) -> list[int]:
    """How many equal parts each piece of columns is; placements split columns evenly."""
    if max(widths) - min(widths) <= _NEAR:
        return [1] * len(widths)
    shares = [round(width / min(widths)) for width in widths] if min(widths) > 0 else []
    if not shares or any(abs(w - s * min(widths)) > _NEAR * s for w, s in zip(widths, shares, strict=True)):
        raise SpaceError(
            f"Column pieces of one table must be multiples of the narrowest within {_NEAR} columns, but those of "
            f"{name!r} have {widths}."
        )
    return shares


def _member(kind: Any, value: Any, name: str) -> Any:
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(m.value for m in kind)
        raise SpaceError(f"Table {name!r} needs one of {known}, but has {value!r}.") from None
