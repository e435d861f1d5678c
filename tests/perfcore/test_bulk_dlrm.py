"""Bulk prices of the DLRM builder's grids equal the walk of each design's own graph."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from perfcore.bulk import BulkPredictor
from perfcore.design.design import Design
from perfcore.design.hardware import System, device, node
from perfcore.design.model import EmbeddingTable, Model
from perfcore.design.sharding import ShardingPlan, ShardingType, TableSharding
from perfcore.design.training import (
    Communication,
    EmbeddingFusion,
    Fusion,
    Launches,
    MlpFusion,
    OptimizerFusion,
    Training,
)
from perfcore.graph.dims import Dims, dims_of, structure_of
from perfcore.memory import memory_of, memory_terms
from perfcore.predictor import Predictor
from perfcore.profile.profile import profile_for

BATCHES, BOTTOM, TOP = (512, 4096), (0, 64, 256), (128, 512)
TABLES = tuple(EmbeddingTable(f"t{k}", 1000 * 10**k, pooling_factor=1 + 3 * k) for k in range(4))
FUSIONS = (
    Fusion(),
    Fusion(embedding=EmbeddingFusion.PER_TABLE, optimizer=OptimizerFusion.FOR_LOOP, mlp=MlpFusion.FUSED),
    Fusion(launches=Launches.CUDA_GRAPH, communication=Communication.OVERLAPPED),
    Fusion(optimizer=OptimizerFusion.FUSED, communication=Communication.SERIAL),
)


def design(world_size, batch, bottom, top, fusion=FUSIONS[0]):
    hidden = (bottom, 128) if bottom else (128,)
    model = Model(13, TABLES, 32, hidden, (256, top))
    plan = ShardingPlan(
        tuple(TableSharding(t.name, ShardingType.TABLE_WISE, (k % world_size,)) for k, t in enumerate(TABLES))
    )
    system = System(device("a100-sxm4-80gb"), node("dgx-a100-80gb"), world_size)
    return Design(model, Training(batch), fusion, plan, system)


def grid(world_size):
    """The product of all choices as a grid, from the dims of its corners."""
    one = dims_of([design(world_size, 512, 64, 128)])

    def along(values, position):
        return np.array(values, dtype=float).reshape([1] * position + [-1] + [1] * (3 - position))

    def lifted(array):
        return np.reshape(array, (1, 1, *np.shape(array)))

    return Dims(
        global_batch=along(BATCHES, 0),
        world_size=lifted(one.world_size),
        local_world_size=lifted(one.local_world_size),
        num_dense_features=13,
        embedding_dim=lifted(one.embedding_dim),
        bottom_hidden=(along(BOTTOM, 1), lifted(one.bottom_hidden[1])),
        top_hidden=(lifted(one.top_hidden[0]), along(TOP, 2)),
        cross_rank=lifted(one.cross_rank),
        shards=type(one.shards)(
            **{f: lifted(getattr(one.shards, f)) for f in type(one.shards).__dataclass_fields__}
        ),
    )


@pytest.mark.parametrize("max_entries", [1, 4096])
@pytest.mark.parametrize("world_size", [1, 4])
def test_every_design_of_a_grid(world_size, max_entries):
    profile = profile_for(device("a100-sxm4-80gb"), node("dgx-a100-80gb"))
    predictor = Predictor(profile)
    first = design(world_size, 512, 64, 128)
    bulk = BulkPredictor(
        grid(world_size),
        [structure_of(replace(first, fusion=f)) for f in FUSIONS],
        cost=predictor.cost,
        overheads=profile.overheads,
        memory=memory_terms,
        max_entries=max_entries,
    )
    choices = list(itertools.product(range(len(FUSIONS)), range(2), range(3), range(2)))[
        :: 1 if max_entries > 1 else 5
    ]
    codes = np.array(choices)
    got = bulk.evaluate(codes[:, 0], codes[:, 1:])
    for k, (f, b, h, t) in enumerate(choices):
        one = design(world_size, BATCHES[b], BOTTOM[h], TOP[t], FUSIONS[f])
        # A multi-tensor optimizer counts the tensors of absent layers on a grid: a part in a thousand.
        assert got.iteration_time_us[k] == pytest.approx(predictor.iteration_time_us(one), rel=1e-3)
        assert got.hbm_bytes[k] == pytest.approx(memory_of(one).total.max(), rel=1e-9)


@pytest.mark.parametrize("max_entries", [1, 4096])
def test_ranks_of_other_pace_and_memory(max_entries):
    profile = profile_for(device("a100-sxm4-80gb"), node("dgx-a100-80gb"))
    predictor, first = Predictor(profile), design(4, 512, 64, 128)
    system = replace(
        first.system, slowness=(1.0, 1.7, 0.6, 1.7), hbm_bytes=(None, 12e9, None, 1.7e9)
    )  # the largest table lies on the smallest GPU
    bulk = BulkPredictor(
        grid(4),
        [structure_of(replace(first, fusion=f)) for f in FUSIONS],
        cost=predictor.cost,
        overheads=profile.overheads,
        memory=memory_terms,
        max_entries=max_entries,
        slowness=np.array(system.slowness).reshape(1, 1, 1, 4),
        hbm_bytes=np.array(system.rank_hbm_bytes).reshape(1, 1, 1, 4),
    )
    codes = np.array(list(itertools.product(range(len(FUSIONS)), range(2), range(3), range(2)))[::3])
    got = bulk.evaluate(codes[:, 0], codes[:, 1:])
    for k, (f, b, h, t) in enumerate(codes):
        one = replace(design(4, BATCHES[b], BOTTOM[h], TOP[t], FUSIONS[f]), system=system)
        memory = memory_of(one)
        rank, left = memory.fullest(system)
        assert got.iteration_time_us[k] == pytest.approx(predictor.iteration_time_us(one), rel=1e-3)
        assert (rank, got.hbm_bytes[k]) == (3, pytest.approx(memory.total[3], rel=1e-9))
        assert got.left_bytes[k] == pytest.approx(left, rel=1e-6)
