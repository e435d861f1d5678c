"""Greedy placement and local search over it, compiled.

The state is the chosen option of each table, the ranks of its shards, and per rank the summed load and
bytes. A state is better when it overflows memory less, then when its largest load is smaller, then when
the sum of squared loads is: the last leads across plateaus of the maximum.

Letters: t tables, o options, r ranks, k the most shards that an option has.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numba
import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]

_ALL, _HOST = 1, 2
_GAIN = 1e-9  # relative; smaller differences are rounding


class Problem(NamedTuple):
    """An `Instance` as plain arrays; see there (`shards` is its `count`, a name that tuples have taken)."""

    first: Ints
    where: Ints
    shards: Ints
    load: Array
    bytes: Array
    capacity: float
    per_host: int


class State(NamedTuple):
    """A placement; arrays are changed in place.

    Attributes:
        option: `(t,)`.
        ranks: `(t, k)`; the first `shards[option]` of a row hold.
        load: `(r,)`.
        bytes: `(r,)`.
    """

    option: Ints
    ranks: Ints
    load: Array
    bytes: Array


def _compiled(function: Any) -> Any:
    return numba.njit(cache=True)(function)


def _score(problem: Problem, load: Array, held: Array) -> tuple[float, float, float]:
    overflow, most, squares = 0.0, 0.0, 0.0
    for r in range(len(load)):
        overflow += max(0.0, held[r] - problem.capacity)
        most = max(most, load[r])
        squares += load[r] * load[r]
    return overflow, most, squares


def _better(a: tuple[float, float, float], b: tuple[float, float, float]) -> bool:
    for i in range(3):
        slack = _GAIN * max(abs(a[i]), abs(b[i]))
        if a[i] < b[i] - slack:
            return True
        if a[i] > b[i] + slack:
            return False
    return False


score: Any = _compiled(_score)
better: Any = _compiled(_better)


def _added(problem: Problem, state: State, option: int, rank: int) -> tuple[float, float]:
    """Overflow that a shard adds to a rank, and the rank's load with it."""
    before = max(0.0, state.bytes[rank] - problem.capacity)
    after = max(0.0, state.bytes[rank] + problem.bytes[option] - problem.capacity)
    return after - before, state.load[rank] + problem.load[option]


added: Any = _compiled(_added)


def _put(problem: Problem, state: State, table: int, shard: int, rank: int) -> None:
    option = state.option[table]
    state.ranks[table, shard] = rank
    state.load[rank] += problem.load[option]
    state.bytes[rank] += problem.bytes[option]


put: Any = _compiled(_put)


def _remove(problem: Problem, state: State, table: int) -> None:
    option = state.option[table]
    for shard in range(problem.shards[option]):
        rank = state.ranks[table, shard]
        state.load[rank] -= problem.load[option]
        state.bytes[rank] -= problem.bytes[option]


remove: Any = _compiled(_remove)


def _best_host(problem: Problem, state: State, option: int) -> int:
    """First rank of the machine on which the option's shards overflow least, then weigh least."""
    start, best = 0, (np.inf, np.inf)
    for host in range(0, len(state.load), problem.per_host):
        overflow, most = 0.0, 0.0
        for rank in range(host, host + problem.per_host):
            more, load = added(problem, state, option, rank)
            overflow, most = overflow + more, max(most, load)
        if (overflow, most) < best:
            start, best = host, (overflow, most)
    return start


best_host: Any = _compiled(_best_host)


def _insert(problem: Problem, state: State, table: int, option: int) -> None:
    """Put a table's shards by one option where they overflow least, then weigh least."""
    state.option[table] = option
    if problem.where[option] == _ALL or problem.where[option] == _HOST:
        start = best_host(problem, state, option) if problem.where[option] == _HOST else 0
        for shard in range(problem.shards[option]):
            put(problem, state, table, shard, start + shard)
        return
    for shard in range(problem.shards[option]):
        chosen, best = 0, (np.inf, np.inf)
        for rank in range(len(state.load)):
            cost = added(problem, state, option, rank)
            if cost < best:
                chosen, best = rank, cost
        put(problem, state, table, shard, chosen)


insert: Any = _compiled(_insert)


def _restore(problem: Problem, state: State, table: int, option: int, ranks: Ints) -> None:
    state.option[table] = option
    for shard in range(problem.shards[option]):
        put(problem, state, table, shard, ranks[shard])


restore: Any = _compiled(_restore)


def _insert_best(problem: Problem, state: State, table: int) -> None:
    """Insert an absent table by whichever of its options gives the best state."""
    best, chosen = (np.inf, np.inf, np.inf), problem.first[table]
    for option in range(problem.first[table], problem.first[table + 1]):
        insert(problem, state, table, option)
        now = score(problem, state.load, state.bytes)
        if better(now, best):
            best, chosen = now, option
        remove(problem, state, table)
    insert(problem, state, table, chosen)


insert_best: Any = _compiled(_insert_best)


def _greedy(problem: Problem, state: State, order: Ints, options: Ints) -> None:
    """Place all tables of an empty state in order (list scheduling), each by its `(t,)` option; -1 is open."""
    for table in order:
        if options[table] < 0:
            insert_best(problem, state, table)
        else:
            insert(problem, state, table, options[table])


greedy: Any = _compiled(_greedy)


