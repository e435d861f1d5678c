"""Options to start a placement search with: which option each table takes, before ranks are chosen.

Letters: t tables, o options, r ranks.
"""

from __future__ import annotations

import numpy as np

from dse.placement.local_search_data import Data
from dse.placement.problem import Array, Ints, Problem

_CEILINGS = 12  # of the largest shard: this many, from the fair share of a rank down to a fraction of it
_SMALLEST_SHARE = 1 / 64
_MEMORY_PRICES = (0.3, 3.0, 30.0)
_ABOVE_CEILING = 1e6  # makes an option with a larger shard lose to every one without


def start_options(problem: Problem, data: Data, *, tight: bool) -> list[Ints]:
    """Distinct `(t,)` choices: of each table the option of least total cost whose shards stay below a ceiling.

    The ceilings run from the share of a rank in all work downwards: whole tables are cheapest, but a large one
    keeps a rank longer than its share. With `tight`, memory is priced as well, and one choice takes least memory.
    """
    owner = problem.table_of_option
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
        largest = np.maximum.reduceat(problem.bytes, problem.first_shard[:-1])
        choices.append(least(data, largest))
    assert all((owner[choice] == np.arange(problem.num_tables)).all() for choice in choices)
    return list({choice.tobytes(): choice for choice in choices}.values())


def least(data: Data, cost: Array) -> Ints:
    """`(t,)` the option of least `(o,)` cost of each table."""
    parts = np.split(cost, data.first_option[1:-1])
    return data.first_option[:-1] + np.array([int(np.argmin(part)) for part in parts], dtype=np.int64)


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
