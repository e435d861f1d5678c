from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from perfcore.cost.model import Calibration
from perfcore.design import hardware
from perfcore.errors import ProfileError
from perfcore.graph import kernels as k
from perfcore.profile.profile import BUNDLED, find_profile, load_profile, profile_for, profile_names

EVERY_KERNEL = [
    k.Gemm(512.0, 1024.0, 479.0, k.DType.FP32),
    k.Gemm(512.0, 1024.0, 479.0, k.DType.TF32),
    k.Gemm(512.0, 1024.0, 479.0, k.DType.BF16),
    k.Gemm(27.0, 27.0, 128.0, k.DType.FP32, batch=2048.0),
    k.Elementwise("relu", 1e6, 4e6, 4e6),
    k.Reduction(2048.0, 1024.0, 4.0),
    k.Concat(1e7, 27.0),
    k.Transpose(2048.0, 27.0, 128.0, 4.0),
    k.PairGather(2048.0, 27.0, 351.0, 4.0),
    k.PairGather(2048.0, 27.0, 351.0, 4.0, backward=True),
    k.FusedInteraction(2048.0, 27.0, 128.0, 4.0),
    k.EmbeddingForward(2048.0, np.array([[1e6, 1e4]]), 10.0, 64.0, 1.0, 4.0, batched=True),
    k.EmbeddingBackward(
        2048.0, np.array([[1e6, 1e4]]), 10.0, 64.0, 1.0, 4.0, batched=True, optimizer="adagrad"
    ),
    k.SparseUpdate(20480.0, 1e6, 64.0, 1.0, 4.0),
    k.Sort(1e5, 8.0),
    k.MultiTensor("sgd", 1e6, 12.0, 12.0),
    k.Memcpy(1e6, k.CopyKind.H2D_PINNED),
    k.Memset(1e6),
    k.Collective(k.CollectiveKind.ALL_REDUCE, 1e7, 4.0, 4.0),
    k.Collective(k.CollectiveKind.ALL_TO_ALL, 1e7, 16.0, 8.0),
]


def hypothetical() -> hardware.Device:
    return replace(hardware.device("h100-sxm"), name="my-gpu", sm_count=200, hbm_bytes_per_s=6e12)


@pytest.fixture
def copy(tmp_path) -> Path:
    """A profile of one's own, with everything it needs beside it."""
    for name in ("v100-sxm2-16gb", "shared"):
        shutil.copytree(BUNDLED / name, tmp_path / name)
    return tmp_path / "v100-sxm2-16gb"


def edit(folder: Path, change) -> None:
    path = folder / "profile.json"
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def test_every_catalogue_device_has_a_profile():
    assert set(hardware.device_names()) <= set(profile_names())


@pytest.mark.parametrize("name", hardware.device_names())
def test_every_profile_prices_every_kernel(name):
    profile = load_profile(name)
    assert profile.device == hardware.device(name)
    for us in profile.cost_model().predict_us(EVERY_KERNEL):
        assert np.all(np.isfinite(us))
        assert np.all(us > 0)
    assert len(profile.hash) == 64
    assert all(profile.provenance.values())


@pytest.mark.parametrize("name", hardware.device_names())
def test_stated_errors_are_sane(name):
    for e in load_profile(name).known_errors:
        assert e.n > 0
        assert 0 < e.gmae_pct <= e.mape_pct + 0.1
        assert e.split
        assert e.source


def test_measured_products_are_flagged():
    h100, l40s = load_profile("h100-sxm").cost_model(), load_profile("l40s").cost_model()
    kernel = k.Gemm(512.0, 1024.0, 512.0, k.DType.BF16)
    assert h100.calibration(kernel) is Calibration.MEASURED
    assert l40s.calibration(kernel) is Calibration.EXTRAPOLATED
    assert h100.calibration(k.Gemm(512.0, 1024.0, 512.0, k.DType.TF32)) is Calibration.ANALYTIC


