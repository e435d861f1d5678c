"""Designs for the graph's tests, and leaves as plain tuples."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from perfcore.design.design import Design
from perfcore.design.hardware import Device, Node, System
from perfcore.design.model import EmbeddingTable, Model
from perfcore.design.sharding import ShardingPlan, ShardingType, TableSharding
from perfcore.design.training import EmbeddingFusion, Fusion, OptimizerFusion, Training
from perfcore.graph.ops import Leaf, WorkloadGraph

EAGER = Fusion(EmbeddingFusion.PER_TABLE, optimizer=OptimizerFusion.FOR_LOOP)
TABLES = (EmbeddingTable("a", 50, 2.0), EmbeddingTable("b", 40, 1.0), EmbeddingTable("c", 60, 3.0))
_DEVICE = Device("d", "d", *[1.0] * 5, 1, *[1.0] * 5)
_NODE = Node("n", "n", "d", 8, *[1.0] * 5)


def small(
    fusion: Fusion = EAGER,
    *,
    world_size: int = 1,
    kinds: tuple[ShardingType, ...] = (ShardingType.TABLE_WISE,),
    **changes: Any,
) -> Design:
    """A small design; `changes` are fields of its model or of its training, `kinds` repeat over its tables."""
    model = Model(13, TABLES, 6, (9, 7), (8, 5), cross_layers=3, cross_rank=2)
    training = Training(8)
    model = replace(model, **{k: v for k, v in changes.items() if hasattr(model, k)})
    training = replace(training, **{k: v for k, v in changes.items() if hasattr(training, k)})
    system = System(_DEVICE, _NODE, world_size)
    return Design(model, training, fusion, plan(model, world_size, kinds), system)


def plan(model: Model, world_size: int, kinds: tuple[ShardingType, ...]) -> ShardingPlan:
    """Tables in turn of each kind, whole ones on the ranks in turn."""
    everyone = tuple(range(world_size))
    placed = []
    for t, table in enumerate(model.tables):
        kind = kinds[t % len(kinds)]
        match kind:
            case ShardingType.TABLE_WISE:
                ranks: tuple[int, ...] = (t % world_size,)
            case ShardingType.COLUMN_WISE:
                ranks = (t % world_size, (t + 1) % world_size)
            case _:
                ranks = everyone
        placed.append(TableSharding(table.name, kind, ranks))
    return ShardingPlan(tuple(placed))


def flat(leaves: Iterable[Leaf]) -> list[tuple[str, tuple[tuple[float, ...], ...]]]:
    """Name and shapes of each leaf as plain numbers (the first design's, on its first rank)."""
    return [(x.name, tuple(tuple(_first(d) for d in shape) for shape in x.shapes)) for x in leaves]


def leaves_of(graph: WorkloadGraph) -> list[tuple[str, tuple[tuple[float, ...], ...]]]:
    """All leaves after the input's copies, which a CPU does not make."""
    return flat(leaf for region in graph.regions[1:] for op in region.ops for leaf in op.leaves)


def op_names(graph: WorkloadGraph) -> list[str]:
    """Names of the top-level ops; an op that goes on in the next region counts once."""
    return [op.name for op in graph.ops() if not op.continues]


def _first(value: Any) -> float:
    return float(np.asarray(value).reshape(-1)[0])
