"""A for-loop optimizer's step is one op on the host, though its launches lie in a region a layer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from graph_designs import EAGER, small

from perfcore.design.model import Interaction
from perfcore.design.training import Optimizer, OptimizerFusion
from perfcore.graph.dlrm import graph_of
from perfcore.graph.ops import Op, WorkloadGraph
from perfcore.overheads import OpOverheads, OverheadTable
from perfcore.steps import HostKind, Opcode, compile_steps

COSTS = OpOverheads(t1_us=1.0, t2_us=10.0, t3_us=100.0, t4_us=1000.0, t5_us=10_000.0, alone_us=1e6)
OVERHEADS = OverheadTable({}, COSTS, 0.0, 0.0, 0.0, 0.0, 1024)


def host_us(graph: WorkloadGraph) -> float:
    launches = list(graph.launches())
    table = compile_steps(graph, [np.ones((1, 1))] * len(launches), OVERHEADS).table
    spent = table[(table["opcode"] == Opcode.HOST) & (table["kind"] != HostKind.NONE)]
    return float(spent["us"].sum())


@pytest.mark.parametrize("optimizer", [Optimizer.SGD, Optimizer.ADAM])
@pytest.mark.parametrize("interaction", Interaction)
def test_the_host_pays_for_one_op(optimizer: Optimizer, interaction: Interaction) -> None:
    design = small(EAGER, optimizer=optimizer, interaction=interaction)
    graph = graph_of(design)
    shares = [op for op in graph.ops() if op.module == "optimizer" and op.launches]
    assert [op.continues for op in shares] == [False] + [True] * (len(shares) - 1)
    launches = tuple(x for op in shares for x in op.launches)
    whole = Op(shares[0].name, launches)
    regions = tuple(r for r in graph.regions if r.ops[0] in shares)
    parts = replace(graph, regions=regions)
    joined = replace(graph, regions=(replace(regions[0], ops=(whole,)),))
    assert host_us(parts) == pytest.approx(host_us(joined))
    layers = 6 + (6 if interaction is Interaction.DCN_V2 else 0)
    biases = layers - (3 if interaction is Interaction.DCN_V2 else 0)
    assert len(launches) == (layers + biases) * (1 if optimizer is Optimizer.SGD else 7)


def test_multi_tensor_steps_are_one_op() -> None:
    for fusion in (OptimizerFusion.FOREACH, OptimizerFusion.FUSED):
        graph = graph_of(small(replace(EAGER, optimizer=fusion)))
        steps = [op for op in graph.ops() if op.module == "optimizer" and op.launches]
        assert [op.continues for op in steps] == [False]


def test_no_launch_object_occurs_twice_in_an_op() -> None:
    for world_size in (1, 4):
        for op in graph_of(small(world_size=world_size)).ops():
            assert len({id(x) for x in op.launches}) == len(op.launches), op.name
