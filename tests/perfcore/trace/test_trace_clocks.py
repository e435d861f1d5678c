"""Streams beyond the three of a design, and hosts that wait for a stream without a launch."""

import numpy as np

from perfcore.graph.kernels import MeasuredKernel
from perfcore.graph.ops import Launch, Op, Region, Stream, WorkloadGraph
from perfcore.overheads import OpOverheads, OverheadTable
from perfcore.schedule import compile_steps, schedule
from perfcore.timeline import Reason


def table(us: float) -> OverheadTable:
    return OverheadTable({}, OpOverheads(us, us, us, us, us, us), 0.0, 0.0, 0.0, 0.0, 1024)


def spacing(*ops: Op, streams: int, us: list[float], host: float = 1.0) -> float:
    graph = WorkloadGraph((Region("all", ops),), num_streams=streams)
    timeline = schedule(compile_steps(graph, [np.array(d) for d in us], table(host)))
    return float(timeline.iteration_time_us[0])


def launch(stream: Stream | int, *after: Stream | int) -> Launch:
    return Launch(MeasuredKernel("k", 1.0), stream=stream, after=after)


def test_kernels_of_many_streams_overlap_unless_one_waits() -> None:
    free = [Op("a", (launch(s),)) for s in (1, 4, 5, 6)]
    assert spacing(*free, streams=6, us=[100.0] * 4) == 100.0
    chained = [Op("a", (launch(1, 6),)), *[Op("a", (launch(s, s - 1 if s > 4 else 1),)) for s in (4, 5, 6)]]
    assert spacing(*chained, streams=6, us=[100.0] * 4) == 400.0


def test_a_host_that_waits_for_a_stream_without_launching() -> None:
    ops = [Op("a", (launch(5),)), Op("wait", blocks_on=(5,))]
    # The host's work before the launch returns (T1, T2) does not overlap with the kernel, nor what follows it.
    assert spacing(*ops, streams=5, us=[100.0]) == 1 + 1 + 100 + 1
    graph = WorkloadGraph((Region("all", tuple(ops)),), num_streams=5)
    timeline = schedule(compile_steps(graph, [np.array(100.0)], table(1.0)))
    assert Reason.BLOCKING in {e.reason for e in timeline.critical_path().edges}


def test_ranks_with_many_streams_keep_their_clocks_apart() -> None:
    ops = (Op("a", (launch(4),)), Op("a", (launch(1, 4),)))
    graph = WorkloadGraph((Region("all", ops),), num_ranks=3, num_streams=4)
    durations = [np.array([10.0, 200.0, 30.0]), np.array([1.0, 2.0, 3.0])]
    timeline = schedule(compile_steps(graph, durations, table(1.0)))
    assert timeline.start_state_us.shape == (1, 15)
    np.testing.assert_allclose(timeline.end_us[0] - timeline.start_us[0], durations)
    assert timeline.iteration_time_us[0] == 200.0
