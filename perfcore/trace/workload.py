"""A step of a trace as a workload graph with measured durations: the graph type and the schedule of a design.

Streams become clocks of their own numbers. A kernel that waits for one that is not the last of its stream needs that
one's end kept: a register, which is a further clock that is set to the stream's when the awaited kernel is launched.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perfcore.graph.ops import Launch, Op, Region, Stream, StreamId, WorkloadGraph
from perfcore.steps import CLOCK_OF, clock_of
from perfcore.trace.extract import launch_latency_us
from perfcore.trace.link import Launched, Wait, awaited_streams, is_collective, stream_waits
from perfcore.trace.pieces import Piece, host_us, kernels_by_correlation, launch_queue, step_pieces
from perfcore.trace.records import Interval, Kernel, KinetoTrace, RuntimeCall
from perfcore.trace.shapes import kernels_of

Array = NDArray[np.float64]
MAX_CLOCKS = 60  # a step's awaited clocks are bits of 64


@dataclass(frozen=True, slots=True, eq=False)
class TracedStep:
    """One step of one process.

    Attributes:
        graph: its ops; names carry what distinguishes pieces of one op.
        pieces: what each op stands for.
        launched: its launches in program order.
        durations_us: of their kernels.
        delays_us: how long each kernel was kept out by one that was launched after it.
        host_us: host times of each op, in the order in which its steps spend them.
        seeds_us: by clock, when what was queued before the step ends, from the step's start; -inf without any.
        waits: between streams.
        window: the measured step.
        queue_us: what launch calls waited for a full launch queue.
        queue_depth: launches in flight before the next launch call waits.
        backlog_us: when the kernels of the last launches before the step end, from its start.
        base_us: what the window's times lack to the machine's clock.
        unlaunched: kernels of the step's time without a launch record.
    """

    graph: WorkloadGraph
    pieces: tuple[Piece, ...]
    launched: tuple[Launched, ...]
    durations_us: tuple[float, ...]
    delays_us: tuple[float, ...]
    host_us: tuple[tuple[float, ...], ...]
    seeds_us: Array
    waits: tuple[Wait, ...]
    window: Interval
    queue_us: float
    queue_depth: int
    backlog_us: tuple[float, ...]
    base_us: float
    unlaunched: int


class TraceGraphs:
    """Builds the steps of one trace; what concerns the whole trace is computed once."""

    def __init__(self, trace: KinetoTrace) -> None:
        self.trace = trace
        self._kernels = kernels_by_correlation(trace)
        self._queue = launch_queue(trace)
        self._launch_us = {c.correlation: c.start_us for op in trace.ops for c in op.calls if c.kernels}
        latencies = launch_latency_us(trace)
        self._latency_us = latencies.median_us() if len(latencies.us) else 0.0
        self._ends = sorted((k.end_us, k.stream) for k in trace.kernels)
        self._syncs = {s.correlation: s for s in trace.syncs}
        self.streams = streams_of(trace)

    def step(self, window: Interval) -> TracedStep:
        """One step as a graph."""
        pieces = step_pieces(self.trace, window)
        by_piece = [self._launches(number, piece) for number, piece in enumerate(pieces)]
        launched = [launch for own in by_piece for launch in own]
        waits, delays = stream_waits(self.trace, pieces, launched, latency_us=self._latency_us)
        awaited = self._awaited(pieces, launched)
        ops, num_streams = self._ops(pieces, by_piece, launched, waits, awaited)
        seeds, unlaunched = self._seeds(window, launched, num_streams)
        queued = [self._queue.waits_us.get(x.call.correlation, 0.0) for x in launched]
        return TracedStep(
            graph=WorkloadGraph((Region("step", tuple(ops)),), num_streams=num_streams),
            pieces=tuple(pieces),
            launched=tuple(launched),
            durations_us=tuple(max(0.0, x.kernel.duration_us) for x in launched),
            delays_us=tuple(delays.get(i, 0.0) for i in range(len(launched))),
            host_us=tuple(
                self._host_us(p, own, streams)
                for p, own, streams in zip(pieces, by_piece, awaited, strict=True)
            ),
            seeds_us=seeds,
            waits=tuple(waits),
            window=window,
            queue_us=sum(queued),
            queue_depth=self._queue.depth,
            backlog_us=self._queue.backlog_us(window.start_us),
            base_us=self.trace.base_us,
            unlaunched=unlaunched,
        )

    def _launches(self, number: int, piece: Piece) -> list[Launched]:
        """One per call and stream; a CUDA graph's kernels of one stream are one."""
        out = []
        for call in piece.launches:
            by_stream: dict[int, list[Kernel]] = {}
            for kernel in self._kernels.get(call.correlation, ()):
                by_stream.setdefault(kernel.stream, []).append(kernel)
            out += [Launched(call, _joined(call, ks), number, piece.op) for ks in by_stream.values()]
        return out

    def _host_us(self, piece: Piece, own: Sequence[Launched], awaited: Sequence[int]) -> tuple[float, ...]:
        """Host times, with nothing for the further streams of a graph's launch."""
        waited = self._waited_us(piece, awaited) if piece.sync else 0.0
        firsts = _first_of_call(own)
        times = host_us(
            piece,
            [max(x.kernel.end_us for x in own if x.call is call) for call in piece.launches],
            waited_us=waited,
            queue_us=[self._queue.waits_us.get(c.correlation, 0.0) for c in piece.launches],
        )
        if not own or all(firsts):
            return times
        out, rest = [times[0]], iter(times[1:])
        for first in firsts:
            out += [next(rest), next(rest)] if first else [0.0, 0.0]
        return (*out, next(rest))

    def _awaited(self, pieces: Sequence[Piece], launched: Sequence[Launched]) -> list[tuple[int, ...]]:
        """By piece, streams whose end its synchronisation waits for."""
        made_in = [x.piece for x in launched]
        return [
            awaited_streams(
                piece.sync,
                self._syncs.get(piece.sync.correlation),
                launched[: bisect_left(made_in, number)],
                self._ended(piece),
            )
            if piece.sync
            else ()
            for number, piece in enumerate(pieces)
        ]

    def _ended(self, piece: Piece) -> list[tuple[float, int]]:
        """Kernels that ended while a piece lasted."""
        first = bisect_right(self._ends, (piece.start_us, sys.maxsize))
        return self._ends[first : bisect_right(self._ends, (piece.end_us, sys.maxsize))]

    def _waited_us(self, piece: Piece, awaited: Sequence[int]) -> float:
        """How long a synchronisation waited: until the last awaited kernel that ended while it lasted.

        Where it is not known what was awaited, any kernel counts: such waits are in the account and not in the graph.
        """
        ends = [end for end, stream in self._ended(piece) if not awaited or stream in awaited]
        return ends[-1] - piece.start_us if ends else 0.0

    def _ops(
        self,
        pieces: Sequence[Piece],
        by_piece: Sequence[Sequence[Launched]],
        launched: Sequence[Launched],
        waits: Sequence[Wait],
        awaited: Sequence[Sequence[int]],
    ) -> tuple[list[Op], int]:
        registers = _registers(
            launched, waits, first=1 + max(map(clock_of, self.streams.values()), default=1)
        )
        saves: dict[int, list[tuple[StreamId, StreamId]]] = {}
        for earlier, register in registers.items():
            stream = self.streams[launched[earlier].kernel.stream]
            saves.setdefault(launched[earlier].piece + 1, []).append((register, stream))
        after: dict[int, list[StreamId]] = {}
        for wait in waits:
            source = registers.get(wait.earlier, self.streams[launched[wait.earlier].kernel.stream])
            after.setdefault(wait.later, []).append(source)
        kernels = kernels_of(launched)
        ops, made = [], 0
        for number, (piece, own) in enumerate(zip(pieces, by_piece, strict=True)):
            launches = tuple(
                Launch(
                    kernels[made + i],
                    stream=self.streams[x.kernel.stream],
                    after=tuple(after.get(made + i, ())),
                    blocks=x.call.blocks,
                )
                for i, x in enumerate(own)
            )
            made += len(own)
            ops.append(
                Op(
                    piece.name,
                    launches,
                    waits=tuple(saves.get(number, ())),
                    blocks_on=tuple(self.streams[s] for s in awaited[number]),
                )
            )
        return ops, max([len(Stream), *registers.values(), *map(clock_of, self.streams.values())])

    def _seeds(self, window: Interval, launched: Sequence[Launched], num_streams: int) -> tuple[Array, int]:
        """Ends of what was queued before the step, and how many kernels of its time have no launch record."""
        seeds = np.full(1 + num_streams, -np.inf)
        own = {x.call.correlation for x in launched}
        first = {}
        for x in reversed(launched):
            first[x.kernel.stream] = x.kernel.start_us
        unlaunched = 0
        for kernel in self.trace.kernels:
            if (
                kernel.correlation in own
                or kernel.start_us >= window.end_us
                or kernel.end_us <= window.start_us
            ):
                continue
            launch_us = self._launch_us.get(kernel.correlation)
            unlaunched += launch_us is None
            queued_before = launch_us is None or launch_us < window.start_us
            if queued_before and kernel.start_us <= first.get(kernel.stream, np.inf):
                clock = clock_of(self.streams[kernel.stream])
                seeds[clock] = max(seeds[clock], kernel.end_us - window.start_us)
        seeds[0] = 0.0
        return seeds, unlaunched


