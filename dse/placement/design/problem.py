"""The placement problem of a design: what may be chosen, and its surrogate for the search.

A cut (`dse.placement.design.relaxed`) is a sum of maxima over ranks, so each cut is a `Problem`: its segments and collectives are
events. The surrogate of a plan is the cut of its own critical cycle, collectives at their slope there.

Letters: t tables, o options, s shards, r ranks, e events.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from dse.placement.design.bound import ClassBound
from dse.placement.design.options import Option, Options
from dse.placement.design.program import Key
from dse.placement.design.relaxed import Cut, Role, transfer_us
from dse.placement.solver.problem import Array, Assignment, Ints, Mask, Problem

_SLOPE_STEP = 0.05  # relative change of bytes at which a collective's slope is taken
_LEAST = 1e-9  # relative; loads this small are rounding


@dataclass(frozen=True, eq=False)
class DesignProblem:
    """What a placement of a design's tables may choose.

    Attributes:
        options: of every table, ascending by table.
        bytes: `(o,)` device memory of the largest shard of each option.
        capacity_bytes: `(r,)` device memory of each rank for tables.
        allowed: `(t, r)` ranks that shards with a choice of rank may take; `None` allows all.
    """

    options: tuple[Option, ...]
    bytes: Array
    capacity_bytes: Array
    allowed: Mask | None = None

    def keep(self, options: Mask) -> DesignProblem:
        """The problem with `(o,)` options left."""
        kept = tuple(o for o, k in zip(self.options, options, strict=True) if k)
        return replace(self, options=kept, bytes=self.bytes[options])


Transform: TypeAlias = Callable[[DesignProblem], DesignProblem]


@dataclass(frozen=True, eq=False)
class Surrogate:
    """One cut of a class as the solver's problem, in µs.

    Attributes:
        problem: events are the cut's segments, its collectives, and what all ranks see.
        events: what they are called.
        constant_us: what the objective lacks to the cut's value, near the plan that it was made at.
    """

    problem: Problem
    events: tuple[str, ...]
    constant_us: float


def surrogate_of(
    bound: ClassBound, cut: Cut, bytes_at: dict[int, float], problem: DesignProblem
) -> Surrogate:
    """A cut as a problem.

    Args:
        bound: the class.
        cut: one of its cycles.
        bytes_at: by variable the bytes of a collective around which its time counts as linear.
        problem: memory of ranks, and which of them are allowed.
    """
    options, variables = bound.options, bound.program.variables
    columns: list[Array] = []
    names: list[str] = []
    shared: Array = np.zeros(len(options.options))
    constant = cut.constant_us
    for weight, key in cut.segments:
        each, everywhere, base = _summed(bound, key)
        constant += weight * base
        shared += weight * everywhere
        if each.any():
            columns.append(weight * each[options.shard_probe])
            names.append(_name(bound, key))
    for weight, v in cut.transfers:
        each, everywhere, base = _summed(bound, (v,))
        slope, intercept = _tangent(bound, v, bytes_at[v])
        constant += weight * (intercept + slope * base)
        shared += weight * slope * everywhere
        if variables[v].role is Role.FULLEST and each.any():
            columns.append(weight * slope * each[options.shard_probe])
            names.append(variables[v].label)
    differs = shared - np.minimum.reduceat(shared, _first(options)[:-1])[options.table]
    constant += float((shared - differs)[_first(options)[:-1]].sum())
    if (differs > _LEAST * max(constant, 1.0)).any():
        # Every rank sees it once, wherever the shards are: as if they were spread evenly.
        ranks = options.design.system.world_size
        columns.append(np.repeat(differs * ranks / options.count, options.count))
        names.append("everywhere")
    cost = np.stack(columns, axis=1) if columns else np.zeros((len(options.shard_probe), 1))
    whole = problem_of(options, cost, bound.costs.bytes, problem)
    return Surrogate(whole, tuple(names) or ("nothing",), constant)


def problem_of(options: Options, cost: Array, bytes_: Array, limits: DesignProblem) -> Problem:
    """Options as the solver's problem, with `(s, e)` costs and `(p,)` memory of probes."""
    ranks, local = options.design.system.world_size, options.design.system.local_world_size
    shards = len(options.shard_probe)
    return Problem(
        first_option=_first(options),
        first_shard=options.first_shard,
        where=np.array([o.where for o in options.options], dtype=np.int64),
        cost=cost,
        bytes=bytes_[options.shard_probe],
        capacity_bytes=limits.capacity_bytes,
        ranks_per_host=local,
        slowness=np.ones(ranks),
        host_bytes=np.zeros(shards),
        host_capacity_bytes=np.full(ranks // local, np.inf),
        allowed=limits.allowed,
    )


def _first(options: Options) -> Ints:
    """`(t + 1,)`: where each table's options begin."""
    tables = len(options.design.model.tables)
    return np.searchsorted(options.table, np.arange(tables + 1)).astype(np.int64)


def _summed(bound: ClassBound, key: Key) -> tuple[Array, Array, float]:
    """`(p,)` what a shard adds to its rank, `(o,)` what an option adds to all ranks, and the base."""
    options = bound.options
    variables = [bound.program.variables[v] for v in key]
    each = np.asarray(np.sum([v.each for v in variables], axis=0))
    everywhere = np.asarray(np.sum([v.everywhere for v in variables], axis=0))
    pieces = np.array([o.pieces for o in options.options])
    first = options.shard_probe[options.first_shard[:-1]]
    return each, pieces * everywhere[first], float(sum(v.base for v in variables))


def _tangent(bound: ClassBound, v: int, bytes_: float) -> tuple[float, float]:
    """Slope and intercept of a collective's time around some bytes."""
    at = max(bytes_, 1.0)
    ends = at * np.array([1 - _SLOPE_STEP, 1.0, 1 + _SLOPE_STEP])
    low, here, high = transfer_us(bound.program.variables[v], ends, bound.cost).tolist()
    slope = max((high - low) / (ends[2] - ends[0]), 0.0)
    return slope, here - slope * at


def _name(bound: ClassBound, key: Key) -> str:
    regions = dict.fromkeys(bound.program.variables[v].region for v in key)
    return ", ".join(r.replace("_", " ") for r in regions)


@dataclass(frozen=True, eq=False)
class RankLoads:
    """What a plan makes of a class's variables.

    Attributes:
        each: `(r, v)` sums over the shards of a rank.
        everywhere: `(v,)` what every rank sees, base included.
    """

    each: Array
    everywhere: Array

    @property
    def largest(self) -> Array:
        """`(v,)`: duration on, or bytes of, the fullest rank."""
        return np.asarray(self.each.max(axis=0) + self.everywhere)


def rank_loads(bound: ClassBound, assignment: Assignment) -> RankLoads:
    """Sum an assignment's shards over all variables of its class."""
    options, variables = bound.options, bound.program.variables
    each_of = np.stack([v.each for v in variables], axis=1)
    everywhere_of = np.stack([v.everywhere for v in variables], axis=1)
    ranks = options.design.system.world_size
    chosen = assignment.option
    shards = np.concatenate([np.arange(options.first_shard[o], options.first_shard[o + 1]) for o in chosen])
    at = np.concatenate([np.asarray(r, dtype=np.int64) for r in assignment.ranks])
    each = np.zeros((ranks, len(variables)))
    np.add.at(each, at, each_of[options.shard_probe[shards]])
    pieces = np.array([options.options[o].pieces for o in chosen])
    first = options.shard_probe[options.first_shard[chosen]]
    base = np.array([v.base for v in variables])
    return RankLoads(each, base + (pieces[:, None] * everywhere_of[first]).sum(axis=0))


def values_us(bound: ClassBound, loads: RankLoads) -> tuple[Array, dict[int, float]]:
    """`(v,)` durations on the fullest rank, and by variable the bytes of collectives."""
    values = loads.largest.copy()
    bytes_at: dict[int, float] = {}
    for i, variable in enumerate(bound.program.variables):
        if variable.role is not Role.RANK:
            bytes_at[i] = float(values[i])
            values[i] = (
                float(transfer_us(variable, values[i : i + 1], bound.cost)[0]) if values[i] > 0 else 0.0
            )
    return values, bytes_at
