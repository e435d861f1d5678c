"""What a Kineto trace holds, as frozen values: host ops, runtime calls, kernels, synchronisation records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

Shapes: TypeAlias = "tuple[tuple[int, ...], ...]"


@dataclass(frozen=True, slots=True)
class Interval:
    """A named stretch of time, in microseconds of the trace's clock."""

    name: str
    start_us: float
    end_us: float

    @property
    def duration_us(self) -> float:
        """Length."""
        return self.end_us - self.start_us


@dataclass(frozen=True, slots=True)
class Kernel(Interval):
    """Work on a device: a kernel, a copy or a fill.

    Attributes:
        stream: the device's number of it.
        correlation: what its launch carries too, -1 without one.
        bytes: of a copy or fill, 0 where the file does not say.
    """

    stream: int
    correlation: int
    bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class LeafCall:
    """The innermost op around a runtime call.

    Attributes:
        name: of the op.
        shapes: of its inputs, empty where the file has none; a list of tensors has shape `()`.
        types: of its inputs, likewise.
    """

    name: str
    shapes: Shapes
    types: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RuntimeCall(Interval):
    """A call of the CUDA or HIP runtime.

    Attributes:
        correlation: what its kernels carry too.
        kernels: how many it launched; 0 for calls that launch nothing, hundreds for a graph.
        blocks: its end waits for device work (synchronisations, pageable copies to the host).
        leaf: the innermost op around it, `None` outside of all ops.
    """

    correlation: int
    kernels: int
    blocks: bool
    leaf: LeafCall | None = None


@dataclass(frozen=True, slots=True)
class HostOp(Interval):
    """A top-level op of the host.

    Attributes:
        calls: runtime calls inside, in order.
        event_starts_us: starts of all profiled events inside, in order: each cost the profiler some time.
    """

    calls: tuple[RuntimeCall, ...]
    event_starts_us: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class SyncRecord:
    """A `cuda_sync` row: what a synchronising call waited for.

    Attributes:
        correlation: of the call.
        stream: the stream that waits, -1 where the host does.
        awaited_stream: -1 where the file does not say.
        record_correlation: of the `cudaEventRecord` call, -1 where the file does not say.
        event_id: of the CUDA event, likewise.
    """

    correlation: int
    stream: int
    awaited_stream: int
    record_correlation: int
    event_id: int = -1


@dataclass(frozen=True, slots=True)
class EventRecord:
    """A `cuda_event` row: which stream an event was recorded on.

    Attributes:
        correlation: of the `cudaEventRecord` call.
        stream: that it was recorded on.
        event_id: of the CUDA event, -1 where the file does not say.
    """

    correlation: int
    stream: int
    event_id: int


class NestedOp(Protocol):
    """An op or annotation at any depth."""

    @property
    def name(self) -> str:
        """As the profiler prints it."""
        ...

    @property
    def start_us(self) -> float:
        """On the trace's clock."""
        ...

    @property
    def end_us(self) -> float:
        """Likewise."""
        ...

    @property
    def correlation(self) -> int:
        """Its record function id, -1 without one."""
        ...


@dataclass(frozen=True, slots=True)
class KinetoTrace:
    """One process's trace.

    Attributes:
        device_name: of the first device that the file lists; empty when it lists none.
        steps: one window an iteration, on the host's clock.
        ops: top-level host ops of the main and autograd threads, by start.
        loose_calls: blocking runtime calls outside all ops, by start.
        kernels: device work, by start.
        event_calls: calls that record an event or let a stream wait for one, by start, of all threads.
        syncs: synchronisation records by the correlation of their call.
        event_records: where events were recorded, in order.
        rank: of the process, 0 where the file does not say.
        world_size: processes, 1 where the file does not say.
        base_us: what times of this file lack to the machine's clock.
        device_bytes: memory of the first device, 0 where the file does not say.
        pid: of the process, -1 where the file does not say.
        nested: every op and annotation of each thread, by start.
        name: of the file.
    """

    device_name: str
    steps: tuple[Interval, ...]
    ops: tuple[HostOp, ...]
    loose_calls: tuple[RuntimeCall, ...]
    kernels: tuple[Kernel, ...]
    event_calls: tuple[RuntimeCall, ...] = ()
    syncs: tuple[SyncRecord, ...] = ()
    event_records: tuple[EventRecord, ...] = ()
    rank: int = 0
    world_size: int = 1
    base_us: float = 0.0
    device_bytes: float = 0.0
    pid: int = -1
    nested: tuple[Sequence[NestedOp], ...] = ()
    name: str = "trace"
