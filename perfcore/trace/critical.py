"""The critical path of a measured step: from its end back to what decided each moment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perfcore.steps import HostKind, Steps
from perfcore.timeline import Edge, lap_back
from perfcore.walk import deciding_clocks

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PathPart:
    """Consecutive edges of one op and reason.

    Attributes:
        op: name of it.
        rank: whose clock advances.
        what: `kernel`, or the overhead's name.
        reason: why it could not be earlier.
        us: how long it takes.
    """

    op: str
    rank: int
    what: str
    reason: str
    us: float


def critical_path(steps: Steps, seeds_us: Array, *, rank: int = 0) -> tuple[PathPart, ...]:
    """What decided when a rank's host ended the step, in order of time."""
    sources = deciding_clocks(steps.table, steps.durations_us, steps.masks, 0, seeds_us)
    _, edges = lap_back(steps, sources, steps.clocks * rank)
    parts: list[PathPart] = []
    for edge in edges.one_by_one():
        part = _part(steps, edge)
        last = parts[-1] if parts else None
        if last and (last.op, last.rank, last.what, last.reason) == (
            part.op,
            part.rank,
            part.what,
            part.reason,
        ):
            parts[-1] = PathPart(part.op, part.rank, part.what, part.reason, last.us + part.us)
        else:
            parts.append(part)
    return tuple(parts)


def by_reason_us(parts: Sequence[PathPart]) -> dict[str, float]:
    """Time of the path by reason."""
    sums: dict[str, float] = {}
    for part in parts:
        sums[part.reason] = sums.get(part.reason, 0.0) + part.us
    return sums


def _part(steps: Steps, edge: Edge) -> PathPart:
    if edge.launch >= 0:
        us, what = float(steps.durations_us[edge.launch, 0, edge.rank]), "kernel"
    else:
        us = edge.host_us
        what = "wait" if edge.kind is HostKind.NONE else edge.kind.name
    return PathPart(steps.op_names[edge.op], edge.rank, what, edge.reason.value, us)
