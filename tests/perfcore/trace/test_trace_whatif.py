"""Changes to a traced iteration: what they mean on programs whose answer is known, and what may not be asked."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from perfcore.errors import TraceError
from perfcore.graph.kernels import Gemm, MeasuredKernel
from perfcore.trace.analysis import analyse
from perfcore.trace.kineto import read_kineto
from perfcore.trace.replay import Program
from perfcore.trace.resize import with_batch, with_world_size
from perfcore.trace.study import programs_of, retimed
from perfcore.trace.whatif import applied, effects_of, parse_change, scheduled_us

DATA = Path(__file__).parents[2] / "data"


@cache
def programs(*names: str) -> tuple[Program, ...]:
    return tuple(programs_of(analyse([read_kineto(DATA / name) for name in names])))


RANKS = tuple(f"dlrm_8xv100/rank{r}.pt.trace.json.gz" for r in (0, 7))
RECSYS = "recsys_a100/rank3.pt.trace.json.gz"
BATCH = 1024


def host_total(program: Program) -> float:
    return float(sum(sum(times) for times in program.host_us))


@pytest.mark.parametrize("text", ["T1 / 2", "t1 * 0.5", "  T1/2 "])
def test_ways_to_write_a_change(text: str) -> None:
    change = parse_change(text)
    assert (change.target, change.factor) == ("t1", 0.5)


@pytest.mark.parametrize(
    "text", ["", "T1", "T1 = 2", "world_size * 2", "nonsense / 2", "T1 / two", "kernels / 1e"]
)
def test_what_is_no_change(text: str) -> None:
    with pytest.raises(TraceError, match="A change is a target") as caught:
        parse_change(text)
    assert "world_size" in str(caught.value.hint)


def test_every_overhead_scales_alone_and_host_scales_them_all() -> None:
    program = programs(RANKS[1])[0]
    parts = [
        host_total(applied(program, parse_change(f"{kind} * 0")))
        for kind in ("T1", "T2", "T3", "T4", "T5", "alone")
    ]
    total = host_total(program)
    assert sum(total - part for part in parts) == pytest.approx(total)
    assert host_total(applied(program, parse_change("host / 4"))) == pytest.approx(total / 4)
    one_op = host_total(applied(program, parse_change("op:aten::linear * 0")))
    assert 0 < total - one_op < total


def test_the_host_bound_step_shrinks_with_the_host_and_grows_with_no_speedup() -> None:
    both = list(programs(*RANKS))
    before = scheduled_us(both)
    effects = effects_of(
        both, [parse_change(t) for t in ("host / 2", "kernels / 2", "collectives * 1", "cuda graph")]
    )
    assert all(e.before_us == before for e in effects)
    halved, kernels, same, graph, together = effects
    assert before / 2 <= halved.after_us < 0.6 * before
    assert kernels.after_us <= before + 1e-6
    assert same.after_us == pytest.approx(before)
    assert together.after_us <= graph.after_us + 1e-6 < before


def test_kernels_are_chosen_by_pattern_in_any_case() -> None:
    program = programs(RECSYS)[0]
    faster = applied(program, parse_change("kernel:*GEMM* / 2"))
    ratios = np.array(faster.durations_us) / np.maximum(program.durations_us, 1e-9)
    hits = np.array(["gemm" in x.kernel.name.lower() for x in program.step.launched])
    np.testing.assert_allclose(ratios[hits], 0.5)
    np.testing.assert_allclose(np.array(faster.durations_us)[~hits], np.array(program.durations_us)[~hits])


def test_fused_ops_pay_their_host_time_once() -> None:
    program = programs(RECSYS)[0]
    fused = applied(program, parse_change("fuse:torch::autograd::*"))
    assert host_total(fused) < host_total(program)
    assert fused.durations_us == program.durations_us


def test_a_larger_batch_makes_no_kernel_faster_and_leaves_weights_alone() -> None:
    program = programs(RECSYS)[0]
    kernels = [launch.kernel for launch in program.step.graph.launches()]
    doubled = np.array(with_batch(program, 2.0).durations_us)
    own = np.array(program.durations_us)
    assert np.all(doubled >= 0.9 * own)  # learned corrections are not monotone to the last percent
    forward = [
        i
        for i, (k, x) in enumerate(zip(kernels, program.step.launched, strict=True))
        if isinstance(k, Gemm) and x.call.leaf and x.call.leaf.name == "aten::addmm" and k.m == BATCH
    ]
    assert np.mean(doubled[forward] / own[forward]) > 1.2
    unknown = [
        i
        for i, (k, x) in enumerate(zip(kernels, program.step.launched, strict=True))
        if isinstance(k, MeasuredKernel) and k.us and not x.collective
    ]
    np.testing.assert_array_equal(doubled[unknown], own[unknown])
    np.testing.assert_allclose(np.array(with_batch(program, 1.0).durations_us), own)


def test_more_ranks_transfer_no_faster_and_other_kernels_stay() -> None:
    program = programs(*RANKS)[1]
    assert program.trace.world_size == 8
    same = np.array(with_world_size(program, 8).durations_us)
    more = np.array(with_world_size(program, 16).durations_us)
    own = np.array(program.durations_us)
    collectives = np.array([x.collective for x in program.step.launched])
    np.testing.assert_allclose(same, own)
    assert np.all(more[collectives] >= own[collectives])
    assert np.any(more[collectives] > 1.5 * own[collectives])  # beyond one machine
    np.testing.assert_array_equal(more[~collectives], own[~collectives])


def test_what_a_trace_does_not_tell_cannot_be_scaled() -> None:
    toy = programs("small_traces/toy_GP100_gpu_user_annotation.kineto.json.gz")[0]
    with pytest.raises(TraceError, match="world_size >= 2"):
        with_world_size(toy, 16)
    with pytest.raises(TraceError, match="holds no shapes"):
        with_batch(programs("resnet50_v100/ddp_ns.pt.trace.json.gz")[0], 2.0)


def test_a_faster_device_never_lengthens_and_its_own_device_changes_nothing() -> None:
    analysis = analyse([read_kineto(DATA / RECSYS)])
    same, faster = retimed(analysis, "a100-sxm4-40gb"), retimed(analysis, "h200-sxm")
    assert same.after_us == pytest.approx(same.before_us)
    assert faster.after_us < faster.before_us
    assert 0.5 < faster.predicted_share < 1
