"""Layers of a trace: what their shapes say, against the network's definition and against plain loops."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfcore.graph.kernels import (
    BatchNorm,
    Convolution,
    Dropout,
    DType,
    EmbeddingBackward,
    GemmLayout,
    LayerNorm,
    MeasuredKernel,
    Pooling,
    Softmax,
    dims,
)
from perfcore.trace.kineto import read_kineto
from perfcore.trace.layers import layer_calls, layers_of, stands_for
from perfcore.trace.link import Launched
from perfcore.trace.records import Kernel, LeafCall, RuntimeCall
from perfcore.trace.replay import Program, device_times
from perfcore.trace.resize import with_batch
from perfcore.trace.retime import price_step, retime
from perfcore.trace.workload import TraceGraphs

RESNET = Path(__file__).parents[2] / "data" / "resnet50_v100"
BATCH = 32


@pytest.fixture(scope="module")
def program() -> Program:
    trace = read_kineto(RESNET / "workers0.pt.trace.json.gz")
    graphs = TraceGraphs(trace)
    step = graphs.step(trace.steps[3])
    return Program(step, step.host_us, step.durations_us, device_times([trace]), trace)


def resnet50() -> list[tuple[int, ...]]:
    """(channels, extent, filters, taps, stride, padding) of its convolutions, He et al. 2015, as torchvision builds it."""
    layers = [(3, 224, 64, 7, 2, 3)]
    channels, extent = 64, 56
    for width, blocks, first in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for block in range(blocks):
            stride = first if block == 0 else 1
            layers.append((channels, extent, width, 1, 1, 0))
            layers.append((width, extent, width, 3, stride, 1))
            layers.append((width, extent // stride, 4 * width, 1, 1, 0))
            if block == 0:
                layers.append((channels, extent, 4 * width, 1, stride, 0))
            channels, extent = 4 * width, extent // stride
    return layers


def described(kernel: Convolution) -> tuple[float, ...]:
    names = ("channels", "height", "filters", "kernel_height", "stride", "padding_height")
    return tuple(float(getattr(kernel, n)) for n in names)  # type: ignore[arg-type]


def test_convolutions_are_the_networks(program: Program) -> None:
    found = [x.kernel for x in program.step.graph.launches() if isinstance(x.kernel, Convolution)]
    by_layout = {g: [c for c in found if c.layout is g] for g in GemmLayout}
    expected = [tuple(map(float, layer)) for layer in resnet50()]
    assert [described(c) for c in by_layout[GemmLayout.FORWARD]] == expected
    assert [described(c) for c in by_layout[GemmLayout.GRAD_WEIGHT]] == expected[::-1]
    assert [described(c) for c in by_layout[GemmLayout.GRAD_INPUT]] == expected[:0:-1]
    assert all(c.batch == BATCH and c.groups == 1 and c.dtype is DType.FP32 for c in found)


def test_every_layer_of_the_network_is_known(program: Program) -> None:
    kernels = [x.kernel for x in program.step.graph.launches()]
    counts = Counter((type(k), getattr(k, "backward", None)) for k in kernels)
    for backward in (False, True):
        assert counts[BatchNorm, backward] == 53
        assert counts[Pooling, backward] == counts[Softmax, backward] == 1
    pooling = next(k for k in kernels if isinstance(k, Pooling))
    assert (pooling.inputs, pooling.outputs) == (BATCH * 64 * 112**2, BATCH * 64 * 56**2)
    priced = price_step(program)
    assert priced.priced_share > 0.999


def test_what_one_launch_stands_for_adds_up_to_its_call(program: Program) -> None:
    kernels = [x.kernel for x in program.step.graph.launches()]
    owners = stands_for(program.step.launched, kernels)
    for call in layer_calls(program.step.launched):
        assert {owners[i] for i in call.launches} == {call.launches[0]}
    alone = [i for i, k in enumerate(kernels) if not (isinstance(k, MeasuredKernel) and k.us == 0)]
    assert all(owners[i] == i for i in alone)


def test_another_device_rescales_all_launches_of_a_layer(program: Program) -> None:
    found = retime([program], "p100-pcie-16gb")
    assert found.predicted_share > 0.999
    assert found.bandwidth_share < 0.001


def test_twice_the_batch_takes_convolutions_about_twice_as_long(program: Program) -> None:
    doubled = np.array(with_batch(program, 2.0).durations_us)
    kernels = [x.kernel for x in program.step.graph.launches()]
    owners = stands_for(program.step.launched, kernels)
    of_layers = [
        i for i, o in enumerate(owners) if isinstance(kernels[o], (Convolution, BatchNorm, Pooling, Softmax))
    ]
    ratio = doubled[of_layers].sum() / np.array(program.durations_us)[of_layers].sum()
    assert 1.8 < ratio <= 2.0


def launched(names: list[str], leaf: LeafCall, piece: int = 0) -> list[Launched]:
    call = RuntimeCall("cudaLaunchKernel", 0.0, 1.0, 1, 1, blocks=False, leaf=leaf)
    return [Launched(call, Kernel(name, 0.0, 5.0, 7, 1), piece, leaf.name) for name in names]


def gradients(names: list[str]) -> dict[GemmLayout | None, int]:
    shapes = ((8, 32, 14, 14), (8, 16, 14, 14), (32, 16, 3, 3), ())
    leaf = LeafCall("aten::convolution_backward", shapes, ("float", "float", "float", ""))
    return {c.layout: len(c.launches) for c in layer_calls(launched(names, leaf))}


@pytest.mark.parametrize(
    ("names", "input_launches", "weight_launches"),
    [
        (["winogradForwardData", "volta_sgemm_64x64_nt", "winogradWgradData", "volta_sgemm_64x64_nt"], 2, 2),
        (["dgrad_engine", "Memset (Device)", "cudnn_train_volta_splitK"], 2, 1),
        (["volta_sgemm_64x64_nn", "volta_sgemm_64x64_tn", "cudnn::cnn::reduce_wgrad_nchw_helper"], 1, 2),
        (["volta_sgemm_64x64_nn", "volta_sgemm_64x64_nt"], 1, 1),
        (["Memset (Device)", "wgrad_alg0_engine"], 0, 2),
        (["something else"], 0, 0),
    ],
)
def test_one_ops_gradients_are_told_apart(
    names: list[str], input_launches: int, weight_launches: int
) -> None:
    expected = {GemmLayout.GRAD_INPUT: input_launches, GemmLayout.GRAD_WEIGHT: weight_launches}
    assert gradients(names) == {k: n for k, n in expected.items() if n}


@settings(max_examples=50, deadline=None)
@given(
    extent=st.tuples(st.integers(7, 60), st.integers(7, 60)),
    taps=st.tuples(st.sampled_from([1, 3, 5, 7]), st.sampled_from([1, 3, 5, 7])),
    stride=st.integers(1, 2),
    same=st.booleans(),
)
def test_stride_and_padding_give_the_recorded_extents(
    extent: tuple[int, int], taps: tuple[int, int], stride: int, same: bool
) -> None:
    padding = [t // 2 if same else 0 for t in taps]
    made = [(e + 2 * p - t) // stride + 1 for e, p, t in zip(extent, padding, taps, strict=True)]
    shapes = ((4, 6, *made), (4, 8, *extent), (6, 8, *taps), ())
    leaf = LeafCall("aten::convolution_backward", shapes, ("float", "float", "float", ""))
    found = layers_of(launched(["dgrad_engine", "wgrad_alg0"], leaf))
    for kernel in found.values():
        assert isinstance(kernel, Convolution)
        sizes = {n: int(v) for n, v in dims(kernel).items()}  # type: ignore[arg-type]
        for axis, result in zip(("height", "width"), made, strict=True):
            free = sizes[axis] + 2 * sizes[f"padding_{axis}"] - sizes[f"kernel_{axis}"]
            assert free // sizes["stride"] + 1 == result


def test_layers_without_shapes_stay_as_measured() -> None:
    for name in ("aten::cudnn_convolution", "aten::cudnn_batch_norm", "aten::convolution_backward"):
        assert layers_of(launched(["wgrad_kernel", "other"], LeafCall(name, (), ()))) == {}


@pytest.mark.parametrize(
    ("name", "shapes", "expected"),
    [
        ("aten::native_layer_norm", ((64, 128), (), (128,)), LayerNorm(64, 128, 4)),
        ("aten::native_layer_norm_backward", ((64, 128), (64, 128)), LayerNorm(64, 128, 4, backward=True)),
        ("aten::_softmax_backward_data", ((2, 8, 16), (2, 8, 16)), Softmax(16, 16, 4, backward=True)),
        ("aten::native_dropout", ((64, 128),), Dropout(64 * 128, 4)),
        (
            "aten::avg_pool2d_backward",
            ((2, 3, 4, 4), (2, 3, 8, 8)),
            Pooling("avg", 384, 96, 4, backward=True),
        ),
        ("aten::cudnn_batch_norm", ((2, 3, 4, 4), (3,)), BatchNorm(32, 3, 4)),
    ],
)
def test_sizes_of_layers(name: str, shapes: tuple[tuple[int, ...], ...], expected: object) -> None:
    leaf = LeafCall(name, shapes, ("float",) * len(shapes))
    found = layers_of(launched(["first", "second"], leaf))
    assert type(found[0]) is type(expected)
    assert dims(found[0]) == dims(expected)  # type: ignore[arg-type]
    assert getattr(found[0], "backward", None) == getattr(expected, "backward", None)
    assert isinstance(found[1], MeasuredKernel)
    assert found[1].us == 0.0


def test_two_calls_of_one_layer_in_a_row_are_two(program: Program) -> None:
    leaf = LeafCall("aten::cudnn_batch_norm", ((2, 3, 4, 4), (3,)), ("float", "float"))
    twice = [*launched(["a"], leaf, piece=1), *launched(["a"], leaf, piece=2)]
    assert [c.launches for c in layer_calls(twice)] == [(0,), (1,)]
    other = replace(twice[0], call=replace(twice[0].call, leaf=None))
    assert layer_calls([other]) == []


def test_a_backward_lookup_stands_for_its_second_kernel() -> None:
    leaf = LeafCall("aten::mm", (), ())
    pair = launched(["cta", "warp"], leaf)
    zeros = np.zeros(1)
    first = EmbeddingBackward(zeros, zeros, zeros, zeros, zeros, zeros)
    assert stands_for(pair, [first, MeasuredKernel("warp", 0.0)]) == [0, 0]
    assert stands_for(pair, [first, MeasuredKernel("warp", 3.0)]) == [0, 1]
