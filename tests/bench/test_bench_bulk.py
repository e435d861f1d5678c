"""Rate of bulk prediction on uniform samples of the terabyte space's grid; `make bench` prints it."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest

from perfcore.bulk import BulkPredictor
from perfcore.design.hardware import device, node
from perfcore.design.model import EmbeddingTable, Interaction, Loss, Model
from perfcore.design.sharding import ShardingPlan, ShardingType, TableSharding, shards_of
from perfcore.design.training import (
    Communication,
    EmbeddingFusion,
    Fusion,
    IndexType,
    InteractionFusion,
    Launches,
    MlpFusion,
    Optimizer,
    OptimizerFusion,
    Precision,
)
from perfcore.graph.dims import Dims, Structure
from perfcore.memory import memory_terms
from perfcore.profile.profile import profile_for

BATCHES = 2.0 ** np.arange(11, 18)
WIDTHS = np.array([0.0, 64, 128, 256, 512, 1024])


def axis(values, position, count):
    return np.asarray(values, dtype=float).reshape([1] * position + [-1] + [1] * (count - position))


def grid(world_size, slots):
    """Axes: batch, then one per MLP slot; 26 tables dealt out in turn."""
    count = 1 + slots
    # The last slot of each MLP is always there.
    hidden = [
        axis(WIDTHS[1:] if k in (slots // 2 - 1, slots - 1) else WIDTHS, 1 + k, count) for k in range(slots)
    ]
    tables = tuple(EmbeddingTable(f"t{k}", 3 * 10**5 * (1 + k % 7)) for k in range(26))
    model = Model(13, tables, 64, (64,), (64,))
    plan = ShardingPlan(
        tuple(TableSharding(t.name, ShardingType.TABLE_WISE, (k % world_size,)) for k, t in enumerate(tables))
    )
    shards = shards_of(plan, model, world_size=world_size)
    lead = (1,) * count
    return Dims(
        global_batch=axis(BATCHES, 0, count),
        world_size=axis([world_size], 0, count),
        local_world_size=axis([world_size], 0, count),
        num_dense_features=13,
        embedding_dim=axis([64], 0, count),
        bottom_hidden=tuple(hidden[: slots // 2]),
        top_hidden=tuple(hidden[slots // 2 :]),
        cross_rank=axis([64], 0, count),
        shards=type(shards)(
            **{
                f: np.reshape(getattr(shards, f), (*lead, world_size, 26))
                for f in type(shards).__dataclass_fields__
            }
        ),
    )


def structures(distributed, few):
    choices = itertools.product(
        (Precision.FP32, Precision.BF16),
        EmbeddingFusion,
        MlpFusion,
        InteractionFusion,
        OptimizerFusion,
        Launches,
        Communication,
    )
    return [
        Structure(
            interaction=Interaction.DOT,
            cross_layers=0,
            loss=Loss.BCE,
            precision=precision,
            optimizer=Optimizer.SGD,
            table_optimizer=Optimizer.SGD,
            table_precision=Precision.FP32,
            pinned_input=True,
            read_loss=False,
            synchronize=False,
            index_dtype=IndexType.INT64,
            distributed=distributed,
            fusion=Fusion(*fusion),
        )
        for precision, *fusion in choices
        if fusion[4] is Launches.EAGER or fusion[0] is EmbeddingFusion.TABLE_BATCHED
    ][:: 32 if few else 2]


@pytest.mark.parametrize("world_size", [1, 8])
def test_designs_per_second(benchmark, world_size):
    few = bool(benchmark.disabled)
    dims = grid(world_size, 3 if few else 6)
    chosen = structures(world_size > 1, few)
    profile = profile_for(device("a100-sxm4-80gb"), node("dgx-a100-80gb"))
    cost = profile.cost_model()
    begin = time.perf_counter()
    predictor = BulkPredictor(dims, chosen, cost=cost, overheads=profile.overheads, memory=memory_terms)
    built_s = time.perf_counter() - begin
    rng = np.random.default_rng(0)
    n = 1000 if few else 200_000
    sizes = [len(BATCHES), *[np.size(h) for h in (*dims.bottom_hidden, *dims.top_hidden)]]
    codes = np.stack([rng.integers(s, size=n) for s in sizes], axis=1).astype(np.int16)
    which = rng.integers(len(chosen), size=n)
    result = benchmark(predictor.evaluate, which, codes)
    assert np.all(np.isfinite(result.iteration_time_us))
    assert np.all(result.iteration_time_us > 0)
    assert np.all(result.hbm_bytes > 0)
    if benchmark.stats:
        benchmark.extra_info |= {
            "designs_per_s": n / benchmark.stats.stats.min,
            "structures": len(chosen),
            "table_construction_s": built_s,
            "table_mib": predictor.table_bytes / 2**20,
        }
