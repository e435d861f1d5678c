"""What another option of one table would cost, all other tables staying where they are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dse.placement.solver.problem import Array, Assignment, Ints, Loads, Mask, Problem, Where


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another option of a table, its shards placed one after another where they delay the plan least.

    Attributes:
        option: which.
        ranks: of its shards.
        objective: of the whole plan then, in the problem's unit.
        missing_bytes: memory that would be missing; 0 where it fits.
    """

    option: int
    ranks: tuple[int, ...]
    objective: float
    missing_bytes: float


def alternatives(
    problem: Problem, assignment: Assignment, loads: Loads, table: int
) -> tuple[Alternative, ...]:
    """The other options of a table: those that fit first, each part by objective."""
    rest = _without(problem, assignment, loads, table)
    options = range(problem.first_option[table], problem.first_option[table + 1])
    found = [_placed(problem, rest, table, o) for o in options if o != assignment.option[table]]
    return tuple(sorted(found, key=lambda a: (a.missing_bytes > 0, a.objective)))


def _without(problem: Problem, assignment: Assignment, loads: Loads, table: int) -> Loads:
    """Loads of all other tables."""
    option, ranks = int(assignment.option[table]), np.asarray(assignment.ranks[table], dtype=np.int64)
    shards = slice(problem.first_shard[option], problem.first_shard[option + 1])
    cost, held, on_host = loads.cost.copy(), loads.bytes.copy(), loads.host_bytes.copy()
    np.subtract.at(cost, ranks, problem.cost[shards] * problem.slowness[ranks, None])
    np.subtract.at(held, ranks, problem.bytes[shards])
    np.subtract.at(on_host, ranks // problem.ranks_per_host, problem.host_bytes[shards])
    return Loads(cost, held, on_host)


def _placed(problem: Problem, rest: Loads, table: int, option: int) -> Alternative:
    state = Loads(rest.cost.copy(), rest.bytes.copy(), rest.host_bytes.copy())
    allowed = np.ones(problem.num_ranks, dtype=bool) if problem.allowed is None else problem.allowed[table]
    first, end = problem.first_shard[option], problem.first_shard[option + 1]
    local = problem.ranks_per_host
    ranks: list[int] = []
    match Where(int(problem.where[option])):
        case Where.ALL:
            ranks = [*range(problem.num_ranks)]
            _add(problem, state, np.arange(first, end), np.arange(problem.num_ranks))
        case Where.HOST:
            for group in range(first, end, local):
                shards = np.arange(group, group + local)
                host = _best_machine(problem, state, shards)
                at = np.arange(host * local, (host + 1) * local)
                _add(problem, state, shards, at)
                ranks += at.tolist()
        case where:
            for shard in range(first, end):
                rank = _best_rank(problem, state, shard, allowed)
                _add(problem, state, np.array([shard]), np.array([rank]))
                ranks.append(rank)
                if where is Where.WITHIN:  # the machine of its first shard holds them all
                    machine = np.arange(problem.num_ranks) // local == rank // local
                    allowed = allowed & machine
    return Alternative(option, tuple(ranks), state.objective, state.overflow_bytes(problem))


def _add(problem: Problem, state: Loads, shards: Ints, ranks: Ints) -> None:
    """Put shards on distinct ranks."""
    state.cost[ranks] += problem.cost[shards] * problem.slowness[ranks, None]
    state.bytes[ranks] += problem.bytes[shards]
    np.add.at(state.host_bytes, ranks // problem.ranks_per_host, problem.host_bytes[shards])


def _best_rank(problem: Problem, state: Loads, shard: int, allowed: Mask) -> int:
    after = np.maximum(
        state.cost.max(axis=0), state.cost + problem.cost[shard] * problem.slowness[:, None]
    ).sum(axis=1)
    missing = np.maximum(state.bytes + problem.bytes[shard] - problem.capacity_bytes, 0.0)
    return int(np.lexsort((state.cost.sum(axis=1), after, missing, ~allowed))[0])


def _best_machine(problem: Problem, state: Loads, shards: Ints) -> int:
    """The machine that delays least when it takes a group; one whose memory suffices before one whose does not."""
    local, events = problem.ranks_per_host, problem.num_events
    by_machine: Array = problem.cost[shards][None] * problem.slowness.reshape(-1, local, 1)
    loaded = state.cost.reshape(-1, local, events) + by_machine
    after = np.maximum(state.cost.max(axis=0), loaded.max(axis=1)).sum(axis=1)
    free = (problem.capacity_bytes - state.bytes).reshape(-1, local)
    missing = np.maximum(problem.bytes[shards][None] - free, 0.0).sum(axis=1)
    return int(np.lexsort((after, missing))[0])
