"""Several processes train what one would: every kind of placement, after two steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sharded_worker import BATCHED, CASES, MIXED, WHOLE, D, G, R, T, design, plan

from perfcore.design.sharding import ComputeKernel, ShardingPlan, shards_of
from perfcore.design.training import Precision
from perfcore.graph.kernels import Bucket
from perfcore.measure.isolate import Settings, measure_isolated, ranks_to_run
from perfcore.measure.layout import can_run, layout_of, pieces
from perfcore.measure.op_classes import OpClass
from perfcore.measure.record import NamedDesign, Status
from perfcore.measure.reduce import reduce_design, table_bytes
from perfcore.measure.reducer import BUCKET_CAP_BYTES, FIRST_BUCKET_BYTES, bucketed

WORKER = Path(__file__).parent / "sharded_worker.py"
PATIENCE_S = 240
QUICK = Settings(min_iterations=3, max_seconds=0.2, time_limit_s=PATIENCE_S, threads=1, max_ranks=2)


@pytest.fixture(scope="module")
def differences(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, float]]]:
    """By rank: how far each design's sharded model is from the whole one."""
    store = tmp_path_factory.mktemp("ranks") / "store"
    path = os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")])
    ranks = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), str(store)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": path},
        )
        for rank in range(2)
    ]
    try:
        ended = [rank.communicate(timeout=PATIENCE_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0], ended
    return [json.loads(out) for out, _ in ended]


@pytest.mark.parametrize("case", CASES)
def test_ranks_train_what_one_process_trains(
    case: str, differences: list[dict[str, dict[str, float]]]
) -> None:
    tolerance = 1e-4 if CASES[case].training.table_precision is Precision.BF16 else 1e-6
    for found in differences:
        assert found[case]["loss"] < tolerance
        assert found[case]["weights"] < tolerance
        assert found[case]["moved"] > 1e-3  # what is compared has been trained


@pytest.mark.parametrize("case", ["column_wise", "table_row_wise", "data_parallel", "grid", "mixed"])
def test_shards_are_those_that_are_predicted(case: str) -> None:
    sharded = CASES[case]
    shards, layout = shards_of(sharded.sharding, sharded.model, world_size=2), layout_of(sharded)
    for shard in (*layout.pooled, *layout.row_split):
        assert shard.height == shards.rows[shard.rank, shard.table]
        assert shard.width == shards.dim[shard.rank, shard.table]
    held = {(s.rank, s.table) for s in (*layout.pooled, *layout.row_split)}
    held |= {(r, t) for r in range(2) for t in layout.replicated}
    assert held == set(zip(*map(list, shards.present.nonzero()), strict=True))


@given(total=st.integers(0, 1000), parts=st.integers(1, 20))
@settings(max_examples=50, deadline=None)
def test_pieces_cover_all(total: int, parts: int) -> None:
    found = pieces(total, parts)
    assert [n for begin, end in found for n in range(begin, end)] == list(range(total))
    assert max(e - b for b, e in found) - min(e - b for b, e in found) <= 1


@given(sizes=st.lists(st.integers(1, 4_000_000), min_size=1, max_size=12))
@settings(max_examples=30, deadline=None)
def test_buckets_close_where_the_prediction_closes_them(sizes: list[int]) -> None:
    import numpy as np
    import torch

    parameters = [torch.nn.Parameter(torch.empty(n, device="meta")) for n in sizes]
    terms = tuple(np.full((1, 1), 4.0 * n) for n in sizes)
    closed = [
        float(Bucket(terms, i, FIRST_BUCKET_BYTES, BUCKET_CAP_BYTES).value()[0, 0]) for i in range(len(sizes))
    ]
    assert [4.0 * sum(p.numel() for p in g) for g in bucketed(parameters)] == [b for b in closed if b]


def test_two_processes_are_measured_and_named(tmp_path: Path) -> None:
    traces = str(tmp_path / "traces")
    sample = measure_isolated(NamedDesign("two", design(MIXED)), replace(QUICK, traces=traces))
    assert sample.status is Status.OK, sample.detail
    found = sample.iteration
    assert found is not None
    assert (found.ranks, found.clock, len(found.iterations_us) >= 3) == (2, "wall", True)
    assert sample.design.system.world_size == 2
    assert "2 processes that share this machine's cores" in sample.notes
    assert set(found.op_us) == {c.value for c in OpClass}
    assert sum(found.op_us.values()) == pytest.approx(found.median_us)
    assert found.added_memory_bytes <= found.peak_memory_bytes
    names = {p.name for p in (tmp_path / "traces").iterdir()}
    assert names == {f"two-rank{r}.{kind}" for r in range(2) for kind in ("kineto.json.gz", "et.json")}


def test_a_rank_that_cannot_train_ends_the_others() -> None:
    """Row-wise Adagrad of the dense part does not exist: every rank refuses; a hang would take minutes."""
    hungry = design(plan((T, (0,)), (T, (1,)), (R, (0, 1)), (D, (0, 1))))
    hungry = replace(
        hungry,
        model=replace(hungry.model, num_dense_features=1_000_000),
        training=replace(hungry.training, global_batch=2**31 - 2),
    )
    sample = measure_isolated(NamedDesign("huge", hungry), QUICK)
    assert sample.status is Status.OUT_OF_MEMORY


@pytest.mark.parametrize(
    ("ranks", "sharded", "expected"),
    [(2, design(WHOLE), 2), (1, design(WHOLE), 1), (2, design(WHOLE, embedding=BATCHED), 2)],
)
def test_how_many_processes(ranks: int, sharded: object, expected: int) -> None:
    assert ranks_to_run(sharded, replace(QUICK, max_ranks=ranks)) == expected  # type: ignore[arg-type]


def test_placements_that_are_not_run_are_reduced_to_one_rank() -> None:
    placed = list(WHOLE.tables)
    placed[0] = replace(placed[0], kernel=ComputeKernel.FUSED_UVM)
    on_host = design(ShardingPlan(tuple(placed)), embedding=BATCHED)
    assert not can_run(on_host)
    assert ranks_to_run(on_host, QUICK) == 1
    grid = design(plan((G, (0, 1)), (T, (1,)), (T, (0,)), (T, (1,))))
    assert ranks_to_run(grid, QUICK) == 2
    apart = replace(grid.system, node=replace(grid.system.node, gpus=1))  # a piece on each of two machines
    assert ranks_to_run(grid.with_system(apart), QUICK) == 1


def test_a_design_on_its_ranks_keeps_its_plan() -> None:
    reduced = reduce_design(design(MIXED), max_batch=4, max_rows=20, ranks=2)
    assert (reduced.design.sharding, reduced.design.training.global_batch) == (MIXED, 8)
    assert reduced.notes == ("batch capped to 4 of 8", "rows capped to 20 in 3 of 4 tables")
    everywhere, once = design(plan(*[(D, (0, 1))] * 4)), design(WHOLE)
    assert table_bytes(everywhere, max_rows=9) == 2 * table_bytes(once, max_rows=9)
