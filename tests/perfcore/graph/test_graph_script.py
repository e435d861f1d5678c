"""DLRM's own script: its launches are those of a public trace of it, its work that of the same model on PyTorch 2."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from graph_designs import EAGER, TABLES, small
from oracles import scalar_iteration_time

from perfcore.design.design import Design, from_dict, to_dict
from perfcore.design.model import EmbeddingTable, Interaction, Loss
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
from perfcore.graph.kernels import CopyKind, Elementwise, EmbeddingBackward, Gemm, Memcpy
from perfcore.graph.ops import Op, WorkloadGraph
from perfcore.overheads import OpOverheads, OverheadTable
from perfcore.schedule import compile_steps, schedule

BATCHED = replace(EAGER, embedding=EmbeddingFusion.TABLE_BATCHED)
LAYER_BACKWARD = [
    ("AddmmBackward0", 3),
    ("torch::autograd::AccumulateGrad", 1),
    ("TBackward0", 0),
    ("torch::autograd::AccumulateGrad", 1),
]
# Ops with their launches, one iteration of DLRM_default (two bottom and four top layers) in its authors' traces of 2021;
# the reduction for a bias gradient, a top-level op there, is part of `AddmmBackward0` since PyTorch 1.10. What the
# traces hold beside it: ops that record annotations, one `empty` a listed pair, and additions of gradients, which this
# project counts to the node whose gradient they add.
TRACE = [
    *[("aten::to", 1)] * 3,
    *[("aten::linear", 2), ("aten::relu", 1)] * 2,
    *[("aten::to", 0)] * 2,
    ("LookupFunction", 1),
    ("aten::cat", 1),
    ("aten::view", 0),
    ("aten::transpose", 0),
    ("aten::bmm", 1),
    *[("aten::to", 0), ("aten::detach_", 0)] * 2,
    ("aten::slice", 0),
    *[("aten::to", 1)] * 2,
    ("aten::index", 1),
    ("aten::cat", 1),
    *[("aten::linear", 2), ("aten::relu", 1)] * 3,
    ("aten::linear", 2),
    ("aten::sigmoid", 1),
    ("aten::to", 1),
    ("aten::broadcast_tensors", 0),
    ("aten::mse_loss", 2),
    ("aten::item", 1),
    ("Optimizer.zero_grad#SGD.zero_grad", 12),
    ("aten::ones_like", 1),
    ("MseLossBackward0", 2),
    ("SigmoidBackward0", 1),
    *[*LAYER_BACKWARD, ("ReluBackward0", 1)] * 3,
    *LAYER_BACKWARD,
    ("CatBackward0", 0),
    ("IndexBackward0", 11),
    ("SliceBackward0", 2),
    ("BmmBackward0", 2),
    ("TransposeBackward0", 1),
    ("ViewBackward0", 0),
    ("CatBackward0", 1),
    ("LookupFunctionBackward", 1),
    ("torch::autograd::AccumulateGrad", 0),
    ("ReluBackward0", 1),
    *LAYER_BACKWARD,
    ("ReluBackward0", 1),
    ("AddmmBackward0", 2),  # no gradient leaves the first layer
    *LAYER_BACKWARD[1:],
    ("Optimizer.step#SGD.step", 12),
    ("cudaDeviceSynchronize", 0),
]


def script(**changes: Any) -> Design:
    return small(BATCHED, program=Program.DLRM_SCRIPT, **changes)


def dlrm_default() -> Design:
    return script(
        bottom_hidden=(512,),
        top_hidden=(1024, 1024, 1024),
        embedding_dim=64,
        loss=Loss.MSE,
        read_loss=True,
        synchronize=True,
    )


def ops_of(graph: WorkloadGraph) -> list[list[Any]]:
    """Name and launches of each op; one that goes on in the next region counts once."""
    found: list[list[Any]] = []
    for op in graph.ops():
        if op.continues:
            found[-1][1] += len(op.launches)
        else:
            found.append([op.name, len(op.launches)])
    return found


def named(graph: WorkloadGraph, name: str) -> list[Op]:
    return [op for op in graph.ops() if op.name == name]


def total(graph: WorkloadGraph, name: str) -> float:
    """Bytes that the pointwise launches of an op's name write."""
    kernels = [x.kernel for op in named(graph, name) for x in op.launches]
    return sum(float(np.sum(k.bytes_written)) for k in kernels if isinstance(k, Elementwise))


def test_launches_are_those_of_a_trace() -> None:
    assert [tuple(op) for op in ops_of(graph_of(dlrm_default()))] == TRACE


def test_the_products_and_lookups_are_those_of_pytorch_2() -> None:
    ours, theirs = (graph_of(small(BATCHED, program=p)) for p in (Program.DLRM_SCRIPT, Program.PYTORCH))

    def shapes(graph: WorkloadGraph) -> Counter[tuple[float, ...]]:
        gemms = [x.kernel for x in graph.launches() if isinstance(x.kernel, Gemm)]
        return Counter(tuple(float(np.sum(d)) for d in (g.batch, g.m, g.n, g.k)) for g in gemms)

    assert shapes(ours) == shapes(theirs)
    assert not any(x.kernel.epilogue for x in ours.launches() if isinstance(x.kernel, Gemm))


def test_every_parameter_is_filled_added_to_and_updated_once() -> None:
    graph = graph_of(script())
    parameters = [13 * 9 + 9, 9 * 7 + 7, 7 * 6 + 6, (6 + 6) * 8 + 8, 8 * 5 + 5, 5 * 1 + 1]
    for name in (
        "Optimizer.zero_grad#SGD.zero_grad",
        "torch::autograd::AccumulateGrad",
        "Optimizer.step#SGD.step",
    ):
        assert total(graph, name) == 4 * sum(parameters)


