"""Tables that stay together: split alike, shard beside shard. For the solver they are one table.

Letters: t tables, o options, g groups.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dse.placement.instances.limits_schema import LimitsFile
from dse.placement.solver.problem import Array, Assignment, Ints, Mask, Problem

Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Together:
    """A problem in which groups of tables are one table each.

    Attributes:
        problem: what is left to solve.
        members: for each table of `problem` the tables of the problem before.
        options: for each option of `problem` an option of each member.
    """

    problem: Problem
    members: Groups
    options: tuple[tuple[int, ...], ...]

    def original(self, assignment: Assignment) -> Assignment:
        """The assignment of the problem before."""
        count = sum(map(len, self.members))
        option = np.zeros(count, dtype=np.int64)
        ranks: list[tuple[int, ...]] = [()] * count
        for members, chosen, placed in zip(self.members, assignment.option, assignment.ranks, strict=True):
            for table, of_member in zip(members, self.options[chosen], strict=True):
                option[table], ranks[table] = of_member, placed
        return Assignment(option, tuple(ranks))

    def reduced(self, assignment: Assignment) -> Assignment:
        """An assignment of the problem before as one of this; a group goes by its first member."""
        chosen = self.chosen(assignment.option)
        return Assignment(chosen, tuple(assignment.ranks[g[0]] for g in self.members))

    def chosen(self, option: Ints) -> Ints:
        """`(g,)`: the option of each group that its first member takes, from `(t,)`."""
        of_first = {options[0]: i for i, options in enumerate(self.options)}
        return np.array([of_first[int(option[g[0]])] for g in self.members], dtype=np.int64)


def groups_of(limits: LimitsFile, position: Mapping[str, int], tables: int) -> Groups:
    """Tables by group, in the order of each group's first; a table by itself is a group."""
    groups = [tuple(position[name] for name in group) for group in limits.together]
    grouped = {t for g in groups for t in g}
    return tuple(sorted([*groups, *((t,) for t in range(tables) if t not in grouped)], key=min))


def option_sets(
    keys: Sequence[Hashable], first_option: Ints, kept: Mask, groups: Groups
) -> list[list[tuple[int, ...]]]:
    """For each group its options: an option of each member, all of one key.

    Args:
        keys: `(o,)` what members must share: type, kernel, which ranks, number of shards.
        first_option: `(t + 1,)` where tables' options begin.
        kept: `(o,)` options that there are.
        groups: of tables.
    """
    sets: list[list[tuple[int, ...]]] = []
    for group in groups:
        options = [[o for o in range(first_option[t], first_option[t + 1]) if kept[o]] for t in group]
        if len(group) == 1:
            sets.append([(o,) for o in options[0]])
            continue
        by_key = [_numbered(of_member, keys) for of_member in options]
        sets.append([tuple(k[key] for k in by_key) for key in by_key[0] if all(key in k for k in by_key)])
    return sets


def _numbered(options: Sequence[int], keys: Sequence[Hashable]) -> dict[tuple[Hashable, int], int]:
    """Options by their key; of those that share one, the first, the second, ..."""
    seen: dict[Hashable, int] = {}
    out = {}
    for o in options:
        seen[keys[o]] = seen.get(keys[o], -1) + 1
        out[keys[o], seen[keys[o]]] = o
    return out


def put_together(problem: Problem, sets: Sequence[Sequence[tuple[int, ...]]], groups: Groups) -> Together:
    """Groups as tables: shard i of a group is shard i of each member; ranks are those allowed to all."""
    options = [s for table in sets for s in table]
    cost, bytes_, host_bytes = _summed_shards(problem, options)
    lead = np.array([s[0] for s in options], dtype=np.int64)
    allowed = None
    if problem.allowed is not None:
        allowed = np.stack([problem.allowed[list(g)].all(axis=0) for g in groups])
        allowed = None if bool(allowed.all()) else allowed
    smaller = replace(
        problem,
        first_option=_starts([len(s) for s in sets]),
        first_shard=_starts(problem.shard_counts[lead].tolist()),
        where=problem.where[lead],
        cost=cost,
        bytes=bytes_,
        host_bytes=host_bytes,
        allowed=allowed,
    )
    return Together(smaller, tuple(groups), tuple(options))


def _summed_shards(problem: Problem, options: Sequence[tuple[int, ...]]) -> tuple[Array, Array, Array]:
    """Costs, bytes and host bytes of the options' shards."""
    first = problem.first_shard
    at = np.concatenate([np.arange(first[s[0]], first[s[0] + 1]) for s in options])
    sums = [problem.cost[at], problem.bytes[at], problem.host_bytes[at]]
    begin = 0
    for members in options:
        end = begin + int(first[members[0] + 1] - first[members[0]])
        for o in members[1:]:
            shards = slice(first[o], first[o + 1])
            for total, values in zip(sums, (problem.cost, problem.bytes, problem.host_bytes), strict=True):
                total[begin:end] += values[shards]
        begin = end
    return sums[0], sums[1], sums[2]


def _starts(counts: Sequence[int]) -> Ints:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
