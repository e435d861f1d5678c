"""Limits that a person sets on a placement: a file, and the smaller problem that it leaves.

Pinned tables, tables that stay together, forbidden kinds, memory per rank and per machine, ranks of other devices. All of them
are a transform of a `Problem`: options that a limit excludes are gone, tables that stay together are one table, and `original`
turns the answer back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from dse.placement.instances.labels import Labels
from dse.placement.instances.limits_schema import KindEntry, LimitsFile
from dse.placement.solver.problem import Array, Assignment, Ints, Mask, Problem, Where
from dse.problems import Problems
from dse.validation_text import nearest
from dse.yaml_loader import Document, load_yaml
from perfcore.units import BYTES_PER_GIB

_READABLE = 200
Option = tuple[str, str, int, int]  # type, kernel, where, shards: what tables that stay together must share


@dataclass(frozen=True, slots=True, eq=False)
class Limited:
    """A problem under limits.

    Attributes:
        problem: what is left to solve.
        labels: of what is left; tables that stay together have joined names.
        members: for each table of `problem` the tables of the problem before.
        options: for each option of `problem` an option of each member.
    """

    problem: Problem
    labels: Labels
    members: tuple[tuple[int, ...], ...]
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


def read_limits(path: Path) -> Document[LimitsFile]:
    """A file of limits.

    Raises:
        ConfigError: it cannot be read, or has mistakes: all of them, one a line.
    """
    return load_yaml(path, LimitsFile)


def unlimited(problem: Problem, labels: Labels) -> Limited:
    """The problem as it is."""
    return Limited(
        problem,
        labels,
        tuple((t,) for t in range(problem.num_tables)),
        tuple((o,) for o in range(problem.num_options)),
    )


def limited(problem: Problem, labels: Labels, document: Document[LimitsFile]) -> Limited:
    """The problem under the limits of a file.

    Raises:
        ConfigError: a limit names what does not exist, contradicts another, or leaves a table no option: all of
            these, one a line.
    """
    problems, limits = Problems(document), document.value
    position = {name: t for t, name in enumerate(labels.tables)}
    check_names(limits, position, problem.num_ranks, problems)
    problems.check()
    allowed = _allowed(problem, limits, position)
    kept = _kept_options(problem, labels, limits, position, allowed)
    groups = _groups(limits, position, problem.num_tables)
    sets = _option_sets(problem, labels, kept, groups)
    _check_sets(sets, groups, labels, limits, allowed, problems)
    problems.check()
    return Limited(
        _reduced(problem, limits, sets, groups, allowed),
        _relabelled(labels, sets, groups),
        groups,
        tuple(s for table in sets for s in table),
    )


def check_names(limits: LimitsFile, position: Mapping[str, int], num_ranks: int, problems: Problems) -> None:
    """Every named table and rank exists; no table stays together with two groups."""
    for loc, name in _named_tables(limits):
        if name not in position:
            problems.add(loc, f"no table is called {name!r}; {_known(name, list(position))}")
    named = {("ranks", i): e.ranks for i, e in enumerate(limits.ranks)}
    for at, ranks in (named | {("pin", i): e.ranks for i, e in enumerate(limits.pin)}).items():
        if max(ranks) >= num_ranks:
            there = (
                f"there are {num_ranks} ranks, 0 to {num_ranks - 1}"
                if num_ranks > 1
                else "there is rank 0 alone"
            )
            problems.add((*at, "ranks"), f"{there}, but got {max(ranks)}")
    seen: set[str] = set()
    for i, group in enumerate(limits.together):
        for j, name in enumerate(group):
            if name in seen:
                problems.add(("together", i, j), f"table {name!r} is in a group already")
            seen.add(name)


def _known(name: str, tables: Sequence[str]) -> str:
    """The nearest name, or as many as a person reads."""
    near = nearest(name, tables, kind="there are")
    return (
        near
        if len(near) < _READABLE or len(tables) < 3
        else f"there are {tables[0]}, {tables[1]}, ..., {tables[-1]}"
    )


def _named_tables(limits: LimitsFile) -> list[tuple[tuple[str | int, ...], str]]:
    pins = [(("pin", i, "table"), entry.table) for i, entry in enumerate(limits.pin)]
    groups = [(("together", i, j), n) for i, g in enumerate(limits.together) for j, n in enumerate(g)]
    kinds = [
        (("kinds", i, "tables", j), n)
        for i, e in enumerate(limits.kinds)
        for j, n in enumerate(e.tables or ())
    ]
    return [*pins, *groups, *kinds]


def _allowed(problem: Problem, limits: LimitsFile, position: Mapping[str, int]) -> Mask:
    shape = (problem.num_tables, problem.num_ranks)
    everywhere = np.ones(shape, dtype=bool) if problem.allowed is None else problem.allowed
    return pinned(everywhere, limits, position)


def pinned(allowed: Mask, limits: LimitsFile, position: Mapping[str, int]) -> Mask:
    """`(t, r)`: of the ranks allowed so far those that pins leave to each table."""
    left = allowed.copy()
    for entry in limits.pin:
        chosen = np.zeros(allowed.shape[1], dtype=bool)
        chosen[entry.ranks] = True
        left[position[entry.table]] &= chosen
    return left


def _kept_options(
    problem: Problem, labels: Labels, limits: LimitsFile, position: Mapping[str, int], allowed: Mask
) -> Mask:
    """`(o,)`: options that kinds and pins leave; a pinned table takes no option that needs ranks of its own choice."""
    types, kernels = np.array(labels.types), np.array(labels.kernels)
    words = np.array([k.partition("@")[0] for k in labels.kernels])  # a cache of any ratio
    table = problem.table_of_option
    kept = np.ones(problem.num_options, dtype=bool)
    for entry in limits.kinds:
        concerned = _concerned(entry, table, position)
        if entry.allow is not None:
            kept &= ~concerned | np.isin(types, entry.allow)
        if entry.forbid is not None:
            kept &= ~(concerned & np.isin(types, entry.forbid))
        if entry.forbid_kernels is not None:
            forbidden = np.isin(kernels, entry.forbid_kernels) | np.isin(words, entry.forbid_kernels)
            kept &= ~(concerned & forbidden)
    everywhere = np.asarray(allowed.all(axis=1))[table]
    fixed = np.isin(problem.where, (Where.ALL, Where.HOST))
    kept &= everywhere | ~fixed
    return kept & np.asarray(allowed.any(axis=1))[table]


def _concerned(entry: KindEntry, table: Ints, position: Mapping[str, int]) -> Mask:
    if entry.tables is None:
        return np.ones(len(table), dtype=bool)
    return np.isin(table, [position[name] for name in entry.tables])


def _groups(limits: LimitsFile, position: Mapping[str, int], tables: int) -> tuple[tuple[int, ...], ...]:
    """Tables by group, in the order of each group's first; a table by itself is a group."""
    groups = [tuple(position[name] for name in group) for group in limits.together]
    grouped = {t for g in groups for t in g}
    return tuple(sorted([*groups, *((t,) for t in range(tables) if t not in grouped)], key=min))