@pytest.mark.parametrize("pinned", [True, False])
def test_copies_are_waited_for_and_labels_come_after_the_forward_pass(pinned: bool) -> None:
    graph = graph_of(script(pinned_input=pinned))
    copies = [op for op in named(graph, "aten::to") if op.launches]
    assert all(x.blocks for op in copies for x in op.launches)
    assert [op.phase for op in copies] == ["input"] * 3 + ["forward"] * 2 + ["input"]
    kernels = [op.launches[0].kernel for op in copies if op.phase == "input"]
    assert {k.kind for k in kernels if isinstance(k, Memcpy)} == {
        CopyKind.H2D_PINNED if pinned else CopyKind.H2D_PAGEABLE
    }
    names = [op.name for op in graph.ops()]
    labels = next(n for n, op in enumerate(graph.ops()) if op is copies[-1])
    assert names[labels - 1] == "aten::sigmoid"
    assert names[labels + 1] == "aten::binary_cross_entropy"


def test_the_pairs_cross_the_link_as_two_lists_of_eight_bytes() -> None:
    copies = [
        op.launches[0].kernel
        for op in named(graph_of(script()), "aten::to")
        if op.phase == "forward" and op.launches
    ]
    features = len(TABLES) + 1
    assert [float(np.sum(k.bytes)) for k in copies if isinstance(k, Memcpy)] == [
        8 * features * (features - 1) / 2
    ] * 2


def test_unsorted_rows_are_moved_once_a_lookup() -> None:
    tables = (
        EmbeddingTable("once", 50, 1.0),
        EmbeddingTable("often", 50, 3.0),
        EmbeddingTable("large", 10**6, 3.0),
    )
    [op] = named(graph_of(script(tables=tables)), "LookupFunctionBackward")
    kernel = op.launches[0].kernel
    assert isinstance(kernel, EmbeddingBackward)
    assert np.ravel(kernel.rows).tolist() == [50, 100 * 8 * 3, 10**6]


def test_designs_of_one_structure_share_a_graph() -> None:
    designs = [script(bottom_hidden=w, global_batch=b) for w in ((9, 7), (30,), ()) for b in (8, 4096)]
    graph = DlrmBuilder(dims_of(designs)).graph(structure_of(designs[0]))
    rng = np.random.default_rng(0)
    alone = OpOverheads(3.0, 7.0, 2.0, 4.0, 5.0, 6.0)
    table = OverheadTable({}, alone, 6.0, 1.0, 0.5, 20.0, 1024)
    durations = [rng.uniform(0, 40, (len(designs), 1)) for _ in graph.launches()]
    times = schedule(compile_steps(graph, durations, table)).iteration_time_us
    for n in range(len(designs)):
        expected = scalar_iteration_time(graph, durations, table, n, warm_up=8, period=12)
        assert times[n] == pytest.approx(expected, rel=1e-9)
    absent = [sum(len(op.launches) for op in graph_of(d).ops()) for d in designs]
    assert len(set(absent)) == 3  # one for each depth


def test_regions_are_rewritten_once() -> None:
    designs = [script(), script(read_loss=True)]
    builder = DlrmBuilder(dims_of(designs[:1]))
    first, second = (builder.graph(structure_of(d)).regions for d in designs)
    assert {id(r) for r in first} < {id(r) for r in second}


def test_the_program_is_written_and_read() -> None:
    assert from_dict(to_dict(script())) == script()


NEEDS: list[tuple[Fusion, dict[str, Any], str]] = [
    (BATCHED, {"interaction": Interaction.CAT}, "`interaction: dot`, but got interaction=cat"),
    (BATCHED, {"precision": Precision.BF16}, "`precision: fp32`, but got precision=bf16"),
    (BATCHED, {"optimizer": Optimizer.ADAM}, "`optimizer: sgd`, but got optimizer=adam"),
    (BATCHED, {"table_optimizer": Optimizer.ADAM}, "`table_optimizer: sgd`, but got table_optimizer=adam"),
    (BATCHED, {"table_precision": Precision.BF16}, "`table_precision: fp32`, but got table_precision=bf16"),
    (EAGER, {}, "`embedding: table_batched`, but got embedding=per_table"),
    (replace(BATCHED, mlp=MlpFusion.FUSED), {}, "`mlp: eager`, but got mlp=fused"),
    (
        replace(BATCHED, interaction=InteractionFusion.FUSED),
        {},
        "`interaction: eager`, but got interaction=fused",
    ),
    (
        replace(BATCHED, optimizer=OptimizerFusion.FOREACH),
        {},
        "`optimizer: for_loop`, but got optimizer=foreach",
    ),
    (replace(BATCHED, launches=Launches.CUDA_GRAPH), {}, "`launches: eager`, but got launches=cuda_graph"),
    (BATCHED, {"world_size": 2}, "`world_size: 1`, but got world_size=2"),
]


@pytest.mark.parametrize(
    ("fusion", "changes", "message"), NEEDS, ids=lambda v: v if isinstance(v, str) else ""
)
def test_what_the_script_cannot_do_is_refused(fusion: Fusion, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DesignError, match=f"`program: dlrm_script` needs {message}"):
        small(fusion, program=Program.DLRM_SCRIPT, **changes)


def test_its_tables_are_fused() -> None:
    design = script()
    first, *rest = design.sharding.tables
    with pytest.raises(DesignError, match="`program: dlrm_script` needs `kernel: fused` for every table"):
        replace(design, sharding=ShardingPlan((replace(first, kernel=ComputeKernel.DENSE), *rest)))
