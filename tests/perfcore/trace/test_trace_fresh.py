"""A trace of the torch that is installed: the newest format, and the ids that join it to an execution trace."""

import warnings
from pathlib import Path

import pytest

from perfcore.trace.analysis import analyse
from perfcore.trace.execution_trace import read_execution_trace
from perfcore.trace.kineto import read_kineto
from perfcore.trace.match import match

STEPS = 3


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    import torch
    from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile, schedule

    folder = tmp_path_factory.mktemp("recorded")
    kineto, nodes = folder / "kineto.json", folder / "nodes.json"
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    observer = ExecutionTraceObserver()
    observer.register_callback(str(nodes))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with profile(
            activities=[ProfilerActivity.CPU],
            schedule=schedule(wait=1, warmup=1, active=STEPS),
            on_trace_ready=lambda p: p.export_chrome_trace(str(kineto)),
            record_shapes=True,
            execution_trace_observer=observer,
        ) as profiler:
            for _ in range(STEPS + 2):
                loss = model(torch.randn(32, 8)).pow(2).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                profiler.step()
    return kineto, nodes


def test_a_trace_of_this_torch_is_accounted_for(recorded: tuple[Path, Path]) -> None:
    trace = read_kineto(recorded[0])
    assert len(trace.steps) == STEPS
    assert trace.base_us > 0
    names = {op.name for op in trace.ops}
    assert {"aten::linear", "AddmmBackward0", "Optimizer.step#SGD.step"} <= names
    rank = analyse([trace]).ranks[0]
    assert rank.exact.max_abs_pct < 0.01  # a host alone, without a device
    assert all(a.explained_us == pytest.approx(a.step_us) for a in rank.accounts)


def test_its_execution_trace_is_matched_by_id(recorded: tuple[Path, Path]) -> None:
    kineto, nodes = recorded
    found = match(read_execution_trace(nodes), read_kineto(kineto))
    assert found.how == "record function id"
    assert found.matched >= 0.995 * found.nodes > 0