def streams_of(trace: KinetoTrace) -> dict[int, StreamId]:
    """The trace's streams by role: the busiest computes, the first with collectives communicates, others as found."""
    kernels: dict[int, int] = {}
    collectives: dict[int, int] = {}
    for kernel in trace.kernels:
        counts = collectives if is_collective(kernel.name) else kernels
        counts[kernel.stream] = counts.get(kernel.stream, 0) + 1
    roles: dict[int, StreamId] = {}
    computing = {s: n for s, n in kernels.items() if s not in collectives} or kernels
    if computing:
        roles[max(computing, key=computing.__getitem__)] = Stream.COMPUTE
    for stream in collectives:
        if stream not in roles and Stream.COMMUNICATION not in roles.values():
            roles[stream] = Stream.COMMUNICATION
    number = len(CLOCK_OF)
    for stream in dict.fromkeys([*collectives, *kernels]):
        if stream not in roles:
            number += 1
            roles[stream] = number
    return roles


def _joined(call: RuntimeCall, kernels: Sequence[Kernel]) -> Kernel:
    """All that a call launched on one stream, as one stretch of time."""
    first = kernels[0]
    if len(kernels) == 1:
        return first
    end = max(k.end_us for k in kernels)
    return Kernel(
        f"{call.name} of {len(kernels)} kernels", first.start_us, end, first.stream, first.correlation
    )


