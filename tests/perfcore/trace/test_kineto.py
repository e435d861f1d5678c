"""Reading Kineto traces: nesting, joins, old names, steps, damaged files."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from perfcore.errors import TraceError
from perfcore.trace.kineto import KinetoTrace, parse_kineto, read_kineto

DATA = Path(__file__).parents[2] / "data"
TRACES = sorted(p for p in DATA.glob("*/*.json.gz") if p.parent.name != "sharding_instances")


def event(cat: str, name: str, ts: float, dur: float, *, tid: Any = 1, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 7, "tid": tid, "args": args}


def parse(*events: dict[str, Any]) -> KinetoTrace:
    return parse_kineto({"traceEvents": list(events)})


def names(trace: KinetoTrace) -> list[str]:
    return [op.name for op in trace.ops]


def test_only_outermost_ops_are_kept_and_annotations_only_group() -> None:
    trace = parse(
        event("user_annotation", "## forward ##", 0, 100),
        event("cpu_op", "aten::linear", 10, 40),
        event("cpu_op", "aten::addmm", 20, 20),
        event("cpu_op", "aten::relu", 60, 10),
    )
    assert names(trace) == ["aten::linear", "aten::relu"]
    assert trace.ops[0].event_starts_us == (20.0,)


def test_backward_runs_on_its_own_thread_and_loses_the_engine_prefix() -> None:
    engine = "autograd::engine::evaluate_function: AddmmBackward0"
    trace = parse(
        event("cpu_op", "aten::linear", 0, 10),
        event("cpu_op", "aten::t", 1, 2),
        event("cpu_op", engine, 20, 30, tid=2),
        event("cpu_op", "AddmmBackward0", 21, 20, tid=2),
        event("cpu_op", "aten::sum", 42, 5, tid=2),
        event("cpu_op", "aten::copy_", 0, 90, tid=3),
    )
    assert names(trace) == ["aten::linear", "AddmmBackward0"]


def test_rounded_times_neither_swallow_siblings_nor_expel_children() -> None:
    trace = parse(
        event("cpu_op", "aten::item", 10, 5),
        event("cpu_op", "aten::_local_scalar_dense", 12, 4),  # ends 1 us after its parent
        event("cpu_op", "aten::view", 15, 3),  # begins before its neighbour's rounded end
        event("cpu_op", "aten::t", 17, 4),
    )
    assert names(trace) == ["aten::item", "aten::view", "aten::t"]


def test_calls_and_kernels_are_joined_by_correlation_whatever_the_call_is_named() -> None:
    trace = parse(
        event("cpu_op", "aten::mm", 0, 50),
        event("cuda_driver", "cuLaunchKernelEx", 10, 5, correlation=3),
        event("cuda_runtime", "cudaGraphLaunch", 20, 5, correlation=4),
        event("cuda_runtime", "cudaFuncGetAttributes", 30, 1, correlation=5),
        event("cuda_runtime", "INVALID", 35, 1, correlation=6),
        event("kernel", "gemm", 40, 5, correlation=3, stream=7),
        *(event("kernel", f"k{i}", 50 + i, 1, correlation=4, stream=7) for i in range(3)),
    )
    assert [(c.name, c.kernels) for c in trace.ops[0].calls] == [
        ("cuLaunchKernelEx", 1),
        ("cudaGraphLaunch", 3),
        ("cudaFuncGetAttributes", 0),
    ]
    assert [k.stream for k in trace.kernels] == [7] * 4


@pytest.mark.parametrize(
    ("call", "kernel", "blocks"),
    [
        ("cudaMemcpyAsync", "Memcpy DtoH (Device -> Pageable)", True),
        ("cudaMemcpyAsync", "Memcpy DtoH (Device -> Pinned)", False),
        ("cudaMemcpyAsync", "Memcpy HtoD (Pageable -> Device)", False),
        ("cudaStreamSynchronize", "", True),
        ("cudaLaunchKernel", "add", False),
    ],
)
def test_what_blocks(call: str, kernel: str, blocks: bool) -> None:
    device = [event("gpu_memcpy", kernel, 20, 2, correlation=1)] if kernel else []
    trace = parse(event("cpu_op", "op", 0, 50), event("cuda_runtime", call, 10, 5, correlation=1), *device)
    assert [c.blocks for c in trace.ops[0].calls] == [blocks]


def test_launches_outside_ops_become_ops_and_waits_outside_are_kept_apart() -> None:
    trace = parse(
        event("cpu_op", "aten::mm", 0, 10),
        event("cuda_runtime", "cudaGraphLaunch", 20, 5, correlation=1),
        event("kernel", "k", 30, 5, correlation=1),
        event("cuda_runtime", "cudaStreamSynchronize", 40, 9, correlation=2),
        event("cuda_runtime", "cudaEventRecord", 60, 1, correlation=3),
    )
    assert names(trace) == ["aten::mm", "cudaGraphLaunch"]
    assert [c.name for c in trace.loose_calls] == ["cudaStreamSynchronize"]


def test_a_collective_inside_a_hook_is_an_op_of_its_own() -> None:
    trace = parse(
        event("cpu_op", "torch::autograd::AccumulateGrad", 0, 50),
        event("cpu_op", "aten::mul", 5, 10),
        event("cpu_op", "c10d::allreduce_", 20, 25),
        event("cpu_op", "record_param_comms", 22, 10),
    )
    assert [(op.name, op.start_us, op.end_us) for op in trace.ops] == [
        ("torch::autograd::AccumulateGrad", 0, 20),
        ("c10d::allreduce_", 20, 50),
    ]


def test_steps_are_the_spacing_of_step_starts_and_device_annotations_do_not_count() -> None:
    trace = parse(
        event("user_annotation", "ProfilerStep#1", 0, 80),
        event("user_annotation", "ProfilerStep#2", 100, 90),
        event("gpu_user_annotation", "ProfilerStep#1", 30, 500),
        event("cpu_op", "aten::mm", 10, 5),
    )
    assert [(s.name, s.start_us, s.end_us) for s in trace.steps] == [
        ("ProfilerStep#1", 0, 100),
        ("ProfilerStep#2", 100, 190),
    ]


def test_without_steps_zero_grad_cuts() -> None:
    trace = parse(
        event("user_annotation", "Optimizer.zero_grad#SGD.zero_grad", 5, 5),
        event("cpu_op", "aten::mm", 10, 5),
        event("user_annotation", "Optimizer.zero_grad#SGD.zero_grad", 50, 5),
        event("cpu_op", "aten::mm", 60, 5),
    )
    assert [(s.start_us, s.end_us) for s in trace.steps] == [(5, 50), (50, 65)]


def test_names_of_2021_and_string_threads_are_understood() -> None:
    trace = parse(
        event("Operator", "ProfilerStep#4", 0, 100, tid="12"),
        event("Operator", "aten::mm", 10, 40, tid="12"),
        event("Runtime", "cudaLaunchKernel", 20, 5, tid="12", correlation=9),
        event("Kernel", "gemm", 30, 9, tid="stream 7", correlation=9, stream=7),
    )
    assert names(trace) == ["aten::mm"]
    assert trace.ops[0].calls[0].kernels == 1
    assert trace.steps[0].name == "ProfilerStep#4"


def test_a_bare_list_of_events_is_a_trace() -> None:
    assert names(parse_kineto([event("cpu_op", "aten::mm", 0, 1)])) == ["aten::mm"]


@pytest.mark.parametrize("packed", [True, False])
def test_json_may_be_packed_or_not(tmp_path: Path, packed: bool) -> None:
    text = json.dumps(
        {"traceEvents": [event("cpu_op", "aten::mm", 0, 1)], "deviceProperties": [{"name": "X"}]}
    )
    path = tmp_path / "t.json"
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    assert read_kineto(path).device_name == "X"


def test_damaged_and_alien_files_are_named(tmp_path: Path) -> None:
    good = gzip.compress(json.dumps({"traceEvents": [event("cpu_op", "aten::mm", 0, 1)]}).encode())
    contents = {
        "short.json.gz": (good[:-12], "the gzip data is truncated or damaged"),
        "short.json": (b'{"traceEvents": [{"ph"', "not JSON, or truncated"),
        "alien.json": (b'{"nodes": []}', "has a list `traceEvents`, but there is none"),
        "number.json": (b"3", "has a list `traceEvents`, but there is none"),
        "nothing.json": (b"{}", "this is an object with nothing in it"),
        "empty.json": (b'{"traceEvents": [3, {}]}', "no profiled op among 2 events"),
        "binary.json": (b"\xff\xfe\x00\x01", "not JSON, or truncated"),
    }
    for name, (raw, message) in contents.items():
        (tmp_path / name).write_bytes(raw)
        with pytest.raises(TraceError, match=f"^{name}: .*{message}"):
            read_kineto(tmp_path / name)
    with pytest.raises(TraceError, match=r"^absent\.json: cannot be read: No such file"):
        read_kineto(tmp_path / "absent.json")


@pytest.mark.parametrize("path", TRACES, ids=lambda p: p.name)
def test_real_traces_are_read(path: Path) -> None:
    trace = read_kineto(path)
    assert trace.ops
    assert trace.kernels
    assert trace.device_name
    starts = [op.start_us for op in trace.ops]
    assert starts == sorted(starts)
    assert any(c.kernels for op in trace.ops for c in op.calls)
    assert all(step.duration_us > 0 for step in trace.steps)
