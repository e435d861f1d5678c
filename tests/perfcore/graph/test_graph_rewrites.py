"""Every fusion choice is a rewrite: the same work and the same results in fewer launches."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from graph_designs import EAGER, TABLES, small

from perfcore.design.design import Design
from perfcore.design.model import Interaction
from perfcore.design.sharding import ShardingType
from perfcore.design.training import (
    Communication,
    EmbeddingFusion,
    IndexType,
    InteractionFusion,
    Launches,
    MlpFusion,
    Optimizer,
    OptimizerFusion,
    Precision,
)
from perfcore.graph.dims import dims_of, structure_of
from perfcore.graph.dlrm import DlrmBuilder, graph_of
from perfcore.graph.kernels import (
    EmbeddingBackward,
    EmbeddingForward,
    FusedInteraction,
    Gemm,
    Kernel,
    Memcpy,
    MultiTensor,
    resolve,
)
from perfcore.graph.ops import Op, Stream, WorkloadGraph

REWRITES: list[dict[str, Any]] = [
    {"embedding": EmbeddingFusion.TABLE_BATCHED},
    {"mlp": MlpFusion.FUSED},
    {"interaction": InteractionFusion.FUSED},
    {"optimizer": OptimizerFusion.FOREACH},
    {"optimizer": OptimizerFusion.FUSED},
]
KINDS = (ShardingType.TABLE_WISE, ShardingType.ROW_WISE, ShardingType.DATA_PARALLEL)
MANY_TABLES = tuple(replace(TABLES[0], name=f"t{i}") for i in range(26))


def kernels(graph: WorkloadGraph) -> list[Kernel]:
    return [resolve(launch.kernel) for launch in graph.launches()]


def number(value: Any) -> float:
    return float(np.asarray(value).sum())


def gemm_flops(kernel: Kernel) -> float:
    """A fused interaction does the products of `bmm`: one in the forward pass, two in the backward."""
    if isinstance(kernel, Gemm):
        return 2 * number(kernel.batch) * number(kernel.m) * number(kernel.n) * number(kernel.k)
    if isinstance(kernel, FusedInteraction):
        products = 2 if kernel.backward else 1
        return 2 * products * number(kernel.batch) * number(kernel.features) ** 2 * number(kernel.dim)
    return 0.0


def rows_looked_up(graph: WorkloadGraph) -> dict[str, float]:
    """Lookups times columns, by kernel kind."""
    total = {"EmbeddingForward": 0.0, "EmbeddingBackward": 0.0}
    for kernel in kernels(graph):
        if isinstance(kernel, (EmbeddingForward, EmbeddingBackward)):
            rows = np.asarray(kernel.batch) * kernel.pooling * kernel.dim
            total[type(kernel).__name__] += number(rows)
    return total


def input_bytes(graph: WorkloadGraph) -> float:
    return sum(number(k.bytes) for k in kernels(graph) if isinstance(k, Memcpy))


def final_output(graph: WorkloadGraph, module: str) -> list[tuple[float, ...]]:
    """Sizes of a module's last forward product, which is what the rest of the model reads."""
    ops = [op for op in graph.ops() if op.phase == "forward" and op.module == module]
    gemms = [x.kernel for op in ops for x in op.launches if isinstance(x.kernel, Gemm)]
    return [(number(k.m), number(k.n)) for k in gemms[-1:]]


@pytest.mark.parametrize("interaction", Interaction)
@pytest.mark.parametrize("precision", Precision)
@pytest.mark.parametrize("rewrite", REWRITES, ids=str)
def test_a_rewrite_does_the_same_work_in_fewer_launches(
    rewrite: dict[str, Any], precision: Precision, interaction: Interaction
) -> None:
    eager = small(tables=MANY_TABLES, precision=precision, interaction=interaction, optimizer=Optimizer.ADAM)
    before, after = graph_of(eager), graph_of(replace(eager, fusion=replace(EAGER, **rewrite)))
    flops = [sum(map(gemm_flops, kernels(g))) for g in (before, after)]
    assert flops[0] > 0
    np.testing.assert_allclose(flops[0], flops[1], rtol=1e-12)
    np.testing.assert_allclose(
        list(rows_looked_up(before).values()), list(rows_looked_up(after).values()), rtol=1e-12
    )
    np.testing.assert_allclose(input_bytes(before), input_bytes(after), rtol=1e-12)
    for module in ("bottom_mlp", "top_mlp"):
        assert final_output(before, module) == final_output(after, module)
    if "interaction" in rewrite and interaction is not Interaction.DOT:
        assert len(kernels(after)) == len(kernels(before))  # nothing to fuse: concatenation is one kernel
    else:
        assert len(kernels(after)) < len(kernels(before))


