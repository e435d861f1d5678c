"""Small random placement problems, and the best answer by looking at all of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from dse.placement.solver.problem import Assignment, Problem, Where, loads_of


def random_problem(
    rng: np.random.Generator, *, tables: int, ranks: int, hosts: int = 1, events: int = 2, tight: float = 2.0
) -> Problem:
    """1 to 4 options a table, of all kinds, with unequal shards; `tight` scales memory; odd ranks and limits."""
    per_host = ranks // hosts
    counts = rng.integers(1, 5, tables)
    where, shards = [], []
    for _ in range(counts.sum()):
        where.append(int(rng.choice(list(Where))))
        groups = int(rng.integers(1, 3))
        shards.append({Where.ALL: ranks, Where.HOST: per_host * groups}.get(Where(where[-1]), groups))
    n = sum(shards)
    owner = np.repeat(np.repeat(np.arange(tables), counts), shards)
    size = rng.lognormal(0.0, 1.0, tables)[owner] / np.repeat(shards, shards)
    cost = size[:, None] * rng.choice([0.0, 0.5, 1.0, 2.0], (n, events))
    if events > 1 and rng.random() < 0.3:
        cost[:, 1] = 2 * cost[:, 0]
    held = np.round(size * 64) * rng.integers(1, 3, n)
    allowed = rng.random((tables, ranks)) < 0.8
    allowed[:, 0] = True
    if rng.random() < 0.5:
        allowed[:] = True
    return Problem(
        first_option=np.r_[0, counts.cumsum()].astype(np.int64),
        first_shard=np.r_[0, np.cumsum(shards)].astype(np.int64),
        where=np.array(where, dtype=np.int64),
        cost=cost,
        bytes=held,
        capacity_bytes=np.full(ranks, tight * held.sum() / counts.mean() / ranks)
        * rng.uniform(0.8, 1.2, ranks),
        ranks_per_host=per_host,
        slowness=np.ones(ranks) if rng.random() < 0.5 else rng.uniform(1.0, 2.0, ranks),
        host_bytes=np.where(rng.random(n) < 0.2, held, 0.0),
        host_capacity_bytes=np.full(hosts, tight * held.sum() / 2),
        allowed=allowed if rng.random() < 0.5 else None,
    )


def ways(problem: Problem, table: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Every option of a table with every choice of ranks."""
    ranks, local = problem.num_ranks, problem.ranks_per_host
    hosts = [tuple(range(h, h + local)) for h in range(0, ranks, local)]
    free = [r for r in range(ranks) if problem.allowed is None or problem.allowed[table, r]]
    for o in range(problem.first_option[table], problem.first_option[table + 1]):
        n = int(problem.shard_counts[o])
        match Where(int(problem.where[o])):
            case Where.ANY:
                yield from ((o, at) for at in itertools.product(free, repeat=n))
            case Where.ALL:
                yield o, tuple(range(ranks))
            case Where.HOST:
                groups = itertools.product(hosts, repeat=n // local)
                yield from ((o, tuple(r for host in g for r in host)) for g in groups)
            case Where.WITHIN:
                for host in hosts:
                    own = [r for r in host if r in free]
                    yield from ((o, at) for at in itertools.product(own, repeat=n))


def is_allowed(problem: Problem, assignment: Assignment) -> bool:
    """Whether each table is placed in one of its ways."""
    pairs = zip(assignment.option, assignment.ranks, strict=True)
    return all((int(o), at) in set(ways(problem, t)) for t, (o, at) in enumerate(pairs))


def best_of_all(problem: Problem) -> float:
    """The least objective within memory, infinite when nothing fits."""
    cost = np.zeros((1, problem.num_ranks, problem.num_events))
    held, on_host = np.zeros((1, problem.num_ranks)), np.zeros((1, len(problem.host_capacity_bytes)))
    for table in range(problem.num_tables):
        alone = [_loads_alone(problem, o, at) for o, at in ways(problem, table)]
        cost, held, on_host = (
            (sums[:, None] + np.array(more)[None]).reshape(-1, *sums.shape[1:])
            for sums, more in zip((cost, held, on_host), zip(*alone, strict=True), strict=True)
        )
    fits = (held <= problem.capacity_bytes).all(axis=1)
    fits &= (on_host <= problem.host_capacity_bytes).all(axis=1)
    return float(cost[fits].max(axis=1).sum(axis=1).min(initial=np.inf))


def _loads_alone(problem: Problem, option: int, ranks: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    loads = loads_of(problem, Assignment(np.array([option]), (ranks,)))
    return loads.cost, loads.bytes, loads.host_bytes
