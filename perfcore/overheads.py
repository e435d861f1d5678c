"""Host overheads T1 to T5 per op (see `docs/architecture.md`): a table with a counted fall-back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OpOverheads:
    """Mean host times of one top-level op.

    Attributes:
        t1_us: between the end of the op before and this one's start.
        t2_us: from its start to its first launch.
        t3_us: from its last launch to its end.
        t4_us: of one launch call.
        t5_us: between two launches.
        alone_us: the whole host time of an op that launches nothing.
    """

    t1_us: float
    t2_us: float
    t3_us: float
    t4_us: float
    t5_us: float
    alone_us: float


@dataclass(frozen=True, slots=True)
class OverheadTable:
    """Overheads of one host and framework.

    Attributes:
        by_op: op name to overheads.
        default: for every op that `by_op` lacks.
        launch_latency_us: from a launch call's start to the kernel's earliest start.
        kernel_gap_us: between queued kernels of a stream.
        graph_gap_us: between kernels inside a CUDA graph.
        graph_launch_us: host time of one graph launch.
        queue_depth: launches in flight before the launch call blocks.
    """

    by_op: Mapping[str, OpOverheads]
    default: OpOverheads
    launch_latency_us: float
    kernel_gap_us: float
    graph_gap_us: float
    graph_launch_us: float
    queue_depth: int

    def of(self, op: str) -> OpOverheads:
        """The op's overheads, or the default."""
        return self.by_op.get(op, self.default)

    def unknown(self, ops: Iterable[str]) -> dict[str, int]:
        """How often the fall-back was taken, by op name."""
        counts: dict[str, int] = {}
        for op in ops:
            if op not in self.by_op:
                counts[op] = counts.get(op, 0) + 1
        return counts
