"""The graph against PyTorch: dispatched aten calls, and the profiler's top-level ops."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from graph_designs import EAGER, TABLES, flat, leaves_of, op_names, small
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile

from perfcore.design.design import Design
from perfcore.design.model import Interaction, Loss
from perfcore.design.training import IndexType, Optimizer, OptimizerFusion, Precision
from perfcore.graph.capture import capture, on_cuda
from perfcore.graph.dlrm import graph_of
from perfcore.measure.batch import Batch, make_batch
from perfcore.measure.model import build_model, make_optimizers, train_step

torch.set_num_threads(1)  # tiny tensors: more threads only wait for each other

FlatLeaf = tuple[str, tuple[tuple[float, ...], ...]]

CONFIGURATIONS: list[dict[str, Any]] = [
    *({"interaction": i, "precision": p} for i in Interaction for p in (Precision.FP32, Precision.BF16)),
    *(
        {"optimizer": o, "implementation": f}
        for o in (Optimizer.SGD, Optimizer.ADAGRAD, Optimizer.ADAM)
        for f in OptimizerFusion
    ),
    {
        "interaction": Interaction.DCN_V2,
        "optimizer": Optimizer.ADAM,
        "implementation": OptimizerFusion.FOREACH,
    },
    {"interaction": Interaction.DCN_V2, "cross_layers": 1, "precision": Precision.BF16},
    {"loss": Loss.MSE},
    {"loss": Loss.MSE, "precision": Precision.BF16, "interaction": Interaction.CAT},
    {"bottom_hidden": (), "top_hidden": ()},
    {"bottom_hidden": (), "top_hidden": (), "precision": Precision.BF16, "interaction": Interaction.CAT},
    {"bottom_hidden": (5, 4, 3, 2), "top_hidden": (11,)},
    {"tables": TABLES[:1]},
    {"interaction": Interaction.CAT, "tables": (replace(TABLES[0], embedding_dim=3), *TABLES[1:])},
    {"table_precision": Precision.BF16},
    {"index_dtype": IndexType.INT32},
    {"table_precision": Precision.BF16, "precision": Precision.BF16, "interaction": Interaction.DCN_V2},
]
# Merging a sparse gradient's rows, or reading the loss, needs values, which fake tensors have not.
NEEDS_VALUES: list[dict[str, Any]] = [
    {"read_loss": True},
    *(
        {"table_optimizer": o, "table_precision": p}
        for o in (Optimizer.ADAGRAD, Optimizer.ADAM, Optimizer.ROWWISE_ADAGRAD)
        for p in (Precision.FP32, Precision.BF16)
    ),
]


def design_of(*, implementation: OptimizerFusion = OptimizerFusion.FOR_LOOP, **changes: Any) -> Design:
    return small(replace(EAGER, optimizer=implementation), **changes)


def distinct_lookups(design: Design) -> Batch:
    """A batch that looks up no row twice, so that merged gradients have as many rows as lookups."""
    batch = make_batch(design, rng=np.random.default_rng(0))
    return replace(batch, indices=tuple(torch.arange(len(i)) for i in batch.indices))


def trainer(design: Design, batch: Batch) -> Callable[[], object]:
    """One training step, after the first, which makes the optimizers' state."""
    model = build_model(design)
    optimizers = make_optimizers(model, design)
    train_step(model, optimizers, batch)
    return lambda: train_step(model, optimizers, batch)


def recorded(step: Callable[[], object]) -> list[FlatLeaf]:
    """What CUDA dispatches in a step; `train_step` ends by detaching the loss for its caller."""
    *leaves, last = on_cuda(capture(step))
    assert last.name == "aten.detach"
    return flat(leaves)


@pytest.mark.parametrize("changes", [*CONFIGURATIONS, *NEEDS_VALUES], ids=str)
def test_leaves_equal_what_torch_dispatches(changes: dict[str, Any]) -> None:
    # Real CPU tensors of a few rows: fake ones do not know how many rows a sparse gradient has.
    design = design_of(**changes)
    assert leaves_of(graph_of(design)) == recorded(trainer(design, distinct_lookups(design)))


@pytest.mark.parametrize("changes", CONFIGURATIONS[::2], ids=str)
def test_leaves_equal_what_torch_dispatches_on_fake_tensors(changes: dict[str, Any]) -> None:
    design = design_of(**changes)
    batch = make_batch(design, rng=np.random.default_rng(0))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        got = recorded(trainer(design, batch.map(mode.from_tensor)))
    want = leaves_of(graph_of(design))
    assert [name for name, _ in got] == [name for name, _ in want]
    for fake, built in zip(got, want, strict=True):
        empty = any(0.0 in shape for shape in fake[1])  # a fake sparse gradient has no rows
        assert empty or fake == built


def test_large_models_are_recorded_without_their_memory() -> None:
    tables = tuple(replace(t, num_embeddings=10**9) for t in TABLES)
    design = design_of(tables=tables, embedding_dim=128, bottom_hidden=(512,), global_batch=4096)
    batch = make_batch(design, rng=np.random.default_rng(0))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        got = recorded(trainer(design, batch.map(mode.from_tensor)))
    assert [name for name, _ in got] == [name for name, _ in leaves_of(graph_of(design))]


def test_the_comparison_notices_a_swapped_order() -> None:
    design = small()
    other = small(bottom_hidden=(7, 9))
    got = recorded(trainer(design, distinct_lookups(design)))
    assert got == leaves_of(graph_of(design))
    assert got != leaves_of(graph_of(other))


PROFILED: list[dict[str, Any]] = [
    {},
    {"precision": Precision.BF16},
    {"interaction": Interaction.CAT, "loss": Loss.MSE, "optimizer": Optimizer.ADAGRAD},
    {
        "interaction": Interaction.DCN_V2,
        "optimizer": Optimizer.ADAM,
        "implementation": OptimizerFusion.FOREACH,
    },
    {"interaction": Interaction.DCN_V2, "precision": Precision.BF16, "implementation": OptimizerFusion.FUSED},
    {"table_optimizer": Optimizer.ADAM, "table_precision": Precision.BF16},
]


@pytest.mark.parametrize("changes", PROFILED, ids=str)
def test_top_level_ops_equal_the_profilers(changes: dict[str, Any]) -> None:
    design = design_of(**changes)
    step = trainer(design, distinct_lookups(design))
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
    *names, last = top_level(profiler)
    assert last == "aten::detach"
    assert names == op_names(graph_of(design))


def top_level(profiler: profile) -> list[str]:
    """Names of events inside no other, in order; an autograd node stands for the engine's frame around it."""
    events = profiler.profiler.kineto_results.events()
    names, end = [], -1
    for event in sorted(events, key=lambda e: (e.start_ns(), -e.duration_ns())):
        if event.start_ns() >= end:
            end = event.end_ns()
            names.append(event.name().removeprefix("autograd::engine::evaluate_function: "))
    return names


def test_capture_leaves_torch_alone_until_it_is_called() -> None:
    code = "import sys, perfcore.graph.capture, perfcore.graph.dlrm; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_capture_records_names_and_shapes_in_order() -> None:
    a, b = torch.ones(2, 3), torch.ones(3, 4)
    leaves = capture(lambda: torch.relu(a @ b))
    assert flat(leaves) == [("aten.mm", ((2.0, 3.0), (3.0, 4.0))), ("aten.relu", ((2.0, 4.0),))]