def _move_all(problem: Problem, state: State) -> bool:
    """Take out each table in turn and put it back as well as possible; True when that gained."""
    gained = False
    for table in range(len(state.option)):
        before = score(problem, state.load, state.bytes)
        option, ranks = state.option[table], state.ranks[table].copy()
        remove(problem, state, table)
        insert_best(problem, state, table)
        if better(score(problem, state.load, state.bytes), before):
            gained = True
        else:
            remove(problem, state, table)
            restore(problem, state, table, option, ranks)
    return gained


move_all: Any = _compiled(_move_all)


def _worst_rank(problem: Problem, state: State) -> int:
    """The rank that overflows most; when none does, the one with the largest load."""
    worst, most = 0, (-1.0, -1.0)
    for rank in range(len(state.load)):
        here = (max(0.0, state.bytes[rank] - problem.capacity), state.load[rank])
        if here > most:
            worst, most = rank, here
    return worst


worst_rank: Any = _compiled(_worst_rank)


def _may_gain(problem: Problem, state: State, now: tuple[float, float, float], a: int, b: int) -> bool:
    """Whether the worst rank could gain by giving a shard of table a for one of table b."""
    mine, other = state.option[a], state.option[b]
    if a == b or problem.where[other] != 0:
        return False
    if now[0] > 0:
        return bool(problem.bytes[other] < problem.bytes[mine])
    return bool(problem.load[other] < problem.load[mine])


may_gain: Any = _compiled(_may_gain)


def _swap_from(problem: Problem, state: State, rank: int) -> bool:
    """Exchange one shard of `rank` with one elsewhere, first gain taken; True when one was."""
    before = score(problem, state.load, state.bytes)
    for a in range(len(state.option)):
        if problem.where[state.option[a]] != 0:
            continue
        for i in range(problem.shards[state.option[a]]):
            if state.ranks[a, i] != rank:
                continue
            for b in range(len(state.option)):
                if not may_gain(problem, state, before, a, b):
                    continue
                for j in range(problem.shards[state.option[b]]):
                    if state.ranks[b, j] == rank:
                        continue
                    exchange(problem, state, a, i, b, j)
                    if better(score(problem, state.load, state.bytes), before):
                        return True
                    exchange(problem, state, a, i, b, j)
    return False


def _exchange(problem: Problem, state: State, a: int, i: int, b: int, j: int) -> None:
    """Shard i of table a and shard j of table b change places."""
    here, there = state.ranks[a, i], state.ranks[b, j]
    load = problem.load[state.option[b]] - problem.load[state.option[a]]
    held = problem.bytes[state.option[b]] - problem.bytes[state.option[a]]
    state.load[here] += load
    state.load[there] -= load
    state.bytes[here] += held
    state.bytes[there] -= held
    state.ranks[a, i], state.ranks[b, j] = there, here


exchange: Any = _compiled(_exchange)
swap_from: Any = _compiled(_swap_from)


def _descend(problem: Problem, state: State, rounds: int) -> None:
    """Moves, then exchanges from the worst rank, until neither gains; at most `rounds` of either."""
    moves = 0
    for _ in range(rounds):
        while moves < rounds and move_all(problem, state):
            moves += 1
        if not swap_from(problem, state, worst_rank(problem, state)):
            return


descend: Any = _compiled(_descend)


def _copy(source: State, target: State) -> None:
    target.option[:] = source.option
    target.ranks[:] = source.ranks
    target.load[:] = source.load
    target.bytes[:] = source.bytes


copy: Any = _compiled(_copy)


def _kick(problem: Problem, state: State, dice: Array) -> None:
    """Take out random tables, then put each back by a random option, half of them on random ranks.

    `dice` is `(kicked, 3)` in [0, 1): table, option, and rank.
    """
    tables = np.unique((dice[:, 0] * len(state.option)).astype(np.int64))
    for table in tables:
        remove(problem, state, table)
    for i, table in enumerate(tables):
        first, end = problem.first[table], problem.first[table + 1]
        option = first + int(dice[i, 1] * (end - first))
        if problem.where[option] == 0 and dice[i, 2] < 0.5:
            state.option[table] = option
            start = int(2 * dice[i, 2] * len(state.load))
            for shard in range(problem.shards[option]):
                put(problem, state, table, shard, (start + shard) % len(state.load))
        else:
            insert(problem, state, table, option)


kick: Any = _compiled(_kick)


def _improve(problem: Problem, state: State, dice: Array, rounds: int) -> None:
    """For each `(kicked, 3)` of `dice` kick, descend, and keep what is no worse."""
    trial = State(state.option.copy(), state.ranks.copy(), state.load.copy(), state.bytes.copy())
    for i in range(len(dice)):
        kick(problem, trial, dice[i])
        descend(problem, trial, rounds)
        now = score(problem, trial.load, trial.bytes)
        if better(score(problem, state.load, state.bytes), now):
            copy(state, trial)
        else:
            copy(trial, state)


improve: Any = _compiled(_improve)


def empty_state(problem: Problem, *, num_ranks: int) -> State:
    """No table placed."""
    tables = len(problem.first) - 1
    return State(
        option=problem.first[:-1].copy(),
        ranks=np.zeros((tables, int(problem.shards.max())), dtype=np.int64),
        load=np.zeros(num_ranks),
        bytes=np.zeros(num_ranks),
    )
