"""Profiles from samples: the fit finds the law that made them, and prices as the file says."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfcore.cost.measured import MeasuredModel, family_of
from perfcore.cost.model import Calibration
from perfcore.cost.work import work_of
from perfcore.design.hardware import System, default_node, device
from perfcore.errors import ProfileError
from perfcore.graph import kernels as k
from perfcore.graph.dlrm import graph_of
from perfcore.measure.iteration import IterationSample
from perfcore.measure.kernel_cases import CPU_LIMITS, dense_cases
from perfcore.measure.kernels import Timing
from perfcore.measure.loops import host_bound, kernel_bound
from perfcore.measure.record import DesignSample, Status, write_samples
from perfcore.measure.samples import KernelSample, SampleFolder
from perfcore.measure.table_cases import copy_cases, table_cases
from perfcore.predictor import Predictor
from perfcore.profile.fit_kernels import fit_kernels, with_scales
from perfcore.profile.fit_loops import fit_loops, loop_work
from perfcore.profile.fit_samples import fit_profile
from perfcore.profile.profile import BUNDLED, load_profile

LAW = np.array([2.0, 1e-4, 3e-4, 5e-4, 7e-4])
SYSTEM = System(device("t4"), default_node("t4"), 1)


def law_us(kernel: k.Kernel) -> float:
    """What this invented device takes: a plain weighted sum of the work."""
    amounts = work_of(kernel).amounts.reshape(-1)
    return float(amounts @ LAW[: len(amounts)])


def samples_of_the_law() -> list[KernelSample]:
    cases = [
        *dense_cases(CPU_LIMITS, tf32=False),
        *table_cases(CPU_LIMITS),
        *copy_cases(CPU_LIMITS, on_cuda=False),
    ]
    by_kind: dict[str, list[k.Kernel]] = {}
    for case in cases:
        by_kind.setdefault(work_of(case.kernel).kind, []).append(case.kernel)
    kept = [kernel for kin in by_kind.values() for kernel in kin[:: max(1, len(kin) // 8)]]
    return [KernelSample(kernel, Timing((law_us(kernel),) * 3, "cold", "wall")) for kernel in kept]


@pytest.fixture(scope="module")
def fitted() -> dict:
    return fit_kernels(samples_of_the_law())


def test_the_law_is_found(fitted: dict) -> None:
    for kernel in (
        k.Gemm(100, 70, 50, k.DType.FP32),
        k.Gemm(100, 7, 50, k.DType.BF16, batch=9),
        k.EmbeddingForward(100, 1000, 3, 16, 0.0, 4.0),
        k.Concat(1e5, 4.0),
    ):
        found = MeasuredModel({n: f.fit for n, f in fitted.items()}).predict_us([kernel])[0]
        assert float(found) == pytest.approx(law_us(kernel), rel=0.05), kernel
    assert fitted["gemm_forward_fp32"].mape_pct < 1


def test_a_kind_without_samples_takes_its_family(fitted: dict) -> None:
    model = MeasuredModel({n: f.fit for n, f in fitted.items()})
    assert family_of("elementwise_tanh") == "elementwise_*"
    us = float(model.predict_us([k.Elementwise("tanh", 1e4, 4e4, 4e4)])[0])
    assert us == pytest.approx(law_us(k.Elementwise("relu", 1e4, 4e4, 4e4)), rel=0.3)
    with pytest.raises(ProfileError, match="is to be priced"):
        MeasuredModel({}).predict_us([k.Sort(8.0, 8.0)])


@given(
    rows=st.lists(st.integers(0, 10_000), min_size=2, max_size=4),
    batch=st.lists(st.integers(1, 4096), min_size=1, max_size=3),
)
@settings(max_examples=25, deadline=None)
def test_many_at_once_equal_one_by_one(fitted: dict, rows: list[int], batch: list[int]) -> None:
    """Candidates by ranks by tables: absent shards cost nothing, tables of a launch are one call."""
    model = MeasuredModel({n: f.fit for n, f in fitted.items()})
    shards = np.array(rows, dtype=float)[None, :, None]
    batches = np.array(batch, dtype=float)[:, None, None]
    [together] = model.predict_us([k.EmbeddingForward(batches, shards, 2.0, 16.0, 0.0, 4.0)])
    assert together.shape == (len(batch), len(rows))
    for i, b in enumerate(batch):
        for j, r in enumerate(rows):
            one = float(model.predict_us([k.EmbeddingForward(b, r, 2.0, 16.0, 0.0, 4.0)])[0])
            assert together[i, j] == pytest.approx(one)
            assert (one > 0) == (r > 0)


def test_calibration_is_by_range(fitted: dict) -> None:
    model = MeasuredModel({n: f.fit for n, f in fitted.items()})
    assert model.calibration(k.Gemm(100, 70, 50, k.DType.FP32)) is Calibration.MEASURED
    assert model.calibration(k.Gemm(1e6, 70, 50, k.DType.FP32)) is Calibration.EXTRAPOLATED


def loops_of(model: MeasuredModel, *, per_op: float, per_launch: float, slow: dict) -> list[DesignSample]:
    """Loops whose iterations are exactly what the fit assumes."""
    loops = []
    for named in [*host_bound(SYSTEM), *kernel_bound(SYSTEM, scale=1)]:
        work = loop_work(graph_of(named.design), model)
        us = sum(work.ops.values()) * per_op + work.more_launches * per_launch
        us += float(work.kernels_us @ np.array(list(slow.values())))
        iteration = IterationSample((us,) * 3, 1, 1, 0.5, "wall")
        loops.append(DesignSample(named.name, named.design, Status.OK, iteration=iteration))
    return loops


def test_loops_give_back_what_made_them(fitted: dict) -> None:
    model = MeasuredModel({n: f.fit for n, f in fitted.items()})
    slow = {"product": 1.1, "lookup": 1.3, "stream": 1.0}
    found = fit_loops(loops_of(model, per_op=12.0, per_launch=3.0, slow=slow), model)
    assert found.mape_pct < 2
    assert found.overheads.kernels_block_host
    assert found.overheads.default.t2_us == pytest.approx(12.0, rel=0.1)
    assert found.scales == pytest.approx(slow, rel=0.1)  # drawn to 1 a little
    with pytest.raises(ProfileError, match="at least 8"):
        fit_loops([], model)


def write_folder(path: Path, fits: dict) -> SampleFolder:
    folder = SampleFolder(path)
    folder.create()
    system = {
        "device": {n: getattr(SYSTEM.device, n) for n in SYSTEM.device.__dataclass_fields__}
        | {"name": "cpu"},
        "node": {
            n: getattr(SYSTEM.node, n) for n in SYSTEM.node.__dataclass_fields__ if n != "input_samples_per_s"
        },
    }
    here = {"device": "Some CPU", "device_kind": "cpu", "torch": "2", "threads": 1}
    folder.add_environment(here | {"system": system})
    for sample in samples_of_the_law():
        folder.add(sample)
    model = MeasuredModel({n: f.fit for n, f in fits.items()})
    slow = {"product": 1.0, "lookup": 1.0, "stream": 1.0}
    write_samples(folder.loops, loops_of(model, per_op=10.0, per_launch=2.0, slow=slow), environment=here)
    return folder


@pytest.fixture(scope="module")
def profile_folder(fitted: dict, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("fit")
    write_folder(root / "samples", fitted)
    fit_profile(root / "samples", root / "mine")
    return root / "mine"


def test_a_written_profile_predicts_the_sum_of_its_parts(profile_folder: Path) -> None:
    profile = load_profile(str(profile_folder))
    predictor = Predictor(profile)
    model = profile.models[k.Gemm]
    for named in kernel_bound(SYSTEM, scale=1)[:4]:
        work = loop_work(graph_of(named.design), model)
        o = profile.overheads
        host = sum(o.of(name).t2_us * n for (name, _), n in work.by_name.items())
        host += work.more_launches * o.of("Optimizer.step#SGD.step").t5_us
        expected = host + work.kernels_us.sum()
        assert predictor.iteration_time_us(named.design) == pytest.approx(expected, rel=1e-6)


def test_a_written_profile_states_its_errors_and_sources(profile_folder: Path) -> None:
    profile = load_profile(str(profile_folder))
    assert profile.name == "mine"
    assert "Some CPU" in profile.provenance["gemm_forward_fp32"]
    assert {"iterations", "gemm_forward_fp32"} <= {e.kernel for e in profile.known_errors}
    assert profile.overheads.provenance["constants"]["queue_depth"]


def test_a_corrupt_entry_is_named(profile_folder: Path, tmp_path: Path) -> None:
    data = json.loads((profile_folder / "profile.json").read_text())
    data["kernels"]["sort"]["parameters"]["residuals"].append(1.0)
    (tmp_path / "profile.json").write_text(json.dumps(data))
    (tmp_path / "overheads.json").write_text((profile_folder / "overheads.json").read_text())
    with pytest.raises(ProfileError, match=r"kernels\.sort\.parameters\.log_work must have"):
        load_profile(str(tmp_path))


def test_bundled_profiles_and_other_folders_are_left_alone(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="never overwritten"):
        fit_profile(tmp_path, BUNDLED / "t4")
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(ProfileError, match="is no profile"):
        fit_profile(tmp_path, tmp_path)


def test_scales_are_of_their_groups(fitted: dict) -> None:
    scaled = with_scales(fitted, {"product": 2.0, "lookup": 3.0, "stream": 4.0})
    assert scaled["bmm_fp32"].fit.scale == 2.0
    assert scaled["sparse_update"].fit.scale == 3.0
    assert scaled["concat"].fit.scale == 4.0
