"""Why no placement fits: the table or rank that breaks it, how much is missing, and what would help.

Every remedy is tried out: a placement under it was found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from dse.errors import NoFeasibleCandidateError
from dse.placement.instances.labels import Labels
from dse.placement.solver.problem import Array, Assignment, Problem, Where, loads_of
from perfcore.units import BYTES_PER_GIB, BYTES_PER_MIB

_SHOWN_AS_GIB = 0.1 * BYTES_PER_GIB
Solve: TypeAlias = Callable[[Problem], Assignment]


@dataclass(frozen=True, slots=True)
class Shortage:
    """What is missing.

    Attributes:
        message: a sentence that names the table or the rank.
        missing_bytes: at least so much.
    """

    message: str
    missing_bytes: float


def shortage_of(problem: Problem, labels: Labels, best: Assignment) -> Shortage:
    """Why a problem without a feasible placement has none.

    Args:
        problem: the problem.
        labels: its names.
        best: the placement with the least overflow that was found.
    """
    return (
        _of_the_rest(problem)
        or _of_a_table(problem, labels)
        or _of_all(problem)
        or _of_a_rank(problem, labels, best)
        or _of_a_machine(problem, labels, best)
    )


def _of_the_rest(problem: Problem) -> Shortage | None:
    """A rank without memory for what is no table, beside others that have it."""
    capacity = problem.capacity_bytes
    rank = int(np.argmin(capacity))
    if capacity[rank] >= 0 or capacity.max() <= 0:
        return None
    return Shortage(
        f"Rank {rank} has no memory for tables, and lacks {_gib(-capacity[rank])} for the rest of the job.",
        -float(capacity[rank]),
    )


def _of_a_table(problem: Problem, labels: Labels) -> Shortage | None:
    """A table too large for its ranks however it is split."""
    missing = _missing_alone(problem)
    starts = problem.first_option[:-1]
    least = np.minimum.reduceat(missing, starts)
    table = int(np.argmax(least))
    if least[table] <= 0:
        return None
    options = np.arange(problem.first_option[table], problem.first_option[table + 1])
    option = int(options[np.argmin(missing[options])])
    shard = float(problem.bytes[problem.first_shard[option] : problem.first_shard[option + 1]].max())
    return Shortage(
        f"Table {labels.tables[table]!r} needs {_gib(shard)} on a rank even as {labels.types[option]}, its best way to be "
        f"split, but its ranks have {_gib(shard - least[table])} for tables: {_gib(least[table])} are missing.",
        float(least[table]),
    )


def _missing_alone(problem: Problem) -> Array:
    """`(o,)` bytes that an option lacks on otherwise empty ranks: of its largest shard, or of the fullest rank."""
    capacity = problem.capacity_bytes
    table = problem.table_of_option
    if problem.allowed is None:
        most = np.full(problem.num_tables, capacity.max())
    else:
        most = np.where(problem.allowed, capacity, -np.inf).max(axis=1)
    largest = np.maximum.reduceat(problem.bytes, problem.first_shard[:-1])
    missing: Array = largest - most[table]
    for o in np.flatnonzero(problem.where == Where.ALL):
        shards = problem.bytes[problem.first_shard[o] : problem.first_shard[o + 1]]
        missing[o] = (shards - capacity).max()
    return missing


def _of_all(problem: Problem) -> Shortage | None:
    """Less memory than all tables need together, each in its smallest way."""
    totals = np.add.reduceat(problem.bytes, problem.first_shard[:-1])
    needed = float(np.minimum.reduceat(totals, problem.first_option[:-1]).sum())
    there = float(np.maximum(problem.capacity_bytes, 0.0).sum())
    if needed <= there:
        return None
    ranks = f"the {problem.num_ranks} ranks have" if problem.num_ranks > 1 else "the rank has"
    return Shortage(
        f"All tables together need {_gib(needed)} at least, but {ranks} {_gib(there)} for them: "
        f"{_gib(needed - there)} are missing.",
        needed - there,
    )


def _of_a_rank(problem: Problem, labels: Labels, best: Assignment) -> Shortage | None:
    loads = loads_of(problem, best)
    over = loads.bytes - problem.capacity_bytes
    rank = int(np.argmax(over))
    if over[rank] <= 0:
        return None
    held = [_held(problem, int(o), ranks, rank) for o, ranks in zip(best.option, best.ranks, strict=True)]
    table = int(np.argmax(held))
    return Shortage(
        f"The tables do not fit side by side: in the best placement found, rank {rank} needs {_gib(loads.bytes[rank])} of "
        f"{_gib(problem.capacity_bytes[rank])}, {_gib(over[rank])} more than there are, and table {labels.tables[table]!r} "
        f"has {_gib(held[table])} of it.",
        float(over[rank]),
    )


def _of_a_machine(problem: Problem, labels: Labels, best: Assignment) -> Shortage:
    """Too little host memory; or too little time to find what fits."""
    needed, there = loads_of(problem, best).host_bytes, problem.host_capacity_bytes
    machine = int(np.argmax(needed - there))
    missing = float((needed - there)[machine])
    if missing <= 0:
        return Shortage(
            "No placement that fits into memory was found in the time given; there may be one.", 0.0
        )
    held = [
        float(problem.host_bytes[problem.first_shard[o] : problem.first_shard[o + 1]].sum())
        for o in best.option
    ]
    return Shortage(
        f"The tables on the host do not fit: in the best placement found, machine {machine} needs "
        f"{_gib(float(needed[machine]))} of its {_gib(float(there[machine]))} of host memory for tables, {_gib(missing)} "
        f"more than there are, and table {labels.tables[int(np.argmax(held))]!r} has the most on hosts.",
        missing,
    )


def _held(problem: Problem, option: int, ranks: Sequence[int], rank: int) -> float:
    shards = problem.bytes[problem.first_shard[option] : problem.first_shard[option + 1]]
    return float(shards[np.asarray(ranks) == rank].sum())


def memory_problem(problem: Problem) -> Problem:
    """The same tables, to be placed so that the fullest rank, in shares of its capacity, is least full; all fits."""
    most = max(float(problem.capacity_bytes.max()), 1.0)
    smaller = most / np.maximum(problem.capacity_bytes, 1.0)
    return replace(
        problem,
        cost=problem.bytes[:, None] / most,
        slowness=smaller,
        capacity_bytes=np.full(problem.num_ranks, np.inf),
    )


def fullest_share(problem: Problem, solve: Solve) -> float:
    """Memory of the fullest rank in shares of its capacity, in the placement found that is best by it.

    Infinite where the host memory does not suffice.
    """
    found = memory_problem(problem)
    loads = loads_of(found, solve(found))
    return loads.objective if loads.overflow_bytes(found) <= 0 else np.inf


def capacity_remedy(problem: Problem, solve: Solve) -> str | None:
    """How much memory would do, if all ranks had as much more of it."""
    if float(problem.capacity_bytes.max()) <= 0:
        return None
    share = fullest_share(problem, solve)
    now = float(problem.capacity_bytes.max())
    if share <= 1 or not np.isfinite(share):
        return None
    equal = bool((problem.capacity_bytes == now).all())
    where = "on each rank" if equal else "on the largest rank, and on the others in proportion"
    return f"{_gib(now * share)} for tables {where} instead of {_gib(now)}."


def refusal(shortage: Shortage, remedies: Sequence[str]) -> NoFeasibleCandidateError:
    """The exception that tells of it, remedies numbered."""
    numbered = "\n".join(f"  {i}. {r}" for i, r in enumerate(remedies, start=1))
    return NoFeasibleCandidateError(
        shortage.message,
        hint=f"Each of these alone would do, a placement was found:\n{numbered}" if remedies else None,
    )


def _gib(bytes_: float) -> str:
    """Memory in words; a rank whose other needs take more than all of it has none."""
    if bytes_ <= 0:
        return "none"
    return (
        f"{bytes_ / BYTES_PER_GIB:,.1f} GiB"
        if bytes_ >= _SHOWN_AS_GIB
        else f"{bytes_ / BYTES_PER_MIB:,.2f} MiB"
    )
