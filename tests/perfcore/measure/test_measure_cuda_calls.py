"""The calls to `torch.cuda`, on a stand-in that checks arguments and order; nothing is simulated beyond that."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from measure_designs import small

import perfcore.graph.kernels as k
from perfcore.design.training import EmbeddingFusion, Fusion, Launches
from perfcore.errors import UnsupportedError
from perfcore.measure import collect as sweep
from perfcore.measure import iteration
from perfcore.measure import world as ranks
from perfcore.measure.batch import make_batch
from perfcore.measure.collect import collect
from perfcore.measure.device_state import device_state
from perfcore.measure.iteration import _captured as captured_step
from perfcore.measure.iteration import indexed, measure_iteration, step_of
from perfcore.measure.kernel_cases import CUDA_LIMITS, Case
from perfcore.measure.kernels import cuda_runs_us, time_case
from perfcore.measure.model import build_model, make_optimizers
from perfcore.measure.source import Source
from perfcore.measure.table_cases import copy_cases, table_cases
from perfcore.measure.world import World, joined


class Cuda:
    """Records what is asked of `torch.cuda`; every call of a captured graph takes 2 ms by its events."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.current: object = "default"
        self.capture_fails = False
        self.replays = 0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        cuda = self

        class Graph:
            def replay(self) -> None:
                cuda.replays += 1

        class Stream:
            def wait_stream(self, other: object) -> None:
                cuda.said.append("side waits")

        class Event:
            def __init__(self, *, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                cuda.said.append("record")

            def synchronize(self) -> None:
                cuda.said.append("event")

            def elapsed_time(self, other: Event) -> float:
                return 2.0

        @contextmanager
        def on(stream: object) -> Iterator[None]:
            before, cuda.current = cuda.current, stream
            yield
            cuda.current = before

        @contextmanager
        def graph(target: Graph) -> Iterator[None]:
            cuda.said.append("capture")
            cuda.current = "capturing"
            yield
            if cuda.capture_fails:  # torch leaves the stream current then
                raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
            cuda.current = "default"

        def current_stream() -> object:
            return SimpleNamespace(wait_stream=lambda _: None, name=cuda.current)

        def set_stream(stream: Any) -> None:
            cuda.current = stream.name
            cuda.said.append("stream back")

        for name, value in {
            "CUDAGraph": Graph,
            "Stream": Stream,
            "Event": Event,
            "stream": on,
            "graph": graph,
            "current_stream": current_stream,
            "set_stream": set_stream,
            "synchronize": lambda *_: cuda.said.append("wait"),
            "_sleep": lambda cycles: cuda.said.append("sleep"),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    found = Cuda()
    found.install(monkeypatch)
    return found


def test_a_device_has_an_index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """torch itself refuses to make `cuda` the current device."""
    assert [indexed(d) for d in ("cuda", "cuda:1", "cpu")] == ["cuda:0", "cuda:1", "cpu"]
    with pytest.raises(ValueError, match="specified index"):
        torch.cuda._utils._get_device_index("cuda")
    taken: list[object] = []

    def take(device: object) -> None:
        taken.append(device)
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", take)
    monkeypatch.setattr(sweep, "device_state", lambda _: {})
    with pytest.raises(UnsupportedError, match="cuda:0 cannot be measured"):
        collect(tmp_path, device="cuda", budget_s=1.0)
    with pytest.raises(RuntimeError, match="no kernel image"):
        measure_iteration(small(), device="cuda")
    assert taken == ["cuda:0", "cuda:0"]


def test_kernels_are_replayed_between_events(cuda: Cuda) -> None:
    calls: list[int] = []
    runs, method = cuda_runs_us([lambda: calls.append(1)], 0.01, kind=k.Gemm, uncaptured=set())
    assert method == "graph_replay"
    assert set(runs) == {2000.0 / 20}  # 2 ms for 20 calls
    assert len(calls) == 1 + 1 + 20  # first use, warm-up on the side stream, capture
    assert "sleep" not in cuda.said
    assert cuda.replays == len(runs) + 1


def test_a_kernel_that_cannot_be_captured_is_tried_once(cuda: Cuda) -> None:
    cuda.capture_fails = True
    failed: set[type] = set()
    for _ in range(2):
        runs, method = cuda_runs_us([lambda: None], 0.01, kind=k.Sort, uncaptured=failed)
        assert method == "events"
        assert set(runs) == {100.0}
    assert cuda.said.count("capture") == 1
    assert cuda.said.count("stream back") == 1
    assert cuda.current == "default"
    assert failed == {k.Sort}
    assert "sleep" in cuda.said  # behind work, so that the host gets ahead


def test_calls_that_wait_are_never_captured(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(k.Sort(8.0, 8.0), lambda s: lambda: torch.sort(s.integers(9, 8)), captured=False)
    source = Source("cpu", cache_bytes=1e3)
    monkeypatch.setattr(source, "device", "cuda:0")
    monkeypatch.setattr(source, "integers", lambda high, count: torch.arange(count))
    timings = list(time_case(case, source, cache_bytes=0.0, max_seconds=0.01))
    assert {t.method for t in timings} == {"events"}
    assert "capture" not in cuda.said


def test_what_waits_or_needs_autograd_is_marked() -> None:
    pageable = [c for c in copy_cases(CUDA_LIMITS, on_cuda=True) if c.kernel.kind is k.CopyKind.H2D_PAGEABLE]  # type: ignore[union-attr]
    assert pageable
    assert not any(c.captured for c in pageable)
    updates = [c for c in table_cases(CUDA_LIMITS) if getattr(c.kernel, "optimizer", None)]
    assert updates
    assert not any(c.captured for c in updates)


def test_an_iteration_is_captured_after_a_warm_up(cuda: Cuda) -> None:
    design = small(Fusion(EmbeddingFusion.TABLE_BATCHED, launches=Launches.CUDA_GRAPH), read_loss=True)
    batches = [make_batch(design, rng=np.random.default_rng(i)) for i in range(2)]
    steps: list[float] = []

    def step(batch: Any) -> torch.Tensor:
        steps.append(float(batch.dense[0, 0]))
        return torch.zeros(())

    replay = captured_step(step, batches[0], device="cpu")
    assert len(steps) == 3 + 1
    assert cuda.said.count("capture") == 1
    replay(batches[1])
    assert cuda.replays == 1
    assert len(steps) == 4  # nothing runs but the graph
    assert batches[0].dense[0, 0] == batches[1].dense[0, 0]  # the graph's input was filled
    cuda.capture_fails = True
    with pytest.raises(UnsupportedError, match="cannot be captured"):
        captured_step(step, batches[0], device="cpu")
    assert cuda.current == "default"


def test_a_captured_loss_is_read_after_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    design = small(Fusion(EmbeddingFusion.TABLE_BATCHED, launches=Launches.CUDA_GRAPH), read_loss=True)
    model, batch = build_model(design), make_batch(design, rng=np.random.default_rng(0))
    read: list[int] = []
    loss = SimpleNamespace(item=lambda: read.append(1))
    monkeypatch.setattr(iteration, "_captured", lambda *_, **__: lambda _: loss)
    step = step_of(model, make_optimizers(model, design), design, batch, device="cuda:0")
    assert model.reads_loss is False  # a graph cannot wait for the host
    step(batch)
    assert read == [1]


@pytest.mark.parametrize(
    "answer", ["1410, 1215, 45, 60.1, 87, 550.54\n", "[N/A], [N/A], 45, [N/A], [N/A], 550.54\n"]
)
def test_clocks_are_read_where_they_are_told(monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    asked: list[list[str]] = []

    def run(command: list[str], **_: Any) -> Any:
        asked.append(command)
        return SimpleNamespace(stdout=answer)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="1234"))
    found = device_state("cuda:0")
    assert asked[0][-2:] == ["-i", "GPU-1234"]
    assert found["temperature.gpu"] == "45"
    assert found["driver_version"] == "550.54"
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace())
    device_state("cuda:1")
    assert asked[1][-2:] == ["-i", "1"]
    monkeypatch.setattr(subprocess, "run", partial(_missing))
    assert "temperature.gpu" not in device_state("cuda:0")


def _missing(*_: Any, **__: Any) -> None:
    raise FileNotFoundError("nvidia-smi")


@pytest.mark.filterwarnings("ignore:.*process group.*")
def test_an_older_gloo_sums_by_an_all_reduce(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def lacks(*_: Any, **__: Any) -> None:
        raise RuntimeError("ProcessGroupGloo does not support reduce_scatter")

    with joined(rank=0, size=1, device="cpu", store=tmp_path / "store", patience_s=30) as world:
        x = torch.arange(6.0).view(3, 2)
        assert torch.equal(world.reduce_scatter(x).wait(), x)
        monkeypatch.setattr(ranks.dist, "reduce_scatter", lacks)
        assert torch.equal(world.reduce_scatter(x).wait(), x)
        assert torch.equal(world.all_gather(x).wait(), x)
        assert world.largest([1.0, 2.0]) == [1.0, 2.0]


def test_a_gpus_collectives_are_called_and_waited_for_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's calls: on tensors, asynchronous, waited for by the stream alone."""
    asked: list[tuple[str, bool]] = []

    def call(name: str) -> Any:
        def run(*_: Any, async_op: bool = False, **__: Any) -> Any:
            asked.append((name, async_op))
            return SimpleNamespace(wait=lambda: asked.append((f"{name} waited", False)))

        return run

    for name in (
        "all_to_all_single",
        "all_reduce",
        "all_gather",
        "reduce_scatter_single",
        "reduce_scatter_tensor",
    ):
        monkeypatch.setattr(ranks.dist, name, call(name), raising=False)
    world = World(0, 2, "cuda:0", None)
    pending = [
        world.all_to_all(torch.ones(4), [2, 2], [2, 2]),
        world.reduce_scatter(torch.ones(4, 2)),
        world.all_gather(torch.ones(2, 2)),
        world.all_reduce(torch.ones(4)),
    ]
    assert [called for _, called in asked] == [True] * 4
    assert pending[1].out.shape == (2, 2)
    assert pending[2].out.shape == (4, 2)
    for each in pending:
        each.wait()
        each.wait()  # a second time costs nothing
    assert len(asked) == 8
