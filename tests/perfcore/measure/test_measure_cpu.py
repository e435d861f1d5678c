from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from measure_designs import small

from perfcore.cost.model import Calibration
from perfcore.design.design import Design
from perfcore.design.hardware import System
from perfcore.errors import ProfileError, UnsupportedError
from perfcore.graph import kernels as k
from perfcore.graph.ops import Launch, Op, Region, WorkloadGraph
from perfcore.measure.calibrate_cpu import calibrate_kernels, fit_profile, middle_designs, tiny_designs
from perfcore.measure.cpu import (
    CpuKernels,
    CpuProfile,
    Fit,
    cpu_cost_model,
    fit,
    kernels_us,
    nonnegative_least_squares,
    ops_by_phase,
)
from perfcore.measure.cpu_benches import benches
from perfcore.measure.cpu_work import parts, work_of


@pytest.fixture(scope="module")
def fits() -> dict[str, Fit]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return calibrate_kernels(seconds=1.0)
    finally:
        torch.set_num_threads(before)


def gemm(m: float, n: float = 64.0) -> k.Gemm:
    return k.Gemm(m, n, 32.0, k.DType.FP32)


SHARDS = {
    "batch": 8.0,
    "rows": np.array([[100.0, 0.0, 5000.0]]),
    "pooling": np.array([[1.0, 1.0, 3.0]]),
    "dim": 16.0,
    "skew": 0.0,
    "element_bytes": 4.0,
}


@given(
    weights=st.lists(st.floats(0, 100), min_size=1, max_size=4),
    rows=st.integers(8, 30),
    seed=st.integers(0, 99),
)
@settings(max_examples=50, deadline=None)
def test_least_squares_finds_nonnegative_weights(weights: list[float], rows: int, seed: int) -> None:
    a = np.random.default_rng(seed).random((rows, len(weights))) + 0.01
    found = nonnegative_least_squares(a, a @ weights)
    assert (found >= 0).all()
    np.testing.assert_allclose(a @ found, a @ weights, rtol=1e-2, atol=1e-2)


def test_least_squares_never_goes_below_zero() -> None:
    a = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    found = nonnegative_least_squares(a, np.array([3.0, 2.0, 1.0]))
    np.testing.assert_allclose(found, [2.0, 0.0], atol=1e-6)


def test_a_fit_reproduces_a_linear_law() -> None:
    work = np.stack([np.ones(12), np.geomspace(1, 1e6, 12)], axis=1)
    fitted = fit(work, work @ [3.0, 0.002])
    assert fitted.held_out_mape_pct < 0.1
    assert fitted.predict_us(np.array([1.0, 1e8])) == pytest.approx(3 + 2e5, rel=1e-3)


def test_every_kind_is_calibrated(fits: dict[str, Fit]) -> None:
    timed = {work_of(b.kernel).kind for b in benches(torch.Generator())}
    assert set(fits) == timed
    assert all(np.isfinite(f.held_out_mape_pct) and (f.weights_us >= 0).all() for f in fits.values())


def test_every_bench_runs_the_kernel_that_it_describes() -> None:
    for bench in benches(torch.Generator().manual_seed(0)):
        out = bench.call()
        if isinstance(bench.kernel, k.Gemm):
            assert isinstance(out, torch.Tensor)
            assert out.numel() == bench.kernel.m * bench.kernel.n * bench.kernel.batch
        if isinstance(bench.kernel, k.EmbeddingBackward):
            assert isinstance(out, torch.Tensor)
            assert out.is_sparse
            assert out._nnz() == bench.kernel.batch * bench.kernel.pooling


def test_durations_are_positive_and_larger_for_much_more_work(fits: dict[str, Fit]) -> None:
    small_us, large_us = CpuKernels(fits).predict_us([gemm(16.0), gemm(16000.0)])
    assert 0 < small_us < large_us


def test_many_candidates_at_once_equal_one_by_one(fits: dict[str, Fit]) -> None:
    model, m = CpuKernels(fits), np.array([[1.0], [77.0], [4096.0]])
    (at_once,) = model.predict_us([gemm(m)])  # type: ignore[arg-type]
    one_by_one = [float(model.predict_us([gemm(float(v))])[0]) for v in m[:, 0]]
    np.testing.assert_allclose(at_once[:, 0], one_by_one)


@pytest.mark.parametrize(
    "kernel",
    [
        k.EmbeddingForward(**SHARDS, batched=True),
        k.EmbeddingBackward(**SHARDS, batched=True),
        k.EmbeddingBackward(**SHARDS, batched=True, optimizer="sgd"),
    ],
)
def test_tables_add_up_and_absent_shards_are_free(kernel: k.Kernel, fits: dict[str, Fit]) -> None:
    (whole,) = CpuKernels(fits).predict_us([kernel])
    assert whole.shape == (1,)
    singles = [
        k.with_dims(kernel, rows=SHARDS["rows"][:, [t]], pooling=SHARDS["pooling"][:, [t]]) for t in (0, 2)
    ]
    assert whole[0] == pytest.approx(sum(us[0] for us in CpuKernels(fits).predict_us(singles)))


