"""Measured kernels of layers: two traces of ResNet-50 training at batch 32, of two V100 machines and library versions.

One of them recorded shapes; the other ran the same network at the same batch, so its i-th call of a kind has the shapes
of the other's. A third trace, ResNet-18 at batch 128 on an RTX 2080 Ti, is never fitted on; an execution trace of the same
process holds its shapes.
"""

from __future__ import annotations

import gzip
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfcore.errors import ProfileError
from perfcore.graph.kernels import BatchNorm, DType, GemmLayout, Kernel
from perfcore.trace.kineto import read_kineto
from perfcore.trace.layers import LayerCall, convolution_of, layer_calls, layers_of
from perfcore.trace.link import Launched
from perfcore.trace.records import Interval
from perfcore.trace.workload import TraceGraphs

Array = NDArray[np.float64]

WITH_SHAPES = Path("kineto_resnet50_V100_workers0") / "kineto.json.gz"
WITHOUT_SHAPES = Path("hta_resnet_ddp_V100_ns") / "kineto.json.gz"
LEFT_OUT = Path("param_resnet_2080Ti")
FEWEST_STEPS = 3
FORWARD_OP, NORM_OP = "aten::cudnn_convolution", "aten::cudnn_batch_norm"
FP32_BYTES = 4.0
_WARM_UP = 3  # steps of the left-out trace, in which cuDNN searches


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """Layers' kernels of one trace and how long each took, means over steps."""

    kernels: tuple[Kernel, ...]
    us: Array

    def of(self, kind: type) -> Samples:
        """Those of one kind."""
        at = [i for i, k in enumerate(self.kernels) if isinstance(k, kind)]
        return Samples(tuple(self.kernels[i] for i in at), self.us[at])

    def take(self, at: NDArray[np.bool_]) -> Samples:
        """Those at these places."""
        return Samples(tuple(k for k, chosen in zip(self.kernels, at, strict=True) if chosen), self.us[at])


def layer_samples(traces: Path) -> tuple[Samples, Samples]:
    """The samples of both traces, the same kernels in the same order.

    Raises:
        ProfileError: a file is missing, or the traces are not of one network.
    """
    for file in (WITH_SHAPES, WITHOUT_SHAPES):
        if not (traces / file).is_file():
            raise ProfileError(f"{traces / file}: a fit needs this trace, but it is missing.")
    return matched_samples(traces / WITH_SHAPES, traces / WITHOUT_SHAPES)


def matched_samples(with_shapes: Path, without_shapes: Path) -> tuple[Samples, Samples]:
    """As `layer_samples`, of these files.

    Raises:
        ProfileError: the traces are not of one network, or one has too few steps.
    """
    kernels, first = _timed(with_shapes)
    _, second = _timed(without_shapes)
    counts = {k: (len(v), len(second.get(k, ()))) for k, v in first.items()}
    if any(a != b for a, b in counts.values()):
        raise ProfileError(f"Both traces must hold the same number of calls of each layer, but got {counts}.")
    found, ours, theirs = [], [], []
    for kind, times in first.items():
        for kernel, a, b in zip(kernels[kind], times, second[kind], strict=True):
            if kernel is not None:
                found.append(kernel)
                ours.append(a)
                theirs.append(b)
    return Samples(tuple(found), np.array(ours)), Samples(tuple(found), np.array(theirs))


def left_out_samples(traces: Path) -> Samples:
    """Convolutions and batch normalisations of a device and a network that no fit sees; medians over its steps.

    Raises:
        ProfileError: a file is missing, or the two are not of one network.
    """
    files = [traces / LEFT_OUT / name for name in ("et.json.gz", "kineto.json.gz")]
    for file in files:
        if not file.is_file():
            raise ProfileError(f"{file}: a fit needs this trace, but it is missing.")
    recorded = recorded_layers(json.loads(gzip.decompress(files[0].read_bytes()))["nodes"])
    trace = read_kineto(files[1])
    graphs = TraceGraphs(trace)
    times: dict[str, list[list[float]]] = defaultdict(list)
    for step in trace.steps[_WARM_UP:]:
        own = _by_kind(graphs.step(step).launched)
        if all(len(own[kind]) == len(kernels) for kind, kernels in recorded.items()):
            for kind in recorded:
                times[kind].append(own[kind])
    if not times:
        raise ProfileError(f"{files[1]}: no step holds the calls of {files[0].name}.")
    us = [np.median(times[kind], axis=0) for kind in recorded]
    return Samples(tuple(k for kernels in recorded.values() for k in kernels), np.concatenate(us))


def recorded_layers(nodes: Sequence[Mapping[str, Any]]) -> dict[str, list[Kernel]]:
    """By kind of call, in the order in which they run: the layers of an execution trace's nodes."""
    found: dict[str, list[Kernel]] = defaultdict(list)
    convolutions = []
    for node in nodes:
        shapes = [tuple(s) for s in node["input_shapes"]]
        if node["name"] == FORWARD_OP:
            convolutions.append((shapes[0], shapes[1], tuple(node["output_shapes"][0])))
        elif node["name"] == NORM_OP:
            batch, channels, *extent = shapes[0]
            sizes = (float(batch * math.prod(extent)), float(channels), FP32_BYTES)
            found[NORM_OP].append(BatchNorm(*sizes))
            found[f"{NORM_OP}_backward"].insert(0, BatchNorm(*sizes, backward=True))
    for number, sides in enumerate(convolutions):
        for layout in GemmLayout:
            kernel = convolution_of(*sides, DType.FP32, layout)
            if kernel is None or (layout is GemmLayout.GRAD_INPUT and number == 0):
                continue  # the first one's input needs no gradient
            found[str(layout)].insert(number if layout is GemmLayout.FORWARD else 0, kernel)
    return dict(found)


def _timed(path: Path) -> tuple[dict[str, list[Kernel | None]], dict[str, list[float]]]:
    """By kind of call, in order: kernels where shapes tell them, and mean durations over the inner steps."""
    trace = read_kineto(path)
    if len(trace.steps) < FEWEST_STEPS:
        raise ProfileError(f"{path}: `steps >= {FEWEST_STEPS}` must hold, but got {len(trace.steps)}.")
    graphs = TraceGraphs(trace)
    kernels: dict[str, list[Kernel | None]] = {}
    times: list[dict[str, list[float]]] = []
    for step in _inner(trace.steps):
        launched = graphs.step(step).launched
        times.append(_by_kind(launched))
        kernels = _kernels(launched)
    means = {kind: np.mean([t[kind] for t in times], axis=0).tolist() for kind in times[0]}
    return kernels, means


def _by_kind(launched: Sequence[Launched]) -> dict[str, list[float]]:
    """By kind of call, in order: what its launches took together."""
    own: dict[str, list[float]] = defaultdict(list)
    for call in layer_calls(launched):
        own[_kind(call)].append(sum(launched[i].kernel.duration_us for i in call.launches))
    return own


def _kernels(launched: Sequence[Launched]) -> dict[str, list[Kernel | None]]:
    """By kind of call, in order: kernels where shapes tell them."""
    found = layers_of(launched)
    named: dict[str, list[Kernel | None]] = defaultdict(list)
    for call in layer_calls(launched):
        named[_kind(call)].append(found.get(call.launches[0]))
    return named


def _inner(steps: Sequence[Interval]) -> Sequence[Interval]:
    """Neither the first step, which may warm up, nor the last, whose kernels may be cut off."""
    return steps[1:-1]


def _kind(call: LayerCall) -> str:
    if call.layout is not None:
        return str(call.layout)
    return call.name
