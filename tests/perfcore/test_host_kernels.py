"""A host that runs its kernels itself: an iteration is the sum of its parts, also in bulk."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from perfcore.errors import ProfileError
from perfcore.graph.kernels import Memset
from perfcore.graph.ops import Launch, Op, Region, WorkloadGraph
from perfcore.overheads import OpOverheads, OverheadTable, overheads_from_json, to_json
from perfcore.schedule import compile_steps, schedule

HOST = OverheadTable(
    by_op={"a": OpOverheads(1.0, 2.0, 0.5, 0.0, 4.0, 3.0)},
    default=OpOverheads(1.0, 1.0, 1.0, 0.0, 1.0, 1.0),
    launch_latency_us=0.0,
    kernel_gap_us=0.0,
    graph_gap_us=0.0,
    graph_launch_us=0.0,
    queue_depth=1,
    provenance={"constants": dict.fromkeys(
        ("launch_latency_us", "kernel_gap_us", "graph_gap_us", "graph_launch_us", "queue_depth"), "a test"
    )},
    kernels_block_host=True,
)  # fmt: skip


def graph(*ops: Op, captured_from: int | None = None) -> WorkloadGraph:
    return WorkloadGraph(
        tuple(Region(str(i), (op,)) for i, op in enumerate(ops)), captured_from=captured_from
    )


def spacing(g: WorkloadGraph, *durations: float) -> float:
    steps = compile_steps(g, [np.array([[d]]) for d in durations], HOST)
    return float(schedule(steps).iteration_time_us[0])


def test_an_iteration_is_the_sum_of_its_parts() -> None:
    kernel = Launch(Memset(4.0))
    g = graph(Op("a", (kernel, kernel)), Op("a"))
    # T1, T2, a kernel, T5, a kernel, T3; then T1 and the time alone.
    assert spacing(g, 10.0, 20.0) == pytest.approx(1 + 2 + 10 + 4 + 20 + 0.5 + 1 + 3)


def test_launches_of_cuda_alone_are_left_out() -> None:
    kernel, own = Launch(Memset(4.0)), Launch(Memset(4.0), cuda_only=True)
    assert spacing(graph(Op("a", (own, kernel, own))), 99.0, 20.0, 99.0) == pytest.approx(1 + 2 + 20 + 0.5)
    assert spacing(graph(Op("a", (own,))), 99.0) == pytest.approx(1 + 3)


def test_there_are_no_cuda_graphs() -> None:
    kernel = Launch(Memset(4.0))
    eager, captured = graph(Op("a", (kernel,))), graph(Op("a", (kernel,)), captured_from=0)
    assert spacing(captured, 10.0) == pytest.approx(spacing(eager, 10.0))


def test_the_flag_is_kept_and_checked() -> None:
    assert overheads_from_json(to_json(HOST)) == HOST
    assert not overheads_from_json(
        {k: v for k, v in to_json(HOST).items() if k != "kernels_block_host"}
    ).kernels_block_host
    with pytest.raises(ProfileError, match="kernels_block_host must be true or false"):
        overheads_from_json(to_json(HOST) | {"kernels_block_host": 1})
    assert replace(HOST, kernels_block_host=False) != HOST
