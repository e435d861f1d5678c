"""Insert tables, list scheduling, and annealing by moves, exchanges and changes of option, compiled.

Letters: see `local_search_data`.
"""

from __future__ import annotations

from typing import cast

import numpy as np

from dse.placement.solver.local_search_core import (
    insertion,
    merit,
    move_gain,
    objective,
    put,
    refresh,
    swap_gain,
    take,
    take_table,
)
from dse.placement.solver.local_search_data import (
    ALL,
    ANY,
    HOST,
    WEIGHT_OVER,
    WITHIN,
    Best,
    Data,
    State,
    called,
    inlined,
    part,
)
from dse.placement.solver.problem import Array, Ints

# Plain numbers in a call would be types of their own, for each of which a function is compiled once more.
NONE, FIRST, EVERY = cast("tuple[int, int, int]", tuple(np.array([-1, 0, 0])))
_SAME = 1e-12  # relative; smaller gains are rounding
_OFTEN, _SELDOM = 64, 512  # steps between changes of temperature, of the weight of overflow


@inlined
def drawn(s: State) -> float:
    """A number in [0, 1) (xorshift64*)."""
    x = s.dice[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    s.dice[0] = x
    return np.float64((x * np.uint64(2685821657736338717)) >> np.uint64(11)) * 2.0**-53


@inlined
def below(s: State, n: int) -> int:
    """A whole number in [0, n)."""
    return int(drawn(s) * n)


@inlined
def may_take(d: Data, table: int, rank: int) -> bool:
    """Whether a table's free shards may be on a rank."""
    return len(d.allowed) == 0 or d.allowed[table, rank]


@part
def best_rank(d: Data, s: State, table: int, shard: int, first: int, end: int, samples: int) -> int:
    """The cheapest of some random ranks of [first, end), of all if `samples` is 0; -1 if none is allowed."""
    best, chosen = np.inf, -1
    for i in range(samples if samples > 0 else end - first):
        rank = first + (below(s, end - first) if samples > 0 else i)
        if not may_take(d, table, rank):
            continue
        gain = insertion(d, s, shard, rank)
        if gain < best or chosen < 0:
            best, chosen = gain, rank
    return chosen


@part
def best_host(d: Data, s: State, option: int, unit: int, samples: int) -> int:
    """The machine on which a group makes the best state, of some random ones or (0) of all."""
    best, chosen, hosts = np.inf, 0, len(s.host_held)
    shard = d.first_shard[option] + unit * d.per_host
    for i in range(samples if samples > 0 else hosts):
        host = below(s, hosts) if samples > 0 else i
        worst = total = 0.0
        for j in range(d.per_host):
            gain = insertion(d, s, shard + j, host * d.per_host + j)
            worst, total = max(worst, gain), total + gain
        if worst + 1e-3 * total < best:
            best, chosen = worst + 1e-3 * total, host
    return chosen


@part
def insert(d: Data, s: State, table: int, option: int, samples: int) -> bool:
    """Place an absent table by an option; False (and still absent) if a unit found no rank.

    Each unit goes where it is cheapest: of all places if `samples` is 0, else of at most so many random ones.
    """
    s.option[table] = option
    where, shard = d.where[option], d.first_shard[option]
    first, end = FIRST, len(s.held)
    if where == WITHIN:
        host = below(s, len(s.host_held)) if samples > 0 else roomiest_host(d, s, table, option)
        first, end = host * d.per_host, (host + 1) * d.per_host
    for unit in range(d.units[option]):
        # A varying number keeps insertions from always taking the greedy place.
        look = 1 + below(s, samples) if samples > 0 else 0
        if where == ALL:
            place = 0
        elif where == HOST:
            place = best_host(d, s, option, unit, look)
        else:
            place = best_rank(d, s, table, shard + unit, first, end, look)
            if place < 0:
                for done in range(unit):
                    take(d, s, table, done)
                s.option[table] = -1
                refresh(d, s)
                return False
        put(d, s, table, unit, place)
        refresh(d, s)
    return True


@part
def roomiest_host(d: Data, s: State, table: int, option: int) -> int:
    """The machine on which the option's first shard is cheapest."""
    rank = best_rank(d, s, table, d.first_shard[option], FIRST, len(s.held), EVERY)
    return max(rank, 0) // d.per_host


@called
def schedule(d: Data, s: State, order: Ints, options: Ints, samples: int) -> None:
    """Place absent tables in order (list scheduling), each by its `(t,)` option; -1 is open."""
    for table in order:
        if options[table] >= 0 and insert(d, s, table, options[table], samples):
            continue
        best, chosen = np.inf, NONE
        for option in range(d.first_option[table], d.first_option[table + 1]):
            if insert(d, s, table, option, samples):
                now = merit(s)
                if now < best or chosen < 0:
                    best, chosen = now, option
                take_table(d, s, table)
                refresh(d, s)
        insert(d, s, table, chosen, samples)


@inlined
def keep_best(s: State, best: Best) -> bool:
    """Whether the state is better than the best so far; notes its value if so (`copy_best` must follow)."""
    over, value = s.over[0], objective(s)
    if over < best.value[0] * (1.0 - _SAME) or (
        over <= best.value[0] and value < best.value[1] * (1.0 - _SAME)
    ):
        best.value[0], best.value[1] = over, value
        return True
    return False


@part
def copy_best(s: State, best: Best) -> None:
    """Copy the state's assignment."""
    for table in range(len(s.option)):
        best.option[table] = s.option[table]
    for slot in range(len(s.place)):
        best.place[slot] = s.place[slot]


@inlined
def is_free(d: Data, option: int) -> bool:
    """Whether the option's units may go to any rank, one by one."""
    return bool(d.where[option] == ANY or (d.where[option] == WITHIN and d.units[option] == 1))


@inlined
def some_slot(d: Data, s: State, focus: float) -> int:
    """A slot of a free unit: on a rank with the largest load of an event, or of a random table; -1 for none."""
    if drawn(s) < focus:
        rank = s.top_rank[below(s, len(s.base)), 0]
        if s.item_count[rank] == 0:
            return -1
        return int(s.items[rank, below(s, s.item_count[rank])])
    table = below(s, len(s.option))
    option = s.option[table]
    if d.where[option] != ANY and d.where[option] != WITHIN:
        return -1
    return int(d.slot0[table] + below(s, d.units[option]))


@part
def relocate(d: Data, s: State, slot: int, b: int) -> None:
    """Move a unit to rank b."""
    table = d.table_of_slot[slot]
    unit = slot - d.slot0[table]
    take(d, s, table, unit)
    put(d, s, table, unit, b)


@part
def try_move(d: Data, s: State, slot: int, limit: float, samples: int) -> int:
    """The best of some random ranks for a unit, if its gain is below the limit; else -1."""
    table = d.table_of_slot[slot]
    option, a = s.option[table], s.place[slot]
    shard = d.first_shard[option] + slot - d.slot0[table]
    first, span = 0, len(s.held)
    if not is_free(d, option):
        first, span = a // d.per_host * d.per_host, d.per_host
    best, chosen = limit, -1
    for _ in range(samples):
        b = first + below(s, span)
        if b != a and may_take(d, table, b):
            gain = move_gain(d, s, shard, a, b)
            if gain <= best:
                best, chosen = gain, b
    return chosen


@part
def try_swap(d: Data, s: State, slot: int, limit: float, samples: int) -> int:
    """The best of some random units to change places with, if its gain is below the limit; else -1."""
    table = d.table_of_slot[slot]
    option, a = s.option[table], s.place[slot]
    shard = d.first_shard[option] + slot - d.slot0[table]
    best, chosen = limit, -1
    for _ in range(samples):
        slot_b = some_slot(d, s, 0.0)
        if slot_b < 0 or s.place[slot_b] == a:
            continue
        table_b, b = d.table_of_slot[slot_b], s.place[slot_b]
        other = s.option[table_b]
        if not (is_free(d, option) and is_free(d, other)) and a // d.per_host != b // d.per_host:
            continue
        if may_take(d, table, b) and may_take(d, table_b, a):
            shard_b = d.first_shard[other] + slot_b - d.slot0[table_b]
            gain = swap_gain(d, s, shard, a, shard_b, b)
            if gain <= best:
                best, chosen = gain, slot_b
    return chosen


@part
def try_option(d: Data, s: State, table: int, option: int, limit: float, samples: int) -> bool:
    """Take a table out and put it back by an option, where cheap; where the gain is not below the limit, as it was."""
    old, before = s.option[table], merit(s)
    for unit in range(d.units[old]):
        s.scratch[unit] = s.place[d.slot0[table] + unit]
    take_table(d, s, table)
    refresh(d, s)
    if insert(d, s, table, option, samples) and merit(s) - before <= limit:
        return True
    take_table(d, s, table)
    s.option[table] = old
    for unit in range(d.units[old]):
        put(d, s, table, unit, s.scratch[unit])
    refresh(d, s)
    return False


@called
def anneal(d: Data, s: State, best: Best, steps: int, hot: float, cold: float, mix: Array) -> int:
    """Annealing from temperature `hot` to `cold`; returns the accepted steps.

    `mix` is `(5,)`: the chance of an exchange, of a change of option, of starting at a rank with the largest load,
    and how many places a move and a change of option look at.
    """
    swaps, options, focus = mix[0], mix[0] + mix[1], mix[2]
    move_samples, insert_samples = int(mix[3]), int(mix[4])
    heat, accepted, pending = hot, 0, keep_best(s, best)
    usual = s.settings[WEIGHT_OVER]
    for step in range(steps):
        if step % _OFTEN == 0:
            heat = hot * (cold / hot) ** (step / steps)
        if step % _SELDOM == 0:
            weight = s.settings[WEIGHT_OVER] * (1.3 if s.over[0] > 0.0 else 0.95)
            s.settings[WEIGHT_OVER] = min(max(weight, usual / 30.0), usual * 1e4)
        limit = -heat * np.log(1.0 - drawn(s))
        kind = drawn(s)
        if kind >= swaps and kind < options:
            table = below(s, len(s.option))
            if drawn(s) < focus:
                slot = some_slot(d, s, 1.0)
                table = d.table_of_slot[slot] if slot >= 0 else table
            first, end = d.first_option[table], d.first_option[table + 1]
            old, new = s.option[table], first + below(s, end - first)
            if new == old and (d.where[old] == ALL or (d.units[old] == 1 and d.where[old] != HOST)):
                continue
            if pending:
                copy_best(s, best)
                pending = False
            if not try_option(d, s, table, new, limit, insert_samples):
                continue
        else:
            slot = some_slot(d, s, focus)
            if slot < 0:
                continue
            if kind < swaps:
                other = try_swap(d, s, slot, limit, move_samples)
                if other < 0:
                    continue
                if pending:
                    copy_best(s, best)
                    pending = False
                a, b = s.place[slot], s.place[other]
                relocate(d, s, slot, b)
                relocate(d, s, other, a)
            else:
                rank = try_move(d, s, slot, limit, move_samples)
                if rank < 0:
                    continue
                if pending:
                    copy_best(s, best)
                    pending = False
                relocate(d, s, slot, rank)
            refresh(d, s)
        accepted += 1
        pending = keep_best(s, best) or pending
    if pending:
        copy_best(s, best)
    s.settings[WEIGHT_OVER] = max(s.settings[WEIGHT_OVER], usual)
    return accepted
