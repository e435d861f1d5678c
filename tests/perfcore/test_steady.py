"""Policy iteration on walks against the plain oracle and the folded matrix, and on a thousand different ranks."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings

from perfcore.graph.ops import WorkloadGraph
from perfcore.maxplus import eigenvalue, fold
from perfcore.schedule import compile_steps, schedule
from perfcore.steady import steady_states
from perfcore.steps import Steps
from perfcore.timeline import Timeline
from perfcore.walk import walk_from

sys.path.insert(0, str(Path(__file__).parent.parent))
from oracles import scalar_iteration_time
from test_schedule import OVERHEADS, programs


@settings(max_examples=12, deadline=None)
@given(programs())
def test_equals_the_plain_oracle(program: tuple[WorkloadGraph, list[np.ndarray]]) -> None:
    graph, durations = program
    times_us, _, _ = steady_states(compile_steps(graph, durations, OVERHEADS))
    for candidate, got in enumerate(times_us):
        assert got == pytest.approx(scalar_iteration_time(graph, durations, OVERHEADS, candidate), rel=1e-9)


def check_state(steps: Steps) -> None:
    """The time is the matrix's eigenvalue, the state is steady, and the root lies on a critical cycle."""
    times_us, roots, states = steady_states(steps)
    np.testing.assert_allclose(times_us, eigenvalue(fold(steps)), rtol=1e-9)
    for candidate, (time_us, root, state) in enumerate(zip(times_us, roots, states, strict=True)):
        walked = walk_from(steps.table, steps.durations_us, steps.masks, candidate, state)
        moved = walked - state
        assert moved.max() <= time_us * (1 + 1e-6) + 1e-6
        assert moved[root] == pytest.approx(time_us, rel=1e-6, abs=1e-6)


@settings(max_examples=50, deadline=None)
@given(programs())
def test_the_state_is_steady(program: tuple[WorkloadGraph, list[np.ndarray]]) -> None:
    graph, durations = program
    check_state(compile_steps(graph, durations, OVERHEADS))


@settings(max_examples=30, deadline=None)
@given(programs(max_candidates=1))
def test_the_critical_cycle_adds_up(program: tuple[WorkloadGraph, list[np.ndarray]]) -> None:
    graph, durations = program
    steps = compile_steps(graph, durations, OVERHEADS)
    folded = schedule(steps)
    times_us, roots, states = steady_states(steps)
    timeline = replace(folded, iteration_time_us=times_us, start_state_us=states, critical_clock=roots)
    assert isinstance(timeline, Timeline)
    path = timeline.critical_path()
    sums = timeline.sensitivity()
    launches = float(np.nansum(sums * steps.durations_us[:, 0]))
    assert path.iterations >= 1
    assert launches <= times_us[0] * (1 + 1e-9)


def many(graph: WorkloadGraph, durations: list[np.ndarray], ranks: int) -> Steps:
    """The program's first rank, on many ranks of different speed."""
    steps = compile_steps(graph, durations, OVERHEADS)
    speed = np.random.default_rng(0).uniform(0.5, 1.5, ranks)
    masks = np.repeat(steps.masks[:, :1, :1], ranks, axis=2)
    return replace(steps, durations_us=steps.durations_us[:, :1, :1] * speed, masks=masks)


@settings(max_examples=15, deadline=None)
@given(programs())
def test_ranks_of_different_speed(program: tuple[WorkloadGraph, list[np.ndarray]]) -> None:
    check_state(many(*program, ranks=20))


@settings(max_examples=3, deadline=None)
@given(programs())
def test_a_thousand_ranks_take_as_long_as_their_slowest_ones(
    program: tuple[WorkloadGraph, list[np.ndarray]],
) -> None:
    """All durations of a rank have one factor, so the slowest rank decides everything."""
    steps = many(*program, ranks=1000)
    slowest = steps.durations_us.sum(axis=(0, 1)).argmax()
    alone = replace(
        steps,
        durations_us=steps.durations_us[:, :, slowest : slowest + 1].copy(),
        masks=steps.masks[:, :, slowest : slowest + 1].copy(),
    )
    expected = eigenvalue(fold(alone))
    np.testing.assert_allclose(schedule(steps).iteration_time_us, expected, rtol=1e-9)
