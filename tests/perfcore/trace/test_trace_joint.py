"""Ranks joined at their collectives: where windows differ, where kernels were lost, where programs differ."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from perfcore.errors import TraceError
from perfcore.schedule import schedule
from perfcore.steps import Opcode
from perfcore.trace.analysis import analyse, joint_steps
from perfcore.trace.joint import join, joint_seeds_us, shared_collectives, transfers_us
from perfcore.trace.kineto import read_kineto
from perfcore.trace.records import KinetoTrace
from perfcore.trace.replay import DeviceTimes, replay_steps, walk, walked_us
from perfcore.trace.workload import TracedStep, TraceGraphs

DATA = Path(__file__).parents[2] / "data" / "dlrm_8xv100"
DEVICE = DeviceTimes(7.0, 1.0)
TRACES = [read_kineto(DATA / f"rank{r}.pt.trace.json.gz") for r in (0, 4, 7)]


def steps_of(traces: list[KinetoTrace]) -> list[TracedStep]:
    return [TraceGraphs(t).step(t.steps[0]) for t in traces]


STEPS = steps_of(TRACES)


def without_collective(trace: KinetoTrace, number: int) -> KinetoTrace:
    """The trace as if one collective's kernel had been lost."""
    found = [k for k in trace.kernels if "nccl" in k.name.lower()]
    lost = found[number].correlation
    ops = tuple(replace(o, calls=tuple(c for c in o.calls if c.correlation != lost)) for o in trace.ops)
    return replace(trace, ops=ops, kernels=tuple(k for k in trace.kernels if k.correlation != lost))


def test_a_collective_ends_for_all_ranks_together_after_the_last_has_come() -> None:
    steps = joint_steps(STEPS, DEVICE, [s.host_us for s in STEPS])
    starts = [s.window.start_us for s in STEPS]
    walked = walk(steps, joint_seeds_us(STEPS, starts, clocks=steps.clocks))
    together = steps.table[steps.table["opcode"] == Opcode.COLLECTIVE]["launch"]
    assert len(together) == 8
    ends, begins = walked.end_us[together], walked.start_us[together]
    np.testing.assert_allclose(ends, ends[:, :1] * np.ones(3))
    np.testing.assert_allclose(ends[:, 0], begins.max(axis=1) + transfers_us(STEPS))


def test_a_rank_alone_is_what_it_was() -> None:
    alone = replay_steps(STEPS[2], DEVICE)
    joined = join([alone], [STEPS[2]])
    assert walked_us(joined, STEPS[2].seeds_us)[0] == pytest.approx(
        walked_us(alone, STEPS[2].seeds_us)[0], abs=10.0
    )


def test_all_ranks_have_one_steady_spacing_and_it_is_no_shorter_than_any_hosts() -> None:
    steps = joint_steps(STEPS, DEVICE, [s.host_us for s in STEPS])
    spacing = schedule(steps).iteration_time_us[0]
    hosts = [sum(map(sum, s.host_us)) for s in STEPS]
    assert spacing >= max(hosts)


@pytest.mark.parametrize("lost", [0, 3, 7])
def test_a_lost_collective_is_left_out_on_all_ranks(lost: int) -> None:
    steps = steps_of([TRACES[0], without_collective(TRACES[1], lost), TRACES[2]])
    common = shared_collectives(steps)
    assert common.shape == (7, 3)
    whole = shared_collectives(STEPS)
    kept = [i for i in range(8) if i != lost]
    assert common[:, 0].tolist() == whole[kept, 0].tolist()
    joined = joint_steps(steps, DEVICE, [s.host_us for s in steps])
    assert (joined.table["opcode"] == Opcode.COLLECTIVE).sum() == 7


def test_ranks_of_different_programs_are_not_joined() -> None:
    other = read_kineto(DATA.parent / "recsys_a100" / "rank3.pt.trace.json.gz")
    with pytest.raises(TraceError, match="must run the same collectives"):
        shared_collectives([STEPS[0], TraceGraphs(other).step(other.steps[0])])
    analysis = analyse([TRACES[0], other])
    assert analysis.joint is None
    assert "same collectives" in analysis.not_joint
    assert all(r.shared.pct for r in analysis.ranks)
