"""What the profiler adds to a measurement: time by class of op, a matching pair of traces, memory, busy time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from measure_designs import EAGER, small

from perfcore.measure import iteration
from perfcore.measure.iteration import measure_iteration
from perfcore.measure.op_classes import OpClass
from perfcore.measure.peak import MemoryWatch
from perfcore.measure.profiled import _busy_us, _by_class, profile_steps
from perfcore.trace.execution_trace import is_execution_trace, read_execution_trace
from perfcore.trace.kineto import read_kineto
from perfcore.trace.match import match


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_traces_of_a_measurement_are_a_pair(tmp_path: Path) -> None:
    sample = measure_iteration(
        small(), min_iterations=2, max_seconds=0.05, profile=True, keep=tmp_path / "kept" / "x"
    )
    kineto, execution = tmp_path / "kept" / "x.kineto.json.gz", tmp_path / "kept" / "x.et.json"
    assert {p.name for p in kineto.parent.iterdir()} == {kineto.name, execution.name}
    assert is_execution_trace(execution)
    found = match(read_execution_trace(execution), read_kineto(kineto))
    assert found.matched > 0.95 * found.nodes > 100
    assert sum(sample.op_us.values()) == pytest.approx(sample.median_us)
    assert set(sample.op_us) == {c.value for c in OpClass} - {OpClass.COMMUNICATION.value}
    assert sample.device_active_us is None  # a CPU's kernels and its host are one


def test_without_a_wish_nothing_is_profiled() -> None:
    sample = measure_iteration(small(), min_iterations=2, max_seconds=0.05)
    assert sample.op_us == {}


def test_classes_follow_the_work() -> None:
    """Wide layers make products dear, many lookups the tables."""
    wide = replace(small(EAGER, batch=256), model=replace(small().model, bottom_hidden=(512, 512)))
    samples = [
        measure_iteration(d, min_iterations=3, max_seconds=0.2, profile=True)
        for d in (wide, small(EAGER, batch=4))
    ]
    shares = [s.op_us[OpClass.PRODUCTS.value] / s.median_us for s in samples]
    assert shares[0] > shares[1]


def test_memory_is_what_the_model_adds() -> None:
    watch = MemoryWatch.begin("cpu")
    block = torch.ones(96 * 2**20 // 4)  # so large that it never comes from memory freed before
    added = watch.added_bytes()
    assert 80 * 2**20 < added < 300 * 2**20
    assert watch.peak_bytes() > added
    assert block.sum() > 0


@dataclass
class Event:
    """What `torch.profiler` gives of one event, as far as it is read."""

    name: str
    id: int
    start: float
    end: float
    device: str = "CPU"
    cpu_parent: Event | None = None
    device_us: float = 0.0
    is_user_annotation: bool = False
    time_range: Any = field(init=False)
    device_type: Any = field(init=False)

    def __post_init__(self) -> None:
        self.time_range = SimpleNamespace(start=self.start, end=self.end)
        self.device_type = SimpleNamespace(name=self.device)

    @property
    def self_device_time_total(self) -> float:
        return self.device_us

    @property
    def self_cpu_time_total(self) -> float:
        return self.end - self.start


def test_kernels_of_a_gpu_are_counted_by_their_ops() -> None:
    step = Event("ProfilerStep#0", 1, 0, 100)
    linear = Event("aten::linear", 2, 1, 20, cpu_parent=step)
    addmm = Event("aten::addmm", 3, 2, 19, cpu_parent=linear, device_us=50.0)
    launch = Event("cudaLaunchKernel", 4, 3, 4, cpu_parent=addmm, device_us=7.0)
    first = Event("Optimizer.step#SGD.step", 5, 30, 40, cpu_parent=step)
    second = Event("Optimizer.step#SGD.step", 6, 41, 50, cpu_parent=step)
    steps = [
        Event("aten::add_", 7, 31, 32, cpu_parent=first, device_us=3.0),
        Event("aten::add_", 8, 42, 43, cpu_parent=second, device_us=5.0),
    ]
    events = [step, linear, addmm, launch, first, second, *steps]
    found = _by_class(events, 2, on_cuda=True)
    assert {k: v for k, v in found.items() if v} == {
        OpClass.PRODUCTS.value: 28.5,
        OpClass.DENSE_OPTIMIZER.value: 1.5,
        OpClass.UPDATES.value: 2.5,
    }


def test_busy_time_is_a_union() -> None:
    events = [
        Event("kernel", 1, 0, 10, device="CUDA"),
        Event("kernel", 2, 5, 12, device="CUDA"),
        Event("memcpy", 3, 20, 21, device="CUDA"),
        Event("ProfilerStep#0", 4, 0, 100, device="CUDA"),
        Event("marked", 5, 0, 100, device="CUDA", is_user_annotation=True),
        Event("aten::mm", 6, 0, 50),
    ]
    assert _busy_us(events) == 13


def test_a_long_iteration_is_profiled_once() -> None:
    calls: list[int] = []
    profile_steps(lambda: calls.append(1), device="cpu", median_us=5e6)
    assert len(calls) == 1


def test_a_profiler_that_fails_leaves_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("Kineto is not available\nand more")

    monkeypatch.setattr(iteration, "profile_steps", fails)
    sample = measure_iteration(small(), min_iterations=2, max_seconds=0.05, profile=True)
    assert sample.median_us > 0
    assert sample.op_us == {}
    assert sample.notes[-1] == "not profiled: Kineto is not available"


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_a_profiler_that_sees_no_kernel_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    found = profile_steps(lambda: torch.ones(2) + 1, device="cuda:0", median_us=1e6)
    assert (found.op_us, found.active_us) == ({}, None)
    assert "saw no kernel" in found.note