def test_a_hypothetical_device_is_priced_by_its_numbers():
    usual, quick = profile_for(hypothetical()), profile_for(replace(hypothetical(), hbm_bytes_per_s=12e12))
    node = hardware.node("dgx-h100")
    assert usual.device.name == "my-gpu"
    kernel = k.Elementwise("relu", 1e9, 4e9, 4e9)
    slow_us, quick_us = (p.cost_model().predict_us([kernel])[0] for p in (usual, quick))
    assert slow_us == pytest.approx(2 * quick_us, rel=0.01)
    assert usual.hash != quick.hash
    priced = profile_for(hypothetical(), node).cost_model()
    assert all(np.all(us > 0) for us in priced.predict_us(EVERY_KERNEL))


def test_a_hypothetical_device_has_no_collectives_without_a_node():
    with pytest.raises(ProfileError, match="node description is needed"):
        profile_for(hypothetical()).cost_model().predict_us(EVERY_KERNEL)


def test_the_node_is_part_of_the_hash():
    device = hardware.device("a100-sxm4-80gb")
    nodes = [hardware.node(n) for n in ("dgx-a100-80gb", "aws-p4d-24xlarge")]
    first, second = (load_profile(device.name, node=n).hash for n in nodes)
    assert first != second
    assert first == load_profile(device.name, node=nodes[0]).hash


def test_cost_models_travel_between_processes():
    costs = load_profile("a100-sxm4-80gb").cost_model()
    there = pickle.loads(pickle.dumps(costs))
    for here_us, there_us in zip(costs.predict_us(EVERY_KERNEL), there.predict_us(EVERY_KERNEL), strict=True):
        np.testing.assert_array_equal(here_us, there_us)


def test_loading_does_not_import_catboost():
    code = (
        "import sys; from perfcore.profile.profile import load_profile; load_profile('a100-sxm4-80gb');"
        "sys.exit('catboost' in sys.modules or 'pandas' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_profiles_are_small():
    bundled = [f for f in BUNDLED.rglob("*") if f.is_file()]
    assert sum(f.stat().st_size for f in bundled) <= 25e6
    for name in hardware.device_names():
        assert sum(f.stat().st_size for f in (BUNDLED / name).iterdir()) <= 3e6, name


def test_found_by_path_and_by_directory_variable(copy, monkeypatch, tmp_path):
    edit(copy, lambda d: d.update(name="mine"))
    assert load_profile(str(copy)).name == "mine"
    monkeypatch.setenv("DSE_PROFILE_DIR", str(tmp_path))
    assert load_profile("v100-sxm2-16gb").name == "mine"
    assert find_profile("t4") == BUNDLED / "t4"


def test_found_in_the_users_data_folder(copy, monkeypatch, tmp_path):
    home = tmp_path / "data"
    shutil.copytree(copy, home / "dlrm-dse" / "profiles" / "v100-at-home")
    shutil.copytree(BUNDLED / "shared", home / "dlrm-dse" / "profiles" / "shared")
    monkeypatch.setenv("XDG_DATA_HOME", str(home))
    assert "v100-at-home" in profile_names()
    assert load_profile("v100-at-home").device.name == "v100-sxm2-16gb"


def test_an_unknown_name_gets_a_hint():
    with pytest.raises(ProfileError, match="'a100-sxm4-80g' is not known") as caught:
        load_profile("a100-sxm4-80g")
    assert "Did you mean 'a100-sxm4-80gb'?" in (caught.value.hint or "")


def test_a_path_that_is_no_folder_is_refused(tmp_path):
    with pytest.raises(ProfileError, match="A profile is a folder"):
        load_profile(str(tmp_path / "nowhere"))


def test_a_folder_without_a_profile_is_refused(tmp_path):
    with pytest.raises(ProfileError, match=r"profile\.json: a profile needs this file"):
        load_profile(str(tmp_path))


def test_broken_json_is_refused(copy):
    (copy / "profile.json").write_text("{")
    with pytest.raises(ProfileError, match=r"profile\.json: must be JSON, but is not"):
        load_profile(str(copy))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(schema_version=99), r"\$\.schema_version must be 1, but got 99"),
        (lambda d: d.pop("schema_version"), r"\$\.schema_version is required"),
        (lambda d: d.update(device="v1000"), r"\$\.device names no device"),
        (lambda d: d.pop("kernels"), r"\$\.kernels is required"),
        (lambda d: d["kernels"].pop("concat"), r"\$\.kernels\.concat is required"),
        (
            lambda d: d["kernels"]["concat"]["parameters"].update(efficiency="high"),
            r"\$\.kernels\.concat\.parameters\.efficiency must be a finite number, but got 'high'",
        ),
        (
            lambda d: d["kernels"]["concat"]["parameters"].update(efficiency=1.5),
            r"`0 < efficiency <= 1` must hold",
        ),
        (
            lambda d: d["kernels"]["sort"].update(basis="guessed"),
            r"\$\.kernels\.sort\.basis must be one of measured, extrapolated, analytic",
        ),
        (
            lambda d: d["kernels"]["gemm_fp32"].update(correction="lost.npz"),
            r"\$\.kernels\.gemm_fp32\.correction names a file that is missing: .*lost\.npz",
        ),
        (
            lambda d: d["kernels"]["gemm_fp32"]["parameters"].update(low=[1, 1]),
            r"\$\.kernels\.gemm_fp32\.parameters\.low must have 4 numbers",
        ),
        (
            lambda d: d["kernels"]["gemm_fp32"]["parameters"].update(low=[1, 1, 1, "k"]),
            r"\$\.kernels\.gemm_fp32\.parameters\.low\.3 must be a finite number",
        ),
        (
            lambda d: d["kernels"]["gemm_bf16"]["parameters"]["pace"].update(compute_share=1.2),
            r"\$\.kernels\.gemm_bf16\.parameters\.pace\.compute_share must be in \(0, 1\], but got 1\.2",
        ),
        (
            lambda d: d["kernels"]["gemm_bf16"]["parameters"]["pace"].update(fill_clocks=-1),
            r"pace\.fill_clocks must be 0 or more, but got -1",
        ),
        (
            lambda d: d["kernels"]["gemm_bf16"]["parameters"].update(widths=[64, 32]),
            r"\$\.kernels\.gemm_bf16\.parameters\.widths must increase, but is \[64\.0, 32\.0\]",
        ),
        (
            lambda d: d["kernels"]["embedding_update"]["parameters"]["by_row_bytes"].reverse(),
            r"by_row_bytes must have increasing `row_bytes` and efficiencies in \(0, 1\]",
        ),
        (lambda d: d.update(collectives="gone.json"), r"gone\.json: a profile needs this file"),
        (lambda d: d.update(known_errors=[{"kernel": "x"}]), r"\$\.known_errors\[0\]\.n is required"),
    ],
)
def test_wrong_content_is_named(copy, change, message):
    edit(copy, change)
    with pytest.raises(ProfileError, match=message):
        load_profile(str(copy))


