"""One design's prediction beside its measurement: memory, the device's busy time, time by class of op."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from perfcore.graph import kernels as k
from perfcore.graph.calls import MODULE as COMMUNICATION
from perfcore.graph.groups import MODULE as EMBEDDING
from perfcore.graph.ops import Op, WorkloadGraph
from perfcore.measure.op_classes import OpClass
from perfcore.predictor import Prediction
from perfcore.steps import Opcode
from perfcore.units import BYTES_PER_GIB, US_PER_MS

OPTIMIZER = "optimizer"


@dataclass(frozen=True, slots=True)
class Compared:
    """Two numbers that should agree; `None` where one is not known."""

    predicted: float | None
    measured: float | None


def compared_classes(
    prediction: Prediction, measured_us: dict[str, float], *, on_cpu: bool
) -> dict[str, Compared]:
    """Time in ms of rank 0 by class of op, the largest first; nothing where nothing was measured.

    Args:
        prediction: of the design that was measured.
        measured_us: by `OpClass`.
        on_cpu: the host runs the kernels, so that an op's host time counts to its class.
    """
    if not measured_us:
        return {}
    predicted = predicted_classes_us(prediction, with_host=on_cpu)
    names = sorted(
        predicted.keys() | measured_us.keys(),
        key=lambda n: -max(predicted.get(n, 0.0), measured_us.get(n, 0.0)),
    )
    pairs = {n: (predicted.get(n, 0.0), measured_us.get(n, 0.0)) for n in names}
    return {n: Compared(p / US_PER_MS, m / US_PER_MS) for n, (p, m) in pairs.items() if p or m}


def predicted_classes_us(prediction: Prediction, *, with_host: bool) -> dict[str, float]:
    """Kernel time of rank 0 by class of op, waiting of collectives included; with the host time of the ops on request."""
    graph, timeline = prediction.graph, prediction.timeline
    rank = prediction.ranks.index(0) if 0 in prediction.ranks else 0
    launch_us = np.nan_to_num(timeline.end_us[0, :, rank] - timeline.start_us[0, :, rank]).tolist()
    sums: dict[str, float] = {}
    launch = 0
    host_us = _host_us(prediction, rank) if with_host else {}
    for index, op in _numbered(graph):
        classes = [class_of_launch(op, x.kernel) for x in op.launches]
        for name in classes:
            sums[name.value] = sums.get(name.value, 0.0) + launch_us[launch]
            launch += 1
        own = classes[0] if classes else _class_of_op(op)
        sums[own.value] = sums.get(own.value, 0.0) + host_us.get(index, 0.0)
    return sums


def class_of_launch(op: Op, kernel: k.Kernel) -> OpClass:
    """The class of what an op launches."""
    if isinstance(kernel, k.Collective):
        return OpClass.COMMUNICATION
    if op.phase == OPTIMIZER or op.module == EMBEDDING or op.module == COMMUNICATION:
        return _class_of_op(op)
    return OpClass.PRODUCTS if isinstance(kernel, k.Gemm) else OpClass.REST


def largest_gap(classes: dict[str, Compared]) -> str:
    """The class whose times differ most, in words; empty where none is known."""
    gaps = {n: abs((c.predicted or 0.0) - (c.measured or 0.0)) for n, c in classes.items()}
    if not gaps:
        return ""
    name = max(gaps, key=gaps.__getitem__)
    pair = classes[name]
    return f"{name} predicted {pair.predicted:.2f} ms, measured {pair.measured:.2f} ms"


def tensors_gib(prediction: Prediction) -> float:
    """What the fullest rank's tensors need, without what the framework holds for itself."""
    memory = prediction.memory
    return float((memory.total - memory.framework).max()) / BYTES_PER_GIB


def _class_of_op(op: Op) -> OpClass:
    if op.phase == OPTIMIZER:
        return OpClass.UPDATES if op.module == EMBEDDING else OpClass.DENSE_OPTIMIZER
    if op.module == EMBEDDING and op.phase in ("forward", "backward"):
        return OpClass.LOOKUPS if op.phase == "forward" else OpClass.UPDATES
    return OpClass.REST


def _host_us(prediction: Prediction, rank: int) -> dict[int, float]:
    """Host time by op index."""
    steps = prediction.timeline.steps
    sums: dict[int, float] = {}
    for row in steps.table[steps.table["opcode"] == int(Opcode.HOST)]:
        if row["mask"] < 0 or steps.masks[row["mask"], 0, rank]:
            sums[int(row["op"])] = sums.get(int(row["op"]), 0.0) + float(row["us"])
    return sums


def _numbered(graph: WorkloadGraph) -> Iterator[tuple[int, Op]]:
    """Ops with their index among the steps, where a CUDA graph's launch is an op of its own."""
    index = 0
    for number, region in enumerate(graph.regions):
        index += number == graph.captured_from
        for op in region.ops:
            yield index, op
            index += 1
