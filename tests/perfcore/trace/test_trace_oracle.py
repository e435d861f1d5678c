"""A program simulated by hand, written down as a profiler would, read back and replayed: nothing may be lost."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfcore.trace.analysis import analyse
from perfcore.trace.critical import critical_path
from perfcore.trace.kineto import parse_kineto
from perfcore.trace.records import KinetoTrace
from perfcore.trace.replay import DeviceTimes, replay_steps, replayed_us, walk
from perfcore.trace.workload import TraceGraphs

DEVICE = DeviceTimes(latency_us=8.0, gap_us=1.0)
STREAMS = (7, 20, 22, 31, 40)


@dataclass(frozen=True)
class Call:
    stream: int
    before_us: int
    call_us: int
    kernel_us: int
    waits_for: int | None  # a stream
    sync: bool  # the host waits for the stream then


@dataclass(frozen=True)
class Plan:
    gap_us: int
    calls: tuple[Call, ...]
    after_us: int


calls = st.builds(
    Call,
    stream=st.sampled_from(STREAMS),
    before_us=st.integers(1, 30),
    call_us=st.integers(1, 10),
    kernel_us=st.integers(1, 200),
    waits_for=st.none() | st.sampled_from(STREAMS),
    sync=st.booleans(),
)
plans = st.lists(
    st.builds(Plan, st.integers(0, 20), st.lists(calls, max_size=3).map(tuple), st.integers(1, 20)),
    min_size=1,
    max_size=12,
)


class Recorder:
    """Runs plans on clocks and writes what a profiler would."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.free = dict.fromkeys(STREAMS, float("-inf"))
        self.last: dict[int, int] = {}  # correlation of the event recorded last on a stream
        self.host = 0.0
        self.correlation = 0
        self.starts: list[float] = []

    def event(self, category: str, name: str, begin: float, end: float, **args: Any) -> None:
        self.events.append(
            {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": 1, "ts": begin, "dur": end - begin, "args": args}
        )  # fmt: skip

    def runtime(self, name: str, us: float) -> int:
        self.correlation += 1
        self.event("cuda_runtime", name, self.host, self.host + us, correlation=self.correlation)
        return self.correlation

    def op(self, plan: Plan) -> None:
        self.host += plan.gap_us
        begin = self.host
        for call in plan.calls:
            self.launch(call)
        self.host += plan.after_us
        self.event("cpu_op", f"aten::op{len(plan.calls)}", begin, self.host)

    def launch(self, call: Call) -> None:
        self.host += call.before_us
        ready = self.host + DEVICE.latency_us
        if call.waits_for is not None and call.waits_for != call.stream:
            recorded = self.runtime("cudaEventRecord", 0.0)
            waiting = self.runtime("cudaStreamWaitEvent", 0.0)
            self.event(
                "cuda_sync", "Stream Wait Event", self.host, self.host, correlation=waiting, stream=call.stream,
                wait_on_stream=call.waits_for, wait_on_cuda_event_record_corr_id=recorded,
            )  # fmt: skip
            ready = max(ready, self.free[call.waits_for])
        start = max(self.free[call.stream] + DEVICE.gap_us, ready)
        self.free[call.stream] = start + call.kernel_us
        self.starts.append(start)
        correlation = self.runtime("cudaLaunchKernel", call.call_us)
        self.event(
            "kernel", f"kernel{call.stream}", start, start + call.kernel_us, correlation=correlation, stream=call.stream
        )  # fmt: skip
        self.host += call.call_us
        if call.sync:
            end = max(self.host, self.free[call.stream]) + 3.0
            waiting = self.runtime("cudaStreamSynchronize", end - self.host)
            self.event(
                "cuda_sync", "Stream Sync", self.host, end, correlation=waiting, stream=call.stream
            )  # fmt: skip
            self.host = end

    def trace(self) -> KinetoTrace:
        self.event("user_annotation", "ProfilerStep#1", 0.0, self.host + 2.0)
        return parse_kineto({"traceEvents": self.events})


@settings(max_examples=50, deadline=None)
@given(plans)
def test_a_recorded_program_replays_to_the_microsecond(plan: list[Plan]) -> None:
    recorder = Recorder()
    for op in plan:
        recorder.op(op)
    trace = recorder.trace()
    step = TraceGraphs(trace).step(trace.steps[0])
    steps = replay_steps(step, DEVICE)
    assert replayed_us(step, steps) == pytest.approx(step.window.duration_us, abs=1e-6)
    if recorder.starts:
        walked = walk(steps, step.seeds_us)
        np.testing.assert_allclose(walked.start_us[:, 0], recorder.starts, atol=1e-6)
    path = critical_path(steps, step.seeds_us)
    # Latencies, gaps and what a wait costs beyond waiting are no work: the path is at most as long as the step.
    assert sum(p.us for p in path) <= step.window.duration_us + 1e-6
    account = analyse([trace]).ranks[0].accounts[0]
    assert account.explained_us == pytest.approx(account.step_us, abs=1e-6)


def test_a_wait_for_an_earlier_kernel_does_not_wait_for_later_ones() -> None:
    """The event was recorded before the long kernel: a register keeps the time of the short one."""
    recorder = Recorder()
    recorder.op(Plan(0, (Call(7, 1, 2, 50, None, sync=False),), 1))
    record = recorder.runtime("cudaEventRecord", 0.0)
    recorder.op(Plan(0, (Call(7, 1, 2, 900, None, sync=False),), 1))
    recorder.host += 5.0
    waiting = recorder.runtime("cudaStreamWaitEvent", 0.0)
    recorder.event("cpu_op", "wait", recorder.host, recorder.host + 0.5)
    recorder.event(
        "cuda_sync", "Stream Wait Event", recorder.host, recorder.host, correlation=waiting, stream=20,
        wait_on_stream=7, wait_on_cuda_event_record_corr_id=record,
    )  # fmt: skip
    recorder.host += 0.5
    first_end = recorder.starts[0] + 50
    start = max(recorder.host + 1 + DEVICE.latency_us, first_end)
    recorder.free[20] = start - DEVICE.gap_us
    recorder.op(Plan(0, (Call(20, 1, 2, 10, None, sync=True),), 1))
    trace = recorder.trace()
    step = TraceGraphs(trace).step(trace.steps[0])
    assert [(w.earlier, w.later, w.how) for w in step.waits] == [(0, 2, "recorded")]
    assert step.graph.num_streams > 3
    walked = walk(replay_steps(step, DEVICE), step.seeds_us)
    assert walked.start_us[2, 0] == pytest.approx(first_end)


@pytest.mark.parametrize("known", ["stream", "correlation", "event id"])
def test_an_awaited_stream_is_read_from_whatever_names_it(known: str) -> None:
    recorder = Recorder()
    recorder.op(Plan(0, (Call(7, 1, 2, 300, None, sync=False), Call(20, 1, 2, 5, None, sync=False)), 1))
    record = recorder.runtime("cudaEventRecord", 0.0)
    recorder.event(
        "cuda_event",
        "cudaEventRecord",
        recorder.host,
        recorder.host,
        correlation=record,
        stream=7,
        event_id=3,
    )
    recorder.host += 1.0
    waiting = recorder.runtime("cudaStreamWaitEvent", 0.0)
    recorder.event("cpu_op", "wait", recorder.host, recorder.host + 0.5)
    recorder.event(
        "cuda_sync", "Stream Wait Event", recorder.host, recorder.host, correlation=waiting, stream=22,
        wait_on_stream=7 if known == "stream" else -1,
        wait_on_cuda_event_record_corr_id=record if known == "correlation" else -1,
        wait_on_cuda_event_id=3 if known == "event id" else -1,
    )  # fmt: skip
    recorder.host += 0.5
    recorder.free[22] = recorder.starts[0] + 300 - DEVICE.gap_us
    recorder.op(Plan(0, (Call(22, 1, 2, 10, None, sync=True),), 1))
    trace = recorder.trace()
    step = TraceGraphs(trace).step(trace.steps[0])
    assert [(w.earlier, w.later, w.how) for w in step.waits] == [(0, 2, "recorded")]


def test_without_records_waits_are_read_from_calls_and_times() -> None:
    """A collective waits for the stream that calls it; a kernel that starts just when another ends waited for it."""
    recorder = Recorder()
    recorder.op(Plan(0, (Call(7, 1, 2, 300, None, sync=False),), 1))
    recorder.runtime("cudaStreamWaitEvent", 0.0)
    recorder.host += 1.0
    launch_us = recorder.host
    correlation = recorder.runtime("cudaLaunchKernel", 2.0)
    begin = recorder.starts[0] + 300
    recorder.event("kernel", "ncclKernel_AllReduce", begin, begin + 40, correlation=correlation, stream=20)
    recorder.host += 3.0
    recorder.event("cpu_op", "c10d::allreduce_", launch_us - 1.0, recorder.host)
    recorder.free[7] = begin + 40 - DEVICE.gap_us
    recorder.op(Plan(0, (Call(7, 1, 2, 10, None, sync=True),), 1))
    trace = recorder.trace()
    step = TraceGraphs(trace).step(trace.steps[0])
    assert [(w.earlier, w.later, w.how) for w in step.waits] == [
        (0, 1, "inferred from calls"),
        (1, 2, "inferred from times"),
    ]
    assert replayed_us(step, replay_steps(step, DEVICE)) == pytest.approx(step.window.duration_us, abs=2.0)


def test_what_was_queued_before_the_step_delays_it_and_is_not_its_own() -> None:
    recorder = Recorder()
    recorder.event("kernel", "unlaunched", -100.0, 400.0, stream=7)
    recorder.free[7] = 400.0
    recorder.op(Plan(0, (Call(7, 1, 2, 30, None, sync=True),), 1))
    trace = recorder.trace()
    step = TraceGraphs(trace).step(trace.steps[0])
    assert (step.unlaunched, len(step.launched)) == (1, 1)
    assert step.seeds_us[1] == 400.0
    assert replayed_us(step, replay_steps(step, DEVICE)) == pytest.approx(step.window.duration_us)


def test_a_graph_is_one_launch_per_stream() -> None:
    recorder = Recorder()
    recorder.host = 10.0
    correlation = recorder.runtime("cudaGraphLaunch", 6.0)
    for i in range(30):
        recorder.event(
            "kernel", f"k{i}", 20.0 + 5 * i, 24.0 + 5 * i, correlation=correlation, stream=(7, 20)[i % 2]
        )
    recorder.host += 6.0
    recorder.op(Plan(1, (), 4))
    trace = recorder.trace()
    step = TraceGraphs(trace).step(trace.steps[0])
    assert [x.kernel.name for x in step.launched] == ["cudaGraphLaunch of 15 kernels"] * 2
    assert replayed_us(step, replay_steps(step, DEVICE)) == pytest.approx(step.window.duration_us)


def test_a_launch_that_waits_for_the_queue_is_no_launch_time() -> None:
    """Two thousand launches of long kernels: calls block as soon as a thousand are in flight."""
    recorder, depth, ends = Recorder(), 1000, list[float]()
    recorder.event("cpu_op", "aten::loop", 0.0, 1e9)
    for number in range(2000):
        waits = max(0.0, ends[number - depth] - recorder.host) if number >= depth else 0.0
        start = max(recorder.host + DEVICE.latency_us, (ends[-1] + DEVICE.gap_us) if ends else 0.0)
        ends.append(start + 20.0)
        correlation = recorder.runtime("cudaLaunchKernel", 2.0 + waits)
        recorder.event("kernel", "k", start, ends[-1], correlation=correlation, stream=7)
        recorder.host += 4.0 + waits
    recorder.events[0]["dur"] = recorder.host
    trace = recorder.trace()
    step = TraceGraphs(trace).step(trace.steps[0])
    assert step.queue_depth == pytest.approx(depth, abs=2)
    assert step.queue_us == pytest.approx(recorder.host - 2000 * 4.0, rel=0.01)
    assert replayed_us(step, replay_steps(step, DEVICE)) == pytest.approx(step.window.duration_us, rel=0.01)
