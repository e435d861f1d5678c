"""A workload graph as flat steps on clocks: what the walk and the fold both execute.

Every rank has four clocks, the host and the streams of `perfcore.graph.ops.Stream`, and one more for each
stream beyond. A step updates one
clock per rank; `docs/architecture.md` lists the rules. Steps carry no candidate axis: durations and masks
do, so that a thousand candidates share one list of steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import lru_cache, reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfcore.errors import DesignError, UnsupportedError
from perfcore.graph.kernels import Collective
from perfcore.graph.ops import Launch, Op, Stream, StreamId, WorkloadGraph
from perfcore.graph.presence import Mask, Present, captured_streams, op_present
from perfcore.overheads import OpOverheads, OverheadTable

Array = NDArray[np.float64]

GRAPH_LAUNCH = "cudaGraphLaunch"
CLOCKS = 4
HOST_CLOCK = 0
_OWN_MASKS = -2  # of a block whose steps carry their masks
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


@dataclass(frozen=True, slots=True, eq=False)
class Steps:
    """One iteration, ready to walk or to fold.

    Attributes:
        table: `(S,)` records of `STEP`, in program order.
        durations_us: `(l, n, r)` by launch.
        masks: `(p, n, r)`: where masked steps are taken.
        op_names: by op index; a CUDA graph's launch is the last.
        launch_ops: op index of each launch.
        communicates: `(l,)`: the launch is a collective, or runs on the communication stream.
        clocks: of each rank.
    """

    table: NDArray[Any]
    durations_us: Array
    masks: Mask
    op_names: tuple[str, ...]
    launch_ops: tuple[int, ...]
    communicates: Mask
    clocks: int = CLOCKS

    @property
    def num_candidates(self) -> int:
        """Size of the candidate axis `n`."""
        return int(self.durations_us.shape[1])

    @property
    def num_ranks(self) -> int:
        """Size of the rank axis `r`."""
        return int(self.durations_us.shape[2])


def compile_steps(graph: WorkloadGraph, durations_us: Sequence[Array], overheads: OverheadTable) -> Steps:
    """The graph as steps.

    Args:
        graph: kernels may be unresolved; an op whose kernel has an empty `Bucket` is absent.
        durations_us: one array per launch in program order; each broadcasts to `(n, r)`.
        overheads: host times of the ops.

    Raises:
        DesignError: the durations do not fit the launches.
        UnsupportedError: a blocking launch stands inside a CUDA graph.
    """
    launches = list(graph.launches())
    if len(launches) != len(durations_us):
        raise DesignError(
            f"One duration per launch is needed, but got {len(durations_us)} for {len(launches)} launches."
        )
    encoder = Encoder(overheads)
    for number, region in enumerate(graph.regions):
        if number == graph.captured_from:
            encoder.open_graph(captured_streams(graph))
        captured = graph.captured_from is not None and number >= graph.captured_from
        for op in region.ops:
            encoder.add(op, captured=captured)
    if graph.captured_from is not None:
        encoder.close_graph(captured_streams(graph))
    steps = encoder.steps(durations_us, num_ranks=graph.num_ranks)
    return replace(steps, clocks=1 + graph.num_streams)


class Encoder:
    """Appends ops to a list of steps. Unmasked ops of one form share one cached block of steps."""

    def __init__(self, overheads: OverheadTable) -> None:
        self._overheads = overheads
        self._blocks: list[NDArray[Any]] = []
        self._block_masks: list[int] = []
        self._names: list[str] = []
        self._launch_ops: list[int] = []
        self._communicates: list[bool] = []
        self._masks: list[Mask] = []

    def add(self, op: Op, *, captured: bool) -> None:
        """Append one op."""
        overheads, launches = self._overheads, op.launches
        if overheads.kernels_block_host:
            launches, captured = _on_host(launches), False  # there are no CUDA graphs either
        if captured and any(x.blocks for x in launches):
            raise UnsupportedError(f"A CUDA graph cannot block the host, but op {op.name!r} does.")
        forms = tuple(_form(x.stream, x.after, x.blocks, isinstance(x.kernel, Collective)) for x in launches)
        costs = None if captured else overheads.of(op.name)
        if costs and op.continues:
            costs = replace(costs, t1_us=costs.t5_us - costs.t3_us, t2_us=0.0)
        gap, latency = (
            overheads.graph_gap_us if captured else overheads.kernel_gap_us,
            overheads.launch_latency_us,
        )
        present = op_present(op)
        if all(x.present is True for x in launches):
            block = _block(forms, op.waits, op.blocks_on, costs, gap, latency)
            self._append(block, op.name, self._mask(present))
        else:
            by_launch = [x.present for x in launches]
            block = self._masked_block(forms, op, costs, (gap, latency), present, by_launch)
            self._append(block, op.name, _OWN_MASKS)
        self._launch_ops += [len(self._names) - 1] * len(launches)
        self._communicates += [form.collective or form.target == 2 for form in forms]

    def open_graph(self, streams: Sequence[StreamId]) -> None:
        """The host comes to the graph's launch; the graph starts when the compute stream gets there."""
        steps = [_host(HostKind.T1, self._overheads.of(GRAPH_LAUNCH).t1_us)]
        steps += [_wait(s, Stream.COMPUTE) for s in streams]
        self._append(_records([] if self._overheads.kernels_block_host else steps), GRAPH_LAUNCH, -1)

    def close_graph(self, streams: Sequence[StreamId]) -> None:
        """The launch call returns; the compute stream goes on when the whole graph has ended."""
        steps = [_host(HostKind.T4, self._overheads.graph_launch_us)]
        steps += [_wait(Stream.COMPUTE, s) for s in streams]
        self._append(_records([] if self._overheads.kernels_block_host else steps), GRAPH_LAUNCH, -1)

    @property
    def masks(self) -> Sequence[Mask]:
        """Where masked steps are taken, as the ops gave them."""
        return self._masks

    def steps(self, durations_us: Sequence[Array], *, num_ranks: int) -> Steps:
        """All that was appended, with its durations and masks broadcast to one `(n, r)`."""
        shapes = {np.shape(d) for d in durations_us} | {m.shape for m in self._masks}
        shape = np.broadcast_shapes((1, num_ranks), *shapes)
        durations = np.empty((len(durations_us), *shape))
        for row, us in enumerate(durations_us):
            durations[row] = us
        masks = np.empty((len(self._masks), *shape), dtype=bool)
        for row, mask in enumerate(self._masks):
            masks[row] = mask
        return Steps(
            table=self.table(),
            durations_us=durations,
            masks=masks,
            op_names=tuple(self._names),
            launch_ops=tuple(self._launch_ops),
            communicates=np.array(self._communicates, dtype=bool),
        )

    def table(self) -> NDArray[Any]:
        """The blocks joined; ops and launches numbered through."""
        if not self._blocks:
            return np.empty(0, dtype=STEP)
        distinct = {id(b): b for b in self._blocks}
        starts = dict(zip(distinct, np.cumsum([0, *map(len, distinct.values())]).tolist(), strict=False))
        lengths = np.array([len(b) for b in self._blocks])
        offsets = np.array([starts[id(b)] for b in self._blocks]) - np.cumsum(lengths) + lengths
        table: NDArray[Any] = np.concatenate(list(distinct.values()))[
            np.arange(lengths.sum()) + np.repeat(offsets, lengths)
        ]
        table["op"] = np.repeat(np.arange(len(lengths)), lengths)
        launched = table["launch"] >= 0
        table["launch"] = np.where(launched, np.cumsum(launched) - 1, -1)
        masks = np.repeat(self._block_masks, lengths)
        table["mask"] = np.where(masks == _OWN_MASKS, table["mask"], masks)
        return table

    def _append(self, block: NDArray[Any], name: str, mask: int) -> None:
        self._blocks.append(block)
        self._names.append(name)
        self._block_masks.append(mask)

    def _mask(self, present: Present) -> int:
        """Row of a mask; equal objects share one."""
        if present is True:
            return -1
        for row, known in enumerate(self._masks):
            if known is present:
                return row
        self._masks.append(np.asarray(present))
        return len(self._masks) - 1

    def _masked_block(
        self,
        forms: tuple[Form, ...],
        op: Op,
        costs: OpOverheads | None,
        gap_latency: tuple[float, float],
        present: Present,
        by_launch: Sequence[Present],
    ) -> NDArray[Any]:
        """An op whose launches are absent here and there; where all are, it costs its time alone."""
        masks = [np.asarray(p) & np.asarray(present) for p in by_launch]
        some = reduce(np.logical_or, masks)
        rows = [(_wait(s, q), present) for s, q in op.waits]
        if costs:
            rows.insert(0, (_host(HostKind.T1, costs.t1_us), present))
            rows += [(_host(HostKind.ALONE, costs.alone_us), np.asarray(present) & ~some)]
            rows += [(_host(HostKind.T2, costs.t2_us), some)]
        before: Mask = np.zeros((), dtype=bool)
        for number, (form, mask) in enumerate(zip(forms, masks, strict=True)):
            if costs and number:
                rows.append((_host(HostKind.T5, costs.t5_us), mask & before))
            rows.append((_launch(form, number, *gap_latency), mask))
            if costs:
                rows.append((_host(HostKind.T4, costs.t4_us), mask))
            if form.blocks:
                rows.append((_block_host(form.target), mask))
            before = before | mask
        rows += [(_block_host(clock_of(s)), present) for s in op.blocks_on]
        if costs:
            rows.append((_host(HostKind.T3, costs.t3_us), some))
        block = _records([step for step, _ in rows])
        block["mask"] = [self._mask(mask) for _, mask in rows]
        return block


