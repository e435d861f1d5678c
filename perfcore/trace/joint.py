"""Steps of all ranks as one program: the i-th collective of every rank is one, and ends for all together.

NCCL kernels wait for the other ranks as long as they run, so the shortest of a collective's kernels is taken for its
transfer; the rest of the others is waiting, which the joint schedule works out anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfcore.errors import TraceError
from perfcore.steps import HostKind, Opcode, Steps
from perfcore.trace.workload import TracedStep

Array = NDArray[np.float64]

# Collectives end together on all ranks, but for what clocks and rounding add.
TOGETHER_US = 500.0


def shared_collectives(steps: Sequence[TracedStep]) -> NDArray[np.int64]:
    """`(k, r)`: launch index of the k-th common collective on each rank.

    All of them, where the ranks run the same ones. Where windows were cut at different places or kernels were lost, those of
    one name that end together on every rank.

    Raises:
        TraceError: fewer than half of the collectives of the rank that has fewest are common.
    """
    own = [[i for i, x in enumerate(s.launched) if x.collective] for s in steps]
    names = [[_name(s, i) for i in found] for s, found in zip(steps, own, strict=True)]
    if all(n == names[0] for n in names):
        return np.array(own, dtype=np.int64).reshape(len(steps), -1).T
    reference = min(range(len(steps)), key=lambda r: len(own[r]))
    common: list[list[int]] = []
    begin = [0] * len(steps)
    for index in own[reference]:
        places = [_same(steps, own[r], begin[r], (reference, index), r) for r in range(len(steps))]
        if None not in places:
            found = [p for p in places if p is not None]
            common.append([own[r][p] for r, p in enumerate(found)])
            begin = [p + 1 for p in found]
    if 2 * len(common) < max(1, len(own[reference])):
        raise TraceError(
            f"Ranks must run the same collectives, but have {[len(o) for o in own]} of which {len(common)} are common.",
            hint="Pass the traces of one step on all ranks.",
        )
    return np.array(common, dtype=np.int64)


def _name(step: TracedStep, index: int) -> str:
    return step.launched[index].kernel.name.split("(")[0]


def _same(
    steps: Sequence[TracedStep], own: Sequence[int], begin: int, wanted: tuple[int, int], rank: int
) -> int | None:
    """Place among a rank's collectives of the one that has the wanted one's name and ends with it."""
    reference, index = wanted
    name, end_us = _name(steps[reference], index), _end_us(steps[reference], index)
    for place in range(begin, len(own)):
        if (
            _name(steps[rank], own[place]) == name
            and abs(_end_us(steps[rank], own[place]) - end_us) <= TOGETHER_US
        ):
            return place
    return None


def _end_us(step: TracedStep, index: int) -> float:
    return step.launched[index].kernel.end_us + step.base_us


def transfers_us(steps: Sequence[TracedStep]) -> Array:
    """`(k,)`: the shortest kernel of the k-th common collective over all ranks."""
    common = shared_collectives(steps)
    by_rank = [[s.launched[i].kernel.duration_us for i in common[:, r].tolist()] for r, s in enumerate(steps)]
    return np.asarray(np.min(by_rank, axis=0), dtype=np.float64)


def join(ranks: Sequence[Steps], traced: Sequence[TracedStep], transfer_us: Array | None = None) -> Steps:
    """One program of `r` ranks from those of each.

    Args:
        ranks: compiled steps of each rank, one rank and one candidate each.
        traced: what they were compiled from.
        transfer_us: `(k,)` of each common collective; the shortest measured one by default.

    Raises:
        TraceError: the ranks run different collectives, or run them on different streams.
    """
    common = shared_collectives(traced)
    transfers = transfers_us(traced) if transfer_us is None else transfer_us
    cuts = [_rows_of(s, common[:, r].tolist()) for r, s in enumerate(ranks)]
    targets = [s.table["target"][rows].tolist() for s, rows in zip(ranks, cuts, strict=True)]
    if any(t != targets[0] for t in targets):
        raise TraceError("Ranks must run their collectives on corresponding streams, but do not.")
    program = _Program(ranks)
    for number in range(len(common) + 1):
        for rank, steps in enumerate(ranks):
            begin = cuts[rank][number - 1] + 1 if number else 0
            stop = cuts[rank][number] if number < len(common) else len(steps.table)
            program.add_own(rank, steps.table[begin:stop])
            if number < len(common):
                program.add_wait(rank, steps.table[stop])
        if number < len(common):
            program.add_collective(ranks[0].table[cuts[0][number]], float(transfers[number]))
    return program.steps()


class _Program:
    """Steps of several ranks, one after the other, each under its rank's mask."""

    def __init__(self, ranks: Sequence[Steps]) -> None:
        self._ranks = ranks
        self._first_op = np.cumsum([0, *(len(s.op_names) for s in ranks)]).tolist()
        self._rows: list[NDArray[Any]] = []
        self._launches: list[Array] = []
        self._launch_ops: list[int] = []
        self._communicates: list[bool] = []

    def add_own(self, rank: int, rows: NDArray[Any]) -> None:
        """Steps that one rank takes."""
        steps, part = self._ranks[rank], rows.copy()
        part["mask"], part["op"] = rank, part["op"] + self._first_op[rank]
        own = part["launch"] >= 0
        for launch in part["launch"][own].tolist():
            us = np.zeros(len(self._ranks))
            us[rank] = steps.durations_us[launch, 0, 0]
            self._launch(
                us,
                steps.launch_ops[launch] + self._first_op[rank],
                communicates=bool(steps.communicates[launch]),
            )
        part["launch"][own] = np.arange(len(self._launches) - int(own.sum()), len(self._launches))
        self._rows.append(part)

    def add_wait(self, rank: int, row: Any) -> None:
        """What a collective waits for on one rank, before it."""
        wait = np.array([row], dtype=row.dtype)
        wait["opcode"], wait["kind"], wait["launch"], wait["mask"] = Opcode.WAIT, HostKind.NONE, -1, rank
        wait["op"] += self._first_op[rank]
        self._rows.append(wait)

    def add_collective(self, row: Any, transfer_us: float) -> None:
        """A launch of all ranks; `row` is the first rank's."""
        together = np.array([row], dtype=row.dtype)
        together["opcode"], together["awaited"] = Opcode.COLLECTIVE, 0
        together["launch"], together["mask"] = len(self._launches), -1
        self._launch(np.full(len(self._ranks), transfer_us), int(row["op"]), communicates=True)
        self._rows.append(together)

    def steps(self) -> Steps:
        """All that was added."""
        ranks = self._ranks
        return Steps(
            table=np.concatenate(self._rows),
            durations_us=np.array(self._launches)[:, None, :],
            masks=np.eye(len(ranks), dtype=bool)[:, None, :],
            op_names=tuple(name for s in ranks for name in s.op_names),
            launch_ops=tuple(self._launch_ops),
            communicates=np.array(self._communicates),
            clocks=max(s.clocks for s in ranks),
        )

    def _launch(self, us: Array, op: int, *, communicates: bool) -> None:
        self._launches.append(us)
        self._launch_ops.append(op)
        self._communicates.append(communicates)


def joint_seeds_us(steps: Sequence[TracedStep], starts_us: Sequence[float], *, clocks: int) -> Array:
    """`(c * r,)`: every rank's clocks when its step starts, from the first rank's start on."""
    state = np.full((len(steps), clocks), -np.inf)
    for rank, (step, start) in enumerate(zip(steps, starts_us, strict=True)):
        state[rank, : len(step.seeds_us)] = step.seeds_us + (start - min(starts_us))
    return state.reshape(-1)


def _rows_of(steps: Steps, launches: Sequence[int]) -> list[int]:
    """Rows that make the given launches."""
    wanted = set(launches)
    return [row for row, launch in enumerate(steps.table["launch"].tolist()) if launch in wanted]
