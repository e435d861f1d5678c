"""Plans as assignments of an instance with TorchRec's prices, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from dse.placement.instances.instance import Instance, Objective
from dse.placement.solver.problem import Assignment, loads_of
from dse.placement.torchrec.estimate import estimate
from dse.placement.torchrec.job import Job
from perfcore.design.sharding import COLUMN_PIECES, ComputeKernel, ShardingPlan, ShardingType, TableSharding

_RATIO = "@"  # instances name a cache with its ratio: `fused_uvm_caching@0.2`


@dataclass(frozen=True, slots=True)
class Choice:
    """What a plan does with one table: `type`, `kernel`, and the rank of each shard."""

    type: str
    kernel: str
    ranks: tuple[int, ...]


def assignment_of_choices(instance: Instance, choices: Sequence[Choice]) -> Assignment | None:
    """The assignment that picks these choices; `None` where the instance lacks one of them."""
    counts, first = np.diff(instance.first_shard), instance.first_option
    options = []
    for t, choice in enumerate(choices):
        wanted = (choice.type, choice.kernel, len(choice.ranks))
        of_table = range(first[t], first[t + 1])
        same = [o for o in of_table if (instance.types[o], instance.kernels[o], counts[o]) == wanted]
        if not same:
            return None
        options.append(same[0])
    return Assignment(np.array(options, dtype=np.int64), tuple(c.ranks for c in choices))


def plan_of_assignment(instance: Instance, assignment: Assignment) -> ShardingPlan:
    """An assignment of an instance as a placement."""
    chosen = zip(instance.names, assignment.option, assignment.ranks, strict=True)
    return ShardingPlan(tuple(_placed(n, instance.types[o], instance.kernels[o], r) for n, o, r in chosen))


def price_ms(job: Job, plan: ShardingPlan) -> dict[Objective, float] | None:
    """What a placement of a job's tables costs by TorchRec's estimators, ms by objective.

    `None` where TorchRec's estimators know no such pieces: columns that do not split evenly into multiples of four,
    grids, and tables on the host without a cache.

    Raises:
        MissingPackageError: TorchRec is not installed.
    """
    pairs = zip(job.tables, plan.tables, strict=True)
    ratios = {p.cache_ratio for p in plan.tables if p.cache_ratio is not None and p.cache_ratio < 1}
    job = replace(job, cache_ratios=tuple(sorted(ratios)))
    pieces = {(t.embedding_dim or 0) // len(p.ranks) for t, p in pairs if p.type in COLUMN_PIECES}
    instance = estimate(job, column_widths=(None, *sorted(pieces - {0})))
    assignment = assignment_of_choices(instance, [_choice(p) for p in plan.tables])
    if assignment is None:
        return None
    return {o: loads_of(instance.problem(o), assignment).objective for o in Objective}


def _choice(placed: TableSharding) -> Choice:
    dense = placed.type is ShardingType.DATA_PARALLEL
    kernel = ComputeKernel.DENSE if dense else placed.kernel
    label = kernel if placed.cache_ratio is None else f"{kernel}{_RATIO}{placed.cache_ratio:g}"
    return Choice(placed.type, label, placed.ranks)


def _placed(name: str, kind: str, kernel: str, ranks: tuple[int, ...]) -> TableSharding:
    if kind == ShardingType.DATA_PARALLEL:
        return TableSharding(name, ShardingType.DATA_PARALLEL, tuple(range(len(ranks))))
    word, _, ratio = kernel.partition(_RATIO)
    return TableSharding(
        name, ShardingType(kind), ranks, ComputeKernel(word), float(ratio) if ratio else None
    )