def _on_host(launches: Sequence[Launch]) -> tuple[Launch, ...]:
    """What a host that runs its kernels itself launches: each blocks, and CUDA's own are absent."""
    return tuple(
        replace(x, blocks=True, present=np.zeros((1, 1), dtype=bool) if x.cuda_only else x.present)
        for x in launches
    )


@dataclass(frozen=True, slots=True)
class Form:
    """What a launch's steps depend on beside durations."""

    target: int
    awaited: int
    blocks: bool
    collective: bool


@lru_cache(maxsize=1024)
def _form(stream: StreamId, after: tuple[StreamId, ...], blocks: bool, collective: bool) -> Form:  # noqa: FBT001
    awaited = sum({1 << clock_of(s) for s in after})
    return Form(clock_of(stream), awaited, blocks, collective)


@lru_cache(maxsize=4096)
def _block(
    forms: tuple[Form, ...],
    waits: tuple[tuple[StreamId, StreamId], ...],
    blocks_on: tuple[StreamId, ...],
    costs: OpOverheads | None,
    gap_us: float,
    latency_us: float,
) -> NDArray[Any]:
    """An op that runs whole: T1, waits, T2, launches with T4 and T5, blocking, T3; no host times if captured."""
    steps = [_wait(s, q) for s, q in waits]
    if costs:
        steps.insert(0, _host(HostKind.T1, costs.t1_us))
        if forms:
            steps.append(_host(HostKind.T2, costs.t2_us))
    for number, form in enumerate(forms):
        if costs and number:
            steps.append(_host(HostKind.T5, costs.t5_us))
        steps.append(_launch(form, number, gap_us, latency_us))
        if costs:
            steps.append(_host(HostKind.T4, costs.t4_us))
        if form.blocks:
            steps.append(_block_host(form.target))
    steps += [_block_host(clock_of(s)) for s in blocks_on]
    if costs:
        steps.append(_host(HostKind.T3, costs.t3_us) if forms else _host(HostKind.ALONE, costs.alone_us))
    return _records(steps)


def _records(steps: Sequence[tuple[float, ...]]) -> NDArray[Any]:
    return np.array(steps, dtype=STEP)


def _host(kind: HostKind, us: float) -> tuple[float, ...]:
    return (Opcode.HOST, HOST_CLOCK, 0, kind, 0, -1, -1, us, 0.0, 0.0)


def _wait(waiting: StreamId, awaited: StreamId) -> tuple[float, ...]:
    return (Opcode.WAIT, clock_of(waiting), 1 << clock_of(awaited), HostKind.NONE, 0, -1, -1, 0.0, 0.0, 0.0)


def _block_host(clock: int) -> tuple[float, ...]:
    return (Opcode.BLOCK, HOST_CLOCK, 1 << clock, HostKind.NONE, 0, -1, -1, 0.0, 0.0, 0.0)


def _launch(form: Form, number: int, gap_us: float, latency_us: float) -> tuple[float, ...]:
    opcode = Opcode.COLLECTIVE if form.collective else Opcode.LAUNCH
    return (opcode, form.target, form.awaited, HostKind.NONE, 0, number, -1, 0.0, gap_us, latency_us)
