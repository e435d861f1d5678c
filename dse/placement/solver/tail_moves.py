"""Moves of a search that prices every rank by itself, compiled: no step costs a pass over the ranks.

An event with a ceiling counts, on each rank, what the rank is above it. Where the ceiling is the k-th largest load, the ceiling and a
k-th of all that is above it are together the mean of the k largest loads: a sum over ranks, so that a step looks at the ranks
that it changes alone.

Letters: t tables, o options, s shards, e events, r ranks, h machines, n entries, u slots (see `local_search_data`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dse.placement.solver.local_search_data import ALL, HOST, called, inlined, part
from dse.placement.solver.local_search_moves import drawn
from dse.placement.solver.problem import Array, Ints
from perfcore.by_pointer import ByPointer

ABOVE, WORK, BYTE = 0, 1, 2
ASK, DO = 0, 1
REPLACED, MOVED, FOCUS, INSERT_LOOKS, MOVE_LOOKS, SWAP_LOOKS = 0, 1, 2, 3, 4, 5


@dataclass(frozen=True, slots=True, eq=False)
class Parts(ByPointer):
    """A problem of alike ranks as plain arrays.

    Attributes:
        first_offer: `(t + 1,)` options to choose from of table t are `offer[first_offer[t]]` to `offer[first_offer[t + 1] - 1]`.
        offer: options.
        first_shard: `(o + 1,)`.
        where: `(o,)`.
        units: `(o,)` what is placed at once: a shard, a group of `HOST`, all shards of `ALL`.
        common: `(o,)` what each rank gets at least from an `ALL` option, summed over events; its entries hold the rest.
        entry0: `(s + 1,)` entries of shard s are `entry0[s]` to `entry0[s + 1] - 1`.
        event: `(n,)`.
        value: `(n,)`.
        bytes: `(s,)`.
        host_bytes: `(s,)`.
        capacity: `(r,)`.
        host_capacity: `(h,)`.
        per_host: ranks of a machine.
        slot0: `(t + 1,)` slots of each table, as many as its options need.
        table_of_slot: `(u,)`.
    """

    first_offer: Ints
    offer: Ints
    first_shard: Ints
    where: Ints
    units: Ints
    common: Array
    entry0: Ints
    event: Ints
    value: Array
    bytes: Array
    host_bytes: Array
    capacity: Array
    host_capacity: Array
    per_host: int
    slot0: Ints
    table_of_slot: Ints


@dataclass(frozen=True, slots=True, eq=False)
class Plan(ByPointer):
    """An assignment, its sums, and the prices of a step; arrays are changed in place.

    Attributes:
        option: `(t,)`.
        place: `(u,)` rank (machine) of each unit.
        load: `(r, e)` without what is common to all ranks.
        held: `(r,)`.
        host_held: `(h,)`.
        ceiling: `(e,)`.
        price: `(3,)` of time above a ceiling, of any time, of a byte beyond capacity.
        dice: `(1,)` state of the random numbers.
        scratch: `(u,)` places of the units of one table.
    """

    option: Ints
    place: Ints
    load: Array
    held: Array
    host_held: Array
    ceiling: Array
    price: Array
    dice: NDArray[np.uint64]
    scratch: Ints


@inlined
def chance(s: Plan) -> float:
    """A number in [0, 1)."""
    return drawn(s)  # type: ignore[arg-type]  # of any state with dice


@inlined
def pick(s: Plan, n: int) -> int:
    """A whole number in [0, n)."""
    return int(chance(s) * n)


@inlined
def more_above(before: float, after: float, limit: float) -> float:
    """By how much what is above a limit grows."""
    return max(after - limit, 0.0) - max(before - limit, 0.0)


@inlined
def shard_price(d: Parts, s: Plan, shard: int, rank: int, sign: float, keep: int) -> float:
    """What adding a shard to a rank (sign 1), or taking it away (-1), costs; done only if told to keep it (`DO`, not `ASK`)."""
    total = 0.0
    for n in range(d.entry0[shard], d.entry0[shard + 1]):
        e, more = d.event[n], sign * d.value[n]
        load = s.load[rank, e]
        total += s.price[WORK] * more + s.price[ABOVE] * more_above(load, load + more, s.ceiling[e])
        if keep:
            s.load[rank, e] = load + more
    more = sign * d.bytes[shard]
    if more != 0.0:
        total += s.price[BYTE] * more_above(s.held[rank], s.held[rank] + more, d.capacity[rank])
        if keep:
            s.held[rank] += more
    more = sign * d.host_bytes[shard]
    if more != 0.0:
        h = rank // d.per_host
        total += s.price[BYTE] * more_above(s.host_held[h], s.host_held[h] + more, d.host_capacity[h])
        if keep:
            s.host_held[h] += more
    return total


@part
def unit_price(d: Parts, s: Plan, option: int, unit: int, place: int, sign: float, keep: int) -> float:
    """As `shard_price`, of all shards of a unit."""
    shard, total = d.first_shard[option], 0.0
    if d.where[option] == ALL:
        for rank in range(len(s.held)):
            total += shard_price(d, s, shard + rank, rank, sign, keep)
        return total
    if d.where[option] == HOST:
        for i in range(d.per_host):
            at = unit * d.per_host + i
            total += shard_price(d, s, shard + at, place * d.per_host + i, sign, keep)
        return total
    return shard_price(d, s, shard + unit, place, sign, keep)


@part
def table_price(d: Parts, s: Plan, table: int, sign: float) -> float:
    """Add a table as its option and places say, or take it away: what that costs."""
    option = s.option[table]
    total = sign * d.common[option]
    for unit in range(d.units[option]):
        total += unit_price(d, s, option, unit, s.place[d.slot0[table] + unit], sign, DO)
    return float(total)


@called
def rebuild_plan(d: Parts, s: Plan) -> None:
    """Sum everything anew."""
    s.load[:] = 0.0
    s.held[:] = 0.0
    s.host_held[:] = 0.0
    for table in range(len(s.option)):
        table_price(d, s, table, 1.0)


@inlined
def places_of(d: Parts, s: Plan, option: int) -> int:
    """How many places a unit of an option has to choose from."""
    if d.where[option] == ALL:
        return 1
    return len(s.host_held) if d.where[option] == HOST else len(s.held)


@inlined
def cheapest_place(d: Parts, s: Plan, option: int, unit: int, looks: int) -> int:
    """The cheapest of some random places."""
    places = places_of(d, s, option)
    best, chosen = np.inf, 0
    for _ in range(looks if places > 1 else 1):
        place = pick(s, places)
        price = unit_price(d, s, option, unit, place, 1.0, ASK) if places > 1 else 0.0
        if price < best:
            best, chosen = price, place
    return chosen


@part
def try_option(d: Parts, s: Plan, table: int, option: int, limit: float, looks: int) -> bool:
    """Put a table back by another option, unless that costs more than the limit."""
    old, slot0 = s.option[table], d.slot0[table]
    for unit in range(d.units[old]):
        s.scratch[unit] = s.place[slot0 + unit]
    total = table_price(d, s, table, -1.0) + d.common[option]
    done = 0
    while done < d.units[option] and total <= limit:
        place = cheapest_place(d, s, option, done, looks)
        s.place[slot0 + done] = place
        total += unit_price(d, s, option, done, place, 1.0, DO)
        done += 1
    if total <= limit:
        s.option[table] = option
        return True
    for unit in range(done):
        unit_price(d, s, option, unit, s.place[slot0 + unit], -1.0, DO)
    for unit in range(d.units[old]):
        s.place[slot0 + unit] = s.scratch[unit]
    table_price(d, s, table, 1.0)
    return False


@part
def relocate_unit(d: Parts, s: Plan, slot: int, limit: float, looks: int) -> bool:
    """Move a unit to the cheapest of some places, unless that costs more than the limit."""
    table = d.table_of_slot[slot]
    option, unit, a = s.option[table], slot - d.slot0[table], s.place[slot]
    gain = unit_price(d, s, option, unit, a, -1.0, DO)
    b = cheapest_place(d, s, option, unit, looks)
    if gain + unit_price(d, s, option, unit, b, 1.0, DO) <= limit:
        s.place[slot] = b
        return True
    unit_price(d, s, option, unit, b, -1.0, DO)
    unit_price(d, s, option, unit, a, 1.0, DO)
    return False


@inlined
def exchange(d: Parts, s: Plan, i: int, j: int) -> float:
    """Let two units change places: what that costs."""
    table_i, table_j, a, b = d.table_of_slot[i], d.table_of_slot[j], s.place[i], s.place[j]
    option_i, unit_i = s.option[table_i], i - d.slot0[table_i]
    option_j, unit_j = s.option[table_j], j - d.slot0[table_j]
    total = unit_price(d, s, option_i, unit_i, a, -1.0, DO) + unit_price(d, s, option_j, unit_j, b, -1.0, DO)
    total += unit_price(d, s, option_i, unit_i, b, 1.0, DO) + unit_price(d, s, option_j, unit_j, a, 1.0, DO)
    s.place[i], s.place[j] = b, a
    return total


@part
def swap_units(d: Parts, s: Plan, slot: int, limit: float, looks: int) -> bool:
    """Let a unit and the first of some random ones change places that does not cost more than the limit."""
    where = d.where[s.option[d.table_of_slot[slot]]] == HOST
    for _ in range(looks):
        table = pick(s, len(s.option))
        option = s.option[table]
        if d.where[option] == ALL or (d.where[option] == HOST) != where:
            continue
        other = d.slot0[table] + pick(s, d.units[option])
        if s.place[other] == s.place[slot]:
            continue
        if exchange(d, s, slot, other) <= limit:
            return True
        exchange(d, s, slot, other)
    return False


@called
def improve_plan(d: Parts, s: Plan, hot: Ints, steps: int, heat: float, mix: Array) -> int:
    """Annealing at one temperature; returns the accepted steps.

    `hot` are slots to look at more often; `mix` is `(6,)`: the chance of a change of option, of that or a move (else an
    exchange), of starting at a hot slot, and how many places each of the three looks at.
    """
    accepted = 0
    for _ in range(steps):
        limit = -heat * np.log(1.0 - chance(s))
        if len(hot) > 0 and chance(s) < mix[FOCUS]:
            slot = hot[pick(s, len(hot))]
            table = d.table_of_slot[slot]
        else:
            table = pick(s, len(s.option))
            slot = d.slot0[table] + pick(s, d.units[s.option[table]])
        option, kind = s.option[table], chance(s)
        if slot - d.slot0[table] >= d.units[option]:
            continue
        if kind < mix[REPLACED]:
            first, end = d.first_offer[table], d.first_offer[table + 1]
            new = int(d.offer[first + pick(s, end - first)])
            if new != option:
                accepted += try_option(d, s, table, new, limit, int(mix[INSERT_LOOKS]))
        elif d.where[option] != ALL:
            if kind < mix[MOVED]:
                accepted += relocate_unit(d, s, slot, limit, int(mix[MOVE_LOOKS]))
            else:
                accepted += swap_units(d, s, slot, limit, int(mix[SWAP_LOOKS]))
    return accepted
