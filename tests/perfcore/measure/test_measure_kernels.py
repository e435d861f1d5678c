"""Micro-benchmarks: cases, timing, samples, the plan, and the sweep."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from perfcore.cost.work import work_of
from perfcore.design.hardware import System, default_node, device
from perfcore.design.training import Optimizer
from perfcore.errors import DesignError, PerfcoreError, ProfileError, UnsupportedError
from perfcore.graph import kernels as k
from perfcore.graph.dlrm import graph_of
from perfcore.measure.collect import (
    FEWEST_LOOPS,
    SHORTEST_LOOP_S,
    _loops_to_measure,
    all_cases,
    collect,
    in_any_order,
)
from perfcore.measure.iteration import IterationSample
from perfcore.measure.kernel_cases import CPU_LIMITS, CUDA_LIMITS, Case, dense_cases
from perfcore.measure.kernels import Timing, check_written, host_runs_us, time_case
from perfcore.measure.loops import host_bound, kernel_bound, record_trace
from perfcore.measure.plan import FEW, Plan
from perfcore.measure.record import DesignSample, Status, middle_samples
from perfcore.measure.samples import KernelSample, SampleFolder, kernel_from_dict, kernel_to_dict
from perfcore.measure.source import Source
from perfcore.measure.table_cases import Tables, _fused_update, copy_cases, table_cases
from perfcore.profile.fit_traces import overheads_of, profiler_cost_us, read_traces


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return all_cases("cpu")


def smallest_of_each_kind(cases: list[Case]) -> list[Case]:
    found: dict[str, Case] = {}
    for case in cases:
        work = work_of(case.kernel)
        kept = found.get(work.kind)
        if kept is None or work.amounts.sum() < work_of(kept.kernel).amounts.sum():
            found[work.kind] = case
    return list(found.values())


def test_every_kind_of_kernel_has_cases(cases: list[Case]) -> None:
    # Collectives have a sweep of their own; caches of tables in host memory are FBGEMM's and are not run; nor are
    # layers that no DLRM has.
    foreign = {k.Convolution, k.BatchNorm, k.Pooling, k.LayerNorm, k.Softmax, k.Dropout}
    kinds = {type(c.kernel) for c in cases} | {k.Collective, k.MeasuredKernel, k.CachePopulate} | foreign
    assert kinds == set(k.Kernel.__args__)


def test_every_kind_runs_and_is_timed(cases: list[Case]) -> None:
    source = Source("cpu", cache_bytes=1e6)
    for case in smallest_of_each_kind(cases):
        timings = list(time_case(case, source, cache_bytes=1e5, max_seconds=0.002))
        assert [t.cache for t in timings] == ["warm", "cold"], case.kernel
        assert all(t.median_us > 0 for t in timings)


def test_products_are_what_the_description_says() -> None:
    """Output shapes, from the dims of the kernel."""
    source = Source("cpu", cache_bytes=1e6)
    products = [c for c in dense_cases(CPU_LIMITS, tf32=False) if isinstance(c.kernel, k.Gemm)]
    for case in products[:: len(products) // 40]:
        g = case.kernel
        assert isinstance(g, k.Gemm)
        out = case.build(source)()
        assert isinstance(out, torch.Tensor)
        shape = (g.m, g.n) if g.batch == 1 else (g.batch, g.m, g.n)
        assert tuple(out.shape) == shape, g


def test_cases_of_a_gpu_stay_below_its_limits() -> None:
    for case in [*dense_cases(CUDA_LIMITS, tf32=True), *table_cases(CUDA_LIMITS)]:
        if isinstance(case.kernel, k.Gemm):
            g = case.kernel
            assert 2.0 * g.m * g.n * g.k * g.batch <= CUDA_LIMITS.flops  # type: ignore[operator]
    kinds = {c.kernel.kind for c in copy_cases(CUDA_LIMITS, on_cuda=True)}  # type: ignore[union-attr]
    assert kinds == set(k.CopyKind)


def test_unwritten_results_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="unwritten"):
        check_written(lambda: torch.full((8,), torch.nan))
    check_written(lambda: torch.ones(8))


def test_a_slow_call_gets_one_run() -> None:
    calls = []
    runs, _ = host_runs_us([lambda: calls.append(sum(range(200_000)))], 0.0)
    assert len(runs) == 1
    assert len(calls) == 2


@pytest.mark.parametrize(
    "kernel",
    [
        k.Gemm(4, 5, 6, k.DType.BF16, layout=k.GemmLayout.GRAD_WEIGHT),
        k.EmbeddingForward(2, np.full((1, 3), 10.0), 1, 8, 0.5, 4.0, batched=True),
        k.Memcpy(8.0, k.CopyKind.D2H),
        k.MultiTensor("add", 8.0, 2.0, 12.0),
    ],
    ids=lambda kernel: type(kernel).__name__,
)
def test_kernels_survive_json(kernel: k.Kernel) -> None:
    back = kernel_from_dict(json.loads(json.dumps(kernel_to_dict(kernel))))
    assert type(back) is type(kernel)
    for f in dataclasses.fields(kernel):
        np.testing.assert_array_equal(getattr(back, f.name), getattr(kernel, f.name))


def sample(m: float) -> KernelSample:
    return KernelSample(k.Gemm(m, 8, 8, k.DType.FP32), Timing((1.0, 2.0, 3.0), "warm", "wall"))


def test_a_cut_line_is_dropped_and_the_folder_continued(tmp_path: Path) -> None:
    folder = SampleFolder(tmp_path)
    folder.create()
    folder.add(sample(1))
    folder.add(sample(2))
    text = folder.kernels.read_text()
    folder.kernels.write_text(text[:-20])
    folder.create()
    folder.add(sample(3))
    assert [s.kernel.m for s in folder.samples()] == [1, 3]  # type: ignore[union-attr]
    assert folder.samples()[0].timing.median_us == 2.0


def test_lines_that_are_no_samples_are_named(tmp_path: Path) -> None:
    folder = SampleFolder(tmp_path)
    with pytest.raises(ProfileError, match="cannot be read"):
        folder.samples()
    folder.kernels.write_text(
        '{"kernel": {"type": "Nothing"}, "runs_us": [1], "cache": "c", "method": "m"}\n'
    )
    with pytest.raises(ProfileError, match="no sample"):
        folder.samples()
    folder.kernels.write_text("no json\n{}\n")
    with pytest.raises(ProfileError, match="must be JSON"):
        folder.samples()


@given(order=st.permutations(range(6)))
@settings(max_examples=20, deadline=None)
def test_a_plan_measures_everything_once(order: list[int]) -> None:
    kernels: list[k.Kernel] = [k.Gemm(2.0**i, 8, 8, k.DType.FP32) for i in order]
    plan, seen = Plan(kernels), []
    while (index := plan.next()) is not None:
        seen.append(index)
        plan.learn(kernels[index], 1.0 + index, index=index)
    assert sorted(seen) == list(range(6))


def test_a_plan_starts_with_each_kind_and_with_its_ends() -> None:
    kernels: list[k.Kernel] = [k.Gemm(2.0**i, 8, 8, k.DType.FP32) for i in range(20)]
    kernels += [k.Memset(4.0**i) for i in range(1, 20)]
    plan, chosen = Plan(kernels), []
    for _ in range(2 * FEW):
        index = plan.next()
        assert index is not None
        chosen.append(index)
        plan.learn(kernels[index], 1.0, index=index)
    assert {0, 19, 20, 38} <= set(chosen)
    assert sum(i < 20 for i in chosen) == FEW


def test_a_plan_skips_what_was_measured_before() -> None:
    kernels: list[k.Kernel] = [k.Memset(4.0), k.Memset(400.0)]
    plan = Plan(kernels)
    plan.learn(k.Memset(4.0), 1.0)
    assert plan.next() == 1
    plan.refuse(1)
    assert plan.next() is None


def test_a_sweep_is_continued_and_knows_its_device(tmp_path: Path) -> None:
    first = collect(tmp_path, device="cpu", budget_s=2.0)
    again = collect(tmp_path, device="cpu", budget_s=2.0)
    assert first.loops >= FEWEST_LOOPS
    kinds = {work_of(s.kernel).kind for s in SampleFolder(tmp_path).samples()}
    assert kinds == {work_of(c.kernel).kind for c in all_cases("cpu")}
    assert again.kernels > 0
    kernels = [json.dumps(kernel_to_dict(s.kernel)) for s in SampleFolder(tmp_path).samples()]
    assert len(kernels) == first.kernels + again.kernels
    assert len(set(kernels)) == len(kernels) / 2  # warm and cold
    torch.set_num_threads(2)
    with pytest.raises(DesignError, match="holds samples of"):
        collect(tmp_path, device="cpu", budget_s=1.0)


@pytest.mark.parametrize(
    ("name", "budget", "words"),
    [("cpu", 0.0, "budget > 0"), ("tpu", 1.0, "must be cpu"), ("cuda:99", 1.0, "needs a CUDA GPU")],
)
def test_wrong_requests_are_refused(tmp_path: Path, name: str, budget: float, words: str) -> None:
    with pytest.raises(PerfcoreError, match=words):
        collect(tmp_path, device=name, budget_s=budget)


def test_measuring_needs_torch_and_numpy_alone(tmp_path: Path) -> None:
    """The command of a bare machine starts where every other package is missing."""
    code = """
