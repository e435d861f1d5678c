"""Where a predicted iteration's time goes: costs by op, and the critical path in a few pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from perfcore.graph.kernels import Collective, Kernel, Memcpy
from perfcore.graph.ops import Op, WorkloadGraph
from perfcore.steps import GRAPH_LAUNCH
from perfcore.timeline import CriticalPath, Timeline

Array: TypeAlias = NDArray[np.float64]

RESOURCES = ("host", "compute", "communication", "copy")


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


@dataclass(frozen=True, slots=True, eq=False)
class EdgeTimes:
    """Edges of the critical path as columns `(e,)`, in order of time.

    Attributes:
        op: index into `Steps.op_names`.
        resource: index into `RESOURCES` of what takes the time.
        us: how long it takes.
    """

    op: NDArray[np.int64]
    resource: NDArray[np.int64]
    us: Array


def edge_times(timeline: Timeline, path: CriticalPath, kernels: Sequence[Kernel]) -> EdgeTimes:
    """Who takes how long on the critical path; `kernels` by launch."""
    launch = path.column("launch")
    resources = np.array([*map(_resource, kernels), 0], dtype=np.int64)  # -1: the host
    durations_us = timeline.steps.durations_us[launch, 0, path.column("rank")] if kernels else 0.0
    us = np.where(launch >= 0, durations_us, path.column("host_us"))
    return EdgeTimes(path.column("op"), resources[launch], us)


def path_pieces(graph: WorkloadGraph, edges: EdgeTimes) -> tuple[PathPiece, ...]:
    """The critical path in order of time, cut where its resource or its part of the iteration changes."""
    names, parts = _names_and_parts(graph)
    codes = {part: code for code, part in enumerate(dict.fromkeys(parts))}
    part = np.array([codes[p] for p in parts])[edges.op]
    cuts = np.flatnonzero((np.diff(part) != 0) | (np.diff(edges.resource) != 0)) + 1
    bounds = [0, *cuts.tolist(), len(part)]
    op, resource, us = edges.op.tolist(), edges.resource.tolist(), edges.us.tolist()
    return tuple(
        PathPiece(
            RESOURCES[resource[start]],
            parts[op[start]],
            tuple(dict.fromkeys([names[o] for o in dict.fromkeys(op[start:end])])),
            sum(us[start:end]),
        )
        for start, end in pairwise(bounds)
        if end > start
    )


def _names_and_parts(graph: WorkloadGraph) -> tuple[list[str], list[str]]:
    """By index in `Steps.op_names`, the last of which may be a CUDA graph's launch."""
    ops = dict(_numbered(graph))
    by_index = [ops.get(i) for i in range(max(ops, default=0) + 2)]
    names = [GRAPH_LAUNCH if op is None else op.name for op in by_index]
    return names, [GRAPH_LAUNCH if op is None else _part(op) for op in by_index]


def _part(op: Op) -> str:
    return op.module if op.module == op.phase else f"{op.module} {op.phase}"


def bound_shares(edges: EdgeTimes) -> dict[str, float]:
    """Share of the critical path's work by host, compute, communication and copy."""
    sums = np.bincount(edges.resource, edges.us, minlength=len(RESOURCES)).tolist()
    total = max(sum(sums), 1e-12)
    return {name: us / total for name, us in zip(RESOURCES, sums, strict=True)}


def _resource(kernel: Kernel) -> int:
    if isinstance(kernel, Collective):
        return 2
    return 3 if isinstance(kernel, Memcpy) else 1


def critical_us_by_op(edges: EdgeTimes, iterations: int, *, ops: int) -> list[float]:
    """Time on the critical path by index in `Steps.op_names`, of one iteration."""
    by_op: list[float] = np.bincount(edges.op, edges.us / iterations, minlength=ops).tolist()
    return by_op


def op_costs(graph: WorkloadGraph, kernel_us: Array, critical_us: Sequence[float]) -> tuple[OpCost, ...]:
    """Costs by name, module and phase, by falling share of the critical path, then of device time."""
    groups: dict[tuple[str, str, str], list[float]] = {}
    launch, by_launch_us = 0, kernel_us.tolist()
    numbered = _numbered(graph)
    if graph.captured_from is not None:
        of_graph = sum(critical_us) - sum(critical_us[index] for index, _ in numbered)
        groups[GRAPH_LAUNCH, "cuda_graph", "launch"] = [1, 0, 0.0, of_graph]
    for index, op in numbered:
        if op.present is not True and not np.any(op.present):
            launch += len(op.launches)
            continue
        sums = groups.setdefault((op.name, op.module, op.phase), [0, 0, 0.0, 0.0])
        sums[0] += 1
        sums[1] += len(op.launches)
        sums[2] += sum(by_launch_us[launch : launch + len(op.launches)])
        sums[3] += critical_us[index]
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
