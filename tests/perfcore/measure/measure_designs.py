"""Small designs that a test machine trains in milliseconds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from perfcore.design.design import Design
from perfcore.design.hardware import Device, Node, System
from perfcore.design.model import EmbeddingTable, Model
from perfcore.design.sharding import ShardingPlan
from perfcore.design.training import EmbeddingFusion, Fusion, OptimizerFusion, Training

TABLES = (EmbeddingTable("a", 50, 2.0), EmbeddingTable("b", 7, 0.5, 1.2), EmbeddingTable("c", 200, 1.0, 0.8))
EAGER = Fusion(EmbeddingFusion.PER_TABLE, optimizer=OptimizerFusion.FOR_LOOP)
_DEVICE = Device("d", "d", *[1.0] * 5, 1, *[1.0] * 5)
_NODE = Node("n", "n", "d", 8, *[1.0] * 5)


def small(fusion: Fusion = EAGER, *, batch: int = 16, world_size: int = 1, **changes: Any) -> Design:
    """A design of three tables; `changes` are fields of its model or of its training."""
    model = Model(4, TABLES, 8, (16,), (12, 6), cross_layers=2, cross_rank=3)
    training = Training(batch)
    model = replace(model, **{k: v for k, v in changes.items() if hasattr(model, k)})
    training = replace(training, **{k: v for k, v in changes.items() if hasattr(training, k)})
    system = System(_DEVICE, _NODE, world_size)
    return Design(model, training, fusion, ShardingPlan.on_one_rank(model), system)
