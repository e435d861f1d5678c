"""One rank of the comparison of `test_measure_sharded`: trains designs sharded and whole, prints how far they differ."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from perfcore.design.design import Design
from perfcore.design.hardware import Device, Node, System
from perfcore.design.model import EmbeddingTable, Interaction, Model
from perfcore.design.sharding import ShardingPlan, ShardingType, TableSharding
from perfcore.design.training import (
    Communication,
    EmbeddingFusion,
    Fusion,
    IndexType,
    Optimizer,
    Precision,
    Training,
)
from perfcore.measure.batch import Batch
from perfcore.measure.model import Dlrm, build_model, make_batch, make_optimizers, train_step
from perfcore.measure.sharded import ShardedDlrm, build_sharded, sharded_optimizers
from perfcore.measure.world import joined

STEPS = 2
T, C, R, TR, G, D = (
    ShardingType(kind)
    for kind in ("table_wise", "column_wise", "row_wise", "table_row_wise", "grid_shard", "data_parallel")
)
TABLES = (
    EmbeddingTable("a", 50, 2.0),
    EmbeddingTable("b", 7, 0.5, 1.2),
    EmbeddingTable("c", 201, 3.0, 0.8),
    EmbeddingTable("d", 30),
)
_DEVICE = Device("d", "d", *[1.0] * 5, 1, *[1.0] * 5)
_NODE = Node("n", "n", "d", 8, *[1.0] * 5)


def plan(*placed: tuple[ShardingType, tuple[int, ...]]) -> ShardingPlan:
    return ShardingPlan(
        tuple(TableSharding(t.name, kind, ranks) for t, (kind, ranks) in zip(TABLES, placed, strict=True))
    )


def design(
    sharding: ShardingPlan,
    *,
    embedding: EmbeddingFusion = EmbeddingFusion.PER_TABLE,
    communication: Communication = Communication.OVERLAPPED,
    interaction: Interaction = Interaction.DOT,
    **training: Any,
) -> Design:
    model = Model(4, TABLES, 8, (16,), (12, 6), interaction, cross_layers=2, cross_rank=3)
    fusion = Fusion(embedding, communication=communication)
    return Design(model, Training(16, **training), fusion, sharding, System(_DEVICE, _NODE, 2))


WHOLE = plan((T, (0,)), (T, (1,)), (T, (0,)), (T, (1,)))
MIXED = plan((C, (1, 0, 1)), (D, (0, 1)), (R, (0, 1)), (T, (1,)))
BATCHED = EmbeddingFusion.TABLE_BATCHED
CASES: dict[str, Design] = {
    "table_wise": design(WHOLE),
    "table_wise_on_one_rank": design(plan(*[(T, (1,))] * 4)),
    "column_wise": design(plan(*[(C, (0, 1))] * 4)),
    "row_wise": design(plan(*[(R, (0, 1))] * 4)),
    "table_row_wise": design(plan((TR, (1,)), (TR, (0, 1)), (TR, (1, 0)), (TR, (0,)))),
    "data_parallel": design(plan(*[(D, (0, 1))] * 4)),
    "grid": design(plan(*[(G, (0, 1, 0, 1)), (T, (1,))] * 2), embedding=BATCHED),
    "mixed": design(MIXED),
    "mixed_batched": design(MIXED, embedding=BATCHED),
    "mixed_serial": design(MIXED, communication=Communication.SERIAL, interaction=Interaction.DCN_V2),
    "batched_cat": design(WHOLE, embedding=BATCHED, interaction=Interaction.CAT),
    "int32": design(MIXED, index_dtype=IndexType.INT32),
    "adagrad": design(MIXED, optimizer=Optimizer.ADAGRAD, table_optimizer=Optimizer.ADAGRAD),
    "rowwise_adagrad": design(
        plan((T, (0,)), (D, (0, 1)), (R, (0, 1)), (T, (1,))), table_optimizer=Optimizer.ROWWISE_ADAGRAD
    ),
    "adam": design(WHOLE, optimizer=Optimizer.ADAM, table_optimizer=Optimizer.ADAM),
    "bf16_tables": design(MIXED, table_precision=Precision.BF16),
}


def whole(sharded: Design) -> Design:
    """The design on one rank, a bag a table."""
    return replace(
        sharded,
        sharding=ShardingPlan.on_one_rank(sharded.model),
        system=replace(sharded.system, world_size=1),
        fusion=replace(sharded.fusion, embedding=EmbeddingFusion.PER_TABLE),
    )


def shards(model: ShardedDlrm) -> list[tuple[int, slice, list[int], torch.Tensor]]:
    """Table, rows, columns and weights of everything that a rank holds."""
    out = []
    for module in (model.pooled, model.row_split, model.replicated):
        if module is None:
            continue
        for bag, group in zip(module.bags, module._groups, strict=True):
            at = 0
            for shard in (module.shards[i] for i in group):
                columns = [c for begin, end in shard.columns for c in range(begin, end)]
                out.append((shard.table, slice(*shard.rows), columns, bag.weight[at : at + shard.height]))
                at += shard.height
    return out


def take_weights(sharded: ShardedDlrm, single: Dlrm) -> None:
    with torch.no_grad():
        for name in ("bottom", "interaction", "top"):
            getattr(sharded, name).load_state_dict(getattr(single, name).state_dict())
        for table, rows, columns, weight in shards(sharded):
            weight.copy_(single.bags[table].weight[rows][:, columns])


def largest_difference(sharded: ShardedDlrm, single: Dlrm) -> float:
    pairs = [
        (a, b)
        for name in ("bottom", "interaction", "top")
        for a, b in zip(getattr(sharded, name).parameters(), getattr(single, name).parameters(), strict=True)
    ]
    pairs += [(w, single.bags[t].weight[rows][:, cols]) for t, rows, cols, w in shards(sharded)]
    return max(float((a.float() - b.float()).detach().abs().max()) for a, b in pairs if a.numel())


def global_batch(batches: list[Batch], tables: int) -> Batch:
    """The ranks' batches one after the other, table by table."""
    lengths = [b.offsets[0].view(tables, -1) for b in batches]
    parts = [torch.split(b.indices[0], n.sum(1).tolist()) for b, n in zip(batches, lengths, strict=True)]
    joined_lengths = [torch.cat([n[t] for n in lengths]) for t in range(tables)]
    return Batch(
        torch.cat([b.dense for b in batches]),
        tuple(torch.cat([p[t] for p in parts]) for t in range(tables)),
        tuple(torch.cumsum(n, 0, dtype=n.dtype) - n for n in joined_lengths),
        torch.cat([b.labels for b in batches]),
    )


def compared(sharded: Design, world: Any) -> dict[str, float]:
    alone = whole(sharded)
    single, model = build_model(alone), build_sharded(sharded, world, seed=7)
    take_weights(model, single)
    before = [p.detach().clone() for p in single.parameters()]
    optimizers, whole_optimizers = sharded_optimizers(model, sharded), make_optimizers(single, alone)
    losses = []
    for step in range(STEPS):
        batches = [make_batch(sharded, rng=np.random.default_rng(10 * step + r)) for r in range(world.size)]
        mine = float(train_step(model, optimizers, batches[world.rank]))
        mean = sum(world.all_gather(torch.tensor([mine])).wait().tolist()) / world.size
        losses.append(
            abs(mean - float(train_step(single, whole_optimizers, global_batch(batches, len(TABLES)))))
        )
    moved = max(float((p - b).detach().abs().max()) for p, b in zip(single.parameters(), before, strict=True))
    return {"loss": max(losses), "weights": largest_difference(model, single), "moved": moved}


def main(rank: str, store: str) -> None:
    torch.set_num_threads(1)
    with joined(rank=int(rank), size=2, device="cpu", store=Path(store), patience_s=60) as world:
        found = {name: compared(case, world) for name, case in CASES.items()}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