def test_wrong_collectives_are_named(copy):
    path = copy / "collectives.json"
    data = json.loads(path.read_text())
    data["curves"][1]["kind"] = "gossip"
    path.write_text(json.dumps(data))
    with pytest.raises(
        ProfileError, match=r"collectives\.json: \$\.curves\[1\]\.kind must be one of all_reduce"
    ):
        load_profile(str(copy))


def test_missing_overheads_name_who_lends_them(copy):
    (copy / "overheads.json").unlink()
    assert load_profile(str(copy)).overheads == load_profile("v100-sxm2-16gb").overheads
    edit(copy, lambda d: d.pop("overheads_from"))
    with pytest.raises(
        ProfileError, match=r"\$\.overheads_from is required where overheads\.json is missing"
    ):
        load_profile(str(copy))


def test_corrupt_overheads_are_named(copy):
    (copy / "overheads.json").write_text("{}")
    with pytest.raises(ProfileError, match=r"overheads\.json: overheads"):
        load_profile(str(copy))


def test_a_time_scale_keeps_calibration_and_intervals(copy):
    edit(copy, lambda d: d.update(time_scale=1.5))
    plain, scaled = load_profile("v100-sxm2-16gb").cost_model(), load_profile(str(copy)).cost_model()
    for kernel in EVERY_KERNEL:
        assert scaled.log_error_90(kernel) == plain.log_error_90(kernel)
        assert scaled.calibration(kernel) is plain.calibration(kernel)
        assert scaled.predict_us([kernel])[0] == pytest.approx(1.5 * plain.predict_us([kernel])[0])


def test_measured_collectives_are_named_as_a_source() -> None:
    assert load_profile("h100-sxm").provenance["collective"].startswith("nccl-tests times")
    assert load_profile("l40s").provenance["collective"].startswith("no measurement")