import importlib.abc, sys
ALLOWED = set(sys.stdlib_module_names) | {"torch", "numpy", "perfcore", "torchgen", "functorch"}
class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in {"numba", "scipy", "pandas", "catboost", "yaml", "pydantic", "typer", "rich", "dse", "optuna", "plotly"}:
            raise ImportError(name)
sys.meta_path.insert(0, Refuse())
import perfcore.measure.collect, perfcore.measure.isolate
from perfcore.measure.__main__ import main
sys.exit(main(["collect", "--device", "cuda:99", "--out", sys.argv[1]]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2, done.stderr
    assert "needs a CUDA GPU" in done.stderr


def test_any_beginning_of_the_loops_holds_both_kinds() -> None:
    system = System(device("t4"), default_node("t4"), 1)
    few, many = host_bound(system), kernel_bound(system, scale=1)
    order = in_any_order(few, many)
    assert {d.name for d in order} == {d.name for d in [*few, *many]}
    for n in range(4, len(order)):
        share = sum(d.name.startswith("host") for d in order[:n]) / n
        assert share == pytest.approx(len(few) / len(order), abs=1 / n)


def test_a_traced_loop_gives_up_its_host_times(tmp_path: Path) -> None:
    """What a GPU's host is fitted from: ops as the builder names them, the profiler's cost from steps without it."""
    system = System(device("t4"), default_node("t4"), 1)
    named = host_bound(system)[0]
    record_trace(named.design, tmp_path / "host-00.json.gz", device="cpu")
    iteration = IterationSample((900.0, 1000.0, 1100.0), 1, 1, 0.5, "wall")
    samples = [DesignSample("host-00", named.design, Status.OK, iteration=iteration)]
    traced = read_traces(samples, tmp_path)
    builder = {op.name for op in graph_of(named.design).ops() if np.any(op.present)}
    assert builder <= {op.name for op in traced[0].trace.ops}
    exact = [replace(traced[0], measured_us=1.0)]
    assert profiler_cost_us(exact) > profiler_cost_us([replace(traced[0], measured_us=300.0)]) >= 0
    assert profiler_cost_us([replace(traced[0], measured_us=1e9)]) == 0
    with pytest.raises(ProfileError, match="no kernel of a GPU"):
        overheads_of(traced, source="a CPU")
    with pytest.raises(ProfileError, match="traced training loop"):
        read_traces([], tmp_path)


def test_what_an_optimizer_keeps_of_a_table_counts_as_a_copys_own() -> None:
    tables = Tables(2, 4, 1000, 2, 8, 0.0)
    built: list[Source] = []

    def build(source: Source) -> Callable[[], object]:
        built.append(source)
        return _fused_update(tables, Optimizer.ADAM)(source)

    source = Source("cpu", cache_bytes=1e4)
    case = Case(next(iter(all_cases("cpu"))).kernel, build)
    assert len(list(time_case(case, source, cache_bytes=1e4, max_seconds=0.05))) == 2
    assert source.bytes >= 2 * (2 * 1000 * 8 * 4)
    assert len(built) == 1  # 64 copies of the moments of a large table would fill the machine's memory


def loop(name: str, us: float | None) -> DesignSample:
    design = host_bound(System(device("t4"), default_node("t4"), 1))[0].design
    if us is None:
        return DesignSample(name, design, Status.UNSUPPORTED, "no")
    return DesignSample(name, design, Status.OK, iteration=IterationSample((us,) * 3, 1, 1, 0.5, "wall"))


def test_of_several_timings_of_a_loop_the_middle_one_counts() -> None:
    samples = [loop("a", us) for us in (5.0, 1.0, 3.0)] + [loop("b", us) for us in (None, 2.0, 9.0)]
    found = middle_samples([*samples, loop("c", None)])
    assert [s.name for s in found] == ["a", "b", "c"]
    assert [s.iteration and s.iteration.median_us for s in found] == [3.0, 2.0, None]


def test_loops_that_are_missing_come_first_and_others_as_time_allows() -> None:
    designs = host_bound(System(device("t4"), default_node("t4"), 1))[:5]
    names = [d.name for d in designs]
    samples = [loop(names[0], 1.0), loop(names[0], 1.0), loop(names[1], 1.0), loop(names[2], None)]
    todo = [d.name for d in _loops_to_measure(designs, samples, seconds=3.9 * SHORTEST_LOOP_S)]
    assert todo == [names[3], names[4], names[1]]
    assert len(_loops_to_measure(designs, samples, seconds=0.0)) == 2
    everything = _loops_to_measure(designs, samples, seconds=100.0)
    assert [d.name for d in everything] == [names[3], names[4], names[1], names[0]]  # not what is refused
