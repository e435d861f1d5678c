"""How far an iteration time may be off, from how far its kernels and its host are known to be.

Kernels of one kind err together (one formula, one fit), kinds err apart: each kind is scheduled anew at the ends of its
own interval, and what that does to the iteration time adds up in quadrature. A kind that hides behind another, or
behind the host, moves nothing and counts for nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from perfcore.cost.model import CostModel
from perfcore.graph.kernels import Gemm, Kernel
from perfcore.graph.ops import WorkloadGraph
from perfcore.overheads import OverheadTable
from perfcore.ranks import merged
from perfcore.schedule import compile_steps, schedule
from perfcore.whatif import HOST_FIELDS, scaled_overheads

Array = NDArray[np.float64]


def iteration_interval_us(
    graph: WorkloadGraph,
    kernels: Sequence[Kernel],
    durations_us: Sequence[Array],
    costs: CostModel,
    overheads: OverheadTable,
    *,
    host_log_error_90: float,
) -> tuple[float, float]:
    """The interval that holds nine in ten iteration times, in µs.

    Args:
        graph: of one design.
        kernels: its kernels in order.
        durations_us: of them, `(1, r)` each.
        costs: says how far off they are.
        overheads: of the host.
        host_log_error_90: nine in ten hosts' times lie within a factor `exp` of it.
    """
    factors = _factors(kernels, costs)
    varied = [np.atleast_2d(us) * factor[:, None] for us, factor in zip(durations_us, factors.T, strict=True)]
    spacing = _spacing_us(graph, varied, overheads)
    middle, ends = float(spacing[0]), spacing[1:].reshape(-1, 2)
    host = [_host_spacing(graph, durations_us, overheads, sign * host_log_error_90) for sign in (-1.0, 1.0)]
    shifts = np.vstack([ends, host]) - middle
    low, high = (float(np.sqrt(np.sum(np.square(side)))) for side in shifts.T)
    return max(middle - low, 0.0), middle + high


def _factors(kernels: Sequence[Kernel], costs: CostModel) -> Array:
    """`(1 + 2 kinds, kernels)`: all ones, then each kind at the low and at the high end of its interval."""
    spreads = np.array([costs.log_error_90(k) for k in kernels])
    names = [_kind(k) for k in kernels]
    rows = [np.zeros(len(kernels))]
    for kind in dict.fromkeys(names):
        members = np.array(
            [spread if name == kind else 0.0 for spread, name in zip(spreads, names, strict=True)]
        )
        rows += [-members, members]
    return np.exp(np.array(rows))


def _kind(kernel: Kernel) -> Hashable:
    """Kernels that share one are priced alike."""
    return type(kernel), kernel.dtype if isinstance(kernel, Gemm) else None


def _host_spacing(
    graph: WorkloadGraph, durations_us: Sequence[Array], overheads: OverheadTable, log_factor: float
) -> float:
    table = scaled_overheads(overheads, **dict.fromkeys(HOST_FIELDS, float(np.exp(log_factor))))
    return float(_spacing_us(graph, durations_us, table)[0])


def _spacing_us(graph: WorkloadGraph, durations_us: Sequence[Array], overheads: OverheadTable) -> Array:
    steps, _ = merged(compile_steps(graph, durations_us, overheads))
    return schedule(steps).iteration_time_us
