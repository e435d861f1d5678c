"""The placement problem as the compiled search sees it, and the state that the search changes.

A *unit* is what is placed at once: a shard of `ANY` or `WITHIN` (on a rank), a group of `HOST` (on a machine), all
shards of `ALL` (one unit, no choice). A *slot* holds the place of a unit of a table's current option.

Costs are sparse: a shard adds to few events. What an `ALL` option adds to every rank alike is kept apart as its
*base*: it shifts the maximum of an event and leaves the order of the ranks, so that changing it costs
no pass over the ranks. Its shards then keep the (few) differences, which may be negative.

Letters: t tables, o options, s shards, e events, r ranks, h machines, n entries, u slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dse.placement.solver.problem import Array, Ints, Mask, Problem
from perfcore.by_pointer import ByPointer
from perfcore.compiled import compiled, inner

ANY, ALL, HOST, WITHIN = 0, 1, 2, 3


# Functions that change a state allocate nothing, so that no references to arrays need counting (`_nrt`).
_IN_PLACE: dict[str, Any] = {"error_model": "numpy", "_nrt": False}

called = compiled(**_IN_PLACE)  # by Python
part = inner(**_IN_PLACE)  # part of compiled functions
inlined = inner(**_IN_PLACE, forceinline=True)  # the same, of those that matter for speed into each caller


@dataclass(frozen=True, slots=True, eq=False)
class Data(ByPointer):
    """A `Problem` as plain arrays; see there.

    Attributes:
        units: `(o,)` units of each option.
        entry0: `(s + 1,)` entries of shard `s` are `entry0[s]` to `entry0[s + 1] - 1`.
        event: `(n,)` event of each entry.
        value: `(n,)` cost of each entry.
        base0: `(o + 1,)` entries of the base of each option likewise.
        base_event: as `event`.
        base_value: as `value`.
        slot0: `(t + 1,)` slots of each table, as many as its options need.
        table_of_slot: `(u,)`.
        total: `(o,)` cost summed over events and shards.
        peak: `(o,)` the largest cost of one shard, summed over events.
    """

    first_option: Ints
    first_shard: Ints
    where: Ints
    units: Ints
    entry0: Ints
    event: Ints
    value: Array
    base0: Ints
    base_event: Ints
    base_value: Array
    bytes: Array
    host_bytes: Array
    capacity: Array
    host_capacity: Array
    slowness: Array
    per_host: int
    slot0: Ints
    table_of_slot: Ints
    allowed: Mask
    total: Array
    peak: Array


@dataclass(frozen=True, slots=True, eq=False)
class State(ByPointer):
    """An assignment and its sums; arrays are changed in place.

    Attributes:
        option: `(t,)` chosen options.
        place: `(u,)` rank (machine) of each unit.
        load: `(e, r)` summed costs without bases.
        power: `(e, r)` `(load / scale) ** p`, 0 for negative loads.
        base: `(e,)` summed bases.
        scale: `(e,)` what loads are measured in.
        event_sum: `(e,)` summed powers.
        level: `(e,)` what an event counts: its largest load mixed with `scale * event_sum ** (1 / p)`.
        top: `(e, 3)` largest loads, falling.
        top_rank: `(e, 3)` their ranks.
        held: `(r,)` summed device memory.
        host_held: `(h,)` summed memory of machines.
        items: `(r, u)` slots of the units of `ANY` and `WITHIN` on each rank.
        item_count: `(r,)` how many.
        item_index: `(u,)` where in its rank's `items` a slot stands.
        touched: `(e,)` 1 where `load` changed since `event_sum` and `top` were summed.
        over: `(1,)` memory beyond capacity.
        settings: `(3,)` weight of overflow, weight of the p-norm against the maximum, log2 of p.
        dice: `(1,)` state of the random numbers.
        scratch: `(u,)` places of the units of one table.
    """

    option: Ints
    place: Ints
    load: Array
    power: Array
    base: Array
    scale: Array
    event_sum: Array
    level: Array
    top: Array
    top_rank: Ints
    held: Array
    host_held: Array
    items: NDArray[np.int32]
    item_count: Ints
    item_index: Ints
    touched: Ints
    over: Array
    settings: Array
    dice: NDArray[np.uint64]
    scratch: Ints


@dataclass(frozen=True, slots=True, eq=False)
class Best(ByPointer):
    """The best assignment so far: as in `State`, and `(2,)` overflow and objective in `value`."""

    option: Ints
    place: Ints
    value: Array


WEIGHT_OVER, WEIGHT_NORM, LOG_P = 0, 1, 2


def data_of(problem: Problem) -> Data:
    """The arrays of a problem."""
    counts, hosts = problem.shard_counts, problem.where == HOST
    units = np.where(problem.where == ALL, 1, np.where(hosts, counts // problem.ranks_per_host, counts))
    slots = np.maximum.reduceat(units, problem.first_option[:-1])
    same = int((problem.slowness == problem.slowness[0]).all())
    cost = np.ascontiguousarray(problem.cost)
    bases = common_costs(problem.first_shard, problem.where, cost, same)
    shard_total = cost.sum(axis=1)
    sparse = entries_of(problem.first_shard, cost, bases)
    allowed = problem.allowed if problem.allowed is not None else np.ones((0, 0), dtype=np.bool_)
    base_at = np.nonzero(bases)
    return Data(
        first_option=problem.first_option,
        first_shard=problem.first_shard,
        where=problem.where,
        units=units.astype(np.int64),
        entry0=sparse[0],
        event=sparse[1],
        value=sparse[2],
        base0=np.r_[0, np.count_nonzero(bases, axis=1).cumsum()].astype(np.int64),
        base_event=base_at[1].astype(np.int64),
        base_value=bases[base_at],
        bytes=problem.bytes,
        host_bytes=problem.host_bytes,
        capacity=problem.capacity_bytes.astype(np.float64),
        host_capacity=problem.host_capacity_bytes.astype(np.float64),
        slowness=problem.slowness.astype(np.float64),
        per_host=problem.ranks_per_host,
        slot0=np.r_[0, slots.cumsum()].astype(np.int64),
        table_of_slot=np.repeat(np.arange(problem.num_tables), slots).astype(np.int64),
        allowed=allowed,
        total=np.add.reduceat(shard_total, problem.first_shard[:-1]),
        peak=np.maximum.reduceat(shard_total, problem.first_shard[:-1]),
    )


def common_costs(first_shard: Ints, where: Ints, cost: Array, same: int) -> Array:
    """`(o, e)`: of each `ALL` option and event the cost that most shards share (by majority vote); else 0."""
    common = np.zeros((len(where), cost.shape[1]))
    if same:
        _vote(first_shard, where, cost, common)
    return common


def entries_of(first_shard: Ints, cost: Array, bases: Array) -> tuple[Ints, Ints, Array]:
    """`entry0`, `event` and `value` of `Data`."""
    entry0 = np.zeros(len(cost) + 1, dtype=np.int64)
    _count_entries(first_shard, cost, bases, entry0)
    event, value = np.empty(entry0[-1], dtype=np.int64), np.empty(entry0[-1])
    _fill_entries(first_shard, cost, bases, event, value)
    return entry0, event, value


@called
def _vote(first_shard: Ints, where: Ints, cost: Array, common: Array) -> None:
    for o in range(len(where)):
        if where[o] != ALL:
            continue
        for e in range(cost.shape[1]):
            votes = 0
            for s in range(first_shard[o], first_shard[o + 1]):
                if votes == 0:
                    common[o, e] = cost[s, e]
                votes += 1 if cost[s, e] == common[o, e] else -1


@called
def _count_entries(first_shard: Ints, cost: Array, bases: Array, entry0: Ints) -> None:
    for o in range(len(bases)):
        for s in range(first_shard[o], first_shard[o + 1]):
            entry0[s + 1] = entry0[s]
            for e in range(cost.shape[1]):
                entry0[s + 1] += cost[s, e] != bases[o, e]


@called
def _fill_entries(first_shard: Ints, cost: Array, bases: Array, event: Ints, value: Array) -> None:
    n = 0
    for o in range(len(bases)):
        for s in range(first_shard[o], first_shard[o + 1]):
            for e in range(cost.shape[1]):
                if cost[s, e] != bases[o, e]:
                    event[n], value[n] = e, cost[s, e] - bases[o, e]
                    n += 1


def empty_state(problem: Problem, data: Data, *, seed: int) -> State:
    """No table placed; all sums 0."""
    events, ranks, slots = problem.num_events, problem.num_ranks, len(data.table_of_slot)
    return State(
        option=np.full(problem.num_tables, -1),
        place=np.zeros(slots, dtype=np.int64),
        load=np.zeros((events, ranks)),
        power=np.zeros((events, ranks)),
        base=np.zeros(events),
        scale=np.ones(events),
        event_sum=np.zeros(events),
        level=np.zeros(events),
        top=np.zeros((events, 3)),
        top_rank=np.zeros((events, 3), dtype=np.int64),
        held=np.zeros(ranks),
        host_held=np.zeros(len(data.host_capacity)),
        items=np.empty((ranks, slots), dtype=np.int32),
        item_count=np.zeros(ranks, dtype=np.int64),
        item_index=np.zeros(slots, dtype=np.int64),
        touched=np.zeros(events, dtype=np.int64),
        over=np.zeros(1),
        settings=np.array([0.0, 1.0, 3.0]),
        dice=np.random.SeedSequence(seed).generate_state(1, dtype=np.uint64) | np.uint64(1),
        scratch=np.zeros(slots, dtype=np.int64),
    )
