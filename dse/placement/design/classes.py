"""The bounds of all classes of a design's plans, and their refinement in the order in which it matters."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np

from dse.placement.design.bound import ClassBound
from dse.placement.design.class_program import DenseCosts, program_of
from dse.placement.design.conditions import Conditions
from dse.placement.design.options import FLAGS, Options
from dse.placement.design.shard_costs import ShardCosts, single_rank_dims
from dse.placement.design.ways import SharedSums
from dse.placement.solver.problem import Array
from perfcore.cost.model import CostModel
from perfcore.overheads import OverheadTable


def class_bounds(
    options: Options,
    costs: ShardCosts,
    cost: CostModel,
    overheads: OverheadTable,
    *,
    capacity_bytes: Array,
    dense: DenseCosts | None = None,
    conditions: Conditions | None = None,
) -> list[ClassBound]:
    """One bound for each class that has a plan, with its first cut.

    Args:
        options: of the design.
        costs: of all probes.
        cost: prices kernels.
        overheads: host times of ops.
        capacity_bytes: `(r,)` memory of each rank for tables.
        dense: of what no plan changes; the design's own when left out.
        conditions: host memory, slower ranks, tables that stay together; the design's own when left out.
    """
    conditions = conditions or Conditions.of(options.design)
    dense = dense or DenseCosts(*single_rank_dims([options.design]), cost)
    most = float(capacity_bytes.max())
    options = options.restricted(
        np.maximum.reduceat(costs.bytes[options.shard_probe], options.first_shard[:-1]) <= most
    )
    ways = options.ways
    shared = SharedSums(options.ways, options.probe_flag)
    fits = ways.largest(costs.bytes) <= most
    usable = [i for i in range(len(FLAGS)) if bool((fits & (ways.flag == i)).any())]
    bounds = []
    tables = len(options.design.model.tables)
    for size in range(1, min(len(usable), tables) + 1):
        for kinds in combinations(usable, size):
            kept = fits & np.isin(ways.flag, kinds)
            if len(np.unique(ways.table[kept])) < tables:
                continue
            bound = ClassBound(
                kinds,
                replace(options.restricted(np.isin(options.flag, kinds)), ways=ways.kept(kept)),
                program_of(
                    options,
                    kinds,
                    costs,
                    dense,
                    overheads,
                    slowness=conditions.slowness if conditions.uneven else None,
                ),
                costs,
                cost,
                float(np.maximum(capacity_bytes, 0.0).sum()),
                most,
                shared.of(ways.kept(kept), np.flatnonzero(kept)),
                conditions,
            )
            bound.start()
            bounds.append(bound)
    return bounds


def refine(bounds: Sequence[ClassBound], *, upper_us: float, seconds_left: Callable[[], float]) -> float:
    """Refine the classes with the least bounds until no cut says more, or none is below `upper_us`.

    Args:
        bounds: changed in place.
        upper_us: no bound above it is of use.
        seconds_left: asked between rounds; stops at 0.

    Returns:
        The least bound.
    """
    queue = [(b.lower_us, i) for i, b in enumerate(bounds)]
    heapq.heapify(queue)
    while queue:
        lower_us, i = queue[0]
        if lower_us >= upper_us or bounds[i].settled() or seconds_left() <= 0:
            break
        bounds[i].refine()
        heapq.heapreplace(queue, (bounds[i].lower_us, i))
    return min((b.lower_us for b in bounds), default=np.inf)
