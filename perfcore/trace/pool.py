"""Mean host times over many steps, by op and by the op before it.

Means are never trimmed. Where an op stands matters (T1 is as much the work after the op before as before this one), so
the mean of the same op after the same op is taken where there is one, else the op's, else that of all ops.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from perfcore.overheads import OpOverheads, OverheadTable
from perfcore.steps import HostKind
from perfcore.trace.workload import TracedStep

_KINDS = (HostKind.T1, HostKind.T2, HostKind.T3, HostKind.T4, HostKind.T5, HostKind.ALONE)
_QUEUE_DEPTH = 1024


@dataclass(frozen=True, slots=True)
class Spread:
    """Untrimmed mean, standard deviation, median and count of some host times, µs."""

    mean_us: float
    std_us: float
    median_us: float
    count: int


class HostPool:
    """Host times of some steps, pooled."""

    def __init__(self, steps: Iterable[TracedStep]) -> None:
        self._samples: dict[tuple[str | HostKind, ...], list[float]] = defaultdict(list)
        for step in steps:
            for name, before, times in _contexts(step):
                for kind, us in zip(kinds(len(times)), times, strict=True):
                    for key in ((before, name, kind), (name, kind), (kind,)):
                        self._samples[key].append(us)
        self._means = {key: float(np.mean(values)) for key, values in self._samples.items()}

    def host_us(self, step: TracedStep) -> tuple[tuple[float, ...], ...]:
        """Mean host times of each op of a step, in the order in which its steps spend them."""
        return tuple(
            tuple(self._mean(before, name, kind) for kind in kinds(len(times)))
            for name, before, times in _contexts(step)
        )

    def table(self, *, launch_latency_us: float, kernel_gap_us: float) -> OverheadTable:
        """Means by op name."""
        return OverheadTable(
            by_op={name: self._op(name) for name in self.ops()},
            default=self._op(None),
            launch_latency_us=launch_latency_us,
            kernel_gap_us=kernel_gap_us,
            graph_gap_us=0.0,
            graph_launch_us=0.0,
            queue_depth=_QUEUE_DEPTH,
        )

    def ops(self) -> list[str]:
        """Names of all ops."""
        return sorted({str(key[0]) for key in self._samples if len(key) == 2})

    def spread(self, op: str, kind: HostKind) -> Spread | None:
        """Mean, spread and count of one kind of one op, `None` where it has none."""
        values = self._samples.get((op, kind))
        if not values:
            return None
        return Spread(float(np.mean(values)), float(np.std(values)), float(np.median(values)), len(values))

    def _mean(self, before: str, name: str, kind: HostKind) -> float:
        for key in ((before, name, kind), (name, kind), (kind,)):
            if key in self._means:
                return self._means[key]
        return 0.0

    def _op(self, name: str | None) -> OpOverheads:
        def mean(kind: HostKind) -> float:
            return self._means.get((name or "", kind), self._means.get((kind,), 0.0))

        seen = [len(self._samples.get((name or "", kind), ())) for kind in _KINDS]
        return OpOverheads(
            t1_us=mean(HostKind.T1),
            t2_us=mean(HostKind.T2),
            t3_us=mean(HostKind.T3),
            t4_us=mean(HostKind.T4),
            t5_us=mean(HostKind.T5),
            alone_us=mean(HostKind.ALONE),
            count=max(seen),
        )


def kinds(count: int) -> list[HostKind]:
    """Kinds of an op's host times, in order."""
    if count == 2:
        return [HostKind.T1, HostKind.ALONE]
    inner = [HostKind.T4, HostKind.T5] * ((count - 2) // 2)
    return [HostKind.T1, HostKind.T2, *inner[:-1], HostKind.T3]


def _contexts(step: TracedStep) -> Iterator[tuple[str, str, tuple[float, ...]]]:
    before = ""
    for op, times in zip(step.graph.ops(), step.host_us, strict=True):
        yield op.name, before, times
        before = op.name
