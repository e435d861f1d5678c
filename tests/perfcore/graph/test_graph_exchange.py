"""Hybrid parallelism: what is exchanged, against a count by hand over samples, ranks and tables."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from graph_designs import EAGER, TABLES, small
from hypothesis import given, settings
from hypothesis import strategies as st

from perfcore.design.design import Design
from perfcore.design.sharding import ShardingType, shards_of
from perfcore.design.training import Communication, EmbeddingFusion, Launches, Precision
from perfcore.graph.dlrm import graph_of
from perfcore.graph.kernels import (
    Bucket,
    Collective,
    CollectiveKind,
    EmbeddingBackward,
    EmbeddingForward,
    Kernel,
)
from perfcore.graph.ops import Stream, WorkloadGraph

WORLD = 4
BATCHED = replace(EAGER, embedding=EmbeddingFusion.TABLE_BATCHED)
KINDS = st.lists(st.sampled_from(ShardingType), min_size=3, max_size=3).map(tuple)


def collectives(graph: WorkloadGraph) -> list[tuple[str, float]]:
    """Kind and bytes, the gradients' all-reduces left out."""
    kernels = [x.kernel for x in graph.launches() if isinstance(x.kernel, Collective)]
    return [(k.kind.value, float(np.max(k.bytes))) for k in kernels if not isinstance(k.bytes, Bucket)]  # type: ignore[arg-type]


def traffic(design: Design) -> dict[str, float]:
    """Bytes of each exchange: the busiest rank's, of what it sends and of what it gets in all."""
    shards = shards_of(design.sharding, design.model, world_size=WORLD)
    local = design.local_batch
    sent = {name: np.zeros(WORLD) for name in ("lengths", "indices", "pooled")}
    got = {name: np.zeros(WORLD) for name in sent}
    partial = 0.0
    for t in range(len(design.model.tables)):
        for owner in range(WORLD):
            if not shards.present[owner, t] or shards.replicated[owner, t]:
                continue
            for sender in range(WORLD):
                values = {"lengths": 8.0 * local, "indices": 8.0 * local * shards.pooling[owner, t]}
                for name, size in values.items():
                    sent[name][sender] += size
                    got[name][owner] += size
                if shards.pooled[owner, t]:  # the answer goes the other way
                    sent["pooled"][owner] += 4.0 * local * shards.dim[owner, t]
                    got["pooled"][sender] += 4.0 * local * shards.dim[owner, t]
        if shards.row_split[:, t].any():
            partial += 4.0 * design.training.global_batch * shards.dim[:, t].max()
    busiest = {name: float(max(sent[name].max(), got[name].max())) for name in sent}
    return {**busiest, "partial": partial}


@settings(max_examples=40, deadline=None)
@given(
    kinds=KINDS, batch=st.sampled_from([4, 32]), batched=st.booleans(), mode=st.sampled_from(Communication)
)
def test_exchanges_equal_a_count_by_hand(
    kinds: tuple[ShardingType, ...], batch: int, batched: bool, mode: Communication
) -> None:
    fusion = replace(BATCHED if batched else EAGER, communication=mode)
    design = small(fusion, world_size=WORLD, kinds=kinds, global_batch=batch)
    size = traffic(design)
    ahead = mode.exchanges_ahead
    lengths, indices = ("all_to_all", size["lengths"]), ("all_to_all", size["indices"])
    expected = [lengths] if ahead else [lengths, indices]
    expected += [("all_to_all", size["pooled"]), ("reduce_scatter", size["partial"])]
    expected += [indices] if ahead else []  # of the next batch, after the forward pass
    expected += [("all_gather", size["partial"]), ("all_to_all", size["pooled"])]
    got = collectives(graph_of(design))
    assert [kind for kind, _ in got] == [kind for kind, value in expected if value]
    np.testing.assert_allclose([v for _, v in got], [v for _, v in expected if v])


def lookups(kernel: Kernel) -> float:
    assert isinstance(kernel, (EmbeddingForward, EmbeddingBackward))
    per_bag = np.asarray(kernel.pooling) * kernel.dim * (np.asarray(kernel.rows) > 0)
    return float(np.broadcast_to(np.asarray(kernel.batch) * per_bag, per_bag.shape).sum())


@settings(max_examples=30, deadline=None)
@given(kinds=KINDS, batched=st.booleans())
def test_every_sample_is_looked_up_once_in_every_table(
    kinds: tuple[ShardingType, ...], batched: bool
) -> None:
    design = small(BATCHED if batched else EAGER, world_size=WORLD, kinds=kinds)
    graph = graph_of(design)
    expected = sum(t.pooling_factor * 6 * design.training.global_batch for t in TABLES)
    for kind in (EmbeddingForward, EmbeddingBackward):
        seen: list[tuple[Any, ...]] = []
        total = 0.0
        for launch in graph.launches():
            kernel = launch.kernel
            if isinstance(kernel, kind):
                total += lookups(kernel)
                seen.append((kernel.rows, kernel.batch))
        np.testing.assert_allclose(total, expected, err_msg=f"{kind.__name__} {len(seen)}")


