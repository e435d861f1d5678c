"""Launches per op against a real trace of a TorchRec DLRM on V100s (one step of one rank of eight)."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from graph_designs import EAGER, small

from perfcore.design.design import Design
from perfcore.design.sharding import ShardingType
from perfcore.design.training import EmbeddingFusion, Optimizer
from perfcore.graph.dlrm import graph_of

TRACE = Path(__file__).parents[2] / "data" / "dlrm_8xv100" / "rank7.pt.trace.json.gz"

# What the traced job does otherwise, so that its launches differ from the graph's.
OTHERWISE = {
    "aten::index": "its indices lie in host memory and are copied to the device each time",
    "IndexBackward0": "the same",
    "CatBackward0": "its gradients meet in `UnsqueezeBackward0`, as its dense feature is unsqueezed",
    "All2All_Pooled_WaitBackward": "it copies each rank's part before it concatenates them",
    "torch::autograd::CppNode<SplitLookupFunction_adagrad_Op>": "a rank with long runs of one row zeroes a buffer",
}


@pytest.fixture(scope="module")
def traced() -> dict[str, set[int]]:
    """Launches by op name: every count that occurs."""
    events = json.loads(gzip.decompress(TRACE.read_bytes()))["traceEvents"]
    spans = [e for e in events if e.get("ph") == "X"]
    ran = {e["args"].get("correlation") for e in spans if e["cat"] in {"kernel", "gpu_memcpy", "gpu_memset"}}
    calls = [e for e in spans if e["cat"] == "cuda_runtime" and e["args"].get("correlation") in ran]
    counts: dict[str, set[int]] = defaultdict(set)
    for op in top_level([e for e in spans if e["cat"] == "cpu_op"]):
        end = op["ts"] + op["dur"]
        inside = [c for c in calls if c["tid"] == op["tid"] and op["ts"] <= c["ts"] <= end]
        counts[op["name"].removeprefix("autograd::engine::evaluate_function: ")].add(len(inside))
    return counts


def top_level(ops: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found, end = [], defaultdict(lambda: -1.0)
    for op in sorted(ops, key=lambda e: (e["ts"], -e["dur"])):
        if op["ts"] >= end[op["tid"]]:
            end[op["tid"]] = op["ts"] + op["dur"]
            found.append(op)
    return found


def built(design: Design) -> dict[str, set[int]]:
    counts: dict[str, set[int]] = defaultdict(set)
    for op in graph_of(design).ops():
        counts[op.name].add(len(op.launches))
    return counts


def test_launches_per_op_equal_a_real_traces(traced: dict[str, set[int]]) -> None:
    fusion = replace(EAGER, embedding=EmbeddingFusion.TABLE_BATCHED)
    kinds = (ShardingType.TABLE_WISE, ShardingType.DATA_PARALLEL)
    ours = built(small(fusion, world_size=8, kinds=kinds, table_optimizer=Optimizer.ADAGRAD))
    common = set(ours) & set(traced)
    assert len(common) >= 25
    for name in common - set(OTHERWISE):
        assert ours[name] <= traced[name], name
    for name in OTHERWISE:  # each exception is one
        assert name in common
        assert not ours[name] <= traced[name]


def test_a_real_trace_has_the_graphs_rare_ops_too(traced: dict[str, set[int]]) -> None:
    """FBGEMM's fused backward differs by one launch at most, the exchange's by the copies of eight ranks."""
    name = "torch::autograd::CppNode<SplitLookupFunction_adagrad_Op>"
    fusion = replace(EAGER, embedding=EmbeddingFusion.TABLE_BATCHED)
    ours = built(small(fusion, world_size=8, table_optimizer=Optimizer.ADAGRAD))
    assert max(traced[name]) - max(ours[name]) == 1
