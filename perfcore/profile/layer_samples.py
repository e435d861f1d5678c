"""Measured kernels of layers: two traces of ResNet-50 training at batch 32, of two V100 machines and library versions.

One of them recorded shapes; the other ran the same network at the same batch, so its i-th call of a kind has the shapes
of the other's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from perfcore.errors import ProfileError
from perfcore.graph.kernels import Kernel
from perfcore.trace.kineto import read_kineto
from perfcore.trace.layers import LayerCall, layer_calls, layers_of
from perfcore.trace.records import Interval
from perfcore.trace.workload import TraceGraphs

Array = NDArray[np.float64]

WITH_SHAPES = Path("kineto_resnet50_V100_workers0") / "kineto.json.gz"
WITHOUT_SHAPES = Path("hta_resnet_ddp_V100_ns") / "kineto.json.gz"
FEWEST_STEPS = 3


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
        found = layers_of(launched)
        own: dict[str, list[float]] = defaultdict(list)
        named: dict[str, list[Kernel | None]] = defaultdict(list)
        for call in layer_calls(launched):
            kind = _kind(call)
            own[kind].append(sum(launched[i].kernel.duration_us for i in call.launches))
            named[kind].append(found.get(call.launches[0]))
        times.append(own)
        kernels = named
    means = {kind: np.mean([t[kind] for t in times], axis=0).tolist() for kind in times[0]}
    return kernels, means


def _inner(steps: Sequence[Interval]) -> Sequence[Interval]:
    """Neither the first step, which may warm up, nor the last, whose kernels may be cut off."""
    return steps[1:-1]


def _kind(call: LayerCall) -> str:
    if call.layout is not None:
        return str(call.layout)
    return call.name
