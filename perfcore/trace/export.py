"""A measured step beside its prediction as a Chrome trace, which Perfetto opens.

Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfcore.steps import Opcode, Steps, clock_of
from perfcore.trace.replay import walk
from perfcore.trace.workload import TracedStep

Array = NDArray[np.float64]
_HOST = 0


def timeline_events(
    traced: Sequence[TracedStep], steps: Steps, seeds_us: Array, *, starts_us: Sequence[float]
) -> dict[str, Any]:
    """Host ops and kernels of every rank, measured and predicted, as two processes each; times in µs.

    Args:
        traced: the measured step of each rank.
        steps: what is predicted: one rank's, or all ranks' joined.
        seeds_us: `(r * c,)` clocks at the start.
        starts_us: of each rank's step on a common clock.
    """
    events: list[dict[str, Any]] = []
    for rank, (step, start) in enumerate(zip(traced, starts_us, strict=True)):
        offset = start - min(starts_us) - step.window.start_us
        events += _names(2 * rank, f"rank {rank} measured", step)
        events += _names(2 * rank + 1, f"rank {rank} predicted", step)
        events += _measured(2 * rank, step, offset)
    events += _predicted(steps, seeds_us)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _measured(pid: int, step: TracedStep, offset_us: float) -> Iterator[dict[str, Any]]:
    for piece in step.pieces:
        if piece.end_us > piece.start_us:
            yield _event(
                pid, _HOST, piece.name, "cpu_op", piece.start_us + offset_us, piece.end_us + offset_us
            )
    for launched, launch in zip(step.launched, step.graph.launches(), strict=True):
        kernel = launched.kernel
        track = clock_of(launch.stream)
        yield _event(
            pid, track, kernel.name, "kernel", kernel.start_us + offset_us, kernel.end_us + offset_us
        )


def _predicted(steps: Steps, seeds_us: Array) -> Iterator[dict[str, Any]]:
    walked = walk(steps, seeds_us)
    for row, rank, begin, end in _host_ops(steps, walked.host_us, seeds_us):
        name = steps.op_names[steps.table["op"][row]]
        yield _event(2 * rank + 1, _HOST, name, "cpu_op", begin, end)
    launches = steps.table[steps.table["launch"] >= 0]
    for launch, track in zip(launches["launch"].tolist(), launches["target"].tolist(), strict=True):
        name = steps.op_names[steps.launch_ops[launch]]
        for rank in np.flatnonzero(np.isfinite(walked.start_us[launch])).tolist():
            begin, end = walked.start_us[launch, rank], walked.end_us[launch, rank]
            if end > begin:
                yield _event(2 * rank + 1, track, f"kernel of {name}", "kernel", float(begin), float(end))


def _host_ops(steps: Steps, host_us: Array, seeds_us: Array) -> Iterator[tuple[int, int, float, float]]:
    """`(last row, rank, start, end)` of each op's host time after its T1."""
    ops, opcodes = steps.table["op"].tolist(), steps.table["opcode"].tolist()
    last_rows = {op: row for row, op in enumerate(ops)}
    first_rows = {op: row for row, op in reversed(list(enumerate(ops))) if opcodes[row] == Opcode.HOST}
    masks = steps.table["mask"].tolist()
    for op, first in sorted(first_rows.items()):
        for rank in range(steps.num_ranks):
            if masks[first] >= 0 and not steps.masks[masks[first], 0, rank]:
                continue
            begin, end = host_us[first, rank], host_us[last_rows[op], rank]
            if end > begin:
                yield last_rows[op], rank, float(begin), float(end)


def _names(pid: int, name: str, step: TracedStep) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "pid": pid, "tid": 0, "name": "process_name", "args": {"name": name}}
    yield {"ph": "M", "pid": pid, "tid": _HOST, "name": "thread_name", "args": {"name": "host"}}
    streams = {clock_of(launch.stream): str(launch.stream) for launch in step.graph.launches()}
    for track, stream in sorted(streams.items()):
        yield {
            "ph": "M",
            "pid": pid,
            "tid": track,
            "name": "thread_name",
            "args": {"name": f"stream {stream}"},
        }


def _event(pid: int, tid: int, name: str, category: str, begin_us: float, end_us: float) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "ts": begin_us,
        "dur": end_us - begin_us,
        "name": name,
        "cat": category,
    }
