"""The placement problem of a design: what may be chosen, and its surrogate for the search.

A cut (`dse.placement.design.relaxed`) is a sum of maxima over ranks, so each cut is a `Problem`: its segments and collectives are
events. The surrogate of a plan is the cut of its own critical cycle, collectives at their slope there.

Letters: t tables, o options, s shards, r ranks, e events.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

import numpy as np

from dse.placement.design.bound import ClassBound
from dse.placement.design.conditions import Conditions
from dse.placement.design.measures import Key
from dse.placement.design.options import Option, Options
from dse.placement.design.relaxed import Cut, Role, transfer_us
from dse.placement.design.shard_costs import ShardCosts
from dse.placement.instances.together import Together, option_sets, put_together
from dse.placement.solver.problem import Array, Assignment, Ints, Mask, Problem, Where

_SLOPE_STEP = 0.05  # relative change of bytes at which a collective's slope is taken
_LEAST = 1e-9  # relative; loads this small are rounding


@dataclass(frozen=True, eq=False)
class DesignProblem:
    """What a placement of a design's tables may choose.

    Attributes:
        options: of every table, ascending by table.
        bytes: `(o,)` device memory of the largest shard of each option.
        capacity_bytes: `(r,)` device memory of each rank for tables.
        conditions: host memory, slower ranks, tables that stay together.
        allowed: `(t, r)` ranks that shards with a choice of rank may take; `None` allows all.
    """

    options: tuple[Option, ...]
    bytes: Array
    capacity_bytes: Array
    conditions: Conditions
    allowed: Mask | None = None

    def keep(self, options: Mask) -> DesignProblem:
        """The problem with `(o,)` options left."""
        kept = tuple(o for o, k in zip(self.options, options, strict=True) if k)
        return replace(self, options=kept, bytes=self.bytes[options])


Transform: TypeAlias = Callable[[DesignProblem], DesignProblem]


def together_key(option: Option) -> Hashable:
    """What options of tables that stay together share."""
    return option.type, option.kernel_label, int(option.where), option.count


@dataclass(frozen=True, eq=False)
class Surrogate:
    """One cut of a class as the solver's problem, in µs.

    Attributes:
        problem: events are the cut's segments, its collectives, and what all ranks see.
        events: what they are called.
        constant_us: what the objective lacks to the cut's value, near the plan that it was made at.
        together: the same, tables that stay together being one.
        fixed_us: `(e,)` what every rank has to do beside its tables where ranks differ in pace: the solver sees it as one
            more table, which is on all ranks.
        launched: `(e,)` whether a rank's pace counts in the prediction: not in collectives, though the solver multiplies
            all costs by it.
    """

    problem: Problem
    events: tuple[str, ...]
    constant_us: float
    together: Together
    fixed_us: Array
    launched: Mask

    @cached_property
    def solved(self) -> Problem:
        """What the solver solves."""
        own = self.together.problem
        return own if not self.fixed_us.any() else _with_fixed(own, self.fixed_us)

    def to_solver(self, assignment: Assignment) -> Assignment:
        """An assignment of `problem` as one of `solved`."""
        own = self.together.reduced(assignment)
        return Assignment(self._more(own.option), (*own.ranks, *self._fixed_ranks()))

    def chosen(self, option: Ints) -> Ints:
        """Options of `solved` from `(t,)` of `problem`."""
        return self._more(self.together.chosen(option))

    def from_solver(self, assignment: Assignment) -> Assignment:
        """The way back."""
        tables = len(self.together.members)
        return self.together.original(Assignment(assignment.option[:tables], assignment.ranks[:tables]))

    def _more(self, option: Ints) -> Ints:
        return np.append(option, self.together.problem.num_options) if self.fixed_us.any() else option

    def _fixed_ranks(self) -> list[tuple[int, ...]]:
        return [tuple(range(self.problem.num_ranks))] if self.fixed_us.any() else []


def _with_fixed(problem: Problem, fixed_us: Array) -> Problem:
    """One more table, on all ranks."""
    ranks = problem.num_ranks
    allowed = problem.allowed
    return replace(
        problem,
        first_option=np.append(problem.first_option, problem.num_options + 1),
        first_shard=np.append(problem.first_shard, problem.first_shard[-1] + ranks),
        where=np.append(problem.where, int(Where.ALL)),
        cost=np.concatenate([problem.cost, np.broadcast_to(fixed_us, (ranks, len(fixed_us)))]),
        bytes=np.append(problem.bytes, np.zeros(ranks)),
        host_bytes=np.append(problem.host_bytes, np.zeros(ranks)),
        allowed=None if allowed is None else np.concatenate([allowed, np.ones((1, ranks), dtype=bool)]),
    )


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
    uneven = problem.conditions.uneven
    columns: list[Array] = []
    names: list[str] = []
    fixed: list[float] = []
    shared: Array = np.zeros(len(options.options))
    constant = cut.constant_us
    for weight, key in cut.segments:
        each, everywhere, base = _summed(bound, key)
        shared += weight * everywhere
        constant += 0.0 if uneven else weight * base
        if each.any() or uneven:
            columns.append(weight * each[options.shard_probe])
            names.append(_name(bound, key))
            fixed.append(weight * base * uneven)
    launches = len(columns)
    for weight, v in cut.transfers:
        each, everywhere, base = _summed(bound, (v,))
        slope, intercept = _tangent(bound, v, bytes_at[v])
        constant += weight * (intercept + slope * base)
        shared += weight * slope * everywhere
        if variables[v].role is Role.FULLEST and each.any():
            columns.append(weight * slope * each[options.shard_probe])
            names.append(variables[v].label)
            fixed.append(0.0)
    differs = shared - np.minimum.reduceat(shared, _first(options)[:-1])[options.table]
    constant += float((shared - differs)[_first(options)[:-1]].sum())
    if (differs > _LEAST * max(constant, 1.0)).any():
        # Every rank sees it once, wherever the shards are: as if they were spread evenly.
        ranks = options.design.system.world_size
        columns.append(np.repeat(differs * ranks / options.count, options.count))
        names.append("everywhere")
        fixed.append(0.0)
    cost = np.stack(columns, axis=1) if columns else np.zeros((len(options.shard_probe), 1))
    whole = problem_of(options, cost, bound.costs, problem)
    groups = problem.conditions.groups
    keys = [together_key(o) for o in options.options]
    sets = option_sets(keys, whole.first_option, np.ones(len(keys), dtype=bool), groups)
    own = np.array(fixed) if columns else np.zeros(1)
    launched = np.arange(len(own)) < launches
    together = put_together(whole, sets, groups)
    return Surrogate(whole, tuple(names) or ("nothing",), constant, together, own, launched)


def problem_of(options: Options, cost: Array, costs: ShardCosts, limits: DesignProblem) -> Problem:
    """Options as the solver's problem, with `(s, e)` costs."""
    return Problem(
        first_option=_first(options),
        first_shard=options.first_shard,
        where=np.array([o.where for o in options.options], dtype=np.int64),
        cost=cost,
        bytes=costs.bytes[options.shard_probe],
        capacity_bytes=limits.capacity_bytes,
        ranks_per_host=options.design.system.local_world_size,
        slowness=limits.conditions.slowness,
        host_bytes=costs.host_bytes[options.shard_probe],
        host_capacity_bytes=limits.conditions.host_capacity_bytes,
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
        slowness: `(r, v)`: of durations that of the ranks, of bytes 1.
    """

    each: Array
    everywhere: Array
    slowness: Array

    @property
    def largest(self) -> Array:
        """`(v,)`: duration on the last rank, or bytes of the fullest."""
        return np.asarray((self.slowness * (self.each + self.everywhere)).max(axis=0))


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
    of_rank = np.array([v.role is Role.RANK for v in variables])
    slowness = np.where(of_rank, bound.conditions.slowness[:, None], 1.0)
    return RankLoads(each, base + (pieces[:, None] * everywhere_of[first]).sum(axis=0), slowness)


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
