"""The steady iteration, and what can be read off it: busy and idle time, the critical path, sensitivities."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfcore.compiled import compiled
from perfcore.graph.ops import StreamId
from perfcore.steps import HostKind, Opcode, Steps, clock_of
from perfcore.walk import deciding_clocks

Array = NDArray[np.float64]


class Reason(StrEnum):
    """Why a step could not be earlier (the edge types of HTA's critical path analysis)."""

    OPERATOR = "operator"
    LAUNCH_DELAY = "launch delay"
    KERNEL_KERNEL = "kernel-kernel"
    WAIT = "wait"
    COLLECTIVE = "collective"
    BLOCKING = "blocking"


_HOST_STEP = int(Opcode.HOST)
_HOST_KINDS = (*(kind for kind in HostKind if kind >= 0), HostKind.NONE)  # by number; -1 is the last


class Edge(NamedTuple):
    """One step of the critical path.

    Attributes:
        op: index into `Steps.op_names`.
        rank: of the clock that the step advances.
        launch: launch index in program order, -1 for host time and waits.
        kind: which overhead, for host time.
        reason: what it waited for.
        host_us: how long the host works; 0 for launches and waits.
    """

    op: int
    rank: int
    launch: int
    kind: HostKind
    reason: Reason
    host_us: float


@dataclass(frozen=True, slots=True, eq=False)
class Edges:
    """Edges of a path as columns `(e,)`, in order of time; what an `Edge` holds, and its step.

    Attributes:
        op: index into `Steps.op_names`.
        launch: launch index in program order, -1 for host time and waits.
        kind: number of the `HostKind`.
        opcode: of the step.
        host_us: how long the host works; 0 for launches and waits.
        clock: that the step advances, as `clocks * rank + clock`.
        decided_by: the clock that the step waited for.
        clocks: of a rank.
    """

    op: NDArray[np.int64]
    launch: NDArray[np.int64]
    kind: NDArray[np.int64]
    opcode: NDArray[np.int64]
    host_us: Array
    clock: NDArray[np.int64]
    decided_by: NDArray[np.int64]
    clocks: int

    @property
    def rank(self) -> NDArray[np.int64]:
        """`(e,)`: of the clocks."""
        return self.clock // self.clocks

    def one_by_one(self) -> tuple[Edge, ...]:
        """The edges as values, in order."""
        columns = (self.op, self.rank, self.launch, self.kind, self.host_us)
        why = zip(self.opcode.tolist(), self.decided_by.tolist(), self.clock.tolist(), strict=True)
        reasons = [_reason(opcode, source, own, self.clocks) for opcode, source, own in why]
        return tuple(
            Edge(op, rank, launch, _HOST_KINDS[kind], reason, us)
            for (op, rank, launch, kind, us), reason in zip(
                zip(*(c.tolist() for c in columns), strict=True), reasons, strict=True
            )
        )


@dataclass(frozen=True, slots=True, eq=False)
class CriticalPath:
    """The longest cycle, over `iterations` iterations.

    Attributes:
        laps: its edges, a lap for each iteration, in order of time.
        iterations: number of laps.
    """

    laps: tuple[Edges, ...]

    @property
    def iterations(self) -> int:
        """Iterations that the cycle takes."""
        return len(self.laps)

    @property
    def edges(self) -> tuple[Edge, ...]:
        """The edges one by one, in order of time."""
        return tuple(edge for lap in self.laps for edge in lap.one_by_one())

    def column(self, name: str) -> NDArray[Any]:
        """`(e,)`: a column of `Edges`, over all laps."""
        return np.concatenate([getattr(lap, name) for lap in self.laps])


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """One steady iteration of n candidates on r ranks; times in µs.

    Attributes:
        steps: what ran.
        iteration_time_us: `(n,)`: the spacing of iterations.
        host_us: `(n, r, 6)`: host time by `HostKind`, waiting left out.
        start_us: `(n, l, r)` by launch, NaN where it is absent; a collective starts when its rank arrives.
        end_us: `(n, l, r)`.
        start_state_us: `(n, c * r)`: the clocks at the iteration's start.
        critical_clock: `(n,)`: a clock on the critical cycle, as `c * rank + clock`.
    """

    steps: Steps
    iteration_time_us: Array
    host_us: Array
    start_us: Array
    end_us: Array
    start_state_us: Array
    critical_clock: NDArray[np.int64]

    def host_time_us(self, kind: HostKind) -> Array:
        """`(n, r)`: host time of one kind."""
        return np.asarray(self.host_us[..., int(kind)])

    def stream_busy_us(self, stream: StreamId) -> Array:
        """`(n, r)`: summed kernel time of a stream, a collective's wait for other ranks included."""
        clocks = np.zeros(len(self.steps.launch_ops), dtype=np.int8)
        launched = self.steps.table[self.steps.table["launch"] >= 0]
        clocks[launched["launch"]] = launched["target"]
        return np.asarray(np.nansum((self.end_us - self.start_us)[:, clocks == clock_of(stream)], axis=1))

    def device_active_us(self) -> Array:
        """`(n, r)`: time in which at least one kernel runs."""
        return self._covered_us(np.ones(len(self.steps.launch_ops), dtype=bool))

    def device_idle_us(self) -> Array:
        """`(n, r)`: time in which no kernel runs."""
        return self.iteration_time_us[:, None] - self.device_active_us()

    def exposed_communication_us(self) -> Array:
        """`(n, r)`: time in which only communication runs."""
        return self.device_active_us() - self._covered_us(~self.steps.communicates)

    def critical_path(self, candidate: int = 0) -> CriticalPath:
        """The cycle of steps that sets the iteration time."""
        steps, at = self.steps, int(self.critical_clock[candidate])
        state = self.start_state_us[candidate]
        sources = deciding_clocks(steps.table, steps.durations_us, steps.masks, candidate, state)
        visited: dict[int, int] = {}
        laps: list[Edges] = []
        while at not in visited:
            visited[at] = len(laps)
            at, lap = lap_back(steps, sources, at)
            laps.append(lap)
        return CriticalPath(tuple(reversed(laps[visited[at] :])))

    def sensitivity(self, candidate: int = 0) -> Array:
        """`(l, r)`: d iteration time / d duration of each launch: its share of the critical cycle.

        A one-sided derivative where several cycles are critical: how much a longer kernel costs at least.
        A collective counts on every rank that takes part.
        """
        path = self.critical_path(candidate)
        launch, rank = path.column("launch"), path.column("rank")
        out = np.zeros(self.start_us.shape[1:])
        np.add.at(out, (launch[launch >= 0], rank[launch >= 0]), 1.0 / path.iterations)
        return out

    def of_rank(self, rank: int) -> Timeline:
        """The kernels and host times of one rank, `r = 1`; steps, states and clocks stay those of all."""
        alone = slice(rank, rank + 1)
        return replace(
            self,
            host_us=self.host_us[:, alone],
            start_us=self.start_us[..., alone],
            end_us=self.end_us[..., alone],
        )

    def _covered_us(self, chosen: NDArray[np.bool_]) -> Array:
        start, end = (np.ascontiguousarray(us[:, chosen]) for us in (self.start_us, self.end_us))
        period, out = self.iteration_time_us, np.empty((len(start), start.shape[2]))
        order = np.argsort(start % period[:, None, None], axis=1, kind="stable")
        _covered(start, end, period, order, out)
        return out


@compiled(_nrt=False)
def _covered(start: Array, end: Array, period: Array, order: Any, out: Array) -> None:
    """`(n, r)` length of the union of `(n, l, r)` intervals that repeat with a period; `order` is that of their starts in it."""
    for i in range(out.shape[0]):
        for r in range(out.shape[1]):
            reached = 0.0  # by those that began in the period before
            for k in range(start.shape[1]):
                if end[i, k, r] - start[i, k, r] >= period[i]:
                    reached = period[i]
                elif end[i, k, r] > start[i, k, r]:
                    over = start[i, k, r] % period[i] + (end[i, k, r] - start[i, k, r]) - period[i]
                    reached = max(reached, over)
            covered = reached
            for x in range(start.shape[1]):
                k = order[i, x, r]
                if end[i, k, r] > start[i, k, r]:
                    begin = start[i, k, r] % period[i]
                    last = min(begin + (end[i, k, r] - start[i, k, r]), period[i])
                    covered += max(last - max(begin, reached), 0.0)
                    reached = max(reached, last)
            out[i, r] = covered


def lap_back(steps: Steps, sources: NDArray[np.int64], clock: int) -> tuple[int, Edges]:
    """From a clock at the iteration's end back to the clock at its start that decided it."""
    table = steps.table
    path = np.empty((3, len(table)), dtype=np.int64)
    first, count = _back(
        table["target"], table["opcode"], table["launch"], sources, clock, steps.clocks, path
    )
    rows, clocks, decided_by = path[:, count - 1 :: -1] if count else path[:, :0]
    op, launch, kind, opcode, us = (table[name][rows] for name in ("op", "launch", "kind", "opcode", "us"))
    host_us = np.where(kind >= 0, us, 0.0)
    return first, Edges(op, launch, kind, opcode, host_us, clocks, decided_by, steps.clocks)


@compiled(_nrt=False)
def _back(
    targets: Any, opcodes: Any, launches: Any, sources: Any, clock: int, clocks: int, path: Any
) -> tuple[int, int]:
    """The clock at the start, and the length of the path: from its end on, steps, their clocks, and what decided them."""
    count = 0
    for i in range(len(targets) - 1, -1, -1):
        source = sources[i, clock // clocks]
        if targets[i] != clock % clocks or source < 0:
            continue
        # A wait that waited for nothing is no edge.
        if launches[i] >= 0 or opcodes[i] == _HOST_STEP or source != clock:
            path[0, count], path[1, count], path[2, count] = i, clock, source
            count += 1
        clock = source
    return clock, count


def _reason(opcode: int, source: int, own: int, clocks: int) -> Reason:
    if opcode == Opcode.HOST:
        return Reason.OPERATOR
    if opcode == Opcode.BLOCK:
        return Reason.BLOCKING
    if opcode == Opcode.COLLECTIVE and source // clocks != own // clocks:
        return Reason.COLLECTIVE
    if source % clocks == 0:
        return Reason.LAUNCH_DELAY
    return Reason.KERNEL_KERNEL if source == own else Reason.WAIT
