"""Single changes of a plan: one table, and those that stay together with it, split in another way or moved."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from dse.placement.design.options import Option, Options
from dse.placement.design.problem import Surrogate
from dse.placement.solver.alternatives import alternatives
from dse.placement.solver.problem import Array, Assignment, Loads, Problem, Where, loads_of
from perfcore.design.sharding import ShardingPlan

_MOST_CHANGES = 2.5e5  # changes times ranks that are looked at


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """A plan with one change.

    Attributes:
        tables: positions of those that change.
        option: that the first of them takes then.
        moved: they are split as before, but lie elsewhere.
        plan: the whole plan then.
        estimate_us: its iteration time, by the critical cycle of the plan before.
    """

    tables: tuple[int, ...]
    option: Option
    moved: bool
    plan: ShardingPlan
    estimate_us: float


def single_changes(
    plan: ShardingPlan, time_us: float, options: Options, assignment: Assignment, surrogate: Surrogate
) -> list[Change]:
    """The changes of a plan that fit into memory, the most promising first; of many tables those of the heaviest.

    Args:
        plan: to be changed.
        time_us: of the plan.
        options: of its class.
        assignment: the plan in these options.
        surrogate: the cut of its critical cycle.
    """
    problem, own = surrogate.solved, surrogate.to_solver(assignment)
    loads, together = loads_of(problem, own), surrogate.together
    out = []
    for g in _heaviest(problem, own, len(together.members)):
        for option, ranks, objective in _changes(problem, own, loads, g):
            tables = list(plan.tables)
            of_members = together.options[option]
            for t, o in zip(together.members[g], of_members, strict=True):
                tables[t] = options.options[o].placed(tables[t].table, ranks)
            estimate_us = time_us + objective - loads.objective
            moved = option == own.option[g]
            changed = ShardingPlan(tuple(tables))
            out.append(
                Change(together.members[g], options.options[of_members[0]], moved, changed, estimate_us)
            )
    return sorted(out, key=lambda c: c.estimate_us)


def _heaviest(problem: Problem, own: Assignment, groups: int) -> list[int]:
    shards = problem.first_shard[np.append(own.option, own.option + 1)].reshape(2, -1)
    heavy = np.argsort([-float(problem.cost[a:b].sum()) for a, b in shards.T[:groups]], kind="stable")
    looked_at = _MOST_CHANGES / problem.num_ranks * problem.num_tables / problem.num_options
    return sorted(heavy[: max(1, int(looked_at))].tolist())


def _changes(
    problem: Problem, own: Assignment, loads: Loads, table: int
) -> Iterator[tuple[int, tuple[int, ...], float]]:
    """Option, ranks and objective of a table's changes that fit."""
    for other in alternatives(problem, own, loads, table):
        if other.missing_bytes <= 0:
            yield other.option, other.ranks, other.objective
    option = int(own.option[table])
    if problem.where[option] == Where.ANY and len(own.ranks[table]) == 1:
        for rank, objective in enumerate(_moved(problem, own, loads, table)):
            if np.isfinite(objective) and rank != own.ranks[table][0]:
                yield option, (rank,), float(objective)


def _moved(problem: Problem, own: Assignment, loads: Loads, table: int) -> Array:
    """`(r,)`: the objective with a whole table on each rank; infinite where it does not fit."""
    shard, rank = problem.first_shard[own.option[table]], own.ranks[table][0]
    local = problem.ranks_per_host
    cost, held, on_host = loads.cost.copy(), loads.bytes.copy(), loads.host_bytes.copy()
    cost[rank] -= problem.cost[shard] * problem.slowness[rank]
    held[rank] -= problem.bytes[shard]
    on_host[rank // local] -= problem.host_bytes[shard]
    there = cost + problem.cost[shard] * problem.slowness[:, None]
    fits = held + problem.bytes[shard] <= problem.capacity_bytes
    fits &= np.repeat(on_host + problem.host_bytes[shard] <= problem.host_capacity_bytes, local)
    if problem.allowed is not None:
        fits &= problem.allowed[table]
    return np.where(fits, np.maximum(cost.max(axis=0), there).sum(axis=1), np.inf)
