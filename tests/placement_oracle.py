"""Tiny placement problems, and every assignment of them: the plain oracle of the placement solvers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from dse.placement.solver.problem import Assignment, Problem, Where, loads_of


def every_place(problem: Problem, option: int, table: int) -> Iterator[tuple[int, ...]]:
    """All ranks that the shards of an option may take."""
    ranks, local = problem.num_ranks, problem.ranks_per_host
    count = int(problem.shard_counts[option])
    allowed = [r for r in range(ranks) if problem.allowed is None or problem.allowed[table, r]]
    match Where(int(problem.where[option])):
        case Where.ALL:
            yield tuple(range(ranks))
        case Where.HOST:
            for hosts in itertools.product(range(ranks // local), repeat=count // local):
                yield tuple(h * local + i for h in hosts for i in range(local))
        case Where.ANY:
            yield from itertools.product(allowed, repeat=count)
        case Where.WITHIN:
            for host in range(ranks // local):
                yield from itertools.product([r for r in allowed if r // local == host], repeat=count)


def every_assignment(problem: Problem) -> Iterator[Assignment]:
    choices = [
        [
            (o, places)
            for o in range(problem.first_option[t], problem.first_option[t + 1])
            for places in every_place(problem, o, t)
        ]
        for t in range(problem.num_tables)
    ]
    for chosen in itertools.product(*choices):
        yield Assignment(np.array([o for o, _ in chosen]), tuple(p for _, p in chosen))


def best_objective(problem: Problem) -> float:
    """The optimum; infinite when nothing fits."""
    best = np.inf
    for assignment in every_assignment(problem):
        loads = loads_of(problem, assignment)
        if loads.overflow_bytes(problem) <= 1e-9:
            best = min(best, loads.objective)
    return float(best)


def random_problem(seed: int, *, most_places: int = 4000) -> Problem:
    """A tiny problem of any kind: few tables, 1 to 4 ranks on 1 or 2 machines, all placements, unequal shards, tight memory."""
    rng = np.random.default_rng(seed)
    while True:
        problem = _draw(rng)
        places = 1.0
        for t in range(problem.num_tables):
            options = range(problem.first_option[t], problem.first_option[t + 1])
            places *= sum(sum(1 for _ in every_place(problem, o, t)) for o in options)
        if 0 < places <= most_places:
            return problem


def _draw(rng: np.random.Generator) -> Problem:
    local, hosts = int(rng.integers(1, 4)), int(rng.integers(1, 3))
    ranks, tables, events = local * hosts, int(rng.integers(1, 5)), int(rng.integers(1, 4))
    where, counts, per_table = [], [], []
    for _ in range(tables):
        kinds = rng.choice(4, size=rng.integers(1, 4), replace=True)
        per_table.append(len(kinds))
        for kind in kinds:
            where.append(int(kind))
            sizes = {0: rng.integers(1, 3), 1: ranks, 2: local * rng.integers(1, 3), 3: rng.integers(1, 3)}
            counts.append(int(sizes[int(kind)]))
    first_shard = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    shards = int(first_shard[-1])
    cost = rng.integers(0, 9, (shards, events)) * (1.0 if rng.random() < 0.5 else 0.37)
    bytes_ = rng.integers(0, 9, shards).astype(float)
    equal = rng.random() < 0.6
    if equal:
        for a, b in itertools.pairwise(first_shard):
            cost[a:b], bytes_[a:b] = cost[a], bytes_[a]
    allowed = (rng.random((tables, ranks)) < 0.8) if rng.random() < 0.3 else None
    if allowed is not None:
        allowed[:, 0] = True
    return Problem(
        first_option=np.concatenate([[0], np.cumsum(per_table)]).astype(np.int64),
        first_shard=first_shard,
        where=np.array(where, dtype=np.int64),
        cost=cost,
        bytes=bytes_,
        capacity_bytes=np.full(ranks, float(rng.integers(4, 30)))
        + (rng.random() < 0.2) * rng.integers(0, 4, ranks),
        ranks_per_host=local,
        slowness=np.ones(ranks) if rng.random() < 0.7 else 1.0 + rng.random(ranks),
        host_bytes=rng.integers(0, 4, shards).astype(float) * (rng.random() < 0.3),
        host_capacity_bytes=np.full(hosts, np.inf if rng.random() < 0.7 else 12.0),
    )
