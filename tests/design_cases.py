"""Small random designs, and every placement of their tables; designs as cost instances."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dse.placement.capacity import tables_capacity_bytes
from dse.placement.design.options import Options
from dse.placement.instances.estimate import estimated_instance
from dse.placement.instances.instance import Instance
from dse.placement.solver.problem import Where
from perfcore.cost.model import CostModel
from perfcore.design import hardware
from perfcore.design.design import Design
from perfcore.design.hardware import System
from perfcore.design.model import EmbeddingTable, Interaction, Model
from perfcore.design.sharding import ShardingPlan, TableSharding
from perfcore.design.training import (
    Communication,
    EmbeddingFusion,
    Fusion,
    InteractionFusion,
    Launches,
    MlpFusion,
    Optimizer,
    OptimizerFusion,
    Precision,
    Training,
)
from perfcore.predictor import Predictor
from perfcore.profile.profile import profile_for

NODE = hardware.node("dgx-a100-80gb")
DEVICE = hardware.device(NODE.device)


def predictor(gpus: int = NODE.gpus) -> Predictor:
    return Predictor(profile_for(DEVICE, replace(NODE, gpus=gpus)))


def random_design(rng: np.random.Generator, *, ranks: int, tables: int, gpus: int = NODE.gpus) -> Design:
    """A model whose embeddings matter, of any fusion, optimizer and number format."""

    def one_of(*values: object) -> object:
        return values[int(rng.integers(len(values)))]

    dim = int(one_of(4, 16, 64, 128))  # type: ignore[call-overload]
    model = Model(
        num_dense_features=13,
        tables=tuple(
            EmbeddingTable(
                f"t{i}",
                int(10 ** rng.uniform(0.5, 6.5)),
                float(one_of(0.0, 1.0, 1.0, 5.0, 40.0)) if rng.random() < 0.9 else 0.3,  # type: ignore[arg-type]
                float(one_of(0.0, 0.0, 1.05)),  # type: ignore[arg-type]
            )
            for i in range(tables)
        ),
        embedding_dim=dim,
        bottom_hidden=(64,) if rng.random() < 0.5 else (512, 256),
        top_hidden=(int(one_of(16, 1024)),),  # type: ignore[call-overload]
        interaction=Interaction(one_of("dot", "cat", "dcn_v2")),
        cross_layers=1,
        cross_rank=32,
    )
    batched = rng.random() < 0.6
    fusion = Fusion(
        embedding=EmbeddingFusion.TABLE_BATCHED if batched else EmbeddingFusion.PER_TABLE,
        mlp=MlpFusion(one_of(*MlpFusion)),
        interaction=InteractionFusion(one_of(*InteractionFusion)),
        optimizer=OptimizerFusion(one_of(*OptimizerFusion)),
        launches=Launches(one_of(*Launches)) if batched else Launches.EAGER,
        communication=Communication(one_of(*Communication)),
    )
    training = Training(
        global_batch=int(ranks * 2 ** rng.integers(5, 16)),
        precision=Precision(one_of("fp32", "bf16")),
        optimizer=Optimizer(one_of("sgd", "adam")),
        table_optimizer=Optimizer(one_of(*Optimizer)),
        table_precision=Precision(one_of("fp32", "bf16")),
        synchronize=bool(rng.random() < 0.2),
    )
    node = replace(NODE, gpus=gpus)
    return Design(model, training, fusion, ShardingPlan.on_one_rank(model), System(DEVICE, node, ranks))


def every_plan(options: Options) -> list[ShardingPlan]:
    """All placements, column pieces in any order being one."""
    design = options.design
    ranks, local = design.system.world_size, design.system.local_world_size
    by_table: list[list[TableSharding]] = [[] for _ in design.model.tables]
    for o in options.options:
        machines = [tuple(range(m, m + local)) for m in range(0, ranks, local)]
        match o.where:
            case Where.ANY:
                placed = list(itertools.combinations_with_replacement(range(ranks), o.count))
            case Where.ALL:
                placed = [tuple(range(ranks))]
            case Where.WITHIN:
                within = (itertools.combinations_with_replacement(m, o.count) for m in machines)
                placed = [p for of_machine in within for p in of_machine]
            case _:
                groups = itertools.combinations_with_replacement(machines, o.pieces)
                placed = [tuple(r for m in g for r in m) for g in groups]
        name = design.model.tables[o.table].name
        by_table[o.table] += [o.placed(name, p) for p in placed]
    return [ShardingPlan(plan) for plan in itertools.product(*by_table)]


def times_of(design: Design, plans: list[ShardingPlan], predictor: Predictor) -> np.ndarray:
    """`(n,)` predicted times of plans, whether they fit or not."""
    designs = [replace(design, sharding=plan) for plan in plans]
    times = [predictor.iteration_times_us(designs[i : i + 256]) for i in range(0, len(designs), 256)]
    return np.concatenate(times)


def instance_of_design(design: Design, cost: CostModel, *, cache_ratios: Sequence[float] = ()) -> Instance:
    """The tables of a design as a cost instance, in the memory that the rest of the job leaves."""
    dims = design.model.table_dims
    tables = [replace(t, embedding_dim=d) for t, d in zip(design.model.tables, dims, strict=True)]
    instance = estimated_instance(
        tables, design.training, design.system, cost, cache_ratios=cache_ratios, fusion=design.fusion
    )
    return replace(instance, capacity_bytes=tables_capacity_bytes(design))
