"""Host time and in-loop slow-downs of a CPU, from training loops measured without a profiler.

A CPU's iteration is the sum of its kernels and of what lies around them. In a trace the two cannot be told
apart, so both are fitted on whole iterations: a factor on each group of kernels (caches are colder and memory
is fresher inside a loop than in a micro-benchmark), a time per op by phase, a time per further launch of an
optimizer's step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perfcore.cost.measured import MeasuredModel
from perfcore.cost.work import work_of
from perfcore.errors import ProfileError
from perfcore.graph.dlrm import graph_of
from perfcore.graph.kernels import resolve
from perfcore.graph.ops import Op, WorkloadGraph
from perfcore.measure.record import DesignSample
from perfcore.overheads import OpOverheads, OverheadTable
from perfcore.profile.fit_kernels import GROUPS, group_of, nonnegative_least_squares

Array = NDArray[np.float64]

OPTIMIZER = "optimizer"
# Draws each factor on kernels to 1 as so many iterations would; the host's times are hardly drawn to 0.
FACTOR_PRIOR, HOST_PRIOR = 0.3, 1e-6
FEWEST = 8


@dataclass(frozen=True, slots=True, eq=False)
class LoopFit:
    """What training loops say.

    Attributes:
        overheads: of a host that runs the kernels itself.
        scales: by group of kernels, how much longer they take inside a loop.
        n: loops.
        gmae_pct, mape_pct: of each loop predicted from the others.
        log_error_90: nine in ten loops lie within a factor `exp` of it of that prediction.
    """

    overheads: OverheadTable
    scales: dict[str, float]
    n: int
    gmae_pct: float
    mape_pct: float
    log_error_90: float


@dataclass(frozen=True, slots=True, eq=False)
class LoopWork:
    """What one design's iteration consists of.

    Attributes:
        kernels_us: `(3,)` by group.
        ops: by phase; ops that continue another are not counted.
        by_name: `(name, phase)` of those ops to their number.
        more_launches: of optimizer steps, beyond each one's first.
    """

    kernels_us: Array
    ops: dict[str, int]
    by_name: dict[tuple[str, str], int]
    more_launches: int


def fit_loops(loops: Sequence[DesignSample], model: MeasuredModel) -> LoopFit:
    """Overheads of a host that runs the kernels itself, and the kernels' slow-downs in a loop.

    Raises:
        ProfileError: fewer than eight loops were measured.
    """
    ran = [(s.design, s.iteration.median_us) for s in loops if s.iteration is not None]
    if len(ran) < FEWEST:
        raise ProfileError(
            f"Host overheads need at least {FEWEST} measured training loops, but got {len(ran)}.",
            hint="Measure with a larger --budget.",
        )
    works = [loop_work(graph_of(design), model) for design, _ in ran]
    measured = np.array([us for _, us in ran])
    phases = sorted({phase for work in works for phase in work.ops})
    parts = np.array([[*w.kernels_us, *(w.ops.get(p, 0) for p in phases), w.more_launches] for w in works])
    factors = _factors(parts, measured)
    left_out = [
        parts[i] @ _factors(np.delete(parts, i, axis=0), np.delete(measured, i)) for i in range(len(ran))
    ]
    errors = np.abs(np.array(left_out) / measured - 1)
    per_op = dict(zip(phases, factors[len(GROUPS) : -1].tolist(), strict=True))
    return LoopFit(
        _table(works, per_op, per_launch_us=float(factors[-1])),
        dict(zip(GROUPS, factors.tolist(), strict=False)),
        len(ran),
        float(100 * np.exp(np.mean(np.log(errors + 4e-4)))),
        float(100 * errors.mean()),
        float(np.quantile(np.abs(np.log(np.maximum(left_out, 1e-9) / measured)), 0.9)),
    )


def loop_work(graph: WorkloadGraph, model: MeasuredModel) -> LoopWork:
    """What an iteration of one design on one host consists of."""
    sums, more = dict.fromkeys(GROUPS, 0.0), 0
    ops: dict[str, int] = {}
    names: dict[tuple[str, str], int] = {}
    for op in graph.ops():
        if not np.any(op.present):
            continue
        kernels = _kernels(op, model)
        for kind, us in kernels:
            sums[group_of(kind)] += us
        if op.phase == OPTIMIZER:
            more += len(kernels) if op.continues else max(0, len(kernels) - 1)
        if not op.continues:
            ops[op.phase] = ops.get(op.phase, 0) + 1
            names[op.name, op.phase] = names.get((op.name, op.phase), 0) + 1
    return LoopWork(np.array([sums[g] for g in GROUPS]), ops, names, more)


def _kernels(op: Op, model: MeasuredModel) -> list[tuple[str, float]]:
    """Kind and duration of each kernel that a host runs of an op."""
    kernels = [resolve(x.kernel) for x in op.launches if np.any(x.present) and not x.cuda_only]
    priced = model.predict_us(kernels)
    return [(work_of(kernel).kind, float(us.sum())) for kernel, us in zip(kernels, priced, strict=True)]


def _factors(parts: Array, measured: Array) -> Array:
    """One factor a column, so that the parts of each row add up to what was measured; relative errors count."""
    columns = parts.shape[1]
    weights = np.full(columns, HOST_PRIOR)
    weights[: len(GROUPS)] = FACTOR_PRIOR
    table = np.vstack([parts / measured[:, None], np.diag(weights)])
    target = np.concatenate(
        [np.ones(len(measured)), np.where(np.arange(columns) < len(GROUPS), weights, 0.0)]
    )
    return nonnegative_least_squares(table, target)


def _table(works: Sequence[LoopWork], per_op: dict[str, float], *, per_launch_us: float) -> OverheadTable:
    """An op of several phases takes the mean over its uses."""
    uses: dict[str, dict[str, int]] = {}
    for work in works:
        for (name, phase), count in work.by_name.items():
            counts = uses.setdefault(name, {})
            counts[phase] = counts.get(phase, 0) + count
    by_op = {name: _overheads(counts, per_op, per_launch_us) for name, counts in sorted(uses.items())}
    totals = {p: sum(counts.get(p, 0) for counts in uses.values()) for p in per_op}
    return OverheadTable(
        by_op=by_op,
        default=_overheads(totals, per_op, 0.0),
        launch_latency_us=0.0,
        kernel_gap_us=0.0,
        graph_gap_us=0.0,
        graph_launch_us=0.0,
        queue_depth=1,
        kernels_block_host=True,
    )


def _overheads(counts: dict[str, int], per_op: dict[str, float], per_launch_us: float) -> OpOverheads:
    total = sum(counts.values())
    us = round(sum(per_op[p] * n for p, n in counts.items()) / max(total, 1), 4)
    more = round(per_launch_us, 4) if counts.get(OPTIMIZER) else 0.0
    return OpOverheads(0.0, us, 0.0, 0.0, more, us, count=total)
