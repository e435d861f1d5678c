"""Changes of a search state and what they would cost, compiled.

What the search minimises is, summed over events, the base plus a mix of the largest load and the p-norm of all
loads, plus a weight times the overflow of memory. The p-norm leads across plateaus of the maximum.

Letters: see `local_search_data`.
"""

from __future__ import annotations

import numpy as np

from dse.placement.solver.local_search_data import (
    ALL,
    ANY,
    HOST,
    LOG_P,
    WEIGHT_NORM,
    WEIGHT_OVER,
    WITHIN,
    Data,
    State,
    called,
    inlined,
    part,
)
from dse.placement.solver.problem import Array


@inlined
def power_of(x: float, log_p: int) -> float:
    """`max(x, 0) ** 2 ** log_p`."""
    if x <= 0.0:
        return 0.0
    for _ in range(log_p):
        x *= x
    return x


@inlined
def mixed(s: State, event: int, most: float, powers: float) -> float:
    """What an event counts with this largest load and this sum of powers."""
    weight = s.settings[WEIGHT_NORM]
    if weight == 0.0:
        return most
    for _ in range(int(s.settings[LOG_P])):
        powers = np.sqrt(powers)
    return float((1.0 - weight) * most + weight * s.scale[event] * powers)


@inlined
def excess(held: float, capacity: float) -> float:
    """Memory beyond capacity."""
    return max(0.0, held - capacity)


@part
def refresh(d: Data, s: State) -> None:
    """Sum anew what `add_shard` left touched."""
    ranks = s.load.shape[1]
    for e in range(len(s.base)):
        if not s.touched[e]:
            continue
        s.touched[e] = 0
        first = second = third = -np.inf
        i = j = k = 0
        total = 0.0
        for r in range(ranks):
            total += s.power[e, r]
            x = s.load[e, r]
            if x > third:
                if x > second:
                    third, k = second, j
                    if x > first:
                        second, j = first, i
                        first, i = x, r
                    else:
                        second, j = x, r
                else:
                    third, k = x, r
        s.event_sum[e] = total
        s.top[e, 0], s.top[e, 1], s.top[e, 2] = first, second, third
        s.top_rank[e, 0], s.top_rank[e, 1], s.top_rank[e, 2] = i, j, k
        s.level[e] = mixed(s, e, first, total)
    if s.over[0] != 0.0:
        recount_overflow(d, s)


@part
def recount_overflow(d: Data, s: State) -> None:
    """Sum the overflow anew, free of rounding."""
    over = 0.0
    for r in range(len(s.held)):
        over += excess(s.held[r], d.capacity[r])
    for h in range(len(s.host_held)):
        over += excess(s.host_held[h], d.host_capacity[h])
    s.over[0] = over


@inlined
def merit(s: State) -> float:
    """What the search minimises; `refresh` must have been called."""
    total = s.settings[WEIGHT_OVER] * s.over[0]
    for e in range(len(s.base)):
        total += s.base[e] + s.level[e]
    return float(total)


@inlined
def objective(s: State) -> float:
    """Sum of the events' largest loads; `refresh` must have been called."""
    total = 0.0
    for e in range(len(s.base)):
        total += s.base[e] + s.top[e, 0]
    return total


@part
def add_shard(d: Data, s: State, shard: int, rank: int, sign: float) -> None:
    """Add (sign 1) or take away (-1) a shard's costs and memory."""
    factor, log_p = sign * d.slowness[rank], int(s.settings[LOG_P])
    for n in range(d.entry0[shard], d.entry0[shard + 1]):
        e = d.event[n]
        s.load[e, rank] += factor * d.value[n]
        s.power[e, rank] = power_of(s.load[e, rank] / s.scale[e], log_p)
        s.touched[e] = 1
    if d.bytes[shard] != 0.0:
        before = excess(s.held[rank], d.capacity[rank])
        s.held[rank] += sign * d.bytes[shard]
        s.over[0] += excess(s.held[rank], d.capacity[rank]) - before
    if d.host_bytes[shard] != 0.0:
        h = rank // d.per_host
        before = excess(s.host_held[h], d.host_capacity[h])
        s.host_held[h] += sign * d.host_bytes[shard]
        s.over[0] += excess(s.host_held[h], d.host_capacity[h]) - before


