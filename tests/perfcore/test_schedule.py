"""The traversal against a plain oracle, networkx and properties that any schedule has."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfcore.errors import DesignError, UnsupportedError
from perfcore.graph.kernels import Bucket, Collective, CollectiveKind, Elementwise, Memset
from perfcore.graph.ops import Launch, Op, Region, Stream, WorkloadGraph
from perfcore.maxplus import compose, eigenvalue, fold
from perfcore.overheads import OpOverheads, OverheadTable
from perfcore.schedule import compile_steps, schedule, spacing_with_queue
from perfcore.steps import HostKind
from perfcore.timeline import Reason

sys.path.insert(0, str(Path(__file__).parent.parent))
from oracles import scalar_iteration_time

COMPUTE, COMMUNICATION, COPY = Stream.COMPUTE, Stream.COMMUNICATION, Stream.COPY
KERNEL = Elementwise("add", 1.0, 1.0, 1.0)
ALL_REDUCE = Collective(CollectiveKind.ALL_REDUCE, 1.0, 2.0, 2.0)
OVERHEADS = OverheadTable(
    by_op={"slow": OpOverheads(3, 20, 5, 7, 11, 4)},
    default=OpOverheads(1, 4, 2, 3, 5, 6),
    launch_latency_us=8,
    kernel_gap_us=1,
    graph_gap_us=0.5,
    graph_launch_us=15,
    queue_depth=1024,
)
FREE = OverheadTable({}, OpOverheads(0, 0, 0, 0, 0, 0), 0, 0, 0, 0, 1024)


def one_region(*ops, ranks=1, captured_from=None):
    return WorkloadGraph((Region("all", tuple(ops)),), num_ranks=ranks, captured_from=captured_from)


def us(*values):
    return [np.atleast_2d(np.asarray(v, dtype=float)) for v in values]


def time_us(graph, durations, overheads=OVERHEADS):
    return schedule(compile_steps(graph, durations, overheads)).iteration_time_us


# ---------------------------------------------------------------- random graphs


@st.composite
def programs(draw, *, max_ranks=3, max_candidates=2, blocking=True):
    ranks, n = draw(st.integers(1, max_ranks)), draw(st.integers(1, max_candidates))
    rng = np.random.default_rng(draw(st.integers(0, 2**31)))
    streams = list(Stream)
    captured = draw(st.sampled_from([None, None, 0, 1]))

    def mask(probability):
        if rng.random() < 0.7:
            return True
        return rng.random((rng.choice([1, n]), rng.choice([1, ranks]))) < probability

    def launch(in_graph):
        return Launch(
            ALL_REDUCE if rng.random() < 0.25 else KERNEL,
            stream=streams[rng.integers(3)],
            after=tuple(s for s in streams if rng.random() < 0.2),
            blocks=bool(blocking and not in_graph and rng.random() < 0.1),
            present=mask(0.7),
        )

    def op(in_graph):
        waits = tuple((streams[rng.integers(3)], streams[rng.integers(3)]) for _ in range(rng.integers(0, 2)))
        name = ["slow", "fast"][rng.integers(2)]
        return Op(
            name, tuple(launch(in_graph) for _ in range(rng.integers(0, 4))), waits=waits, present=mask(0.7)
        )

    regions = tuple(
        Region(str(k), tuple(op(captured is not None and k >= captured) for _ in range(rng.integers(1, 5))))
        for k in range(3)
    )
    graph = WorkloadGraph(regions, num_ranks=ranks, captured_from=captured)
    scale = rng.choice([3.0, 30.0])
    durations = [
        np.round(rng.random((rng.choice([1, n]), rng.choice([1, ranks]))) * scale, 3)
        for _ in graph.launches()
    ]
    return graph, durations


@settings(deadline=None, max_examples=25)
@given(programs())
def test_equals_the_plain_oracle(program):
    graph, durations = program
    got = time_us(graph, durations)
    expected = [scalar_iteration_time(graph, durations, OVERHEADS, candidate=i) for i in range(len(got))]
    np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-9)


@settings(deadline=None, max_examples=30)
@given(programs(), st.integers(0, 10**6))
def test_a_faster_kernel_never_lengthens_the_iteration(program, pick):
    graph, durations = program
    if not durations:
        return
    faster = list(durations)
    faster[pick % len(faster)] = faster[pick % len(faster)] * 0.5
    assert np.all(time_us(graph, faster) <= time_us(graph, durations) + 1e-9)


@settings(deadline=None, max_examples=30)
@given(programs())
def test_no_shorter_than_any_stream_or_the_host(program):
    graph, durations = program
    timeline = schedule(compile_steps(graph, durations, OVERHEADS))
    bound = timeline.iteration_time_us[:, None] + 1e-6
    assert np.all(timeline.host_us.sum(axis=-1) <= bound)
    for stream in Stream:
        assert np.all(np.nan_to_num(timeline.stream_busy_us(stream)) <= bound)
    busiest = np.max([timeline.stream_busy_us(s) for s in Stream], axis=0)
    assert np.all(timeline.device_active_us() <= bound)
    assert np.all(timeline.device_active_us() >= busiest - 1e-6)
    assert np.all(timeline.exposed_communication_us() >= -1e-6)


@settings(deadline=None, max_examples=30)
@given(programs(max_candidates=3))
def test_many_at_once_equal_one_by_one(program):
    graph, durations = program
    steps = compile_steps(graph, durations, OVERHEADS)
    at_once = schedule(steps)
    for i in range(steps.num_candidates):
        one = replace(steps, durations_us=steps.durations_us[:, i : i + 1], masks=steps.masks[:, i : i + 1])
        alone = schedule(one)
        np.testing.assert_array_equal(alone.iteration_time_us[0], at_once.iteration_time_us[i])
        np.testing.assert_array_equal(alone.start_us[0], at_once.start_us[i])
        np.testing.assert_array_equal(alone.host_us[0], at_once.host_us[i])


@settings(deadline=None, max_examples=30)
@given(programs(max_candidates=1, blocking=True))
def test_the_critical_cycle_adds_up_to_the_iteration_time(program):
    """Sensitivities are exact while no other cycle takes over: a tiny change moves the time by its share."""
    graph, durations = program
    timeline = schedule(compile_steps(graph, durations, OVERHEADS))
    share = timeline.sensitivity()
    assert np.all(share <= 1 + 1e-9)
    epsilon = 1e-5
    for k in range(len(durations)):
        slower = list(durations)
        slower[k] = durations[k] + epsilon
        if not isinstance(list(graph.launches())[k].kernel, Collective):
            gained = (time_us(graph, slower) - timeline.iteration_time_us)[0]
            assert gained >= share[k].max(initial=0) * epsilon - 1e-9


@settings(deadline=None, max_examples=30)
@given(programs(max_candidates=1))
def test_iterations_repeat_from_the_steady_state(program):
    """One more iteration shifts the critical clock by exactly the iteration time."""
    graph, durations = program
    steps = compile_steps(graph, durations, OVERHEADS)
    timeline = schedule(steps)
    after = np.max(fold(steps)[0] + timeline.start_state_us[0], axis=1)
    root = timeline.critical_clock[0]
    assert after[root] - timeline.start_state_us[0, root] == pytest.approx(timeline.iteration_time_us[0])
    assert np.all(after - timeline.start_state_us[0] <= timeline.iteration_time_us[0] + 1e-6)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.floats(0.5, 100), min_size=1, max_size=8), st.integers(0, 7))
def test_longest_path_of_one_stream_without_overheads(kernel_us, split):
    """One iteration on two streams with a join is a longest path in a graph of kernels."""
    ops, dag, last = [], nx.DiGraph(), {COMPUTE: "start", COPY: "start"}
    for k, duration in enumerate(kernel_us):
        stream = COPY if k % 8 == split else COMPUTE
        ops.append(Op("op", (Launch(KERNEL, stream, after=(COMPUTE, COPY)),)))
        for before in last.values():
            dag.add_edge(before, k, weight=duration)
        last[stream] = k
    for before in last.values():
        dag.add_edge(before, "end", weight=0)
    ops.append(Op("join", (Launch(KERNEL, COMPUTE, after=(COPY,)),)))
    got = time_us(one_region(*ops), us(*kernel_us, 0), FREE)
    assert got[0] == pytest.approx(nx.dag_longest_path_length(dag))


# ---------------------------------------------------------------- cases by hand


def test_host_bound_is_the_hosts_sum():
    graph = one_region(Op("a", (Launch(KERNEL), Launch(KERNEL))), Op("b"))
    # T1 + T2 + T4 + T5 + T4 + T3, then T1 + alone
    assert time_us(graph, us(0.1, 0.1)) == pytest.approx([1 + 4 + 3 + 5 + 3 + 2 + 1 + 6])


def test_device_slightly_slower_than_host():
    graph = one_region(Op("a", (Launch(KERNEL),)))
    host = 1 + 4 + 3 + 2
    assert time_us(graph, us(host - 1 + 1e-6)) == pytest.approx([host + 1e-6], rel=1e-12)
    assert time_us(graph, us(host - 1 - 1e-6)) == pytest.approx([host], rel=1e-12)


def test_reducible_streams_grow_at_their_own_rates():
    graph = one_region(Op("a", (Launch(KERNEL, COMPUTE),)), Op("b", (Launch(KERNEL, COPY),)))
    timeline = schedule(compile_steps(graph, us(100, 300), OVERHEADS))
    assert timeline.iteration_time_us == pytest.approx([301])
    assert timeline.stream_busy_us(COMPUTE) == pytest.approx(np.array([[100.0]]))


def test_two_streams_in_a_loop():
    """A waits for B and B for A within one iteration: their kernels alternate."""
    graph = one_region(
        Op("a", (Launch(KERNEL, COMPUTE, after=(COPY,)),)), Op("b", (Launch(KERNEL, COPY, after=(COMPUTE,)),))
    )
    assert time_us(graph, us(50, 70), FREE) == pytest.approx([120])


def test_collective_ends_for_all_ranks_together():
    graph = one_region(
        Op("work", (Launch(KERNEL),)),
        Op("reduce", (Launch(ALL_REDUCE, COMMUNICATION, after=(COMPUTE,)),)),
        Op("use", (Launch(KERNEL),), waits=((COMPUTE, COMMUNICATION),)),
        ranks=2,
    )
    timeline = schedule(compile_steps(graph, us([100, 300], 40, 10), FREE))
    assert timeline.iteration_time_us == pytest.approx([350])
    assert timeline.end_us[0, 1, 0] == timeline.end_us[0, 1, 1]
    assert timeline.end_us[0, 1, 0] - timeline.start_us[0, 1, 0] == pytest.approx(240)
    assert timeline.exposed_communication_us()[0] == pytest.approx([240, 40])
    reasons = {e.reason for e in timeline.critical_path().edges}
    assert reasons <= {Reason.KERNEL_KERNEL, Reason.WAIT, Reason.COLLECTIVE}
    slow_rank = timeline.sensitivity()[0, 1]
    assert slow_rank == 1


def test_blocking_launch_holds_the_host():
    graph = one_region(Op("item", (Launch(KERNEL, blocks=True),)))
    # The host blocks until latency + kernel after the call, and the launch call's own time runs beside it.
    timeline = schedule(compile_steps(graph, us(100), OVERHEADS))
    assert timeline.iteration_time_us == pytest.approx([1 + 4 + 8 + 100 + 2])
    assert Reason.BLOCKING in {e.reason for e in timeline.critical_path().edges}


def test_cuda_graph_pays_one_launch():
    ops = tuple(Op("slow", (Launch(KERNEL), Launch(KERNEL))) for _ in range(5))
    graph = one_region(*ops, captured_from=0)
    timeline = schedule(compile_steps(graph, us(*[1.0] * 10), OVERHEADS))
    assert timeline.iteration_time_us == pytest.approx(
        [16]
    )  # T1 + graph_launch_us against 10 × 1.5 of kernels
    assert timeline.host_time_us(HostKind.T4)[0, 0] == 15
    assert time_us(graph, us(*[2.0] * 10)) == pytest.approx([25])


def test_cuda_graph_is_one_unit_of_its_stream():
    """Streams of a graph join at its end: the next iteration's graph starts after all of it."""
    graph = one_region(Op("a", (Launch(KERNEL, COPY),)), Op("b", (Launch(KERNEL, COMPUTE),)), captured_from=0)
    assert time_us(graph, us(100, 30), FREE) == pytest.approx([100])
    chained = one_region(
        Op("a", (Launch(KERNEL, COMPUTE),)),
        Op("b", (Launch(KERNEL, COPY, after=(COMPUTE,)),)),
        captured_from=0,
    )
    assert time_us(chained, us(100, 30), FREE) == pytest.approx([130])


