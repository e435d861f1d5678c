"""A predicted iteration as a Chrome trace, which Perfetto opens."""

from __future__ import annotations

from typing import Any

import numpy as np

from perfcore.predictor import Prediction
from perfcore.steps import CLOCK_OF, clock_of


def trace_events(prediction: Prediction, *, iterations: int = 3) -> dict[str, Any]:
    """The kernels of several steady iterations on every rank, in the Trace Event Format (times in µs).

    https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
    """
    timeline = prediction.timeline
    launches = list(prediction.graph.launches())
    events: list[dict[str, Any]] = []
    for rank in range(timeline.steps.num_ranks):
        events += [_named(rank, number, f"{stream} stream") for stream, number in CLOCK_OF.items()]
        events.append(
            {
                "ph": "M",
                "pid": rank,
                "name": "process_name",
                "args": {"name": f"predicted rank {prediction.ranks[rank]}"},
            }
        )
        for index, launch in enumerate(launches):
            start, end = timeline.start_us[0, index, rank], timeline.end_us[0, index, rank]
            if np.isnan(start) or end <= start:
                continue
            for iteration in range(iterations):
                events.append(
                    {
                        "ph": "X",
                        "pid": rank,
                        "tid": clock_of(launch.stream),
                        "ts": float(start) + iteration * float(timeline.iteration_time_us[0]),
                        "dur": float(end - start),
                        "name": type(launch.kernel).__name__,
                        "cat": "kernel",
                        "args": {"op": timeline.steps.op_names[timeline.steps.launch_ops[index]]},
                    }
                )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _named(rank: int, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": rank, "tid": track, "name": "thread_name", "args": {"name": name}}