@part
def add_unit(d: Data, s: State, option: int, unit: int, place: int, sign: float) -> None:
    """Add or take away a unit's costs and memory."""
    shard = d.first_shard[option]
    if d.where[option] == ALL:
        for n in range(d.base0[option], d.base0[option + 1]):
            e = d.base_event[n]
            s.base[e] += sign * d.slowness[0] * d.base_value[n]
        for r in range(len(s.held)):
            add_shard(d, s, shard + r, r, sign)
    elif d.where[option] == HOST:
        for i in range(d.per_host):
            add_shard(d, s, shard + unit * d.per_host + i, place * d.per_host + i, sign)
    else:
        add_shard(d, s, shard + unit, place, sign)


@part
def put(d: Data, s: State, table: int, unit: int, place: int) -> None:
    """Place a unit of a table's current option."""
    option, slot = s.option[table], d.slot0[table] + unit
    s.place[slot] = place
    add_unit(d, s, option, unit, place, 1.0)
    if d.where[option] == ANY or d.where[option] == WITHIN:
        s.item_index[slot] = s.item_count[place]
        s.items[place, s.item_count[place]] = slot
        s.item_count[place] += 1


@part
def take(d: Data, s: State, table: int, unit: int) -> None:
    """Undo `put`."""
    option, slot = s.option[table], d.slot0[table] + unit
    place = s.place[slot]
    add_unit(d, s, option, unit, place, -1.0)
    if d.where[option] == ANY or d.where[option] == WITHIN:
        s.item_count[place] -= 1
        last = s.items[place, s.item_count[place]]
        s.items[place, s.item_index[slot]] = last
        s.item_index[last] = s.item_index[slot]


@part
def take_table(d: Data, s: State, table: int) -> None:
    """Take all units of a placed table away."""
    if s.option[table] >= 0:
        for unit in range(d.units[s.option[table]]):
            take(d, s, table, unit)
        s.option[table] = -1


@inlined
def rest_top(s: State, event: int, a: int, b: int) -> float:
    """Largest load of the other ranks."""
    for i in range(3):
        if s.top_rank[event, i] != a and s.top_rank[event, i] != b:
            return float(s.top[event, i])
    return -np.inf


@inlined
def changed(s: State, event: int, a: int, b: int, load_a: float, load_b: float) -> float:
    """What an event would count more if two ranks had these loads; `a == b` for one rank."""
    log_p, scale = int(s.settings[LOG_P]), s.scale[event]
    most, powers = max(rest_top(s, event, a, b), load_a), power_of(load_a / scale, log_p)
    rest = s.event_sum[event] - s.power[event, a]
    if a != b:
        most, powers = max(most, load_b), powers + power_of(load_b / scale, log_p)
        rest -= s.power[event, b]
    return float(mixed(s, event, most, powers + max(rest, 0.0)) - s.level[event])


@inlined
def overflow_of(d: Data, s: State, rank: int, more: float) -> float:
    """Overflow that a rank gains with more memory."""
    if more == 0.0:
        return 0.0
    return excess(s.held[rank] + more, d.capacity[rank]) - excess(s.held[rank], d.capacity[rank])


@inlined
def host_overflow_of(d: Data, s: State, rank: int, more: float) -> float:
    """As `overflow_of`, of the machine of a rank."""
    if more == 0.0:
        return 0.0
    h = rank // d.per_host
    return excess(s.host_held[h] + more, d.host_capacity[h]) - excess(s.host_held[h], d.host_capacity[h])