def test_an_empty_kernel_takes_no_time(fits: dict[str, Fit]) -> None:
    durations = CpuKernels(fits).predict_us(
        [gemm(0.0), k.Memcpy(1e6, k.CopyKind.H2D_PINNED), k.Elementwise("add", 0.0, 0.0, 0.0)]
    )
    assert [float(us) for us in durations] == [0, 0, 0]


def test_fused_kernels_are_their_parts() -> None:
    forward = parts(k.FusedInteraction(8.0, 4.0, 16.0, 4.0))
    backward = parts(k.FusedInteraction(8.0, 4.0, 16.0, 4.0, backward=True))
    assert [type(p) for p in forward] == [k.Gemm, k.PairGather]
    assert [type(p) for p in backward] == [k.PairGather, k.Gemm]
    total = k.MultiTensor("sgd", k.Total((np.array([2.0]), np.array([3.0]))), 2.0, 12.0)
    (resolved,) = parts(total)
    np.testing.assert_allclose(k.dims(resolved)["elements"], [5.0])  # type: ignore[arg-type]


def test_the_range_of_the_samples_is_known(fits: dict[str, Fit]) -> None:
    model = CpuKernels(fits)
    assert model.calibration(gemm(128.0)) is Calibration.MEASURED
    assert model.calibration(gemm(1e7)) is Calibration.EXTRAPOLATED


def test_what_no_cpu_runs_is_refused(fits: dict[str, Fit]) -> None:
    collective = k.Collective(k.CollectiveKind.ALL_REDUCE, 1e6, 8.0, 8.0)
    with pytest.raises(UnsupportedError, match="One CPU runs no Collective"):
        cpu_cost_model(fits).predict_us([collective])
    with pytest.raises(ProfileError, match="'gemm_forward' is to be priced"):
        CpuKernels({}).predict_us([gemm(4.0)])


SCALES = {"gemm": 1.5, "lookup": 1.0, "memory": 1.0}


def graph(forward: int, backward: int) -> WorkloadGraph:
    launch = Launch(gemm(32.0))
    ops = [Op("a", (launch,), phase="forward")] * forward + [
        Op("b", (launch, launch), phase="backward")
    ] * backward
    absent = Op("c", (Launch(gemm(1e9)),), present=np.zeros((1, 1), bool), phase="forward")
    return WorkloadGraph((Region("all", (*ops, absent)),))


def test_an_iteration_is_the_sum_of_its_ops(fits: dict[str, Fit]) -> None:
    one = float(CpuKernels(fits).predict_us([gemm(32.0)])[0])
    profile = CpuProfile(fits, SCALES, {"forward": 5.0}, default_overhead_us=2.0)
    assert ops_by_phase(graph(3, 2)) == {"forward": 3, "backward": 2}
    assert profile.iteration_us(graph(3, 2)) == pytest.approx(7 * 1.5 * one + 3 * 5.0 + 2 * 2.0)


def test_a_profile_is_recovered_from_iterations(fits: dict[str, Fit]) -> None:
    graphs = [graph(f, b) for f, b in ((1, 5), (7, 2), (4, 4), (30, 1))]
    true = CpuProfile(
        fits, {"gemm": 1.0, "lookup": 1.0, "memory": 1.0}, {"forward": 6.0, "backward": 11.0}, 0.0
    )
    measured = [true.iteration_us(g) for g in graphs]
    found = fit_profile(graphs, measured, fits)
    assert [found.iteration_us(g) for g in graphs] == pytest.approx(measured, rel=0.01)
    assert found.scales["memory"] == pytest.approx(1.0)
    assert min(found.overheads_us.values()) <= found.default_overhead_us <= max(found.overheads_us.values())


def test_index_put_is_priced_without_the_sort_that_cuda_needs(fits: dict[str, Fit]) -> None:
    scatter = Launch(k.PairGather(256.0, 9.0, 36.0, 4.0, backward=True))
    sort = Launch(k.Sort(1e6, 8.0))
    alone, both = (
        WorkloadGraph((Region("r", (Op("x", launches),)),)) for launches in ((scatter,), (sort, scatter))
    )
    assert kernels_us(both, fits) == kernels_us(alone, fits)


@pytest.mark.parametrize("make", [tiny_designs, middle_designs])
def test_loops_differ(make: Callable[[System], list[Design]]) -> None:
    designs = make(small(world_size=8).system)
    assert len({(d.model, d.training, d.fusion) for d in designs}) == len(designs)
    assert {d.system.world_size for d in designs} == {1}