@pytest.mark.parametrize("optimizer", [Optimizer.SGD, Optimizer.ADAGRAD, Optimizer.ADAM])
def test_multi_tensor_optimizers_update_every_parameter_once(optimizer: Optimizer) -> None:
    design = small(replace(EAGER, optimizer=OptimizerFusion.FUSED), optimizer=optimizer)
    updates = [k for k in kernels(graph_of(design)) if isinstance(k, MultiTensor)]
    widths = [(13, 9), (9, 7), (7, 6), (6 + 4 * 3 // 2, 8), (8, 5), (5, 1)]
    assert [number(k.elements) for k in updates] == [sum(n * (k + 1) for k, n in widths)]
    assert [number(k.tensors) for k in updates] == [2 * len(widths)]


def test_fewer_bytes_move_in_a_fused_optimizer_than_in_foreach() -> None:
    moved = {}
    for fusion in (OptimizerFusion.FOREACH, OptimizerFusion.FUSED):
        design = small(replace(EAGER, optimizer=fusion), optimizer=Optimizer.ADAM)
        updates = [k for k in kernels(graph_of(design)) if isinstance(k, MultiTensor)]
        moved[fusion] = sum(number(k.elements) * k.bytes_per_element for k in updates)
    assert moved[OptimizerFusion.FUSED] < moved[OptimizerFusion.FOREACH]


@pytest.mark.parametrize("world_size", [1, 8])
def test_a_cuda_graph_captures_all_but_the_input(world_size: int) -> None:
    batched = replace(EAGER, embedding=EmbeddingFusion.TABLE_BATCHED)
    design = small(replace(batched, launches=Launches.CUDA_GRAPH), world_size=world_size)
    graph = graph_of(design)
    assert graph.captured_from == 1
    assert graph.regions[0].name == "input"
    assert all(op.phase == "input" for op in graph.regions[0].ops)
    assert not any(op.phase == "input" for region in graph.regions[1:] for op in region.ops)
    eager = graph_of(replace(design, fusion=batched))
    assert eager.captured_from is None
    assert [op.name for op in eager.ops()] == [op.name for op in graph.ops()]


@pytest.mark.parametrize("embedding", EmbeddingFusion)
@pytest.mark.parametrize("kinds", [KINDS[:1], KINDS[1:2], KINDS[2:], KINDS], ids=str)
def test_communication_modes_launch_the_same_and_wait_elsewhere(
    embedding: EmbeddingFusion, kinds: tuple[ShardingType, ...]
) -> None:
    graphs = {
        mode: graph_of(
            small(replace(EAGER, embedding=embedding, communication=mode), world_size=4, kinds=kinds)
        )
        for mode in Communication
    }
    names = [sorted(op.name for op in g.ops()) for g in graphs.values()]
    assert names[0] == names[1]
    serial = list(graphs[Communication.SERIAL].ops())
    for position, op in enumerate(serial):
        if any(x.stream is Stream.COMMUNICATION for x in op.launches):
            assert awaited_before_next_work(serial[position + 1 :]), op.name
    assert waits(graphs[Communication.OVERLAPPED]) < waits(graphs[Communication.SERIAL])


def awaited_before_next_work(ops: list[Op]) -> bool:
    """The compute stream waits before it gets new work; a further collective may be called meanwhile."""
    for op in ops:
        if (Stream.COMPUTE, Stream.COMMUNICATION) in op.waits:
            return True
        if any(x.stream is Stream.COMPUTE for x in op.launches):
            return False
    return False


def waits(graph: WorkloadGraph) -> int:
    return sum(len(op.waits) for op in graph.ops())


def test_pinned_copies_do_not_block() -> None:
    for pinned, kind in ((True, "h2d_pinned"), (False, "h2d_pageable")):
        region = graph_of(small(pinned_input=pinned)).regions[0]
        launches = [x for op in region.ops for x in op.launches]
        assert [x.kernel.kind.value for x in launches if isinstance(x.kernel, Memcpy)] == [kind] * 8
        assert [x.blocks for x in launches] == [not pinned] * 8


def structures() -> list[Design]:
    fusions = [
        replace(EAGER, embedding=e, mlp=m, optimizer=o)
        for e, m, o in product(EmbeddingFusion, MlpFusion, OptimizerFusion)
    ]
    return [small(fusion, interaction=i) for fusion in fusions for i in Interaction]


def test_structures_share_region_objects() -> None:
    designs = structures()
    builder = DlrmBuilder(dims_of(designs[:1]))
    graphs = [builder.graph(structure_of(d)) for d in designs]
    regions = [region for graph in graphs for region in graph.regions]
    assert len({id(r) for r in regions}) < len(regions) / 8
    by_fusion = {structure_of(d).fusion: g for d, g in zip(designs, graphs, strict=True) if g is not None}
    first, *_, last = by_fusion.values()
    assert first.regions[0] is not last.regions[0]  # one copy a table, or one for all
    loss = [next(r for r in g.regions if r.name == "loss") for g in graphs]
    assert len({id(r) for r in loss}) == 1
    bottom = [next(r for r in g.regions if r.name == "bottom_mlp/0") for g in graphs]
    assert len({id(r) for r in bottom}) == 2  # eager and fused


def test_a_shared_region_equals_a_fresh_one() -> None:
    designs = structures()
    builder = DlrmBuilder(dims_of(designs[:1]))
    for design in designs:
        shared, fresh = builder.graph(structure_of(design)), graph_of(design)
        assert [(r.name, [o.name for o in r.ops]) for r in shared.regions] == [
            (r.name, [o.name for o in r.ops]) for r in fresh.regions
        ]
        assert len(kernels(shared)) == len(kernels(fresh))


def test_the_loss_is_read_before_the_backward_pass_or_after_the_graph() -> None:
    eager = [op.name for op in graph_of(small(read_loss=True)).ops()]
    assert eager.index("aten::item") == eager.index("aten::binary_cross_entropy") + 1
    captured = graph_of(
        small(
            replace(EAGER, embedding=EmbeddingFusion.TABLE_BATCHED, launches=Launches.CUDA_GRAPH),
            read_loss=True,
        )
    )
    assert captured.captured_from == 2
    assert [r.name for r in captured.regions[:2]] == ["read_loss", "input"]
    assert captured.regions[0].ops[0].launches[0].blocks


def test_the_host_waits_at_the_end_of_the_iteration_or_after_the_graph() -> None:
    eager = graph_of(small(synchronize=True))
    assert eager.regions[-1].ops[0].blocks_on == (Stream.COMPUTE,)
    captured = graph_of(
        small(
            replace(EAGER, embedding=EmbeddingFusion.TABLE_BATCHED, launches=Launches.CUDA_GRAPH),
            synchronize=True,
        )
    )
    assert captured.captured_from == 2
    assert [r.name for r in captured.regions[:2]] == ["synchronize", "input"]


def test_indices_of_half_the_width_halve_their_copies() -> None:
    def copied(dtype: IndexType) -> float:
        graph = graph_of(small(replace(EAGER, embedding=EmbeddingFusion.TABLE_BATCHED), index_dtype=dtype))
        sizes = [float(np.max(k.bytes)) for k in kernels(graph) if isinstance(k, Memcpy)]
        return sum(sizes[1:3])  # after the dense input: indices, offsets

    assert copied(IndexType.INT32) == copied(IndexType.INT64) / 2
