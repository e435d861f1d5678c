"""Limits on the placement of a design: what a file of limits says, as a transform of a `DesignProblem`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from dse.placement.design.problem import DesignProblem
from dse.placement.instances.limits import check_names, pinned, ranks_capacity
from dse.placement.instances.limits_schema import LimitsFile
from dse.placement.solver.problem import Mask, Where
from dse.problems import Problems
from dse.yaml_loader import Document

Transform: TypeAlias = Callable[[DesignProblem], DesignProblem]


def design_transform(document: Document[LimitsFile], tables: Sequence[str], *, num_ranks: int) -> Transform:
    """What the limits do to a design's problem.

    Raises:
        ConfigError: a limit names what does not exist: all of these, one a line. The transform raises it for tables
            that are left without an option.
    """
    problems, position = Problems(document), {name: t for t, name in enumerate(tables)}
    check_names(document.value, position, num_ranks, problems)
    problems.check()

    def transform(problem: DesignProblem) -> DesignProblem:
        return _limited(problem, document, position, tables)

    return transform


def by_tables(limits: LimitsFile) -> bool:
    """Whether limits ask for what an iteration's bound does not know: tables that stay together, slower ranks, hosts, kernels."""
    return bool(
        limits.together
        or limits.host_gib is not None
        or any(e.slowness != 1.0 for e in limits.ranks)
        or any(e.forbid_kernels is not None for e in limits.kinds)
    )


def _limited(
    problem: DesignProblem,
    document: Document[LimitsFile],
    position: dict[str, int],
    tables: Sequence[str],
) -> DesignProblem:
    limits, ranks = document.value, len(problem.capacity_bytes)
    allowed = np.ones((len(tables), ranks), dtype=bool) if problem.allowed is None else problem.allowed
    allowed = pinned(allowed, limits, position)
    table = np.array([o.table for o in problem.options])
    kept = _kept(problem, limits, position, allowed)
    left = np.isin(np.arange(len(tables)), table[kept])
    if not left.all():
        name = tables[int(np.argmin(left))]
        pins = [i for i, p in enumerate(limits.pin) if p.table == name]
        at: tuple[str | int, ...] = ("pin", pins[-1]) if pins else ("kinds",)
        raise document.error(at, f"the limits leave table {name!r} no kind of sharding")
    return replace(
        problem.keep(kept),
        capacity_bytes=ranks_capacity(problem.capacity_bytes, limits),
        allowed=None if bool(allowed.all()) else allowed,
    )


def _kept(problem: DesignProblem, limits: LimitsFile, position: dict[str, int], allowed: Mask) -> Mask:
    types = np.array([str(o.type) for o in problem.options])
    table = np.array([o.table for o in problem.options])
    fixed = np.isin([int(o.where) for o in problem.options], (Where.ALL, Where.HOST))
    somewhere = np.asarray(allowed.any(axis=1))[table]
    kept: Mask = somewhere & (np.asarray(allowed.all(axis=1))[table] | ~fixed)
    for entry in limits.kinds:
        at = None if entry.tables is None else [position[name] for name in entry.tables]
        concerned = np.ones(len(table), dtype=bool) if at is None else np.isin(table, at)
        if entry.allow is not None:
            kept &= ~concerned | np.isin(types, entry.allow)
        if entry.forbid is not None:
            kept &= ~(concerned & np.isin(types, entry.forbid))
    return kept
