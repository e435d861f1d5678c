"""What the placement solver solves: one option per table, a rank for each of its shards.

The objective is a sum of maxima: every *event* (the lookups of an iteration, an exchange, the backward pass, ...)
ends when its slowest rank ends, and the events follow one another. One event alone gives the largest sum of a rank.

Axis letters: `t` tables, `o` options, `s` shards, `e` events, `r` ranks, `h` machines.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]
Mask: TypeAlias = NDArray[np.bool_]


class Where(IntEnum):
    """Which ranks the shards of an option may take."""

    ANY = 0  # each shard any rank; several may share one
    ALL = 1  # one on every rank, shard i on rank i
    HOST = 2  # groups of `ranks_per_host`: each group takes all ranks of any machine, in order; groups may share one
    WITHIN = 3  # each shard any rank of one machine; several may share one


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """Options of every table, as arrays.

    Attributes:
        first_option: `(t + 1,)` options of table `t` are `first_option[t]` to `first_option[t + 1] - 1`.
        first_shard: `(o + 1,)` shards of option `o` likewise.
        where: `(o,)` a `Where`.
        cost: `(s, e)` time that a shard adds to each event of its rank; finite, >= 0, in the caller's unit.
        bytes: `(s,)` device memory that a shard takes on its rank.
        capacity_bytes: `(r,)` device memory for tables; may be negative.
        ranks_per_host: ranks of a machine; divides the number of ranks.
        slowness: `(r,)` factor on every cost of a rank, > 0; 1 where all devices are alike.
        host_bytes: `(s,)` memory that a shard takes on its machine.
        host_capacity_bytes: `(h,)` memory of each machine for tables.
        allowed: `(t, r)` ranks that a table's shards of kind `ANY` or `WITHIN` may take; `None` allows all.
            (Options with shards on fixed ranks outside it must have been left out.)
    """

    first_option: Ints
    first_shard: Ints
    where: Ints
    cost: Array
    bytes: Array
    capacity_bytes: Array
    ranks_per_host: int
    slowness: Array
    host_bytes: Array
    host_capacity_bytes: Array
    allowed: Mask | None = None

    @property
    def num_tables(self) -> int:
        """Tables to place."""
        return len(self.first_option) - 1

    @property
    def num_options(self) -> int:
        """Options of all tables."""
        return len(self.where)

    @property
    def num_events(self) -> int:
        """Terms of the objective."""
        return int(self.cost.shape[1])

    @property
    def num_ranks(self) -> int:
        """Ranks."""
        return len(self.capacity_bytes)

    @property
    def table_of_option(self) -> Ints:
        """`(o,)`: the table of each option."""
        return np.repeat(np.arange(self.num_tables), np.diff(self.first_option)).astype(np.int64)

    @property
    def option_of_shard(self) -> Ints:
        """`(s,)`: the option of each shard."""
        return np.repeat(np.arange(self.num_options), np.diff(self.first_shard)).astype(np.int64)

    @property
    def shard_counts(self) -> Ints:
        """`(o,)`: shards of each option."""
        return np.diff(self.first_shard).astype(np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Assignment:
    """An answer to a `Problem`.

    Attributes:
        option: `(t,)` chosen options.
        ranks: for each table the rank of each shard of its chosen option, in the shards' order.
    """

    option: Ints
    ranks: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Loads:
    """What an assignment means for each rank.

    Attributes:
        cost: `(r, e)` summed costs, slowness included.
        bytes: `(r,)` summed device memory.
        host_bytes: `(h,)` summed memory of machines.
    """

    cost: Array
    bytes: Array
    host_bytes: Array

    @property
    def objective(self) -> float:
        """Sum over events of the maximum over ranks."""
        return float(self.cost.max(axis=0).sum())

    def overflow_bytes(self, problem: Problem) -> float:
        """Bytes beyond capacity, over all ranks and machines; 0 when the assignment is feasible."""
        device = np.maximum(self.bytes - problem.capacity_bytes, 0.0).sum()
        host = np.maximum(self.host_bytes - problem.host_capacity_bytes, 0.0).sum()
        return float(device + host)


def loads_of(problem: Problem, assignment: Assignment) -> Loads:
    """The loads of an assignment, summed shard by shard."""
    cost = np.zeros((problem.num_ranks, problem.num_events))
    held, on_host = np.zeros(problem.num_ranks), np.zeros(len(problem.host_capacity_bytes))
    for option, ranks in zip(assignment.option, assignment.ranks, strict=True):
        shards = slice(problem.first_shard[option], problem.first_shard[option + 1])
        at = np.asarray(ranks, dtype=np.int64)
        np.add.at(cost, at, problem.cost[shards] * problem.slowness[at, None])
        np.add.at(held, at, problem.bytes[shards])
        np.add.at(on_host, at // problem.ranks_per_host, problem.host_bytes[shards])
    return Loads(cost, held, on_host)


def homogeneous(
    *,
    first_option: Ints,
    first_shard: Ints,
    where: Ints,
    cost: Array,
    bytes_: Array,
    capacity_bytes: float,
    num_ranks: int,
    ranks_per_host: int,
) -> Problem:
    """A problem of equal ranks, without pinned tables and without limits of host memory."""
    return Problem(
        first_option=first_option,
        first_shard=first_shard,
        where=where,
        cost=cost,
        bytes=bytes_,
        capacity_bytes=np.full(num_ranks, capacity_bytes),
        ranks_per_host=ranks_per_host,
        slowness=np.ones(num_ranks),
        host_bytes=np.zeros(len(bytes_)),
        host_capacity_bytes=np.full(num_ranks // ranks_per_host, np.inf),
    )
