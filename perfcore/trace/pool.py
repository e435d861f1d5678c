"""Mean host times over many steps, by op and by the op before it.

Means are never trimmed. Where an op stands matters (T1 is as much the work after the op before as before this one), so
the mean of the same op after the same op is taken where there is one, else the op's, else that of all ops.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TypeAlias

import numpy as np

from perfcore.overheads import OpOverheads, OverheadTable
from perfcore.steps import HostKind
from perfcore.trace.workload import TracedStep

_KINDS = (HostKind.T1, HostKind.T2, HostKind.T3, HostKind.T4, HostKind.T5, HostKind.ALONE)
_QUEUE_DEPTH = 1024
ANY, START = "", "(start of step)"
Key: TypeAlias = "tuple[str, str, HostKind]"  # the op before, the op, the kind


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
        self._steps = tuple(steps)
        sums: dict[Key, tuple[float, int]] = {}
        for step in self._steps:
            for key, (us, count) in _sums(step).items():
                known_us, known = sums.get(key, (0.0, 0))
                sums[key] = (known_us + us, known + count)
        self._means = {key: us / count for key, (us, count) in sums.items()}

    def host_us(self, step: TracedStep) -> tuple[tuple[float, ...], ...]:
        """Mean host times of each op of a step, in the order in which its steps spend them."""
        means = self._means
        return tuple(
            tuple(
                means[first]
                if first in means
                else means[second]
                if second in means
                else means.get(third, 0.0)
                for first, second, third in of_op
            )
            for of_op in _keys(step)
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
        return sorted({op for op, _ in self._samples if op})

    def spread(self, op: str, kind: HostKind) -> Spread | None:
        """Mean, spread and count of one kind of one op, `None` where it has none."""
        values = self._samples.get((op, kind))
        if not values:
            return None
        return Spread(float(np.mean(values)), float(np.std(values)), float(np.median(values)), len(values))

    @cached_property
    def _samples(self) -> dict[tuple[str, HostKind], list[float]]:
        """Every host time by op and kind."""
        samples: dict[tuple[str, HostKind], list[float]] = defaultdict(list)
        for step in self._steps:
            for op, times in zip(step.graph.ops(), step.host_us, strict=True):
                for kind, us in zip(kinds(len(times)), times, strict=True):
                    samples[op.name, kind].append(us)
        return samples

    def _op(self, name: str | None) -> OpOverheads:
        def mean(kind: HostKind) -> float:
            of_all = self._means.get((ANY, ANY, kind), 0.0)
            return of_all if name is None else self._means.get((ANY, name, kind), of_all)

        return OpOverheads(
            t1_us=mean(HostKind.T1),
            t2_us=mean(HostKind.T2),
            t3_us=mean(HostKind.T3),
            t4_us=mean(HostKind.T4),
            t5_us=mean(HostKind.T5),
            alone_us=mean(HostKind.ALONE),
            count=max((len(self._samples.get((name or "", kind), ())) for kind in _KINDS), default=0),
        )


@lru_cache(maxsize=512)
def _keys(step: TracedStep) -> tuple[tuple[tuple[Key, Key, Key], ...], ...]:
    """By op and host time: where its mean is looked for, in order."""
    out, before = [], START
    for op, times in zip(step.graph.ops(), step.host_us, strict=True):
        out.append(
            tuple(
                ((before, op.name, kind), (ANY, op.name, kind), (ANY, ANY, kind))
                for kind in kinds(len(times))
            )
        )
        before = op.name
    return tuple(out)


@lru_cache(maxsize=512)
def _sums(step: TracedStep) -> dict[Key, tuple[float, int]]:
    """Sum and count by key."""
    sums: dict[Key, tuple[float, int]] = {}
    for keys, times in zip(_keys(step), step.host_us, strict=True):
        for ways, us in zip(keys, times, strict=True):
            for key in ways:
                known_us, known = sums.get(key, (0.0, 0))
                sums[key] = (known_us + us, known + 1)
    return sums


def kinds(count: int) -> list[HostKind]:
    """Kinds of an op's host times, in order."""
    if count == 2:
        return [HostKind.T1, HostKind.ALONE]
    inner = [HostKind.T4, HostKind.T5] * ((count - 2) // 2)
    return [HostKind.T1, HostKind.T2, *inner[:-1], HostKind.T3]
