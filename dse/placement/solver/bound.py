"""Lower bounds of a placement problem that do not grow with the number of ranks.

Ranks are left out: a plan is only which option each table takes. With x_o = 1 for the chosen options and M_e the maximum of
event e over ranks, every assignment obeys

1. Σ_s c_se x_o(s) <= R M_e, R = Σ_r 1 / slowness_r: a rank's summed costs are at most M_e / slowness_r, then sum over ranks;
2. slowness_min (U_e + Σ_{o of table t, not ALL} x_o max_s c_se) <= M_e for every table t, U_e = Σ_{o ALL} x_o min_s c_se: the rank
   with the table's largest shard holds a shard of every `ALL` option as well;
3. Σ_o b_o x_o <= Σ_r capacity_r, for device and for host memory;
4. where all costs of an event are whole multiples of a step g and ranks are alike, so is M_e: columns of one width
   exchange one number of bytes, so that this is common. It cuts off the even spreading that 1 allows.

So the least Σ_e M_e under 1-4 is at most the optimum. Without whole numbers it is a linear program in (t, o) and e, solved in a
fraction of a second for a thousand tables and ranks.

Letters: t tables, o options, s shards, e events, r ranks; columns of the programs: options, events M_e, shares U_e, steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dse.placement.solver.linear import Program, Rows, solve_relaxed, solve_whole
from dse.placement.solver.problem import Array, Ints, Mask, Problem, Where

# A step of an event's costs that divides the bound into more parts than this is no use, and whole numbers of that
# size have sent presolving into a loop without end.
_MOST_STEPS = 100
_STEP_PARTS = 64
_STEP_TOLERANCE = 1e-9  # of the number of steps


@dataclass(frozen=True, slots=True, eq=False)
class Bound:
    """A lower bound, and the relaxation's point.

    Attributes:
        value: no feasible assignment's objective is below; infinite when there is none.
        weights: `(o,)` share of each option; `None` when the relaxation has no point.
        events: `(e,)` the maxima at that point.
        by_option: `(o,)` no feasible assignment with this option is below; `None` likewise.
    """

    value: float
    weights: Array | None
    events: Array | None
    by_option: Array | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Options:
    """Options without their ranks.

    Attributes:
        usable: `(o,)` some rank can hold it.
        total: `(o, e)` costs of all shards.
        largest: `(o, e)` the largest shard's, slowness included; for `ALL` the smallest shard's.
        bytes: `(o,)` device memory of all shards.
        host_bytes: `(o,)` memory on machines.
        shared: `(o,)` a shard on every rank.
    """

    usable: Mask
    total: Array
    largest: Array
    bytes: Array
    host_bytes: Array
    shared: Mask


def options_of(problem: Problem) -> Options:
    """Sums and extremes of the shards of each option."""
    first, shared = problem.first_shard[:-1], problem.where == Where.ALL
    fastest = float(problem.slowness.min())
    largest = np.where(
        shared[:, None],
        np.minimum.reduceat(problem.cost, first, axis=0),
        np.maximum.reduceat(problem.cost, first, axis=0),
    )
    return Options(
        usable=_usable(problem),
        total=np.add.reduceat(problem.cost, first, axis=0),
        largest=largest * fastest,
        bytes=np.add.reduceat(problem.bytes, first),
        host_bytes=np.add.reduceat(problem.host_bytes, first),
        shared=shared,
    )


def _usable(problem: Problem) -> Mask:
    """`(o,)`: each shard alone fits the rank where it must be, or some rank."""
    option = problem.option_of_shard
    index = np.arange(len(option)) - problem.first_shard[option]
    on_all = problem.where[option] == Where.ALL
    roomy = float(problem.capacity_bytes.max())
    limit = np.where(on_all, problem.capacity_bytes[np.where(on_all, index, 0)], roomy)
    fits = (problem.bytes <= limit) & (problem.host_bytes <= problem.host_capacity_bytes.max())
    usable: Mask = np.logical_and.reduceat(fits, problem.first_shard[:-1])
    return usable


def bound_of_averages(problem: Problem, options: Options) -> float:
    """What rule 1 says of all events together, without a linear program: each table by its option of least total cost."""
    ranks = float((1.0 / problem.slowness).sum())
    work = np.where(options.usable, options.total.sum(axis=1), np.inf)
    return float(np.minimum.reduceat(work, problem.first_option[:-1]).sum()) / ranks


def lower_bound(
    problem: Problem, *, below: float | None = None, time_limit_s: float = 0.0, events_whole: bool = True
) -> Bound:
    """A lower bound of the optimum; see the module for the proof.

    Args:
        problem: best reduced first (`dominance.reduced`): fewer events, more steps.
        below: a known objective; the bound is then of assignments below it, or this value itself.
        time_limit_s: for whole numbers (rule 4, and one option per table) after the linear program.
        events_whole: use rule 4.

    Returns:
        The bound; its point is the linear program's.
    """
    options = options_of(problem)
    program = rank_free(problem, options, below=below, steps=None)
    relaxed = solve_relaxed(program)
    value, point = relaxed.bound, relaxed.x
    if point is not None and time_limit_s > 0:
        steps = steps_of(problem, relaxed.bound) if events_whole else None
        whole = solve_whole(rank_free(problem, options, below=below, steps=steps), time_limit_s=time_limit_s)
        value = max(value, whole.bound)
    if below is not None:
        value = min(value, below)
    if point is None:
        return Bound(value, None, None)
    count = problem.num_options
    by_option = None if relaxed.duals is None else _by_option(problem, program, relaxed.duals)
    return Bound(value, point[:count], point[count : count + problem.num_events], by_option)


def _by_option(problem: Problem, program: Program, duals: Array) -> Array:
    """`(o,)` bounds of the assignments with each option.

    For multipliers y and d = c - y A, every point costs at least the rows' part plus d x (`Program.dual_bound`). With one option of
    each table, d x over a table's columns is at least its least d; with option o it is d_o.
    """
    count = problem.num_options
    reduced = np.where(program.high[:count] > 0, program.reduced_costs(duals)[:count], np.inf)
    least = np.minimum.reduceat(reduced, problem.first_option[:-1])
    bounds: Array = program.dual_bound(duals) + reduced - np.repeat(least, np.diff(problem.first_option))
    return bounds


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """A program to which columns and rows may be added: its rows, and `(j,)` objective, highest values and kinds."""

    rows: Rows
    objective: Array
    high: Array
    whole: Mask


def rank_free(problem: Problem, options: Options, *, below: float | None, steps: Array | None) -> Program:
    """Rules 1 to 3 as a program over options and events, and rule 4 for events with `steps > 0`."""
    parts = rank_free_parts(problem, options, below=below, steps=steps)
    low = np.zeros(len(parts.high))
    return parts.rows.program(objective=parts.objective, low=low, high=parts.high, whole=parts.whole)


def rank_free_parts(problem: Problem, options: Options, *, below: float | None, steps: Array | None) -> Parts:
    """As `rank_free`, before it is closed."""
    num_options, num_events = options.total.shape
    rows = Rows()
    _add_choice(rows, problem)
    _add_averages(rows, problem, options)
    _add_largest(rows, problem, options)
    _add_memory(rows, problem, options)
    highest = np.maximum.reduceat(options.total, problem.first_option[:-1], axis=0).sum(axis=0)
    highest = highest * float(problem.slowness.max())
    if below is not None:
        highest = np.minimum(highest, below)
    stepped = np.flatnonzero(steps > 0) if steps is not None else np.zeros(0, dtype=np.int64)
    if steps is not None and len(stepped):
        add_steps(rows, steps, stepped, first_event=num_options, first_step=num_options + 2 * num_events)
    most_steps = np.zeros(0) if steps is None else np.ceil(highest[stepped] / steps[stepped])
    high = np.concatenate([options.usable.astype(np.float64), highest, highest, most_steps])
    objective, whole = np.zeros(len(high)), np.ones(len(high), dtype=np.bool_)
    objective[num_options : num_options + num_events] = 1.0
    whole[num_options : num_options + 2 * num_events] = False
    return Parts(rows, objective, high, whole)


def add_steps(rows: Rows, steps: Array, stepped: Ints, *, first_event: int, first_step: int) -> None:
    """Rule 4: event = step * whole number."""
    at = np.arange(len(stepped))
    columns = np.concatenate([first_event + stepped, first_step + at])
    values = np.concatenate([1.0 / steps[stepped], -np.ones(len(stepped))])
    rows.add(np.tile(at, 2), columns, values, count=len(stepped), low=0.0, high=0.0)


def steps_of(problem: Problem, bound: float) -> Array:
    """`(e,)`: the step of which all costs of an event are whole multiples; 0 where there is no useful one."""
    steps = np.zeros(problem.num_events)
    if np.ptp(problem.slowness) > 0:
        return steps
    for event in range(problem.num_events):
        costs = np.unique(problem.cost[:, event])
        costs = costs[costs > 0] * problem.slowness[0]
        if len(costs):
            steps[event] = _step(costs, finest=max(bound, 0.0) / _MOST_STEPS)
    return steps


def _step(costs: Array, *, finest: float) -> float:
    for parts in range(1, _STEP_PARTS + 1):
        step = float(costs[0]) / parts
        if step < finest:
            return 0.0
        counts = costs / step
        if bool(np.all(np.abs(counts - np.round(counts)) <= _STEP_TOLERANCE * counts)):
            return step
    return 0.0


def _add_choice(rows: Rows, problem: Problem) -> None:
    options = np.arange(problem.num_options)
    ones = np.ones(problem.num_options)
    rows.add(problem.table_of_option, options, ones, count=problem.num_tables, low=1.0, high=1.0)


def _add_averages(rows: Rows, problem: Problem, options: Options) -> None:
    ranks = float((1.0 / problem.slowness).sum())
    for event in range(problem.num_events):
        used = np.flatnonzero(options.total[:, event])
        columns = np.append(used, problem.num_options + event)
        values = np.append(options.total[used, event] / ranks, -1.0)
        rows.add([0] * len(columns), columns, values, count=1, high=0.0)


def _add_largest(rows: Rows, problem: Problem, options: Options) -> None:
    """Rule 2; the average says as much of events whose shards all lie on every rank."""
    table, first_event = problem.table_of_option, problem.num_options
    first_share = first_event + problem.num_events
    for event in range(problem.num_events):
        own = np.flatnonzero(~options.shared & (options.largest[:, event] > 0))
        shared = np.flatnonzero(options.shared & (options.largest[:, event] > 0))
        columns = np.append(shared, first_share + event)
        values = np.append(options.largest[shared, event], -1.0)
        rows.add([0] * len(columns), columns, values, count=1, low=0.0, high=0.0)
        tables, row = np.unique(table[own], return_inverse=True)
        each, ones = np.arange(len(tables)), np.ones(len(tables))
        rows.add(
            np.concatenate([row, each, each]),
            np.concatenate(
                [own, np.full(len(tables), first_share + event), np.full(len(tables), first_event + event)]
            ),
            np.concatenate([options.largest[own, event], ones, -ones]),
            count=len(tables),
            high=0.0,
        )


def _add_memory(rows: Rows, problem: Problem, options: Options) -> None:
    columns = np.arange(problem.num_options)
    for needed, capacity in (
        (options.bytes, np.maximum(problem.capacity_bytes, 0.0).sum()),
        (options.host_bytes, problem.host_capacity_bytes.sum()),
    ):
        if np.isfinite(capacity) and needed.any():
            scale = max(float(needed.max()), 1.0)
            rows.add([0] * len(columns), columns, needed / scale, count=1, high=float(capacity) / scale)
