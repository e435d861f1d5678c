"""Small placement problems solved to the end, as a mixed-integer program.

Shards of one option that cost the same are told apart by nothing, so a column counts how many of them a rank holds. The rules of
`bound` are added: they hold for every assignment, and branch and bound proves with them in seconds what it otherwise
does not in hours. Columns: those of the relaxation, then counts.

Letters: t tables, o options, s shards, e events, r ranks, h machines.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dse.placement.solver.bound import options_of, rank_free_parts, steps_of
from dse.placement.solver.linear import Program, Rows, solve_whole
from dse.placement.solver.problem import Array, Assignment, Ints, Problem, Where, loads_of

# Beyond so many counted columns the branch and bound gets nowhere in a minute.
MOST_COLUMNS = 12_000


@dataclass(frozen=True, slots=True, eq=False)
class Exact:
    """What branch and bound found.

    Attributes:
        assignment: better than `below`; `None` when none was found.
        bound: no feasible assignment is below it, or `below` where that is smaller.
        finished: nothing better exists, or the assignment is the best.
    """

    assignment: Assignment | None
    bound: float
    finished: bool


@dataclass(frozen=True, slots=True)
class _Counted:
    """A column: how many of an option's `shards` (equal ones) a rank holds, or of its groups a machine.

    Attributes:
        option: whose.
        shards: the first of each equal shard, or of each equal group.
        place: rank, or machine for `HOST`; -1 - machine for the choice of a machine by `WITHIN`.
    """

    option: int
    shards: tuple[int, ...]
    place: int


def size_of(problem: Problem) -> int:
    """Counted columns that `solve_exactly` needs; at least so many where that is more than it takes."""
    moved = problem.where != Where.ALL
    places = np.where(problem.where[moved] == Where.HOST, problem.ranks_per_host, 1)
    least = int((problem.num_ranks // places).sum()) if problem.allowed is None else 0
    return least if least > MOST_COLUMNS else len(_counted(problem))


def solve_exactly(
    problem: Problem, *, below: float, bound: float, time_limit_s: float, tolerance: float = 1e-6
) -> Exact:
    """Look for an assignment with an objective less than `below * (1 - tolerance)`, to the end or the time limit.

    Args:
        problem: small, and best reduced (`dominance.reduced`).
        below: a known objective; infinite when none is known.
        bound: a known lower bound.
        time_limit_s: of branch and bound.
        tolerance: relative; what is better by less is not looked for.
    """
    counted = _counted(problem)
    target = below * (1.0 - tolerance) if np.isfinite(below) else None
    program = _program(problem, counted, target=target, bound=bound)
    solved = solve_whole(program, time_limit_s=time_limit_s)
    least = max(bound, min(solved.bound, below if target is None else target))
    if solved.x is None:
        return Exact(None, least, solved.finished)
    values = np.round(solved.x[len(solved.x) - len(counted) :]).astype(np.int64)
    chosen = np.flatnonzero(solved.x[: problem.num_options] > 0.5)
    assignment = _assignment(problem, counted, chosen, values)
    better = loads_of(problem, assignment).overflow_bytes(problem) <= _slack_bytes(problem)
    return Exact(assignment if better else None, least, solved.finished and better)


def _slack_bytes(problem: Problem) -> float:
    return 1e-9 * float(np.abs(problem.capacity_bytes).sum())


def _counted(problem: Problem) -> list[_Counted]:
    columns: list[_Counted] = []
    for option in range(problem.num_options):
        shards = np.arange(problem.first_shard[option], problem.first_shard[option + 1])
        where = Where(int(problem.where[option]))
        if where is Where.ALL:
            continue
        size = problem.ranks_per_host if where is Where.HOST else 1
        ranks = list(range(problem.num_ranks // size))
        if problem.allowed is not None and where is not Where.HOST:
            table = int(problem.table_of_option[option])
            ranks = [r for r in ranks if problem.allowed[table, r]]
        if where is Where.WITHIN:
            hosts = sorted({r // problem.ranks_per_host for r in ranks})
            columns += [_Counted(option, (), -1 - host) for host in hosts]
        for equal in _equal(problem, shards.reshape(-1, size)):
            columns += [_Counted(option, equal, place) for place in ranks]
    return columns


def _equal(problem: Problem, groups: Ints) -> list[tuple[int, ...]]:
    """First shards of the groups `(g, size)`, equal ones together."""
    rows = np.column_stack([problem.cost, problem.bytes, problem.host_bytes])[groups]
    _, which = np.unique(rows.reshape(len(groups), -1), axis=0, return_inverse=True)
    return [tuple(int(s) for s in groups[which == k, 0]) for k in range(int(which.max()) + 1)]


def _program(problem: Problem, counted: list[_Counted], *, target: float | None, bound: float) -> Program:
    options, steps = options_of(problem), steps_of(problem, bound)
    parts = rank_free_parts(problem, options, below=target, steps=steps)
    first, rows = len(parts.high), parts.rows
    _add_counts(rows, problem, counted, first)
    _add_ranks(rows, problem, counted, first)
    if target is not None:
        events = problem.num_options + np.arange(problem.num_events)
        rows.add([0] * len(events), events, np.ones(len(events)), count=1, high=target)
    most = np.array([max(len(c.shards), 1) for c in counted], dtype=np.float64)
    high = np.concatenate([parts.high, most])
    return rows.program(
        objective=np.concatenate([parts.objective, np.zeros(len(counted))]),
        low=np.zeros(len(high)),
        high=high,
        whole=np.concatenate([parts.whole, np.ones(len(counted), dtype=np.bool_)]),
    )


def _add_counts(rows: Rows, problem: Problem, counted: list[_Counted], first: int) -> None:
    """A chosen option's equal shards all have a rank; those of `WITHIN` on the machine that it chose."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for i, column in enumerate(counted):
        host = column.place // problem.ranks_per_host
        if column.place < 0:
            groups.setdefault((column.option,), []).append(i)
        elif problem.where[column.option] == Where.WITHIN:
            groups.setdefault((column.option, column.shards[0], host), []).append(i)
        else:
            groups.setdefault((column.option, column.shards[0]), []).append(i)
    chosen = {(c.option, -1 - c.place): i for i, c in enumerate(counted) if c.place < 0}
    for key, members in groups.items():
        whole = float(max(len(counted[members[0]].shards), 1))
        of = first + chosen[key[0], key[2]] if len(key) == 3 else key[0]
        columns = np.append(first + np.array(members), of)
        rows.add([0] * len(columns), columns, [1.0] * len(members) + [-whole], count=1, low=0.0, high=0.0)


