"""Ops: what the host runs in order, and the kernels that it launches.

The host's program is a list of top-level profiler ops. Each has leaves (what it dispatches; names and
shapes as `torch.overrides` sees them), host overheads keyed by its name, and launches.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from perfcore.graph.kernels import Kernel
from perfcore.values import dataclass


class Stream(StrEnum):
    """Device queues; work on one stream runs in order."""

    COMPUTE = "compute"
    COMMUNICATION = "communication"
    COPY = "copy"


# A stream of its own number, from 4 on, where a traced program has more than three.
StreamId: TypeAlias = "Stream | int"
Shape: TypeAlias = "tuple[float | NDArray[np.float64], ...]"


@dataclass(frozen=True, slots=True, eq=False)
class Leaf:
    """One dispatched aten call: its name (`aten.addmm`) and the shapes of its tensor arguments, in order."""

    name: str
    shapes: tuple[Shape, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """One kernel put on a stream.

    Attributes:
        kernel: what runs.
        stream: where.
        after: streams whose present end it waits for (an event recorded and waited for at once).
        blocks: the host waits for its end (pageable copies, `.item()`).
        present: False (per candidate and rank, broadcasting to `(..., r)`) where it is not launched.
        cuda_only: only CUDA's implementation of the op launches it; a host that runs kernels itself does not.
    """

    kernel: Kernel
    stream: StreamId = Stream.COMPUTE
    after: tuple[StreamId, ...] = ()
    blocks: bool = False
    present: NDArray[np.bool_] | bool = True
    cuda_only: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Op:
    """One top-level op.

    Attributes:
        name: as the profiler prints it; overheads are keyed by it.
        launches: in order.
        leaves: aten calls, in order.
        waits: `(waiting stream, awaited stream)` pairs executed before the first launch
            (`cudaStreamWaitEvent` on an event recorded just now).
        present: False (broadcasting to `(..., r)`) where the op does not run at all: an absent layer.
        continues: the host is still inside the op before, whose T3 was charged too early: T5 minus T3 stands
            in place of T1 and T2. So one op whose launches depend on many axes can be spread over regions.
        blocks_on: streams whose end the host waits for after the op's launches (`cudaStreamSynchronize`).
        phase: which part of the iteration, for reports: `forward`, `backward`, `optimizer`, ...
        module: which part of the model, for reports: `bottom_mlp`, `embedding`, ...
    """

    name: str
    launches: tuple[Launch, ...] = ()
    leaves: tuple[Leaf, ...] = ()
    waits: tuple[tuple[StreamId, StreamId], ...] = ()
    present: NDArray[np.bool_] | bool = True
    continues: bool = False
    blocks_on: tuple[StreamId, ...] = ()
    phase: str = ""
    module: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """Consecutive ops that depend on few axes; the bulk path folds a region into one max-plus matrix."""

    name: str
    ops: tuple[Op, ...]


@dataclass(frozen=True, slots=True, eq=False)
class WorkloadGraph:
    """One iteration in program order of the host.

    Attributes:
        regions: in order.
        num_ranks: size of the rank axis `r`.
        captured_from: regions from this index on are captured in one CUDA graph; `None` without one.
        num_streams: on each device; more than three where streams have numbers of their own.
    """

    regions: tuple[Region, ...]
    num_ranks: int = 1
    captured_from: int | None = None
    num_streams: int = len(Stream)

    def ops(self) -> Iterator[Op]:
        """All ops in program order."""
        for region in self.regions:
            yield from region.ops

    def launches(self) -> Iterator[Launch]:
        """All launches in program order."""
        for op in self.ops():
            yield from op.launches
