"""What a placement problem can lose without losing its optimum: events, restrictions and dominated options.

Five steps, each exact:

1. An event without cost goes; events that are proportional, shard by shard, become one (the sum of two
   maxima that the same rank always attains is the maximum of the sum).
2. On one machine `WITHIN` is `ANY`, and one group of `HOST` is `ALL`.
3. Events are *folded*: where every option with cost in the events D has a stand-in of the same table that
   costs the same work in other events D' instead (and is no worse otherwise), no option needs D. Proof: take
   an optimal assignment and replace all options with cost in D by their stand-ins on the same ranks.
   The maximum of D' then is at most max(D') + max(D) of before, since a maximum of sums is at most the sum of
   the maxima, and all other events and all memory are no larger.
4. An option goes when another of its table is *no worse*: whatever ranks the first takes, the other can take
   some of the same with no more cost in any event and no more memory. Replacing one by the other keeps an
   assignment feasible and its objective no larger.
5. Events that have become free of cost go as in 1.

Letters: t tables, o options, s shards, e events, r ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from dse.placement.solver.problem import Array, Assignment, Ints, Mask, Problem, Where
from perfcore.compiled import compiled, inner

_ANY, _ALL, _HOST, _WITHIN = (int(w) for w in Where)
_ROUNDING = 1e-12  # relative; ratios of costs that differ less are equal
_MOST_FOLDED = 3  # events of one kind of option: more are not looked for


@dataclass(frozen=True, slots=True, eq=False)
class Reduced:
    """A smaller problem with the same optimum.

    Attributes:
        problem: without what was dropped; its events may be fewer.
        option: `(o,)` what the options of `problem` were called in the original.
    """

    problem: Problem
    option: Ints

    def original(self, assignment: Assignment) -> Assignment:
        """An assignment of the smaller problem as one of the original; same ranks, same objective."""
        return Assignment(self.option[assignment.option], assignment.ranks)

    def translated(self, assignment: Assignment) -> Assignment | None:
        """An assignment of the original as one of the smaller problem; `None` where it uses a dropped option."""
        place = np.full(int(max(self.option.max(), assignment.option.max())) + 1, -1)
        place[self.option] = np.arange(len(self.option))
        option = place[assignment.option]
        return None if (option < 0).any() else Assignment(option, assignment.ranks)


def reduced(problem: Problem) -> Reduced:
    """Drop what cannot matter; see the module for the rules and why they are exact."""
    smaller = _simple_where(_merged_events(problem))
    option = np.arange(problem.num_options, dtype=np.int64)
    for keep in (_unfolded, _undominated):
        kept = keep(smaller)
        smaller, option = _with_options(smaller, kept), option[kept]
    return Reduced(_merged_events(smaller), option)


def _merged_events(problem: Problem) -> Problem:
    groups: list[list[int]] = []
    for event in range(problem.num_events):
        column = problem.cost[:, event]
        if not column.any():
            continue
        same = (g for g in groups if _proportional(problem.cost[:, g[0]], column))
        if group := next(same, None):
            group.append(event)
        else:
            groups.append([event])
    if len(groups) == problem.num_events:
        return problem
    merged = [problem.cost[:, g].sum(axis=1) for g in groups]
    cost = np.stack(merged, axis=1) if merged else np.zeros((len(problem.bytes), 1))
    return replace(problem, cost=np.ascontiguousarray(cost))


def _proportional(a: Array, b: Array) -> bool:
    at = int(np.argmax(a))
    ratio = b[at] / a[at]
    if ratio == 0 or not np.allclose(a[:100] * ratio, b[:100], rtol=_ROUNDING, atol=0.0):
        return False
    return bool(np.allclose(a * ratio, b, rtol=_ROUNDING, atol=0.0))


def _simple_where(problem: Problem) -> Problem:
    if problem.num_ranks != problem.ranks_per_host:
        return problem
    where = problem.where.copy()
    where[where == _WITHIN] = _ANY
    where[(where == _HOST) & (problem.shard_counts == problem.num_ranks)] = _ALL
    return replace(problem, where=where)


def _unfolded(problem: Problem) -> Mask:
    """`(o,)`: without the options whose events are folded into others."""
    kept = np.ones(problem.num_options, dtype=np.bool_)
    if problem.num_events == 1:
        return kept
    signatures = np.maximum.reduceat(problem.cost, problem.first_shard[:-1], axis=0) > 0
    found = np.unique(signatures, axis=0)
    for donor in found:
        for taker in found:
            gone, instead = np.flatnonzero(donor & ~taker), np.flatnonzero(taker & ~donor)
            if 0 < len(gone) == len(instead) <= _MOST_FOLDED:
                image = np.arange(problem.num_events)
                image[gone] = instead
                affected = signatures[:, gone].any(axis=1) & kept
                if affected.any() and _can_fold(*_plain(problem), affected, kept & ~affected, image):
                    kept &= ~affected
    return kept


def _undominated(problem: Problem) -> Mask:
    kept: Mask = _not_worse_than_others(*_plain(problem), np.arange(problem.num_events))
    return kept


def _with_options(problem: Problem, kept: Mask) -> Problem:
    if kept.all():
        return problem
    shards = np.repeat(kept, problem.shard_counts)
    table = problem.table_of_option[kept]
    return replace(
        problem,
        first_option=np.searchsorted(table, np.arange(problem.num_tables + 1)).astype(np.int64),
        first_shard=np.r_[0, problem.shard_counts[kept].cumsum()].astype(np.int64),
        where=problem.where[kept],
        cost=problem.cost[shards],
        bytes=problem.bytes[shards],
        host_bytes=problem.host_bytes[shards],
    )


def _plain(problem: Problem) -> tuple[Ints, Ints, Ints, Array, Array, Mask, int]:
    allowed = problem.allowed if problem.allowed is not None else np.ones((0, 0), dtype=np.bool_)
    memory = np.stack([problem.bytes, problem.host_bytes], axis=1)
    return (
        problem.first_option,
        problem.first_shard,
        problem.where,
        problem.cost,
        memory,
        allowed,
        problem.ranks_per_host,
    )


@inner()
def _may_stand_in(
    first_shard: Ints, where: Ints, allowed: Mask, per_host: int, table: int, a: int, b: int
) -> bool:
    """Whether shard i of option a may always take the rank of shard i of option b."""
    shards = first_shard[a + 1] - first_shard[a]
    if shards > first_shard[b + 1] - first_shard[b]:
        return False
    if where[a] == where[b]:
        return True
    if where[a] == _WITHIN and not (where[b] == _HOST and shards <= per_host):
        return False
    if where[a] != _ANY and where[a] != _WITHIN:
        return False
    if where[b] == _WITHIN or len(allowed) == 0:
        return True
    ranks = shards if where[b] == _ALL else allowed.shape[1]
    return bool(allowed[table, :ranks].all())


@inner()
def _no_worse(first_shard: Ints, cost: Array, memory: Array, a: int, b: int, image: Ints) -> bool:
    """Whether each shard of a costs and holds no more than b's, when b's event e counts as `image[e]`."""
    for i in range(first_shard[a + 1] - first_shard[a]):
        mine, other = first_shard[a] + i, first_shard[b] + i
        if memory[mine, 0] > memory[other, 0] or memory[mine, 1] > memory[other, 1]:
            return False
        for e in range(cost.shape[1]):
            limit = 0.0
            for folded in range(cost.shape[1]):
                if image[folded] == e:
                    limit += cost[other, folded]
            if cost[mine, e] > limit:
                return False
    return True


@compiled()
def _can_fold(
    first_option: Ints,
    first_shard: Ints,
    where: Ints,
    cost: Array,
    memory: Array,
    allowed: Mask,
    per_host: int,
    affected: Mask,
    standing: Mask,
    image: Ints,
) -> bool:
    """Whether every affected option has a stand-in among the `standing` ones of its table."""
    for table in range(len(first_option) - 1):
        for b in range(first_option[table], first_option[table + 1]):
            if not affected[b]:
                continue
            found = False
            for a in range(first_option[table], first_option[table + 1]):
                if (
                    standing[a]
                    and _may_stand_in(first_shard, where, allowed, per_host, table, a, b)
                    and _no_worse(first_shard, cost, memory, a, b, image)
                ):
                    found = True
                    break
            if not found:
                return False
    return True


@compiled()
def _not_worse_than_others(
    first_option: Ints,
    first_shard: Ints,
    where: Ints,
    cost: Array,
    memory: Array,
    allowed: Mask,
    per_host: int,
    image: Ints,
) -> Mask:
    """`(o,)`: False where another option of the table is no worse; of equal ones the first stays."""
    kept = np.ones(len(where), dtype=np.bool_)
    for table in range(len(first_option) - 1):
        for b in range(first_option[table + 1] - 1, first_option[table] - 1, -1):
            for a in range(first_option[table], first_option[table + 1]):
                if (
                    a != b
                    and kept[a]
                    and _may_stand_in(first_shard, where, allowed, per_host, table, a, b)
                    and _no_worse(first_shard, cost, memory, a, b, image)
                ):
                    kept[b] = False
                    break
    return kept