def test_an_absent_op_is_as_if_removed():
    ops = [Op("slow", (Launch(KERNEL),)), Op("gone", (Launch(KERNEL),)), Op("fast", (Launch(KERNEL, COPY),))]
    absent = [ops[0], replace(ops[1], present=np.array([[False]])), ops[2]]
    expected = time_us(one_region(ops[0], ops[2]), us(50, 60))
    assert time_us(one_region(*absent), us(50, 1000, 60)) == pytest.approx(expected)


def test_an_op_without_its_launches_costs_its_time_alone():
    nowhere = np.array([[False]])
    op = Op("slow", (Launch(KERNEL, present=nowhere), Launch(KERNEL, present=nowhere)))
    timeline = schedule(compile_steps(one_region(op), us(9, 9), OVERHEADS))
    assert timeline.iteration_time_us == pytest.approx([3 + 4])
    assert np.isnan(timeline.start_us).all()


def test_an_empty_bucket_has_no_op():
    terms = (np.array([[4.0], [0.0]]), np.array([[4.0], [1.0]]), np.array([[1.0], [1.0]]))
    ops = [
        Op("reduce", (Launch(replace(ALL_REDUCE, bytes=Bucket(terms, k, 4.0, 100.0)), COMMUNICATION),))
        for k in range(3)
    ]
    timeline = schedule(compile_steps(one_region(*ops), us(10, 10, 10), FREE))
    assert np.isfinite(timeline.start_us[..., 0]).tolist() == [[True, False, True], [False, False, True]]
    assert timeline.iteration_time_us == pytest.approx([20, 10])


