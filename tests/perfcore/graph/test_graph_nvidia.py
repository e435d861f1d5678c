"""NVIDIA's example: bytes of its sparse gradients, what autocast adds, what a CUDA graph holds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from graph_designs import EAGER, TABLES, small
from oracles import scalar_iteration_time

from perfcore.design.design import Design
from perfcore.design.sharding import ComputeKernel, ShardingPlan
from perfcore.design.training import (
    EmbeddingFusion,
    Fusion,
    InteractionFusion,
    Launches,
    MlpFusion,
    Optimizer,
    OptimizerFusion,
    Precision,
    Program,
)
from perfcore.errors import DesignError
from perfcore.graph.dims import dims_of, structure_of
from perfcore.graph.dlrm import DlrmBuilder, graph_of
from perfcore.graph.kernels import (
    Concat,
    Elementwise,
    EmbeddingBackward,
    EmbeddingForward,
    FusedInteraction,
    Gemm,
    Kernel,
)
from perfcore.graph.ops import Op, Stream, WorkloadGraph
from perfcore.overheads import OpOverheads, OverheadTable
from perfcore.schedule import compile_steps, schedule

FUSION = replace(
    EAGER,
    embedding=EmbeddingFusion.TABLE_BATCHED,
    interaction=InteractionFusion.FUSED,
    optimizer=OptimizerFusion.FUSED,
)
ONE_HOT = tuple(replace(t, pooling_factor=1.0) for t in TABLES)
LOOKUPS, DIM = 8 * 3, 6


def example(fusion: Fusion = FUSION, **changes: Any) -> Design:
    return small(fusion, program=Program.NVIDIA_EXAMPLE, **{"tables": ONE_HOT, **changes})


def kernels(graph: WorkloadGraph, op: str) -> list[Kernel]:
    return [x.kernel for o in graph.ops() if o.name == op for x in o.launches]


def moved(kernel: Kernel) -> tuple[float, float]:
    assert isinstance(kernel, Elementwise)
    return float(np.sum(kernel.bytes_read)), float(np.sum(kernel.bytes_written))


@pytest.mark.parametrize(
    ("precision", "size"), [(Precision.FP32, 4), (Precision.TF32, 4), (Precision.BF16, 2)]
)
def test_the_values_of_the_sparse_gradient_are_copied_twice(precision: Precision, size: int) -> None:
    graph = graph_of(example(precision=precision))
    values = LOOKUPS * DIM
    clone, indices, copy = kernels(graph, "LookupFunctionBackward")
    assert moved(clone) == (values * size, values * size)
    assert moved(indices) == (LOOKUPS * 8, LOOKUPS * 8)
    assert moved(copy) == (values * size, values * 4)


def test_sgd_multiplies_the_values_and_adds_the_rows() -> None:
    dense, scaled, added = kernels(graph_of(example()), "Optimizer.step#SGD.step")
    assert moved(scaled) == (LOOKUPS * DIM * 4, LOOKUPS * DIM * 4)
    assert isinstance(added, EmbeddingBackward)
    assert (added.optimizer, added.element_bytes, added.index_bytes) == ("sgd", 4.0, 8.0)
    assert np.ravel(added.rows).tolist() == [t.num_embeddings for t in ONE_HOT]
    assert type(dense).__name__ == "MultiTensor"


def test_tables_stay_fp32_and_features_follow_autocast() -> None:
    graph = graph_of(example(precision=Precision.BF16))
    [gather] = kernels(graph, "LookupFunction")
    assert isinstance(gather, EmbeddingForward)
    assert (gather.element_bytes, gather.index_bytes) == (4.0, 8.0)
    fused = [x.kernel for x in graph.launches() if isinstance(x.kernel, FusedInteraction)]
    assert [k.element_bytes for k in fused] == [2.0, 2.0]
    [joined] = [k for k in kernels(graph, "aten::cat") if isinstance(k, Concat)]
    assert float(np.sum(joined.bytes)) == 8 * 4 * DIM * 2


def test_autocast_unscales_every_gradient_and_waits_for_the_flag() -> None:
    def unscaled(precision: Precision) -> list[Op]:
        return [o for o in graph_of(example(precision=precision)).ops() if "unscale" in o.name]

    dense, sparse = unscaled(Precision.BF16)
    assert dense.launches[0].kernel.bytes_per_element == 8.0  # type: ignore[union-attr]
    assert moved(sparse.launches[0].kernel) == (LOOKUPS * DIM * 4, LOOKUPS * DIM * 4)
    assert unscaled(Precision.TF32) == []
    names = [o.name for o in graph_of(example(precision=Precision.BF16)).ops()]
    assert names.index("aten::item") + 1 == names.index("Optimizer.step#SGD.step")


def test_the_interactions_output_is_padded() -> None:
    def widths(design: Design) -> set[tuple[float, ...]]:
        gemms = [x.kernel for x in graph_of(design).launches() if isinstance(x.kernel, Gemm)]
        return {tuple(float(np.sum(d)) for d in (g.m, g.n, g.k)) for g in gemms}

    plain = small(FUSION, tables=ONE_HOT)
    assert (8.0, 8.0, 12.0) in widths(plain)  # six columns and six pairs
    assert (8.0, 8.0, 16.0) in widths(example())
    assert {w for w in widths(example()) if 12.0 in w} == set()
    assert (8.0, 1.0, 5.0) in widths(example())  # narrow ones stay


def test_batches_are_copied_ahead_and_nothing_waits() -> None:
    [region] = [r for r in graph_of(example()).regions if r.name == "input"]
    streams = [x.stream for op in region.ops for x in op.launches]
    assert streams == [Stream.COPY] * 4 + [Stream.COMPUTE]
    assert not any(x.blocks for op in region.ops for x in op.launches)


def test_a_graph_holds_forward_and_backward_alone() -> None:
    graph = graph_of(example(replace(FUSION, launches=Launches.CUDA_GRAPH), synchronize=True))
    names = [r.name for r in graph.regions]
    assert graph.captured_from == 4
    assert names[:4] == ["optimizer", "table_optimizer", "synchronize", "input"]
    assert {"optimizer", "table_optimizer", "synchronize"}.isdisjoint(names[4:])
    placeholders = graph.regions[3].ops[-3:]
    assert [float(np.sum(op.launches[0].kernel.bytes)) for op in placeholders] == [
        8 * 13 * 4,
        LOOKUPS * 8,
        8 * 4,
    ]  # type: ignore[union-attr]


@pytest.mark.parametrize("launches", Launches)
def test_designs_of_one_structure_share_a_graph(launches: Launches) -> None:
    fusion = replace(FUSION, launches=launches)
    designs = [
        example(fusion, bottom_hidden=w, global_batch=b, precision=Precision.BF16)
        for w in ((9, 7), ())
        for b in (8, 4096)
    ]
    graph = DlrmBuilder(dims_of(designs)).graph(structure_of(designs[0]))
    rng = np.random.default_rng(1)
    table = OverheadTable({}, OpOverheads(3.0, 7.0, 2.0, 4.0, 5.0, 6.0), 6.0, 1.0, 0.5, 20.0, 1024)
    durations = [rng.uniform(0, 40, (len(designs), 1)) for _ in graph.launches()]
    times = schedule(compile_steps(graph, durations, table)).iteration_time_us
    for n in range(len(designs)):
        expected = scalar_iteration_time(graph, durations, table, n, warm_up=8, period=12)
        assert times[n] == pytest.approx(expected, rel=1e-9)


NEEDS: list[tuple[Fusion, dict[str, Any], str]] = [
    (FUSION, {"optimizer": Optimizer.ADAM}, "needs `optimizer: sgd`, but got optimizer=adam"),
    (
        FUSION,
        {"table_precision": Precision.BF16},
        "needs `table_precision: fp32`, but got table_precision=bf16",
    ),
    (FUSION, {"pinned_input": False}, "needs `pinned_input: True`, but got pinned_input=False"),
    (FUSION, {"world_size": 2}, "needs `world_size: 1`, but got world_size=2"),
    (FUSION, {"tables": TABLES}, "needs one lookup a sample, but table 'a' has pooling_factor=2.0"),
    (replace(FUSION, mlp=MlpFusion.FUSED), {}, "needs `mlp: eager`, but got mlp=fused"),
    (
        replace(FUSION, interaction=InteractionFusion.EAGER),
        {},
        "needs `interaction: fused`, but got interaction=eager",
    ),
    (
        replace(FUSION, optimizer=OptimizerFusion.FOREACH),
        {},
        "needs `optimizer: fused`, but got optimizer=foreach",
    ),
]


@pytest.mark.parametrize(
    ("fusion", "changes", "message"), NEEDS, ids=lambda v: v if isinstance(v, str) else ""
)
def test_what_the_example_cannot_do_is_refused(fusion: Fusion, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DesignError, match=f"`program: nvidia_example` {message}"):
        example(fusion, **changes)


def test_its_tables_are_fused() -> None:
    design = example()
    first, *rest = design.sharding.tables
    with pytest.raises(DesignError, match="`program: nvidia_example` needs `kernel: fused` for every table"):
        replace(design, sharding=ShardingPlan((replace(first, kernel=ComputeKernel.DENSE), *rest)))