def names(graph: WorkloadGraph) -> list[str]:
    return [op.name for op in graph.ops()]


@pytest.mark.parametrize("fusion", [EAGER, BATCHED], ids=["per_table", "table_batched"])
def test_overlapped_exchanges_run_beside_the_bottom_mlp(fusion: Any) -> None:
    graph = graph_of(small(fusion, world_size=WORLD))
    order = [region.name for region in graph.regions]
    inside = order[order.index("forward_exchange") : order.index("forward_wait")]
    assert [n for n in inside if n.startswith("bottom_mlp/")] == [f"bottom_mlp/{j}" for j in range(3)]
    inside = order[order.index("backward_exchange") : order.index("backward_wait")]
    assert [n for n in inside if n.startswith("bottom_mlp_back")] == [
        f"bottom_mlp_backward/{j}" for j in (2, 1, 0)
    ]
    for region in graph.regions:
        if region.name.startswith(("bottom_mlp", "top_mlp")):
            awaited = {pair for op in region.ops for pair in op.waits}
            assert (Stream.COMPUTE, Stream.COMMUNICATION) not in awaited
    serial = graph_of(small(replace(fusion, communication=Communication.SERIAL), world_size=WORLD))
    order = [region.name for region in serial.regions]
    assert order.index("forward_wait") == order.index("forward_exchange") + 1


def test_the_lookups_backward_does_not_wait_for_all_reduces() -> None:
    ops = list(graph_of(small(world_size=WORLD)).ops())
    called = next(i for i, op in enumerate(ops) if op.name == "All2All_Pooled_WaitBackward")
    held = next(i for i, op in enumerate(ops) if (Stream.COPY, Stream.COMMUNICATION) in op.waits)
    reduced = next(i for i, op in enumerate(ops) if op.name == "c10d::allreduce_" and i > called)
    awaited = next(i for i, op in enumerate(ops) if (Stream.COMPUTE, Stream.COPY) in op.waits)
    assert called < held < reduced < awaited


def test_the_optimizer_waits_for_all_reduces() -> None:
    for fusion in (EAGER, BATCHED):
        ops = [
            op
            for op in graph_of(small(fusion, world_size=WORLD)).ops()
            if op.phase == "optimizer" and op.launches
        ]
        assert ops[0].waits == ((Stream.COMPUTE, Stream.COMMUNICATION),)


def test_bf16_tables_halve_what_per_table_exchanges() -> None:
    size = {}
    for precision in (Precision.FP32, Precision.BF16):
        got = collectives(graph_of(small(world_size=WORLD, table_precision=precision)))
        size[precision] = [v for _, v in got]
    assert size[Precision.BF16][:2] == size[Precision.FP32][:2]
    assert size[Precision.BF16][2:] == [v / 2 for v in size[Precision.FP32][2:]]


def test_one_rank_communicates_nothing() -> None:
    graph = graph_of(small())
    assert not [x for x in graph.launches() if isinstance(x.kernel, Collective)]
    assert not [op for op in graph.ops() if op.waits]
    assert CollectiveKind.ALL_REDUCE.value not in " ".join(names(graph))


def test_the_next_batch_is_exchanged_beside_this_one() -> None:
    pipelined = replace(EAGER, communication=Communication.PIPELINED)
    graph = graph_of(small(pipelined, world_size=WORLD))
    order = [region.name for region in graph.regions]
    assert order[:4] == ["input_received", "lengths_ahead", "input", "embedding"]
    assert order[order.index("indices_ahead") - 1] == "loss"
    streams = {region.name: {x.stream for op in region.ops for x in op.launches} for region in graph.regions}
    assert streams["input"] == {Stream.COPY}
    assert streams["input_received"] == {Stream.COMPUTE}
    assert streams["lengths_ahead"] == {Stream.COPY, Stream.COMMUNICATION}
    exchange = [x for x in graph.launches() if x.stream is Stream.COMMUNICATION]
    assert [x.after for x in exchange if Stream.COMPUTE not in x.after] == [(Stream.COPY,), ()]
    captured = graph_of(
        small(replace(pipelined, embedding=BATCHED.embedding, launches=Launches.CUDA_GRAPH), world_size=WORLD)
    )
    assert [r.name for r in captured.regions[:3]] == ["input", "input_received", "lengths_ahead"]
    assert captured.captured_from == 1
    assert Stream.COPY not in {x.stream for r in captured.regions[1:] for op in r.ops for x in op.launches}
    assert graph_of(small(pipelined)).regions[0].ops[0].launches[0].stream is Stream.COMPUTE  # one rank