def _option_sets(
    problem: Problem, labels: Labels, kept: Mask, groups: Sequence[tuple[int, ...]]
) -> list[list[tuple[int, ...]]]:
    """For each group its options: an option of each member, all of one type, kernel and number of shards."""
    first = problem.first_option
    counts = problem.shard_counts
    sets: list[list[tuple[int, ...]]] = []
    for group in groups:
        options = [[o for o in range(first[t], first[t + 1]) if kept[o]] for t in group]
        if len(group) == 1:
            sets.append([(o,) for o in options[0]])
            continue
        by_key: list[dict[tuple[Option, int], int]] = []
        for of_member in options:
            seen: dict[Option, int] = {}
            keyed = {}
            for o in of_member:
                key = (labels.types[o], labels.kernels[o], int(problem.where[o]), int(counts[o]))
                seen[key] = seen.get(key, -1) + 1
                keyed[key, seen[key]] = o
            by_key.append(keyed)
        sets.append([tuple(k[key] for k in by_key) for key in by_key[0] if all(key in k for k in by_key)])
    return sets


def _check_sets(
    sets: Sequence[Sequence[tuple[int, ...]]],
    groups: Sequence[tuple[int, ...]],
    labels: Labels,
    limits: LimitsFile,
    allowed: Mask,
    problems: Problems,
) -> None:
    for group, options in zip(groups, sets, strict=True):
        if options and allowed[list(group)].all(axis=0).any():
            continue
        names = [labels.tables[t] for t in group]
        if len(group) > 1:
            place: tuple[str | int, ...] = (
                "together",
                next(i for i, g in enumerate(limits.together) if names[0] in g),
            )
            why = "no rank is allowed to all" if options else "no kind of sharding is left to all"
            problems.add(
                place, f"the limits leave {' and '.join(names)} no placement together: {why} of them"
            )
            continue
        pins = [i for i, p in enumerate(limits.pin) if p.table == names[0]]
        kinds = [i for i, e in enumerate(limits.kinds) if e.tables is None or names[0] in e.tables]
        section, at = ("pin", pins) if pins else ("kinds", kinds)
        problems.add(
            (section, at[-1]) if at else (),
            f"the limits leave table {names[0]!r} no kind of sharding (a pin excludes those that take every rank)"
            if pins
            else f"the limits leave table {names[0]!r} no kind of sharding",
        )