def _first_of_call(own: Sequence[Launched]) -> list[bool]:
    earlier = [None, *(x.call.correlation for x in own)]
    return [x.call.correlation != before for x, before in zip(own, earlier, strict=False)]


def _registers(launched: Sequence[Launched], waits: Sequence[Wait], *, first: int) -> dict[int, int]:
    """By awaited launch: a clock for its end, where its stream has gone on before the waiting one is launched.

    A register is free again when the last launch that waits for it has been made; one that held a later time than the
    next would delay it, so a register serves one stream alone.
    """
    last_use: dict[int, int] = {}
    for wait in waits:
        last_use[wait.earlier] = max(last_use.get(wait.earlier, 0), wait.later)
    free_from: dict[tuple[int, int], int] = {}
    registers: dict[int, int] = {}
    made = first
    for earlier, later in sorted(last_use.items()):
        stream = launched[earlier].kernel.stream
        if not any(x.kernel.stream == stream for x in launched[earlier + 1 : later]):
            continue
        if launched[earlier].piece == launched[later].piece:
            continue
        free = [r for (s, r), use in free_from.items() if s == stream and use <= earlier]
        if not free and made >= MAX_CLOCKS:
            continue
        register = free[0] if free else made
        made += not free
        free_from[stream, register] = later
        registers[earlier] = register
    return registers
