"""The part of an exported plan that is the same for all: it reads the data above it, in a file of its own.

In an exported file the three constants below hold a plan. `ranks` of a table are those of its shards, in order: one
for table_wise; one a column piece for column_wise and table_column_wise; those of the machines, piece after piece, for
table_row_wise and grid_shard; all of them where it is None (row_wise, data_parallel).
"""

# ruff: noqa: T201 - an exported plan prints itself
from __future__ import annotations

from typing import Any

WORLD_SIZE = 1
LOCAL_WORLD_SIZE = 1
TABLES: dict[str, dict[str, Any]] = {}

# --- from here on the same in every plan ---


def shards_of(name: str) -> list[tuple[int, int, int, int, int]]:
    """First row, first column, rows, columns and rank of each shard, as TorchRec cuts a table of that type."""
    table = TABLES[name]
    ranks = table["ranks"] or list(range(WORLD_SIZE))
    if table["type"] == "data_parallel":
        return [(0, 0, table["rows"], table["columns"], rank) for rank in ranks]
    pieces = len(ranks) // len(table["widths"])
    # TorchRec gives all ranks but the last ones the same number of rows, rounded up.
    height = -(-table["rows"] // pieces)
    shards, first_column = [], 0
    for i, width in enumerate(table["widths"]):
        for j, rank in enumerate(ranks[i * pieces : (i + 1) * pieces]):
            first = min(j * height, table["rows"])
            shards.append((first, first_column, min(height, table["rows"] - first), width, rank))
        first_column += width
    return shards


def sharding_plan(model: Any, compute_device: str = "cuda", names: dict[str, str] | None = None) -> Any:
    """The `ShardingPlan` of a model that holds these tables in `EmbeddingBagCollection`s.

    `names` are the model's names of the plan's tables, where they differ: `{"table_0": "t_cat_0"}`.

    Raises:
        ValueError: the model's tables are not those of the plan, or the plan needs a GPU.
    """
    from torchrec.distributed.types import EmbeddingModuleShardingPlan, ShardingPlan
    from torchrec.modules.embedding_modules import EmbeddingBagCollection

    modules = {p: m for p, m in model.named_modules() if isinstance(m, EmbeddingBagCollection)}
    found = {c.name: c for m in modules.values() for c in m.embedding_bag_configs()}
    planned = {(names or {}).get(name, name): name for name in TABLES}
    if found.keys() != planned.keys():
        raise ValueError(f"plan and model differ in the tables {sorted(found.keys() ^ planned.keys())}")
    for name, config in found.items():
        size = (TABLES[planned[name]]["rows"], TABLES[planned[name]]["columns"])
        if (config.num_embeddings, config.embedding_dim) != size:
            raise ValueError(f"the plan is for {size} rows and columns of table {name}")
    plans: Any = {
        path: EmbeddingModuleShardingPlan(
            (c.name, parameter_sharding(planned[c.name], compute_device))
            for c in module.embedding_bag_configs()
        )
        for path, module in modules.items()
    }
    return ShardingPlan(plans)


def parameter_sharding(name: str, compute_device: str = "cuda") -> Any:
    """The `ParameterSharding` of one table."""
    from torchrec.distributed.sharding_plan import placement
    from torchrec.distributed.types import (
        CacheParams,
        EnumerableShardingSpec,
        ParameterSharding,
        ShardMetadata,
    )

    table, shards = TABLES[name], shards_of(name)
    if compute_device == "cpu" and "uvm" in table["kernel"]:
        raise ValueError(f"the kernel {table['kernel']} of table {name} needs a GPU")
    metadata = [
        ShardMetadata(
            shard_offsets=[row, column],
            shard_sizes=[rows, columns],
            placement=placement(compute_device, rank, LOCAL_WORLD_SIZE),
        )
        for row, column, rows, columns, rank in shards
    ]
    cache = table["cache_load_factor"]
    return ParameterSharding(
        sharding_type=table["type"],
        compute_kernel=table["kernel"],
        ranks=[rank for *_, rank in shards],
        sharding_spec=None if table["type"] == "data_parallel" else EnumerableShardingSpec(metadata),
        cache_params=None if cache is None else CacheParams(load_factor=cache),
    )


def plan_as_json(plan: Any) -> dict[str, Any]:
    """A TorchRec `ShardingPlan` as plain values, which `dse plan --import` reads."""
    tables = {name: p for module in plan.plan.values() for name, p in module.items()}
    return {
        "tables": {
            name: {
                "type": p.sharding_type,
                "kernel": p.compute_kernel,
                "cache_load_factor": p.cache_params.load_factor if p.cache_params else None,
                "ranks": list(p.ranks) if p.ranks else None,
                "shards": [
                    [*s.shard_offsets, *s.shard_sizes, s.placement.rank()] for s in p.sharding_spec.shards
                ]
                if p.sharding_spec
                else None,
            }
            for name, p in tables.items()
        }
    }


def as_json() -> dict[str, Any]:
    """This plan, as `plan_as_json` gives it; needs no TorchRec."""
    tables = {}
    for name, table in TABLES.items():
        shards = shards_of(name)
        tables[name] = {
            "type": table["type"],
            "kernel": table["kernel"],
            "cache_load_factor": table["cache_load_factor"],
            "ranks": [rank for *_, rank in shards],
            "shards": None if table["type"] == "data_parallel" else [list(shard) for shard in shards],
        }
    return {"tables": tables}


if __name__ == "__main__":
    import json

    print(json.dumps(as_json()))