def _reduced(
    problem: Problem,
    limits: LimitsFile,
    sets: Sequence[Sequence[tuple[int, ...]]],
    groups: Sequence[tuple[int, ...]],
    allowed: Mask,
) -> Problem:
    options = [s for table in sets for s in table]
    cost, bytes_, host_bytes = _summed_shards(problem, options)
    lead = np.array([s[0] for s in options], dtype=np.int64)
    together = np.stack([allowed[list(g)].all(axis=0) for g in groups])
    host = problem.host_capacity_bytes
    if limits.host_gib is not None:
        host = np.minimum(host, limits.host_gib * BYTES_PER_GIB)
    return replace(
        problem,
        first_option=_starts([len(s) for s in sets]),
        first_shard=_starts(problem.shard_counts[lead].tolist()),
        where=problem.where[lead],
        cost=cost,
        bytes=bytes_,
        host_bytes=host_bytes,
        capacity_bytes=ranks_capacity(problem.capacity_bytes, limits),
        slowness=_slowness(problem, limits),
        host_capacity_bytes=host,
        allowed=None if bool(together.all()) else together,
    )


def _summed_shards(problem: Problem, options: Sequence[tuple[int, ...]]) -> tuple[Array, Array, Array]:
    """Costs, bytes and host bytes of the options' shards: shard i of a group is shard i of each member."""
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


def ranks_capacity(capacity_bytes: Array, limits: LimitsFile) -> Array:
    """`(r,)`: a limit for all ranks lowers the capacity, one for some ranks replaces it."""
    capacity = capacity_bytes.copy()
    if limits.hbm_gib is not None:
        capacity = np.minimum(capacity, limits.hbm_gib * BYTES_PER_GIB)
    for entry in limits.ranks:
        if entry.hbm_gib is not None:
            capacity[entry.ranks] = entry.hbm_gib * BYTES_PER_GIB
    return capacity


def _slowness(problem: Problem, limits: LimitsFile) -> Array:
    slowness = problem.slowness.copy()
    for entry in limits.ranks:
        slowness[entry.ranks] *= entry.slowness
    return slowness


def _relabelled(
    labels: Labels, sets: Sequence[Sequence[tuple[int, ...]]], groups: Sequence[tuple[int, ...]]
) -> Labels:
    lead = [s[0] for table in sets for s in table]
    return Labels(
        tables=tuple(" + ".join(labels.tables[t] for t in g) for g in groups),
        types=tuple(labels.types[o] for o in lead),
        kernels=tuple(labels.kernels[o] for o in lead),
        events=labels.events,
    )


def _starts(counts: Sequence[int]) -> Ints:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
