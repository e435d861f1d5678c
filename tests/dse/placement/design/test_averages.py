"""Bounds by averages alone: valid for every plan, of many settings at once, and no idle bounds."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from design_cases import DEVICE, NODE, every_plan, predictor, random_design, times_of

from dse.placement.design.averages import bounds_at_batches_us
from dse.placement.design.options import options_of
from dse.placement.design.probing import costs_at_batches, shard_costs
from dse.placement.design.shard_costs import exchanges_of
from perfcore.design.design import Design
from perfcore.design.hardware import System
from perfcore.design.model import EmbeddingTable
from perfcore.design.sharding import ShardingPlan
from perfcore.design.training import EmbeddingFusion, Fusion, Launches, Optimizer, Precision
from perfcore.graph.dims import structure_of

ROUNDING = 1e-9
LARGE = tuple(EmbeddingTable(f"t{i}", 2_000_000, 20.0, 1.05) for i in range(8))


def at_batch(design: Design, batch: int) -> Design:
    return replace(design, training=replace(design.training, global_batch=batch))


def settings_of(
    rng: np.random.Generator, worlds: Sequence[int], dims: Sequence[int], gpus: int
) -> list[Design]:
    """The same tables and network on other ranks and with other columns."""
    first = random_design(rng, ranks=worlds[0], tables=2, gpus=gpus)
    node = replace(NODE, gpus=gpus)
    models = [replace(first.model, embedding_dim=d) for d in dims]
    return [
        replace(first, model=m, sharding=ShardingPlan.on_one_rank(m), system=System(DEVICE, node, w))
        for w in worlds
        for m in models
    ]


def gaps(first: int, count: int, *, worlds: Sequence[int], dims: Sequence[int], gpus: int) -> Iterator[float]:
    """By how much the best of all plans exceeds its bound, in percent; the bounds are of all settings at once."""
    p = predictor(gpus)
    for seed in range(first, first + count):
        rng = np.random.default_rng(seed)
        designs = settings_of(rng, worlds, dims, gpus)
        batches = (max(worlds) * 2 ** rng.integers(5, 16, size=2)).tolist()
        lower_us = bounds_at_batches_us(designs, batches, p)
        for n, g in ((0, 0), (1, len(designs) - 1)):
            design = at_batch(designs[g], batches[n])
            best_us = float(times_of(design, every_plan(options_of(design)), p).min())
            gap = 100.0 * (best_us / lower_us[n, g] - 1.0)
            assert gap >= -100 * ROUNDING, f"seed {seed}, batch {n} of setting {g}"
            yield gap


@pytest.mark.parametrize(
    ("worlds", "dims", "gpus", "count"),
    [((2,), (16, 64), 8, 8), ((2, 4), (16,), 8, 2), ((2,), (4, 16), 1, 5), ((4,), (16,), 2, 1)],
    ids=["2 ranks", "2 and 4 ranks", "2 machines", "2 machines of 2"],
)
def test_the_bounds_are_never_above_the_best_of_all_plans(
    worlds: Sequence[int], dims: Sequence[int], gpus: int, count: int
) -> None:
    found = list(gaps(0, count, worlds=worlds, dims=dims, gpus=gpus))
    assert np.median(found) < 1.0  # and they are no idle bounds
    assert max(found) < 20.0


@pytest.mark.parametrize("embedding", EmbeddingFusion)
def test_costs_of_many_settings_are_those_of_each(embedding: EmbeddingFusion) -> None:
    p = predictor(2)
    designs = settings_of(np.random.default_rng(4), (4, 8), (16, 64), 2)
    designs = [replace(d, fusion=Fusion(embedding=embedding)) for d in designs]
    batches, overheads = np.array([256.0, 65536.0]), p.profile.overheads
    many = costs_at_batches([options_of(d) for d in designs], batches, p.cost, overheads)
    for group, costs in zip(designs, many, strict=True):
        for n, batch in enumerate(batches.astype(int).tolist()):
            alone, found = shard_costs(options_of(at_batch(group, batch)), p.cost, overheads), costs.at(n)
            np.testing.assert_allclose(found.bytes, alone.bytes, rtol=1e-12)
            assert list(found.stays) == list(alone.stays)
            for name, stay in alone.stays.items():
                np.testing.assert_allclose(found.stays[name].host, stay.host, rtol=1e-12)
                np.testing.assert_allclose(found.stays[name].compute, stay.compute, rtol=1e-12)
            for name, ops in alone.ops.items():
                for mine, theirs in zip(found.ops[name], ops, strict=True):
                    assert (mine.name, mine.present.tolist()) == (theirs.name, theirs.present.tolist())
                    for a, b in zip(mine.launches, theirs.launches, strict=True):
                        np.testing.assert_allclose(a.each, b.each, rtol=1e-12)
                        np.testing.assert_allclose(a.everywhere, b.everywhere, rtol=1e-12)
                        np.testing.assert_allclose(a.base, b.base, rtol=1e-12)


def test_shards_cost_the_same_whatever_the_network() -> None:
    """What is priced for one network serves all that exchange and look up embeddings alike."""
    p, seen = predictor(), {}
    for seed in range(60):
        design = random_design(np.random.default_rng(seed), ranks=4, tables=2)
        tables = settings_of(np.random.default_rng(3), (4,), (16,), 8)[0].model.tables
        model = replace(design.model, tables=tables, embedding_dim=16)
        training = replace(design.training, table_optimizer=Optimizer.SGD, table_precision=Precision.FP32)
        training = replace(training, global_batch=8192, synchronize=False)
        design = replace(design, model=model, training=training, sharding=ShardingPlan.on_one_rank(model))
        costs = shard_costs(options_of(design), p.cost, p.profile.overheads)
        said = {
            name: [
                (op.name, [(x.base, x.each.tolist(), x.everywhere.tolist()) for x in op.launches])
                for op in ops
            ]
            for name, ops in costs.ops.items()
        }
        stays = {name: (s.host.tolist(), s.compute.tolist(), s.host_base) for name, s in costs.stays.items()}
        found = said, stays, costs.reduced_bytes.tolist(), costs.bytes.tolist()
        assert seen.setdefault(exchanges_of(structure_of(design)), found) == found
    assert len(seen) < 20


def test_bounds_grow_with_batches_and_columns_where_tables_decide() -> None:
    p = predictor()
    busy = Fusion(embedding=EmbeddingFusion.TABLE_BATCHED, launches=Launches.CUDA_GRAPH)
    designs = []
    for design in settings_of(np.random.default_rng(11), (4,), (16, 64, 128), 8):
        model = replace(design.model, tables=LARGE)
        designs.append(replace(design, fusion=busy, model=model, sharding=ShardingPlan.on_one_rank(model)))
    lower_us = bounds_at_batches_us(designs, [2**k for k in (13, 15, 17)], p)
    assert (np.diff(lower_us, axis=0) > 0).all()
    assert (np.diff(lower_us, axis=1) > 0).all()


def check_many(count: int) -> None:
    """More of them: python tests/dse/placement/design/test_averages.py COUNT."""
    for worlds, dims, gpus in (((2,), (16, 64), 8), ((2, 4), (16,), 8), ((2,), (4, 16), 1)):
        many = np.array(list(gaps(1000, count, worlds=worlds, dims=dims, gpus=gpus)))
        said = f"{len(many)} gaps: median {np.median(many):.3g} %, most {many.max():.3g} %"
        print(worlds, dims, gpus, said)  # noqa: T201


if __name__ == "__main__":
    check_many(int(sys.argv[1]))