@inlined
def insertion(d: Data, s: State, shard: int, rank: int) -> float:
    """What the merit gains by a shard on a rank."""
    over = overflow_of(d, s, rank, d.bytes[shard]) + host_overflow_of(d, s, rank, d.host_bytes[shard])
    total = s.settings[WEIGHT_OVER] * over
    for n in range(d.entry0[shard], d.entry0[shard + 1]):
        e = d.event[n]
        load = s.load[e, rank] + d.value[n] * d.slowness[rank]
        total += changed(s, e, rank, rank, load, load)
    return float(total)


@part
def move_gain(d: Data, s: State, shard: int, a: int, b: int) -> float:
    """What the merit gains by moving a shard from rank a to b."""
    size, on_host = d.bytes[shard], d.host_bytes[shard]
    over = overflow_of(d, s, a, -size) + overflow_of(d, s, b, size)
    if on_host != 0.0 and a // d.per_host != b // d.per_host:
        over += host_overflow_of(d, s, a, -on_host) + host_overflow_of(d, s, b, on_host)
    total = s.settings[WEIGHT_OVER] * over
    for n in range(d.entry0[shard], d.entry0[shard + 1]):
        e, value = d.event[n], d.value[n]
        load_a, load_b = s.load[e, a] - value * d.slowness[a], s.load[e, b] + value * d.slowness[b]
        total += changed(s, e, a, b, load_a, load_b)
    return float(total)


@part
def swap_gain(d: Data, s: State, shard: int, a: int, other: int, b: int) -> float:
    """What the merit gains when `shard` of rank a and `other` of rank b change places."""
    size, on_host = d.bytes[other] - d.bytes[shard], d.host_bytes[other] - d.host_bytes[shard]
    over = overflow_of(d, s, a, size) + overflow_of(d, s, b, -size)
    if on_host != 0.0 and a // d.per_host != b // d.per_host:
        over += host_overflow_of(d, s, a, on_host) + host_overflow_of(d, s, b, -on_host)
    total = s.settings[WEIGHT_OVER] * over
    i, j = d.entry0[shard], d.entry0[other]
    end_i, end_j = d.entry0[shard + 1], d.entry0[other + 1]
    while i < end_i or j < end_j:
        of_i = d.event[i] if i < end_i else len(s.base)
        of_j = d.event[j] if j < end_j else len(s.base)
        e, more = min(of_i, of_j), 0.0
        if of_j == e:
            more += d.value[j]
            j += 1
        if of_i == e:
            more -= d.value[i]
            i += 1
        if more != 0.0:
            load_a, load_b = s.load[e, a] + more * d.slowness[a], s.load[e, b] - more * d.slowness[b]
            total += changed(s, e, a, b, load_a, load_b)
    return float(total)


def rebuild(d: Data, s: State, weight_norm: float, log_p: int, scale: Array) -> None:
    """Sum everything anew with other settings; a scale of 0 asks for the largest load."""
    s.settings[WEIGHT_NORM], s.settings[LOG_P] = weight_norm, log_p
    for sums in (s.load, s.base, s.held, s.host_held, s.over, s.item_count):
        sums.fill(0)
    s.scale.fill(1.0)
    _rebuild(d, s, scale)


@called
def _rebuild(d: Data, s: State, scale: Array) -> None:
    log_p = int(s.settings[LOG_P])
    for table in range(len(s.option)):
        if s.option[table] >= 0:
            for unit in range(d.units[s.option[table]]):
                put(d, s, table, unit, s.place[d.slot0[table] + unit])
    for e in range(len(s.base)):
        most = 0.0
        for r in range(len(s.held)):
            most = max(most, s.load[e, r])
        s.scale[e] = scale[e] if scale[e] > 0.0 else (most if most > 0.0 else 1.0)
        for r in range(len(s.held)):
            s.power[e, r] = power_of(s.load[e, r] / s.scale[e], log_p)
        s.touched[e] = 1
    s.over[0] = 1.0
    refresh(d, s)
