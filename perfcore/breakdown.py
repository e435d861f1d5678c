"""Where a predicted iteration's time goes: costs by op, and the critical path in a few pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from perfcore.graph.kernels import Collective, Kernel, Memcpy
from perfcore.graph.ops import Op, WorkloadGraph
from perfcore.steps import GRAPH_LAUNCH
from perfcore.timeline import CriticalPath, Timeline

Array: TypeAlias = NDArray[np.float64]
EdgeTime: TypeAlias = tuple[int, int, float]  # op, launch (-1: host), µs


@dataclass(frozen=True, slots=True)
class OpCost:
    """What ops of one name, module and phase cost together in one iteration.

    Attributes:
        name: as the profiler prints it.
        module: part of the model.
        phase: part of the iteration.
        count: ops.
        kernels: launches.
        device_us: summed kernel time.
        critical_us: time on the critical path.
    """

    name: str
    module: str
    phase: str
    count: int
    kernels: int
    device_us: float
    critical_us: float


@dataclass(frozen=True, slots=True)
class PathPiece:
    """Consecutive steps of the critical path that one resource takes for one part of the iteration.

    Attributes:
        resource: `host`, `compute`, `communication` or `copy`.
        part: module and phase.
        ops: names of the ops, in order, without repetition.
        us: time on the path.
    """

    resource: str
    part: str
    ops: tuple[str, ...]
    us: float


def path_pieces(
    graph: WorkloadGraph, edge_us: Sequence[EdgeTime], kernels: Sequence[Kernel]
) -> tuple[PathPiece, ...]:
    """The critical path in order of time, cut where its resource or its part of the iteration changes."""
    by_index = dict(_numbered(graph))
    steps = [
        ("host" if launch < 0 else _resource(kernels[launch]), by_index.get(op), us)
        for op, launch, us in edge_us
    ]
    pieces = []
    for (resource, part), group in groupby(steps, key=lambda step: (step[0], _part(step[1]))):
        members = list(group)
        names = tuple(dict.fromkeys(GRAPH_LAUNCH if op is None else op.name for _, op, _ in members))
        pieces.append(PathPiece(resource, part, names, sum(us for _, _, us in members)))
    return tuple(pieces)


def _part(op: Op | None) -> str:
    if op is None:
        return GRAPH_LAUNCH
    return op.module if op.module == op.phase else f"{op.module} {op.phase}"


def edge_times(timeline: Timeline, path: CriticalPath) -> list[EdgeTime]:
    """`(op, launch, µs)` of every edge of the critical path."""
    durations = timeline.steps.durations_us[:, 0].tolist()
    return [
        (e.op, e.launch, durations[e.launch][e.rank]) if e.launch >= 0 else (e.op, -1, e.host_us)
        for e in path.edges
    ]


def bound_shares(edge_us: Sequence[EdgeTime], kernels: Sequence[Kernel]) -> dict[str, float]:
    """Share of the critical path's work by host, compute, communication and copy."""
    sums = {"host": 0.0, "compute": 0.0, "communication": 0.0, "copy": 0.0}
    for _, launch, us in edge_us:
        sums["host" if launch < 0 else _resource(kernels[launch])] += us
    total = max(sum(sums.values()), 1e-12)
    return {name: us / total for name, us in sums.items()}


def _resource(kernel: Kernel) -> str:
    if isinstance(kernel, Collective):
        return "communication"
    return "copy" if isinstance(kernel, Memcpy) else "compute"


def critical_us_by_op(edge_us: Sequence[EdgeTime], iterations: int) -> dict[int, float]:
    """Time on the critical path by op index, of one iteration."""
    sums: dict[int, float] = {}
    for op, _, us in edge_us:
        sums[op] = sums.get(op, 0.0) + us / iterations
    return sums


def op_costs(graph: WorkloadGraph, kernel_us: Array, critical_us: dict[int, float]) -> tuple[OpCost, ...]:
    """Costs by name, module and phase, by falling share of the critical path, then of device time."""
    groups: dict[tuple[str, str, str], list[float]] = {}
    launch, by_launch_us = 0, kernel_us.tolist()
    numbered = _numbered(graph)
    if graph.captured_from is not None:
        of_graph = sum(critical_us.values()) - sum(critical_us.get(index, 0.0) for index, _ in numbered)
        groups[GRAPH_LAUNCH, "cuda_graph", "launch"] = [1, 0, 0.0, of_graph]
    for index, op in numbered:
        if op.present is not True and not np.any(op.present):
            launch += len(op.launches)
            continue
        sums = groups.setdefault((op.name, op.module, op.phase), [0, 0, 0.0, 0.0])
        sums[0] += 1
        sums[1] += len(op.launches)
        sums[2] += sum(by_launch_us[launch : launch + len(op.launches)])
        sums[3] += critical_us.get(index, 0.0)
        launch += len(op.launches)
    costs = [OpCost(*key, int(s[0]), int(s[1]), s[2], s[3]) for key, s in groups.items()]
    return tuple(sorted(costs, key=lambda c: (-c.critical_us, -c.device_us, c.name)))


def _numbered(graph: WorkloadGraph) -> list[tuple[int, Op]]:
    """Ops with their index in `Steps.op_names`, which counts a CUDA graph's launch as an op of its own."""
    out, index = [], 0
    for number, region in enumerate(graph.regions):
        if number == graph.captured_from:
            index += 1
        for op in region.ops:
            out.append((index, op))
            index += 1
    return out
