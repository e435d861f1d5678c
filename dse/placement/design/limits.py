"""Limits on the placement of a design: what a file of limits says, as a transform of a `DesignProblem`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dse.placement.design.conditions import Conditions
from dse.placement.design.problem import DesignProblem, Transform, together_key
from dse.placement.instances.limits import (
    check_names,
    check_sets,
    hosts_capacity,
    kept_options,
    pinned,
    ranks_capacity,
    slower,
)
from dse.placement.instances.limits_schema import LimitsFile
from dse.placement.instances.together import groups_of, option_sets
from dse.placement.solver.problem import Mask, Where
from dse.problems import Problems
from dse.yaml_loader import Document
from perfcore.design.design import Design


def transform_of(document: Document[LimitsFile], design: Design) -> Transform:
    """What the limits do to a design's problem.

    Raises:
        ConfigError: a limit names what does not exist: all of these, one a line. The transform raises it for tables
            that are left without an option.
    """
    tables = [t.name for t in design.model.tables]
    problems, position = Problems(document), {name: t for t, name in enumerate(tables)}
    check_names(document.value, position, design.system.world_size, problems)
    problems.check()

    def transform(problem: DesignProblem) -> DesignProblem:
        return _limited(problem, document, position, tables)

    return transform


def _limited(
    problem: DesignProblem,
    document: Document[LimitsFile],
    position: dict[str, int],
    tables: Sequence[str],
) -> DesignProblem:
    limits, ranks = document.value, len(problem.capacity_bytes)
    allowed = np.ones((len(tables), ranks), dtype=bool) if problem.allowed is None else problem.allowed
    allowed = pinned(allowed, limits, position)
    groups = groups_of(limits, position, len(tables))
    sets = option_sets(
        [together_key(o) for o in problem.options],
        np.searchsorted([o.table for o in problem.options], np.arange(len(tables) + 1)).astype(np.int64),
        _kept(problem, limits, position, allowed),
        groups,
    )
    problems = Problems(document)
    check_sets(sets, groups, tables, limits, allowed, problems)
    problems.check()
    left = np.zeros(len(problem.options), dtype=bool)
    left[[o for of_group in sets for options in of_group for o in options]] = True
    before = problem.conditions
    return replace(
        problem.keep(left),
        capacity_bytes=ranks_capacity(problem.capacity_bytes, limits),
        allowed=None if bool(allowed.all()) else allowed,
        conditions=Conditions(
            hosts_capacity(before.host_capacity_bytes, limits), slower(before.slowness, limits), groups
        ),
    )


def _kept(problem: DesignProblem, limits: LimitsFile, position: dict[str, int], allowed: Mask) -> Mask:
    options = problem.options
    return kept_options(
        [str(o.type) for o in options],
        [o.kernel_label for o in options],
        np.array([o.table for o in options]),
        np.isin([int(o.where) for o in options], (Where.ALL, Where.HOST)),
        limits,
        position,
        allowed,
    )
