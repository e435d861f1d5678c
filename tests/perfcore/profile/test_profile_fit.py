"""Fits recover what synthetic measurements were made with."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from fp32_rows import fp32_rows

from perfcore.cost.gemm import GemmParams, analytic_us
from perfcore.cost.model import Calibration
from perfcore.cost.roofline import GemmShapes, gemm_roofline
from perfcore.design import hardware
from perfcore.errors import ProfileError
from perfcore.graph import kernels as k
from perfcore.profile import fit, fit_gemm, fit_layers, fit_tables
from perfcore.profile.fit_batched import fit_batched
from perfcore.profile.fit_trees import Trees
from perfcore.profile.layer_samples import Samples
from perfcore.profile.profile import BUNDLED, load_profile

WIDTHS = [32, 64, 128, 512, 1024, 4096, 8192, 16384]


def grid(sizes) -> pd.DataFrame:
    m, n, width = (a.ravel() for a in np.meshgrid(sizes, WIDTHS, WIDTHS, indexing="ij"))
    return pd.DataFrame({"batch": 1, "m": m, "n": n, "k": width})


def true_us(frame: pd.DataFrame, device, dtype, *, efficiency=0.6, floor_us=5.0) -> np.ndarray:
    shapes = GemmShapes(*(frame[c].to_numpy(dtype=np.float64) for c in ("batch", "m", "n", "k")))
    params = GemmParams(efficiency, floor_us)
    return analytic_us(gemm_roofline(shapes, device, dtype), params) * (1 + 0.1 * (shapes.n < 100))


def bf16_frame(name: str) -> pd.DataFrame:
    frame = grid([1, 16, 256, 4096, 32768])
    us = true_us(frame, hardware.device(name), k.DType.BF16, floor_us=2.2)
    versions = [frame.assign(latency_ms=us * scale / 1e3) for scale in (0.98, 1.0, 1.3)]
    return pd.concat(versions, ignore_index=True)


def vector_frame(device, *, share=0.9, gap_us=18.0, host_us=30.0) -> pd.DataFrame:
    rows, cols = (
        a.ravel()
        for a in np.meshgrid([1, 16, 512, 8192, 16384, 32768], [64, 1024, 8192, 12288, 16384], indexing="ij")
    )
    frames = []
    for op in fit_tables.ATEN_NAMES:
        bytes_ = 4.0 * fit_tables.TENSORS.get(op, 2) * rows * cols
        us = np.maximum(bytes_ / (share * device.hbm_bytes_per_s) * 1e6 + 2.0 + gap_us, host_us)
        frames.append(pd.DataFrame({"op": op, "rows": rows, "cols": cols, "latency_ms": us / 1e3}))
    return pd.concat(frames, ignore_index=True)


def nccl_frame(system: str) -> pd.DataFrame:
    sizes = 2.0 ** np.arange(9, 30, 2)
    parts = []
    for name in fit_tables.NCCL_KINDS:
        for gpus in (2, 4, 8):
            for scale in (0.9, 1.0, 1.2):
                us = scale * (10.0 + sizes / 200e9 * 1e6)
                parts.append(
                    pd.DataFrame(
                        {
                            "system": system,
                            "collective": name,
                            "num_gpus": gpus,
                            "bytes": sizes,
                            "latency_ms": us / 1e3,
                        }
                    )
                )
    return pd.concat(parts, ignore_index=True)


def test_the_label_is_the_median_over_versions():
    device = hardware.device("h100-sxm")
    samples = fit_gemm.bf16_samples(bf16_frame("h100-sxm"), device)
    assert len(samples.us) == 5 * len(WIDTHS) ** 2
    frame = grid([1, 16, 256, 4096, 32768]).sort_values(["m", "n", "k"])
    np.testing.assert_allclose(samples.us, true_us(frame, device, k.DType.BF16, floor_us=2.2), rtol=1e-9)


def test_a_correction_learns_what_the_roofline_lacks():
    device = hardware.device("h100-sxm")
    samples = fit_gemm.bf16_samples(bf16_frame("h100-sxm"), device)
    result = fit_gemm.fit_gemm(samples, floor_us=2.2, trees=Trees(iterations=100), basis=Calibration.MEASURED)
    assert result.params.efficiency == 1.0
    assert result.params.pace is not None
    assert result.params.widths == tuple(WIDTHS)
    assert result.held_out.mape_pct < 0.5 * result.analytic.mape_pct
    assert result.samples == len(samples.us)


def test_pairs_of_n_and_k_stay_in_one_fold():
    frame = grid([1, 2, 3])
    shapes = GemmShapes(*(frame[c].to_numpy(dtype=np.float64) for c in ("batch", "m", "n", "k")))
    folds = pd.Series(fit_gemm.nk_folds(shapes)).groupby([frame["n"], frame["k"]]).nunique()
    assert folds.eq(1).all()
    assert len(set(fit_gemm.nk_folds(shapes))) > 5


def test_pointwise_rates_are_found():
    device = hardware.device("t4")
    result = fit_tables.fit_vector(vector_frame(device), device, floor_us=2.0)
    assert result.efficiency == pytest.approx(dict.fromkeys(result.efficiency, 0.9), rel=0.02)
    assert result.held_out.mape_pct < 1
    assert result.common == pytest.approx(0.9, rel=0.02)


def test_short_pointwise_rows_show_the_host_and_long_ones_the_gap():
    device = hardware.device("t4")
    frame = vector_frame(device)
    share = fit_tables.gap_share([(op, frame[frame["op"] == op]) for op in fit_tables.ATEN_NAMES], device)
    assert share == pytest.approx((18.0 + 2.0) / 30.0, abs=0.02)


def test_too_few_long_rows_are_refused():
    device = hardware.device("h100-sxm")
    with pytest.raises(ProfileError, match=r"five rows of 0\.2 ms or more are needed for 'add', but got 0"):
        fit_tables.fit_vector(vector_frame(device).query("rows < 16"), device, floor_us=2.0)


def test_curves_take_the_median_over_versions():
    [curve] = [
        c
        for c in fit_tables.nccl_curves(nccl_frame("x"))
        if (c.kind, c.num_gpus) == (k.CollectiveKind.ALL_TO_ALL, 4)
    ]
    assert curve.us[0] == pytest.approx(10.0 + 512 / 200e9 * 1e6, rel=1e-4)
    assert fit_tables.curve_errors([curve]).mape_pct < 10


def test_the_published_errors_are_computed_as_published():
    e = fit_gemm.errors(np.array([1.1, 0.8, 1.0]), np.ones(3))
    assert e.n == 3
    assert e.mape_pct == pytest.approx(10.0)
    assert e.bias_pct == pytest.approx(-10 / 3)
    assert e.gmae_pct == pytest.approx(100 * (0.1004 * 0.2004 * 0.0004) ** (1 / 3), rel=1e-6)


def bmm_frame(name: str) -> pd.DataFrame:
    """Batched products at 0.7 of the roofline, 4 µs of start-up."""
    device = hardware.device(name)
    rows = []
    for op, (n, width) in {"mla_gen_pre": (512.0, 128.0), "mla_gen_post": (128.0, 512.0)}.items():
        for heads in (1, 2, 4, 8, 16, 32):
            for tokens in (16, 256, 4096):
                shape = GemmShapes(*(np.array([float(x)]) for x in (heads, tokens, n, width)))
                us = 4.0 + float(gemm_roofline(shape, device, k.DType.BF16).us[0]) / 0.7
                rows.append((op, heads, tokens, us / 1e3))
    frame = pd.DataFrame(rows, columns=["op_name", "num_heads", "num_tokens", "latency"])
    return frame.assign(bmm_dtype="bfloat16")


def test_constants_of_batched_products_are_found() -> None:
    device = hardware.device("h100-sxm")
    params = GemmParams(efficiency=0.9, floor_us=2.0)
    found = fit_batched(bmm_frame("h100-sxm"), device, params)
    assert (found.efficiency, found.floor_us) == pytest.approx((0.7, 4.0), rel=0.01)
    assert found.held_out.mape_pct < 1 < found.plain.mape_pct


@pytest.fixture
def data(tmp_path) -> Path:
    """Small synthetic measurements of every kind, laid out like the raw data."""
    root = tmp_path / "raw"
    (root / "kernels").mkdir(parents=True)
    (root / "paper").mkdir()
    boards = fit.board_devices(BUNDLED)
    pd.concat([bf16_frame(n).assign(system=s) for s, n in fit.BF16_SYSTEMS.items()]).to_parquet(
        root / "kernels" / "gemm_bf16.parquet"
    )
    for make, file in ((fp32_rows, "gemm_fp32"), (vector_frame, "vector_fp32")):
        pd.concat([make(boards[n]).assign(gpu=g) for g, n in fit.FP32_GPUS.items()]).to_parquet(
            root / "kernels" / f"{file}.parquet"
        )
    pd.concat([nccl_frame(s) for s in fit.BF16_SYSTEMS]).to_csv(root / "kernels" / "nccl.csv.gz")
    pd.concat([bmm_frame(n).assign(system=s) for s, n in fit.BF16_SYSTEMS.items()]).to_csv(
        root / "kernels" / "mla_bmm.csv.gz"
    )
    sizes = 2.0 ** np.arange(8, 31)
    figure = [
        pd.DataFrame(
            {"collective": c, "n_gpus": 4, "size_bytes": sizes, "latency_us(read off)": 80 + sizes / 5e4}
        )
        for c in fit_tables.FIGURE_KINDS
    ]
    paper = root / "paper"
    pd.concat(figure).to_csv(paper / "collectives_4xv100_latency_busbw_from_figure.csv")
    pd.DataFrame(
        {
            "collective": ["all_to_all(v)", "all_reduce"],
            "n_gpus": 8,
            "ln_p_log2bytes": 12,
            "sats_p_log2bytes": 24,
            "max_bus_bw_GBps": [46.0, 130.0],
            "overhead_us": [68.0, 43.0],
            "sig_L": [5.9, 6.7],
            "sig_x0": [12.5, 11.6],
            "sig_k": [0.23, 0.19],
            "sig_b": [-4.0, -4.3],
        }
    ).to_csv(paper / "collective_fit_params_v100.csv")
    gemm = pd.DataFrame({"M": [2048, 512], "N": [1024, 64], "K": 1024, "batch": 1, "mean_us": [430.0, 30.0]})
    gemm.to_csv(paper / fit.GEMM_FILE)
    samples = ["EL backward", "EL forward"]
    samples += [f"trace DLRM_{name} {way}" for name in ("default", "MLPerf") for way in ("fwd", "bwd")]
    points = pd.DataFrame(
        {"sample": samples, "B": 2048, "E": 1e6, "T": 8, "L": 10, "D": 64, "measured_kernel_us": 99.0}
    )
    points.to_csv(paper / fit.EMBEDDING_FILE)
    trace = pd.DataFrame(
        {
            "kernel": ["vectorized_elementwise_kernel"],
            "op_input_shapes": ["((2048, 512), (), (0,))"],
            "kernels_per_op": 1,
            "mean_us": 9.9,
            "min_us": 9.0,
            "max_us": 11.0,
        }
    )
    trace.to_csv(paper / fit.MEMORY_FILE)
    return root


@pytest.fixture
def out(tmp_path) -> Path:
    folder = tmp_path / "profiles"
    (folder / "shared").mkdir(parents=True)
    for name in ("constants.json", "boards.json"):
        shutil.copy(BUNDLED / "shared" / name, folder / "shared" / name)
    return folder


def few_layers() -> Samples:
    """One kernel of each product and layer, and what it took."""
    sizes = (8.0, 64.0, 28.0, 28.0, 64.0, 1.0, 1.0, k.DType.FP32)
    kernels = [
        *(k.Convolution(*sizes, layout=layout) for layout in k.GemmLayout),
        *(k.BatchNorm(6272.0, 64.0, 4.0, backward=b) for b in (False, True)),
        *(k.Pooling("max", 4e5, 1e5, 4.0, backward=b) for b in (False, True)),
    ]
    return Samples(tuple(kernels), np.full(len(kernels), 20.0))


@pytest.fixture
def few_trees(monkeypatch):
    monkeypatch.setattr(fit_layers, "layer_samples", lambda _: (few_layers(), few_layers()))
    monkeypatch.setattr(fit_layers, "left_out_samples", lambda _: few_layers())
    for name in ("BF16_TREES", "FP32_TREES", "BF16_POOLED_TREES"):
        monkeypatch.setattr(fit, name, Trees(iterations=8, depth=3))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.usefixtures("few_trees")
def test_fitting_twice_gives_the_same_files_and_they_load(data, out, monkeypatch, capsys):
    assert fit.main(["--data", str(data), "--out", str(out)]) == 0
    first = contents(out)
    fit.fit_all(data, out)
    assert contents(out) == first
    monkeypatch.setenv("DSE_PROFILE_DIR", str(out))
    shutil.copy(BUNDLED / "v100-sxm2-16gb" / "overheads.json", out / "v100-sxm2-16gb")
    shutil.copy(BUNDLED / "a100-sxm4-80gb" / "overheads.json", out / "a100-sxm4-80gb")
    for name in hardware.device_names():
        profile = load_profile(str(out / name))
        [us] = profile.cost_model().predict_us([k.Gemm(4096.0, 1024.0, 512.0, k.DType.BF16)])
        assert us > 0
    capsys.readouterr()
    assert fit.main(["--report", "--out", str(out)]) == 0
    assert "h100-sxm           gemm_bf16" in capsys.readouterr().out


def test_a_missing_data_file_is_named(tmp_path, out):
    with pytest.raises(ProfileError, match=r"gemm_bf16\.parquet: a fit needs this file"):
        fit.fit_all(tmp_path, out)


def test_the_command_wants_something_to_do(capsys):
    with pytest.raises(SystemExit):
        fit.main([])
    assert "one of --data and --report is required" in capsys.readouterr().err
