"""A workload graph as flat steps on clocks: what the walk and the fold both execute.

Steps carry no candidate axis: durations and masks do, so that a thousand candidates share one list of steps.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfcore.errors import DesignError, UnsupportedError
from perfcore.graph.kernels import Collective
from perfcore.graph.ops import Launch, Op, Stream, StreamId, WorkloadGraph
from perfcore.graph.presence import Mask, Present, captured_streams, op_present
from perfcore.op_steps import (
    CLOCK_OF,
    CLOCKS,
    GRAPH_LAUNCH,
    HOST_CLOCK,
    STEP,
    HostKind,
    Opcode,
    block,
    clock_of,
    form_of,
    host,
    masked_block,
    records,
    wait,
)
from perfcore.overheads import OpOverheads, OverheadTable

__all__ = [
    "CLOCKS",
    "CLOCK_OF",
    "GRAPH_LAUNCH",
    "HOST_CLOCK",
    "STEP",
    "Encoder",
    "HostKind",
    "Opcode",
    "Steps",
    "clock_of",
    "compile_steps",
]

Array = NDArray[np.float64]

_OWN_MASKS = -2  # of an op whose steps have masks of their own


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
    """Appends ops to a list of steps."""

    def __init__(self, overheads: OverheadTable) -> None:
        self._overheads = overheads
        self._known = _known_blocks(_Same(overheads))
        self._blocks: list[bytes] = []
        self._block_masks: list[int] = []
        self._names: list[str] = []
        self._launch_ops: list[int] = []
        self._communicates: list[bool] = []
        self._masks: list[Mask] = []
        self._rows: dict[int, int] = {}  # of masks by identity, which lasts as long as they are kept
        self._given: list[Present] = []

    def add(self, op: Op, *, captured: bool) -> None:
        """Append one op.

        Raises:
            UnsupportedError: it blocks the host inside a CUDA graph.
        """
        if self._overheads.kernels_block_host:
            # There are no CUDA graphs either.
            op, captured = replace(op, launches=_on_host(op.launches)), False
        launched = [(x.stream, x.after, x.blocks, type(x.kernel) is Collective) for x in op.launches]
        key = (op.name, captured, op.continues, op.waits, op.blocks_on, *launched)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._compiled(op, captured=captured)
        present = op_present(op)
        self._launch_ops += [len(self._names)] * len(launched)
        self._communicates += known.communicates
        if all(x.present is True for x in op.launches):
            self._append(known.steps, op.name, self._mask(present))
        else:
            forms = tuple(form_of(*x) for x in launched)
            steps, masks = masked_block(op, forms, known.costs, known.gap_latency_us, present)
            steps["mask"] = [self._mask(mask) for mask in masks]
            self._append(steps.tobytes(), op.name, _OWN_MASKS)

    def _compiled(self, op: Op, *, captured: bool) -> _Block:
        """The op where all of it is present."""
        table = self._overheads
        if captured and any(x.blocks for x in op.launches):
            raise UnsupportedError(f"A CUDA graph cannot block the host, but op {op.name!r} does.")
        costs = None if captured else table.of(op.name)
        if costs and op.continues:
            costs = replace(costs, t1_us=costs.t5_us - costs.t3_us, t2_us=0.0)
        gap_latency_us = (table.graph_gap_us if captured else table.kernel_gap_us, table.launch_latency_us)
        forms = tuple(form_of(x.stream, x.after, x.blocks, type(x.kernel) is Collective) for x in op.launches)
        communicates = [form.collective or form.target == CLOCK_OF[Stream.COMMUNICATION] for form in forms]
        steps = block(forms, op.waits, op.blocks_on, costs, gap_latency_us)
        return _Block(steps.tobytes(), communicates, costs, gap_latency_us)

    def open_graph(self, streams: Sequence[StreamId]) -> None:
        """The host comes to the graph's launch; the graph starts when the compute stream gets there."""
        steps = [host(HostKind.T1, self._overheads.of(GRAPH_LAUNCH).t1_us)]
        self._append_graph([*steps, *(wait(s, Stream.COMPUTE) for s in streams)])

    def close_graph(self, streams: Sequence[StreamId]) -> None:
        """The launch call returns; the compute stream goes on when the whole graph has ended."""
        steps = [host(HostKind.T4, self._overheads.graph_launch_us)]
        self._append_graph([*steps, *(wait(Stream.COMPUTE, s) for s in streams)])

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
        """The ops' steps in order; ops and launches numbered through."""
        table: NDArray[Any] = np.frombuffer(bytearray(b"".join(self._blocks)), dtype=STEP)
        lengths = [len(steps) // STEP.itemsize for steps in self._blocks]
        table["op"] = np.repeat(np.arange(len(lengths)), lengths)
        launched = table["launch"] >= 0
        table["launch"] = np.where(launched, np.cumsum(launched) - 1, -1)
        masks = np.repeat(np.array(self._block_masks, dtype=np.int64), lengths)
        table["mask"] = np.where(masks == _OWN_MASKS, table["mask"], masks)
        return table

    def _append(self, steps: bytes, name: str, mask: int) -> None:
        self._blocks.append(steps)
        self._names.append(name)
        self._block_masks.append(mask)

    def _append_graph(self, steps: Sequence[tuple[float, ...]]) -> None:
        none = self._overheads.kernels_block_host
        self._append(records([] if none else steps).tobytes(), GRAPH_LAUNCH, -1)

    def _mask(self, present: Present) -> int:
        """Row of a mask; one object has one row."""
        if present is True:
            return -1
        row = self._rows.setdefault(id(present), len(self._masks))
        if row == len(self._masks):
            self._masks.append(np.asarray(present))
            self._given.append(present)
        return row


@dataclass(frozen=True, slots=True, eq=False)
class _Block:
    """An op compiled: its records where all of it is present, whether its launches communicate, and its costs."""

    steps: bytes
    communicates: list[bool]
    costs: OpOverheads | None
    gap_latency_us: tuple[float, float]


@dataclass(frozen=True, slots=True, eq=False)
class _Same:
    """A table of overheads as a key: itself alone is equal to it."""

    table: OverheadTable

    def __hash__(self) -> int:
        return id(self.table)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.table is self.table


@lru_cache(maxsize=16)
def _known_blocks(table: _Same) -> dict[Hashable, _Block]:
    """Ops compiled with a table of overheads so far, by all that their steps depend on."""
    return {}


def _on_host(launches: Sequence[Launch]) -> tuple[Launch, ...]:
    """What a host that runs its kernels itself launches: each blocks, and CUDA's own are absent."""
    return tuple(
        replace(x, blocks=True, present=np.zeros((1, 1), dtype=bool) if x.cuda_only else x.present)
        for x in launches
    )
