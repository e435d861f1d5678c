"""Place the tables of a model on ranks by a policy."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from dse.errors import NoFeasibleCandidateError, SpaceError
from dse.placement.policy.cost import AnalyticCost, ShardCost
from dse.placement.policy.options import ALL_KINDS, Instance, Policy, instance_of
from dse.placement.solver.problem import Assignment, Where, homogeneous, loads_of
from perfcore.design.design import Design
from perfcore.design.hardware import System
from perfcore.design.model import Model
from perfcore.design.sharding import ShardingPlan, ShardingType, TableSharding
from perfcore.design.training import Fusion, Program, Training
from perfcore.units import BYTES_PER_GIB

Array: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]

# Steps times tables of a placement by policy, of which a space asks for hundreds; the greedy starts come on top.
_WORK = 120_000
_CLOSE = 1e-3  # relative; a load that close to the least possible one is not worth a search
_WORK_TO_FIT = 20_000  # steps, where nothing fits memory yet


@dataclass(frozen=True, slots=True, eq=False)
class Solution:
    """An answer to an `Instance`.

    Attributes:
        option: `(t,)` chosen options.
        ranks: for each table the ranks of its shards.
        load_us: `(r,)` summed loads, on ranks as slow as they are.
        bytes: `(r,)` summed bytes.
    """

    option: Ints
    ranks: tuple[tuple[int, ...], ...]
    load_us: Array
    bytes: Array


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """Where every table lives, and what that means for each rank.

    Attributes:
        plan: the placement.
        load_us: `(r,)` µs of embedding work and exchange per iteration, by the cost that was minimised.
        hbm_bytes: `(r,)` memory of the shards with their optimizer state and buffers.
        capacity_bytes: `(r,)` what each rank can give to tables; negative when the rest alone does not fit.
        feasible: every rank's `hbm_bytes` is within capacity.
        worst_table: the table with the largest shard on the fullest rank.
        worst_rank: the fullest rank: the one with the least memory left.
    """

    plan: ShardingPlan
    load_us: Array
    hbm_bytes: Array
    capacity_bytes: Array
    feasible: bool
    worst_table: str
    worst_rank: int

    def check(self) -> None:
        """Return when the placement is feasible.

        Raises:
            NoFeasibleCandidateError: it is not; names the rank, its largest table and the remedies.
        """
        if self.feasible:
            return
        needed, most = (v[self.worst_rank] / BYTES_PER_GIB for v in (self.hbm_bytes, self.capacity_bytes))
        alike = bool((self.capacity_bytes == self.capacity_bytes[0]).all())
        raise NoFeasibleCandidateError(
            f"Tables need at most {max(most, 0.0):.1f} GiB on {'each' if alike else 'that'} rank beside the rest of the "
            f"job, but rank {self.worst_rank} needs {needed:.1f} GiB, and table {self.worst_table!r} has the most of it.",
            hint="Raise world_size, lower embedding_dim or the batch, store tables in bf16, choose rowwise_adagrad "
            "or sgd for tables, or allow the policy `row_wise` or `auto`.",
        )


def place(
    model: Model,
    training: Training,
    system: System,
    *,
    policy: str,
    fusion: Fusion | None = None,
    kinds: Set[ShardingType] = ALL_KINDS,
    cost: ShardCost | None = None,
    seed: int = 0,
) -> Placement:
    """Place the tables so that the largest load of a rank is small, within memory.

    The load of a rank is the sum over its shards of lookup, update and exchange time. The solver builds
    greedy placements and improves them by moves, exchanges and restarts; the same seed gives the same plan.

    Args:
        model: whose tables to place; its MLPs take memory from them.
        training: batch, number formats and optimizers.
        system: ranks, memory and links.
        policy: a `Policy` by name.
        fusion: per-table embeddings keep sparse gradients; the default is table-batched.
        kinds: sharding types that the policy `auto` may use beside whole tables.
        cost: what a shard costs, hashable; by default traffic over data-sheet bandwidths.
        seed: of the restarts.

    Returns:
        The best placement found; when nothing fits, the one with the least overflow and `feasible=False`.

    Raises:
        SpaceError: the policy is unknown.
        DesignError: the batch does not divide by the ranks.
    """
    chosen = _policy(policy)
    design = _unplaced(model, training, fusion or Fusion(), system)
    instance = instance_of(design, chosen, cost or AnalyticCost(training, system), kinds=kinds)
    solution = solve(instance, seed=seed)
    return _placement(design, instance, solution)


@lru_cache(maxsize=256)
def _unplaced(model: Model, training: Training, fusion: Fusion, system: System) -> Design:
    """The design with a plan that does not matter, whatever its program; policies are asked for one after another."""
    plain = replace(training, program=Program.PYTORCH)
    return Design(model, plain, fusion, ShardingPlan.on_one_rank(model), system)


def solve(instance: Instance, *, seed: int = 0) -> Solution:
    """The best assignment found: least overflow, then least maximum load; the same plan everywhere."""
    from dse.placement.solver.anytime import Search

    alike = homogeneous(
        first_option=instance.first,
        first_shard=np.concatenate([[0], np.cumsum(instance.count)]).astype(np.int64),
        where=instance.where,
        cost=np.repeat(instance.load_us, instance.count)[:, None],
        bytes_=np.repeat(instance.bytes, instance.count),
        capacity_bytes=float(instance.capacity_bytes.max()),
        num_ranks=instance.num_ranks,
        ranks_per_host=instance.ranks_per_host,
    )
    problem = replace(alike, capacity_bytes=instance.capacity_bytes, slowness=instance.slowness)
    if (instance.where == Where.ALL).all() and len(instance.where) == instance.num_tables:
        everyone = tuple(range(instance.num_ranks))
        found = Assignment(np.arange(instance.num_tables), (everyone,) * instance.num_tables)
    else:
        # Where tables may be split, whole ones are among the starts: they are the first of their options.
        split = len(set(instance.kinds)) > 1
        going = Search(problem, seed=seed, options=instance.first[:-1] if split else None, fine=split)
        enough = _least_load_us(instance) * (1 + _CLOSE)
        going.run(work=_WORK // instance.num_tables, time_limit_s=np.inf, enough=enough)
        if going.overflow_bytes > 0 and _may_fit(instance):
            going.run(work=_WORK_TO_FIT, time_limit_s=np.inf)
        found = going.best
    loads = loads_of(problem, found)
    # Shards of an option are alike.
    ranks = tuple(tuple(sorted(r)) for r in found.ranks)
    return Solution(found.option, ranks, loads.cost[:, 0], loads.bytes)


def _least_load_us(instance: Instance) -> float:
    """No assignment loads its fullest rank less: that is at least the mean, and holds any table's shard.

    A rank of slowness `s` does `load / s` of the work, so the mean is over `1 / s`.
    """
    first = instance.first[:-1]
    total_us = float(np.minimum.reduceat(instance.load_us * instance.count, first).sum())
    largest_us = float(np.minimum.reduceat(instance.load_us, first).max())
    return max(total_us / float((1 / instance.slowness).sum()), largest_us * float(instance.slowness.min()))


def _may_fit(instance: Instance) -> bool:
    """All shards together, and the largest shard of each table, are within memory for some choice of options."""
    first, capacity = instance.first[:-1], instance.capacity_bytes
    total = float(np.minimum.reduceat(instance.bytes * instance.count, first).sum())
    largest = float(np.minimum.reduceat(instance.bytes, first).max())
    # The rest of a job that does not fit into some rank fits nowhere.
    return total <= capacity.sum() and largest <= capacity.max() and bool((capacity >= 0).all())


def _policy(name: str) -> Policy:
    try:
        return Policy(name)
    except ValueError:
        known = ", ".join(Policy)
        raise SpaceError(f"A sharding policy is one of {known}, but got {name!r}.") from None


def _placement(design: Design, instance: Instance, solution: Solution) -> Placement:
    tables = tuple(
        TableSharding(table.name, instance.kinds[o], ranks)
        for table, o, ranks in zip(design.model.tables, solution.option, solution.ranks, strict=True)
    )
    worst = int(np.argmax(solution.bytes - instance.capacity_bytes))
    held = [
        instance.bytes[o] * ranks.count(worst)
        for o, ranks in zip(solution.option, solution.ranks, strict=True)
    ]
    return Placement(
        plan=ShardingPlan(tables),
        load_us=solution.load_us,
        hbm_bytes=solution.bytes,
        capacity_bytes=instance.capacity_bytes,
        feasible=bool((solution.bytes <= instance.capacity_bytes).all()),
        worst_table=design.model.tables[int(np.argmax(held))].name,
        worst_rank=worst,
    )
