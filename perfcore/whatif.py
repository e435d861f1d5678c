"""What would change if: the same iteration re-scheduled with faster kernels or a faster host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from perfcore.graph.ops import WorkloadGraph
from perfcore.overheads import OpOverheads, OverheadTable
from perfcore.schedule import compile_steps, schedule
from perfcore.steps import Steps

Array = NDArray[np.float64]

HOST_FIELDS = ("t1_us", "t2_us", "t3_us", "t4_us", "t5_us", "alone_us")


@dataclass(frozen=True, slots=True)
class WhatIf:
    """One change and its effect.

    Attributes:
        change: in words.
        iteration_time_us: after it.
        saved_share: share of the iteration time that it saves.
    """

    change: str
    iteration_time_us: float
    saved_share: float


def what_if(
    graph: WorkloadGraph, steps: Steps, overheads: OverheadTable, *, factor: float = 2.0
) -> tuple[WhatIf, ...]:
    """Every kernel class and every host overhead made `factor` times faster, one at a time, best first.

    Exact: each change is scheduled anew, so a saving that another stream hides counts for nothing.
    """
    before_us = float(schedule(steps).iteration_time_us[0])
    launches = list(graph.launches())
    durations = list(steps.durations_us)
    changes: list[tuple[str, float]] = []
    for name in sorted({type(x.kernel).__name__ for x in launches}):
        faster = [
            us / factor if type(x.kernel).__name__ == name else us
            for x, us in zip(launches, durations, strict=True)
        ]
        changes.append((f"{name} kernels / {factor:g}", _spacing(graph, faster, overheads)))
    for field in HOST_FIELDS:
        label = "launch-less ops" if field == "alone_us" else field.removesuffix("_us").upper()
        table = scaled_overheads(overheads, **{field: 1.0 / factor})
        changes.append((f"{label} / {factor:g}", _spacing(graph, durations, table)))
    host = scaled_overheads(overheads, **dict.fromkeys(HOST_FIELDS, 1.0 / factor))
    changes.append((f"whole host / {factor:g}", _spacing(graph, durations, host)))
    effects = [WhatIf(change, us, 1.0 - us / before_us) for change, us in changes]
    return tuple(sorted(effects, key=lambda w: w.iteration_time_us))


def scaled_overheads(table: OverheadTable, **factors: float) -> OverheadTable:
    """The table with named fields of every op multiplied."""

    def scaled(op: OpOverheads) -> OpOverheads:
        return replace(op, **{field: getattr(op, field) * by for field, by in factors.items()})

    return replace(table, by_op={k: scaled(v) for k, v in table.by_op.items()}, default=scaled(table.default))


def _spacing(graph: WorkloadGraph, durations: Sequence[Array], overheads: OverheadTable) -> float:
    return float(schedule(compile_steps(graph, durations, overheads)).iteration_time_us[0])