def test_a_full_queue_changes_nothing_without_a_pause_of_the_host():
    graph = one_region(*[Op("a", (Launch(KERNEL),)) for _ in range(20)])
    steps = compile_steps(graph, us(*[30.0] * 20), OVERHEADS)
    assert spacing_with_queue(steps, queue_depth=8) == pytest.approx(schedule(steps).iteration_time_us)


def test_a_full_queue_delays_a_busy_host():
    """40 launches at once, then long host work: with a queue of 4 the device starves during that work."""
    pause = OverheadTable(
        {"pause": OpOverheads(0, 0, 0, 0, 0, 1000)}, OpOverheads(0, 0, 0, 1, 0, 0), 0, 0, 0, 0, 4
    )
    graph = one_region(*[Op("a", (Launch(KERNEL),)) for _ in range(40)], Op("pause"))
    steps = compile_steps(graph, us(*[25.0] * 40), pause)
    assert schedule(steps).iteration_time_us == pytest.approx([1040])
    assert spacing_with_queue(steps, queue_depth=4)[0] > 1800


# ---------------------------------------------------------------- algebra and bad input


def test_eigenvalue_of_a_periodic_and_a_reducible_matrix():
    never = -np.inf
    periodic = np.array([[never, 3.0], [5.0, never]])
    reducible = np.array([[2.0, never], [7.0, 1.0]])
    assert eigenvalue(np.stack([periodic, reducible])) == pytest.approx([4.0, 2.0])


