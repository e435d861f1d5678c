"""Solve placement problems, and place the tables of a model on ranks."""

from __future__ import annotations

import time
from collections.abc import Set
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from dse.errors import NoFeasibleCandidateError, SpaceError
from dse.placement.cost import AnalyticCost, ShardCost
from dse.placement.options import ALL_KINDS, Instance, Policy, Where, instance_of
from dse.placement.problem import Assignment, Problem
from perfcore.design.design import Design
from perfcore.design.hardware import System
from perfcore.design.model import Model
from perfcore.design.sharding import ShardingPlan, ShardingType, TableSharding
from perfcore.design.training import Fusion, Training
from perfcore.units import BYTES_PER_GIB

Array: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]

# How long the search goes on; in steps and not in seconds, so that it gives the same plan everywhere.
_WORK, _MAX_KICKS = 200_000, 150
_DESCENT_WORK, _MAX_ROUNDS = 20_000_000, 1000
_TINY, _OUT = 1e-300, 1e300


@dataclass(frozen=True, slots=True, eq=False)
class Solution:
    """An answer to an `Instance`.

    Attributes:
        option: `(t,)` chosen options.
        ranks: for each table the ranks of its shards.
        load_us: `(r,)` summed loads.
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
        capacity_bytes: what a rank can give to tables; negative when the rest alone does not fit.
        feasible: every rank's `hbm_bytes` is within capacity.
        worst_table: the table with the largest shard on the fullest rank.
        worst_rank: the fullest rank.
    """

    plan: ShardingPlan
    load_us: Array
    hbm_bytes: Array
    capacity_bytes: float
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
        needed, most = (v / BYTES_PER_GIB for v in (self.hbm_bytes[self.worst_rank], self.capacity_bytes))
        raise NoFeasibleCandidateError(
            f"Tables need at most {max(most, 0.0):.1f} GiB on each rank beside the rest of the job, but rank "
            f"{self.worst_rank} needs {needed:.1f} GiB, and table {self.worst_table!r} has the most of it.",
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
        cost: what a shard costs; by default traffic over data-sheet bandwidths.
        seed: of the restarts.

    Returns:
        The best placement found; when nothing fits, the one with the least overflow and `feasible=False`.

    Raises:
        SpaceError: the policy is unknown.
        DesignError: the batch does not divide by the ranks.
    """
    chosen = _policy(policy)
    design = Design(model, training, fusion or Fusion(), ShardingPlan.on_one_rank(model), system)
    instance = instance_of(design, chosen, cost or AnalyticCost(training, system), kinds=kinds)
    solution = solve(instance, seed=seed)
    return _placement(design, instance, solution)


def solve(instance: Instance, *, seed: int = 0) -> Solution:
    """The best assignment found: least overflow, then least maximum load, then least sum of squares."""
    from dse.placement import local_search as compiled
    from dse.placement.local_search import descend, empty_state, greedy, improve, score

    problem = compiled.Problem(
        instance.first,
        instance.where,
        instance.count,
        instance.load_us / max(float(instance.load_us.max()), _TINY),  # keeps squares in range
        instance.bytes,
        instance.capacity_bytes,
        instance.ranks_per_host,
    )
    states, rounds = [], max(1, min(_MAX_ROUNDS, _DESCENT_WORK // _work(instance)))
    for order, options in _starts(instance):
        state = empty_state(problem, num_ranks=instance.num_ranks)
        greedy(problem, state, order, options)
        descend(problem, state, rounds)
        states.append(state)
    best = min(states, key=lambda s: score(problem, s.load, s.bytes))
    improve(problem, best, _dice(instance, seed=seed), rounds)
    return _solution(instance, best.option, best.ranks)


def search(
    problem: Problem,
    *,
    seed: int = 0,
    time_limit_s: float = 10.0,
    work: int = 20_000_000,
    start: Assignment | None = None,
    options: Ints | None = None,
    enough: float = 0.0,
) -> Assignment:
    """The best assignment found: least overflow of memory, then least objective.

    The search ends after `work` steps, after many steps without a gain, at the time limit, or when its objective is
    small enough. It depends on seed and work alone where the time limit cuts nothing off.

    Args:
        problem: what to solve.
        seed: of the random numbers.
        time_limit_s: looked at every few thousand steps; a few thousand are always done.
        work: steps; about two million take a second.
        start: an assignment to begin with, beside greedy ones; the answer is never worse.
        options: a `(t,)` choice of options to begin with as well, e.g. a relaxation's.
        enough: an objective that needs no improvement, e.g. a lower bound.

    Raises:
        SpaceError: the problem has no table or no rank, or a start that is no assignment of it.
    """
    from dse.placement.anytime import CHUNK, PATIENCE, Search

    until = time.perf_counter() + time_limit_s
    going = Search(problem, seed=seed, start=start, options=options)
    least, gained_at = (going.overflow_bytes, going.objective), 0
    while going.steps < min(work, PATIENCE * max(gained_at, going.round_steps)):
        if going.objective <= enough or (going.steps and time.perf_counter() >= until):
            break
        going.improve(CHUNK)
        if (now := (going.overflow_bytes, going.objective)) < least:
            least, gained_at = now, going.steps
    return going.best


def _policy(name: str) -> Policy:
    try:
        return Policy(name)
    except ValueError:
        known = ", ".join(Policy)
        raise SpaceError(f"A sharding policy is one of {known}, but got {name!r}.") from None


def _starts(instance: Instance) -> list[tuple[Ints, Ints]]:
    """Orders and options `(t,)` of the greedy starts; option -1 is open.

    Beside the open ones: every table by its option of least work over all ranks, of least memory, of least
    work on one rank, and by each way to split it. A single move away from many replicas, or towards them, rarely gains, so the search
    starts on both sides.
    """
    starts = instance.first[:-1]
    totals = instance.load_us * instance.count, instance.bytes * instance.count
    by_load, by_bytes = (
        np.argsort(-np.minimum.reduceat(total, starts), kind="stable").astype(np.int64) for total in totals
    )
    open_ = np.full(instance.num_tables, -1)
    fixed = [_least(instance, cost) for cost in (*totals, instance.load_us)]
    codes = [list(ShardingType).index(kind) for kind in instance.kinds]
    ways = np.stack([codes, instance.count], axis=1)
    for way in np.unique(ways, axis=0):
        fixed.append(_least(instance, totals[0] + _OUT * (ways != way).any(axis=1)))
    return [(by_load, open_), (by_bytes, open_), *((by_load, f) for f in fixed)]


def _least(instance: Instance, cost: Array) -> Ints:
    """`(t,)` the option of least `(o,)` cost of each table."""
    parts = np.split(cost, instance.first[1:-1])
    least: Ints = instance.first[:-1] + np.array([int(np.argmin(part)) for part in parts])
    return least


def _dice(instance: Instance, *, seed: int) -> Array:
    """`(kicks, kicked, 3)` numbers in [0, 1); fewer kicks where a descent has more to look at."""
    tables, ranks = instance.num_tables, instance.num_ranks
    kicks = min(_MAX_KICKS, _WORK // _work(instance)) if ranks > 1 else 0
    return np.random.default_rng(seed).random((kicks, max(2, min(tables // 8, 8)), 3))


def _work(instance: Instance) -> int:
    """What one round of a descent looks at, roughly: every option on every rank, every pair of movable shards."""
    shards = np.maximum.reduceat(
        np.where(instance.where == Where.ANY, instance.count, 0), instance.first[:-1]
    )
    return instance.num_ranks * int(instance.count.sum()) + int(shards.sum()) ** 2


def _solution(instance: Instance, option: Ints, ranks: Ints) -> Solution:
    load, held = np.zeros(instance.num_ranks), np.zeros(instance.num_ranks)
    placed = tuple(
        tuple(sorted(int(r) for r in row[: instance.count[o]])) for o, row in zip(option, ranks, strict=True)
    )
    for o, where in zip(option, placed, strict=True):
        np.add.at(load, list(where), instance.load_us[o])
        np.add.at(held, list(where), instance.bytes[o])
    return Solution(option.copy(), placed, load, held)


def _placement(design: Design, instance: Instance, solution: Solution) -> Placement:
    tables = tuple(
        TableSharding(table.name, instance.kinds[o], ranks)
        for table, o, ranks in zip(design.model.tables, solution.option, solution.ranks, strict=True)
    )
    worst = int(np.argmax(solution.bytes))
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
