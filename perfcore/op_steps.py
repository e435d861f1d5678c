"""An op as steps on clocks.

Every rank has four clocks, the host and the streams of `perfcore.graph.ops.Stream`, and one more for each
stream beyond. A step updates one clock per rank; `docs/architecture.md` lists the rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache, reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfcore.graph.ops import Op, Stream, StreamId
from perfcore.graph.presence import Mask, Present
from perfcore.overheads import OpOverheads

GRAPH_LAUNCH = "cudaGraphLaunch"
CLOCKS = 4
HOST_CLOCK = 0
CLOCK_OF = {Stream.COMPUTE: 1, Stream.COMMUNICATION: 2, Stream.COPY: 3}


def clock_of(stream: StreamId) -> int:
    """The clock of a stream."""
    return CLOCK_OF[stream] if isinstance(stream, Stream) else stream


class Opcode(IntEnum):
    """What a step does; `target`, `awaited` are its clocks."""

    HOST = 0  # host += us
    LAUNCH = 1  # target = max(target + gap, host + latency, awaited...) + duration
    WAIT = 2  # target = max(target, awaited)
    BLOCK = 3  # host = max(host, awaited)
    COLLECTIVE = 4  # as LAUNCH, started together: target = max over ranks(...) + duration


class HostKind(IntEnum):
    """Which overhead a host step is; `NONE` for steps that cost the host nothing."""

    NONE = -1
    T1 = 0
    T2 = 1
    T3 = 2
    T4 = 3
    T5 = 4
    ALONE = 5


STEP = np.dtype(
    [
        ("opcode", np.int8),
        ("target", np.int8),
        ("awaited", np.int64),  # bit mask over clocks
        ("kind", np.int8),
        ("op", np.int32),
        ("launch", np.int32),  # row of `durations_us`, -1 where the step launches nothing
        ("mask", np.int32),  # row of `masks`, -1 where every candidate and rank takes the step
        ("us", np.float64),
        ("gap_us", np.float64),
        ("latency_us", np.float64),
    ],
    align=True,
)


@dataclass(frozen=True, slots=True)
class Form:
    """What a launch's steps depend on beside durations."""

    target: int
    awaited: int
    blocks: bool
    collective: bool


@lru_cache(maxsize=1024)
def form_of(stream: StreamId, after: tuple[StreamId, ...], blocks: bool, collective: bool) -> Form:  # noqa: FBT001
    """The form of a launch."""
    awaited = sum({1 << clock_of(s) for s in after})
    return Form(clock_of(stream), awaited, blocks, collective)


def block(
    forms: tuple[Form, ...],
    waits: tuple[tuple[StreamId, StreamId], ...],
    blocks_on: tuple[StreamId, ...],
    costs: OpOverheads | None,
    gap_latency_us: tuple[float, float],
) -> NDArray[Any]:
    """An op that runs whole: T1, waits, T2, launches with T4 and T5, blocking, T3; no host times if captured."""
    steps = [wait(s, q) for s, q in waits]
    if costs:
        steps.insert(0, host(HostKind.T1, costs.t1_us))
        if forms:
            steps.append(host(HostKind.T2, costs.t2_us))
    for number, form in enumerate(forms):
        if costs and number:
            steps.append(host(HostKind.T5, costs.t5_us))
        steps.append(_launch(form, number, *gap_latency_us))
        if costs:
            steps.append(host(HostKind.T4, costs.t4_us))
        if form.blocks:
            steps.append(_block_host(form.target))
    steps += [_block_host(clock_of(s)) for s in blocks_on]
    if costs:
        steps.append(host(HostKind.T3, costs.t3_us) if forms else host(HostKind.ALONE, costs.alone_us))
    return records(steps)


def masked_block(
    op: Op,
    forms: tuple[Form, ...],
    costs: OpOverheads | None,
    gap_latency_us: tuple[float, float],
    present: Present,
) -> tuple[NDArray[Any], list[Present]]:
    """An op whose launches are absent here and there, and where each step is taken; an op without any is alone."""
    masks = [np.asarray(x.present) & np.asarray(present) for x in op.launches]
    some = reduce(np.logical_or, masks)
    rows = [(wait(s, q), present) for s, q in op.waits]
    if costs:
        rows.insert(0, (host(HostKind.T1, costs.t1_us), present))
        rows += [(host(HostKind.ALONE, costs.alone_us), np.asarray(present) & ~some)]
        rows += [(host(HostKind.T2, costs.t2_us), some)]
    before: Mask = np.zeros((), dtype=bool)
    for number, (form, mask) in enumerate(zip(forms, masks, strict=True)):
        if costs and number:
            rows.append((host(HostKind.T5, costs.t5_us), mask & before))
        rows.append((_launch(form, number, *gap_latency_us), mask))
        if costs:
            rows.append((host(HostKind.T4, costs.t4_us), mask))
        if form.blocks:
            rows.append((_block_host(form.target), mask))
        before = before | mask
    rows += [(_block_host(clock_of(s)), present) for s in op.blocks_on]
    if costs:
        rows.append((host(HostKind.T3, costs.t3_us), some))
    return records([step for step, _ in rows]), [mask for _, mask in rows]


def records(steps: Sequence[tuple[float, ...]]) -> NDArray[Any]:
    """Steps as an array of `STEP`."""
    return np.array(steps, dtype=STEP)


def host(kind: HostKind, us: float) -> tuple[float, ...]:
    """A step of the host alone."""
    return (Opcode.HOST, HOST_CLOCK, 0, kind, 0, -1, -1, us, 0.0, 0.0)


def wait(waiting: StreamId, awaited: StreamId) -> tuple[float, ...]:
    """A stream's wait for another."""
    return (Opcode.WAIT, clock_of(waiting), 1 << clock_of(awaited), HostKind.NONE, 0, -1, -1, 0.0, 0.0, 0.0)


def _block_host(clock: int) -> tuple[float, ...]:
    return (Opcode.BLOCK, HOST_CLOCK, 1 << clock, HostKind.NONE, 0, -1, -1, 0.0, 0.0, 0.0)


def _launch(form: Form, number: int, gap_us: float, latency_us: float) -> tuple[float, ...]:
    opcode = Opcode.COLLECTIVE if form.collective else Opcode.LAUNCH
    return (opcode, form.target, form.awaited, HostKind.NONE, 0, number, -1, 0.0, gap_us, latency_us)