def test_folding_parts_and_composing_equals_folding_the_whole():
    first = one_region(Op("slow", (Launch(KERNEL, COPY), Launch(KERNEL, after=(COPY,)))), ranks=2)
    second = one_region(Op("r", (Launch(ALL_REDUCE, COMMUNICATION, after=(COMPUTE,)),)), Op("fast"), ranks=2)
    whole = WorkloadGraph(first.regions + second.regions, num_ranks=2)
    durations = us([5, 9], [30, 2], 17)
    parts = [
        fold(compile_steps(g, d, OVERHEADS)) for g, d in ((first, durations[:2]), (second, durations[2:]))
    ]
    np.testing.assert_allclose(compose(parts[1], parts[0]), fold(compile_steps(whole, durations, OVERHEADS)))


def test_bad_input_names_the_rule():
    graph = one_region(Op("item", (Launch(Memset(1.0), blocks=True),)))
    with pytest.raises(DesignError, match=r"One duration per launch is needed, but got 0 for 1"):
        compile_steps(graph, [], OVERHEADS)
    with pytest.raises(UnsupportedError, match=r"cannot block the host, but op 'item'"):
        compile_steps(replace(graph, captured_from=0), us(1), OVERHEADS)
    with pytest.raises(DesignError, match=r"queue_depth >= 1"):
        spacing_with_queue(compile_steps(graph, us(1), OVERHEADS), queue_depth=0)
