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


def check_joinable(steps: Sequence[TracedStep]) -> None:
    """Every rank must run the same collectives in the same order.

    Raises:
        TraceError: they do not; the message names the first difference.
    """
    found = [[x.kernel.name.split("(")[0] for x in s.launched if x.collective] for s in steps]
    for rank, names in enumerate(found):
        if names != found[0]:
            at = next(
                (i for i, (a, b) in enumerate(zip(names, found[0], strict=False)) if a != b),
                min(len(names), len(found[0])),
            )
            raise TraceError(
                f"Ranks must run the same collectives, but trace {rank} has {len(names)}, the first {len(found[0])}, "
                f"and number {at} differs.",
                hint="Pass the traces of one step on all ranks.",
            )


def transfers_us(steps: Sequence[TracedStep]) -> Array:
    """`(i,)`: the shortest kernel of the i-th collective over all ranks."""
    by_rank = [[x.kernel.duration_us for x in s.launched if x.collective] for s in steps]
    return np.asarray(np.min(by_rank, axis=0), dtype=np.float64)


def join(ranks: Sequence[Steps], traced: Sequence[TracedStep], transfer_us: Array | None = None) -> Steps:
    """One program of `r` ranks from those of each.

    Args:
        ranks: compiled steps of each rank, one rank and one candidate each.
        traced: what they were compiled from.
        transfer_us: `(i,)` of each collective; the shortest measured one by default.

    Raises:
        TraceError: the ranks run different collectives.
    """
    check_joinable(traced)
    transfers = transfers_us(traced) if transfer_us is None else transfer_us
    cuts = [_collective_rows(s, t) for s, t in zip(ranks, traced, strict=True)]
    rows: list[NDArray[Any]] = []
    launches: list[Array] = []
    launch_ops: list[int] = []
    communicates: list[bool] = []
    ops = np.cumsum([0, *(len(s.op_names) for s in ranks)])
    for number in range(len(cuts[0]) + 1):
        for rank, steps in enumerate(ranks):
            begin = 0 if number == 0 else cuts[rank][number - 1] + 1
            stop = cuts[rank][number] if number < len(cuts[rank]) else len(steps.table)
            part = steps.table[begin:stop].copy()
            part["mask"], part["op"] = rank, part["op"] + ops[rank]
            own = part["launch"] >= 0
            for launch in part["launch"][own].tolist():
                us = np.zeros(len(ranks))
                us[rank] = steps.durations_us[launch, 0, 0]
                launches.append(us)
                launch_ops.append(steps.launch_ops[launch] + int(ops[rank]))
                communicates.append(bool(steps.communicates[launch]))
            part["launch"][own] = np.arange(len(launches) - int(own.sum()), len(launches))
            rows.append(part)
            if number < len(cuts[rank]):
                rows.append(_own_waits(steps.table[cuts[rank][number]], rank))
        if number < len(cuts[0]):
            first = ranks[0].table[cuts[0][number]]
            rows.append(_together(first, len(launches)))
            launches.append(np.full(len(ranks), transfers[number]))
            launch_ops.append(int(first["op"]))
            communicates.append(True)
    return Steps(
        table=np.concatenate(rows),
        durations_us=np.array(launches)[:, None, :],
        masks=np.eye(len(ranks), dtype=bool)[:, None, :],
        op_names=tuple(name for s in ranks for name in s.op_names),
        launch_ops=tuple(launch_ops),
        communicates=np.array(communicates),
        clocks=max(s.clocks for s in ranks),
    )


def joint_seeds_us(steps: Sequence[TracedStep], starts_us: Sequence[float], *, clocks: int) -> Array:
    """`(c * r,)`: every rank's clocks when its step starts, from the first rank's start on."""
    state = np.full((len(steps), clocks), -np.inf)
    for rank, (step, start) in enumerate(zip(steps, starts_us, strict=True)):
        state[rank, : len(step.seeds_us)] = step.seeds_us + (start - min(starts_us))
    return state.reshape(-1)


def _collective_rows(steps: Steps, traced: TracedStep) -> list[int]:
    launches = {i for i, x in enumerate(traced.launched) if x.collective}
    return [row for row, launch in enumerate(steps.table["launch"].tolist()) if launch in launches]


def _own_waits(row: Any, rank: int) -> NDArray[Any]:
    """What the collective waits for on one rank, as a step before it."""
    wait = np.array([row], dtype=row.dtype)
    wait["opcode"], wait["kind"], wait["launch"], wait["mask"] = Opcode.WAIT, HostKind.NONE, -1, rank
    return wait


def _together(row: Any, launch: int) -> NDArray[Any]:
    out = np.array([row], dtype=row.dtype)
    out["opcode"], out["awaited"], out["launch"], out["mask"] = Opcode.COLLECTIVE, 0, launch, -1
    return out
