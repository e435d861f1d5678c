"""Overheads of a GPU's host, from a public A100 trace and an iteration time without the profiler."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from perfcore.profile.fit_traces import SKIP_STEPS, TracedLoop, overheads_of, profiler_cost_us
from perfcore.trace.extract import Overhead, extract_overheads, kept_steps
from perfcore.trace.kineto import read_kineto

FOLDER = Path(__file__).parents[2] / "data" / "recsys_a100"


@pytest.fixture(scope="module")
def loop() -> TracedLoop:
    trace = read_kineto(next(FOLDER.glob("*.json.gz")))
    steps = kept_steps(trace, skip_steps=SKIP_STEPS)
    return TracedLoop(trace, 0.9 * float(np.median([s.duration_us for s in steps])))


def test_the_profilers_cost_makes_both_times_agree(loop: TracedLoop) -> None:
    """Events of a step times their cost are what the profiler added, for the median step."""
    cost = profiler_cost_us([loop])
    table = extract_overheads(loop.trace, skip_steps=SKIP_STEPS)
    steps = kept_steps(loop.trace, skip_steps=SKIP_STEPS)
    events = sum(int(s.events.sum()) for kinds in table.values() for s in kinds.values()) / len(steps)
    added = float(np.median([s.duration_us for s in steps])) - loop.measured_us
    assert cost * events == pytest.approx(added)
    assert profiler_cost_us([replace(loop, measured_us=1e9)]) == 0


def test_overheads_are_means_without_the_profilers_cost(loop: TracedLoop) -> None:
    cost = profiler_cost_us([loop])
    table = overheads_of([loop], source="a trace of an A100")
    samples = extract_overheads(loop.trace, skip_steps=SKIP_STEPS)
    checked = 0
    for op, kinds in samples.items():
        for kind in (Overhead.T2, Overhead.T3, Overhead.T5):
            if kind in kinds and op in table.by_op:
                plain = max(
                    0.0,
                    float(
                        np.mean(
                            [u - cost * e for u, e in zip(kinds[kind].us, kinds[kind].events, strict=True)]
                        )
                    ),
                )
                assert getattr(table.by_op[op], f"{kind}_us") == pytest.approx(plain, abs=1e-3)
                checked += 1
    assert checked > 10
    assert not table.kernels_block_host
    assert table.launch_latency_us > 0
    assert "taken over from" in table.provenance["constants"]["graph_launch_us"]
