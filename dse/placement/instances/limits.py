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
from dse.placement.instances.together import Together, groups_of, option_sets, put_together
from dse.placement.solver.problem import Array, Ints, Mask, Problem, Where
from dse.problems import Problems
from dse.ranks import check_ranks, check_there
from dse.validation_text import nearest
from dse.yaml_loader import Document, load_yaml
from perfcore.units import BYTES_PER_GIB

_READABLE = 200


@dataclass(frozen=True, slots=True, eq=False)
class Limited(Together):
    """A problem under limits, tables that stay together being one.

    Attributes:
        labels: of what is left; tables that stay together have joined names.
    """

    labels: Labels


def read_limits(path: Path) -> Document[LimitsFile]:
    """A file of limits.

    Raises:
        ConfigError: it cannot be read, or has mistakes: all of them, one a line.
    """
    return load_yaml(path, LimitsFile)


def without_section(document: Document[LimitsFile], section: str) -> Document[LimitsFile] | None:
    """The limits without a section; nothing where it was not there."""
    empty = type(document.value)()
    if getattr(document.value, section) == getattr(empty, section):
        return None
    return replace(document, value=document.value.model_copy(update={section: getattr(empty, section)}))


def unlimited(problem: Problem, labels: Labels) -> Limited:
    """The problem as it is."""
    return Limited(
        problem,
        tuple((t,) for t in range(problem.num_tables)),
        tuple((o,) for o in range(problem.num_options)),
        labels,
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
    groups = groups_of(limits, position, problem.num_tables)
    keys = [
        *zip(labels.types, labels.kernels, problem.where.tolist(), problem.shard_counts.tolist(), strict=True)
    ]
    sets = option_sets(keys, problem.first_option, kept, groups)
    check_sets(sets, groups, labels.tables, limits, allowed, problems)
    problems.check()
    left = put_together(_under(problem, limits, allowed), sets, groups)
    return Limited(left.problem, left.members, left.options, _relabelled(labels, sets, groups))


def check_names(limits: LimitsFile, position: Mapping[str, int], num_ranks: int, problems: Problems) -> None:
    """Every named table and rank exists; no rank differs in two ways, no table stays together with two groups."""
    for loc, name in _named_tables(limits):
        if name not in position:
            problems.add(loc, f"no table is called {name!r}; {_known(name, list(position))}")
    check_ranks(limits.ranks, num_ranks, problems, "ranks")
    for i, entry in enumerate(limits.pin):
        check_there(entry.ranks, num_ranks, problems, "pin", i, "ranks")
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
    """`(o,)`: options that kinds and pins leave."""
    fixed = np.isin(problem.where, (Where.ALL, Where.HOST))
    return kept_options(
        labels.types, labels.kernels, problem.table_of_option, fixed, limits, position, allowed
    )


def kept_options(
    types: Sequence[str],
    kernels: Sequence[str],
    table: Ints,
    fixed: Mask,
    limits: LimitsFile,
    position: Mapping[str, int],
    allowed: Mask,
) -> Mask:
    """`(o,)`: options that kinds and pins leave.

    Args:
        types: `(o,)` sharding types.
        kernels: `(o,)` compute kernels; a cache is followed by its ratio, which limits may leave away.
        table: `(o,)`.
        fixed: `(o,)` options that need ranks of their own choice, which a pinned table never takes.
        limits: kinds.
        position: of tables by name.
        allowed: `(t, r)` ranks that pins leave.
    """
    words = np.array([k.partition("@")[0] for k in kernels])
    kept = np.ones(len(table), dtype=bool)
    for entry in limits.kinds:
        concerned = _concerned(entry, table, position)
        if entry.allow is not None:
            kept &= ~concerned | np.isin(np.array(types), entry.allow)
        if entry.forbid is not None:
            kept &= ~(concerned & np.isin(np.array(types), entry.forbid))
        if entry.forbid_kernels is not None:
            forbidden = np.isin(np.array(kernels), entry.forbid_kernels) | np.isin(
                words, entry.forbid_kernels
            )
            kept &= ~(concerned & forbidden)
    kept &= np.asarray(allowed.all(axis=1))[table] | ~fixed
    return kept & np.asarray(allowed.any(axis=1))[table]


def _concerned(entry: KindEntry, table: Ints, position: Mapping[str, int]) -> Mask:
    if entry.tables is None:
        return np.ones(len(table), dtype=bool)
    return np.isin(table, [position[name] for name in entry.tables])


def check_sets(
    sets: Sequence[Sequence[tuple[int, ...]]],
    groups: Sequence[tuple[int, ...]],
    tables: Sequence[str],
    limits: LimitsFile,
    allowed: Mask,
    problems: Problems,
) -> None:
    """Every group has an option and a rank that all of its tables may take."""
    for group, options in zip(groups, sets, strict=True):
        if options and allowed[list(group)].all(axis=0).any():
            continue
        names = [tables[t] for t in group]
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


def _under(problem: Problem, limits: LimitsFile, allowed: Mask) -> Problem:
    """The problem with the memory and the ranks that limits leave."""
    return replace(
        problem,
        capacity_bytes=ranks_capacity(problem.capacity_bytes, limits),
        slowness=slower(problem.slowness, limits),
        host_capacity_bytes=hosts_capacity(problem.host_capacity_bytes, limits),
        allowed=None if bool(allowed.all()) else allowed,
    )


def ranks_capacity(capacity_bytes: Array, limits: LimitsFile) -> Array:
    """`(r,)`: a limit for all ranks lowers the capacity, one for some ranks replaces it."""
    capacity = capacity_bytes.copy()
    if limits.hbm_gib is not None:
        capacity = np.minimum(capacity, limits.hbm_gib * BYTES_PER_GIB)
    for entry in limits.ranks:
        if entry.hbm_gib is not None:
            capacity[entry.ranks] = entry.hbm_gib * BYTES_PER_GIB
    return capacity


def hosts_capacity(capacity_bytes: Array, limits: LimitsFile) -> Array:
    """`(h,)`: a limit lowers the capacity."""
    if limits.host_gib is None:
        return capacity_bytes
    return np.asarray(np.minimum(capacity_bytes, limits.host_gib * BYTES_PER_GIB))


def slower(slowness: Array, limits: LimitsFile) -> Array:
    """`(r,)`: what is said of ranks that differ takes the place of what was known of them."""
    slowness = slowness.copy()
    for entry in limits.ranks:
        if entry.slowness is not None:
            slowness[entry.ranks] = entry.slowness
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