def _add_ranks(rows: Rows, problem: Problem, counted: list[_Counted], first: int) -> None:
    """The load of each rank is at most the event's maximum; its memory, and its machine's, at most the capacity."""
    columns, ranks, shards = _entries(problem, counted, first)
    entry_cost = problem.cost[shards] * problem.slowness[ranks, None]
    every = np.arange(problem.num_ranks)
    for event in range(problem.num_events):
        used = entry_cost[:, event] > 0
        rows.add(
            np.concatenate([ranks[used], every]),
            np.concatenate([columns[used], np.full(len(every), problem.num_options + event)]),
            np.concatenate([entry_cost[used, event], -np.ones(len(every))]),
            count=len(every),
            high=0.0,
        )
    hosts = ranks // problem.ranks_per_host
    _add_capacity(rows, ranks, columns, problem.bytes[shards], problem.capacity_bytes)
    _add_capacity(rows, hosts, columns, problem.host_bytes[shards], problem.host_capacity_bytes)


def _add_capacity(rows: Rows, place: Ints, columns: Ints, bytes_: Array, capacity: Array) -> None:
    scale = max(float(bytes_.max(initial=0.0)), 1.0)
    for p in np.flatnonzero(np.isfinite(capacity)):
        at = (place == p) & (bytes_ > 0)
        if at.any():
            high = float(capacity[p]) / scale
            rows.add([0] * int(at.sum()), columns[at], bytes_[at] / scale, count=1, high=high)


def _entries(problem: Problem, counted: list[_Counted], first: int) -> tuple[Ints, Ints, Ints]:
    """Column, rank and shard of everything that adds to a rank."""
    found: list[tuple[int, int, int]] = []
    for option in np.flatnonzero(problem.where == Where.ALL):
        start = int(problem.first_shard[option])
        found += [(int(option), r, start + r) for r in range(problem.num_ranks)]
    for i, column in enumerate(counted):
        if column.place < 0:
            continue
        size = problem.ranks_per_host if problem.where[column.option] == Where.HOST else 1
        for k in range(size):
            found.append((first + i, column.place * size + k, column.shards[0] + k))
    table = np.array(found, dtype=np.int64).reshape(-1, 3)
    return table[:, 0], table[:, 1], table[:, 2]


def _assignment(problem: Problem, counted: list[_Counted], chosen: Ints, values: Ints) -> Assignment:
    """Deal the counted shards out; `chosen` `(t,)` options, in table order."""
    ranks: dict[int, dict[int, int]] = {}
    left: dict[tuple[int, int], list[int]] = {}
    for column, value in zip(counted, values, strict=True):
        if column.place < 0 or not value:
            continue
        pool = left.setdefault((column.option, column.shards[0]), list(column.shards))
        size = problem.ranks_per_host if problem.where[column.option] == Where.HOST else 1
        for _ in range(int(value)):
            shard = pool.pop()
            placed = ranks.setdefault(column.option, {})
            placed |= {shard + k: column.place * size + k for k in range(size)}
    everywhere = tuple(range(problem.num_ranks))
    where = [tuple(r for _, r in sorted(ranks[o].items())) if o in ranks else everywhere for o in chosen]
    return Assignment(chosen.astype(np.int64), tuple(where))
