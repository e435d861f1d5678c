"""Options to start a placement search with: which option each table takes, before ranks are chosen.

Ranks are left out: with ceilings for the largest shard of each event, an event lasts about as long as a rank's share of
its work, or as its largest shard. The ceilings are lowered one event at a time for as long as that helps.

Letters: t tables, o options, e events, r ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dse.placement.solver.local_search_data import ALL, Data
from dse.placement.solver.problem import Array, Ints, Problem

_CEILINGS = 12  # of the largest shard: this many, from the fair share of a rank down to a fraction of it
_SMALLEST_SHARE = 1 / 64
_LEVELS = np.geomspace(1.0, 1 / 128, 10)  # of an event's ceiling: from its largest shard down,
_FINER = np.geomspace(1.6, 0.6, 8)  # and then around the best so far
_SWEEPS = 4
_PRICINGS = 3  # how often the price of an event's work is adapted to what bounds it
_LEAST_PRICE = 0.05
_KEPT = 20
_MEMORY_PRICES = (0.3, 3.0, 30.0)
_ABOVE_CEILING = 1e6  # makes an option with a larger shard lose to every one without
_TINY = 1e-300


def start_options(problem: Problem, data: Data, *, tight: bool, fine: bool = True) -> list[Ints]:
    """Distinct `(t,)` choices: of each table the option of least total cost whose shards stay below a ceiling.

    The ceilings run from the share of a rank in all work downwards: whole tables are cheapest, but a large one
    keeps a rank longer than its share. With `tight`, memory is priced as well, and one choice takes least memory. With
    `fine`, the ceilings of the events are lowered one by one as well.
    """
    if problem.num_options == problem.num_tables:
        return [np.arange(problem.num_tables, dtype=np.int64)]
    memory = np.add.reduceat(problem.bytes + problem.host_bytes, problem.first_shard[:-1])
    share = float(data.total[least(data, data.total)].sum()) / problem.num_ranks
    ceilings = share * np.geomspace(1.0, _SMALLEST_SHARE, _CEILINGS)
    choices = [least(data, _above(data.peak, ceiling) + data.total) for ceiling in ceilings]
    choices += [least(data, data.total), least(data, data.peak)]
    if tight:
        price = share * problem.num_ranks / max(float(memory[least(data, memory)].sum()), 1.0)
        priced = [data.total + weight * price * memory for weight in _MEMORY_PRICES]
        choices += [least(data, _above(data.peak, c) + p) for p in priced for c in ceilings[::2]]
        choices.append(least(data, memory))
        choices.append(least(data, np.maximum.reduceat(problem.bytes, problem.first_shard[:-1])))
    if fine:
        choices += _below_ceilings(problem, data, choices[0])
    return list({choice.tobytes(): choice for choice in choices}.values())


def least(data: Data, cost: Array) -> Ints:
    """`(t,)` the option of least `(o,)` cost of each table, of equal ones the first."""
    starts = data.first_option[:-1]
    lowest = np.repeat(np.minimum.reduceat(cost, starts), np.diff(data.first_option))
    candidates = np.flatnonzero(cost <= lowest)
    return candidates[np.searchsorted(candidates, starts)].astype(np.int64)


def by_size(data: Data) -> Ints:
    """`(t,)` tables, the largest total cost (by its cheapest option) first."""
    size = np.minimum.reduceat(data.total, data.first_option[:-1])
    return np.argsort(-size, kind="stable").astype(np.int64)


def by_memory(problem: Problem, data: Data) -> Ints:
    """`(t,)` tables, the most memory of one shard (by its smallest option) first."""
    largest = np.maximum.reduceat(problem.bytes, problem.first_shard[:-1])
    size = np.minimum.reduceat(largest, data.first_option[:-1])
    return np.argsort(-size, kind="stable").astype(np.int64)


def _above(peak: Array, ceiling: float) -> Array:
    penalty: Array = np.maximum(peak - ceiling, 0.0) * _ABOVE_CEILING
    return penalty


@dataclass(frozen=True, slots=True, eq=False)
class _Work:
    """`(o, e)`: a rank's share in each option's work, the part of it that all ranks have, and the largest shard."""

    share: Array
    everywhere: Array
    largest: Array

    def duration(self, options: Ints) -> tuple[Array, Array]:
        """`(e,)` of each event about how long it takes at least by work, and by its largest shard."""
        on_all = self.everywhere[options].sum(axis=0)
        return self.share[options].sum(axis=0), on_all + self.largest[options].max(axis=0)


def _work(problem: Problem) -> _Work:
    first = problem.first_shard[:-1]
    share = np.add.reduceat(problem.cost, first, axis=0) / problem.num_ranks
    largest = np.maximum.reduceat(problem.cost, first, axis=0)
    on_all = (problem.where == ALL)[:, None]
    return _Work(share, np.where(on_all, share, 0.0), np.where(on_all, 0.0, largest))


def _below_ceilings(problem: Problem, data: Data, first: Ints) -> list[Ints]:
    """The most promising choices found while the events' ceilings are lowered in turn."""
    work, events = _work(problem), problem.num_events
    most = work.largest.max(axis=0)
    found: dict[bytes, tuple[float, Ints]] = {}
    for ceilings in (most.copy(), work.largest[first].max(axis=0)):
        best = _priced(data, work, ceilings, found)
        for sweep in range(_SWEEPS):
            before = best
            for event in range(events):
                for level in ceilings[event] * _FINER if sweep else most[event] * _LEVELS:
                    kept, ceilings[event] = ceilings[event], level
                    now = _priced(data, work, ceilings, found)
                    if now < best:
                        best = now
                    else:
                        ceilings[event] = kept
            if sweep and best >= before:
                break
    ranked = sorted(found.values(), key=lambda f: f[0])
    return [options for _, options in ranked[:_KEPT]]


def _priced(data: Data, work: _Work, ceilings: Array, found: dict[bytes, tuple[float, Ints]]) -> float:
    """The least estimated objective of some choices below the ceilings; they are added to `found`."""
    over = np.maximum(work.largest - ceilings, 0.0).sum(axis=1) * _ABOVE_CEILING
    price, best = np.ones(len(ceilings)), np.inf
    # One event's price weighs all options alike.
    for _ in range(_PRICINGS if len(ceilings) > 1 else 1):
        options = least(data, over + work.share @ price)
        by_work, by_shard = work.duration(options)
        estimate = float(np.maximum(by_work, by_shard).sum())
        found.setdefault(options.tobytes(), (estimate, options))
        best = min(best, estimate)
        # Work costs little in an event that waits for its largest shard anyway.
        price = np.clip(by_work / np.maximum(by_shard, _TINY), _LEAST_PRICE, 1.0)
    return best
