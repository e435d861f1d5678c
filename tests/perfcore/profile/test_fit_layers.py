"""The layers' entries of the bundled profiles are what the fit makes of the traces."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perfcore.cost.convolution import ConvolutionParams
from perfcore.design import hardware
from perfcore.errors import ProfileError
from perfcore.graph.kernels import BatchNorm, Convolution, DType, GemmLayout
from perfcore.profile.fit_layers import (
    OWN,
    add_left_out,
    convolution_us,
    fit_convolution,
    layer_entries,
    product_share,
)
from perfcore.profile.layer_samples import (
    Samples,
    layer_samples,
    left_out_samples,
    matched_samples,
    recorded_layers,
)
from perfcore.profile.profile import BUNDLED, load_profile

DATA = Path(__file__).parents[2] / "data"
TRACES = (
    DATA / "resnet50_v100" / "workers0.pt.trace.json.gz",
    DATA / "resnet50_v100" / "ddp_ns.pt.trace.json.gz",
)
START = ConvolutionParams(*[0.6] * 6, bandwidth=0.75, weight_passes=1.0, floor_us=3.0, product_share=0.8)


def stored(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((BUNDLED / name / "profile.json").read_text(encoding="utf-8"))
    return content


@pytest.fixture(scope="module")
def samples() -> tuple[Samples, Samples]:
    return matched_samples(*TRACES)


def test_the_bundled_entries_are_the_fits(samples: tuple[Samples, Samples]) -> None:
    constants = json.loads((BUNDLED / "shared" / "constants.json").read_text(encoding="utf-8"))["layers"]
    entries, known = layer_entries(samples, constants, product_share=product_share(BUNDLED))
    content = stored(OWN)
    for name in ("convolution", "batch_norm", "pooling"):
        assert content["kernels"][name] == entries[name]
    assert [e for e in content["known_errors"] if e["kernel"].split(" ")[0] in entries] == known


def test_other_devices_take_shares_over_and_scale_bandwidths() -> None:
    own = stored(OWN)["kernels"]
    names = ("forward", "grad_input", "winograd_products", "product_share", "floor_us")
    for path in BUNDLED.glob("*/profile.json"):
        name = path.parent.name
        kernels = stored(name)["kernels"]
        ratio = (
            kernels["elementwise"]["parameters"]["efficiency"]
            / own["elementwise"]["parameters"]["efficiency"]
        )
        ours, theirs = own["convolution"]["parameters"], kernels["convolution"]["parameters"]
        assert [theirs[n] for n in names] == [ours[n] for n in names]
        assert theirs["bandwidth"] == pytest.approx(ours["bandwidth"] * ratio, rel=1e-3)
        assert theirs["weight_passes"] == pytest.approx(ours["weight_passes"] / ratio, rel=1e-3)
        basis = "measured" if name == OWN else "extrapolated"
        assert kernels["convolution"]["basis"] == kernels["batch_norm"]["basis"] == basis
        assert kernels["softmax"]["basis"] == "analytic"
        rates = kernels["elementwise"]["parameters"]["functions"]
        assert kernels["softmax"]["parameters"]["efficiency"] == rates["softmax"]["efficiency"]


def test_the_traces_hold_the_networks_layers(samples: tuple[Samples, Samples]) -> None:
    for s in samples:
        assert len(s.of(Convolution).kernels) == 158  # 53, and no gradient of the first one's input
        assert len(s.of(BatchNorm).kernels) == 106
        assert np.all(s.us > 0)


def test_a_fit_finds_the_constants_that_made_the_times(samples: tuple[Samples, Samples]) -> None:
    truth = replace(START, forward=0.8, grad_input=0.7, grad_weight=0.5, winograd_products=0.75)
    own = samples[0].of(Convolution)
    made = Samples(own.kernels, convolution_us(truth, own.kernels))
    found = fit_convolution([made], START)
    np.testing.assert_allclose(convolution_us(found, own.kernels), made.us, rtol=0.01)


def test_a_profile_without_layers_takes_the_pooled_ones(tmp_path: Path) -> None:
    content = stored("t4")
    for name in ("convolution", "batch_norm", "dropout"):
        del content["kernels"][name]
    for name in ("t4", "shared"):
        (tmp_path / name).mkdir()
        for file in (BUNDLED / name).iterdir():
            (tmp_path / name / file.name).write_bytes(file.read_bytes())
    (tmp_path / "t4" / "profile.json").write_text(json.dumps(content), encoding="utf-8")
    kernel = BatchNorm(1e5, 64.0, 4.0)
    profiles = [load_profile(str(tmp_path / "t4")), load_profile("shared", device=hardware.device("t4"))]
    old, pooled = (p.cost_model().predict_us([kernel])[0] for p in profiles)
    assert old == pooled


def recorded(name: str, *shapes: tuple[int, ...], out: tuple[int, ...] = ()) -> dict[str, Any]:
    return {
        "name": name,
        "input_shapes": [list(s) for s in shapes],
        "output_shapes": [list(out)],
    }


def test_an_execution_trace_tells_the_layers_in_the_order_of_their_calls() -> None:
    nodes = [
        recorded("aten::cudnn_convolution", (8, 3, 32, 32), (16, 3, 3, 3), out=(8, 16, 16, 16)),
        recorded("aten::cudnn_batch_norm", (8, 16, 16, 16), (16,)),
        recorded("aten::relu", (8, 16, 16, 16)),
        recorded("aten::cudnn_convolution", (8, 16, 16, 16), (32, 16, 1, 1), out=(8, 32, 16, 16)),
        recorded("aten::cudnn_batch_norm", (8, 32, 16, 16), (32,)),
    ]
    found = recorded_layers(nodes)
    filters = {kind: [getattr(x, "filters", 0) for x in found[kind]] for kind in GemmLayout}
    assert filters == {"forward": [16, 32], "grad_input": [32], "grad_weight": [32, 16]}
    first = found["forward"][0]
    assert isinstance(first, Convolution)
    assert (first.stride, first.padding_height) == (2, 1)
    backward = found["aten::cudnn_batch_norm_backward"]
    assert [x.channels for x in backward if isinstance(x, BatchNorm) and x.backward] == [32, 16]


def test_a_device_left_out_widens_the_intervals_of_others(tmp_path: Path) -> None:
    for name in ("shared", "t4", OWN):
        (tmp_path / name).mkdir()
        for file in (BUNDLED / name).iterdir():
            (tmp_path / name / file.name).write_bytes(file.read_bytes())
    kernels = (
        Convolution(8.0, 64.0, 28.0, 28.0, 64.0, 1.0, 1.0, DType.FP32),
        BatchNorm(6272.0, 64.0, 4.0),
    )
    device = hardware.device("p100-pcie-16gb")
    pooled = load_profile("shared", device=device).cost_model()
    far = np.array([3 * float(us) for us in pooled.predict_us(kernels)])
    before = stored(OWN)
    add_left_out(tmp_path, device, Samples(kernels, far))
    read = {n: json.loads((tmp_path / n / "profile.json").read_text()) for n in ("shared", "t4", OWN)}
    for name in ("convolution", "batch_norm"):
        assert read["t4"]["kernels"][name]["log_error_90"] == pytest.approx(np.log(3), abs=1e-3)
    assert read[OWN] == before
    [convolution, norm] = read["shared"]["known_errors"][-2:]
    assert convolution["kernel"] == "convolution (p100-pcie-16gb left out)"
    assert norm["mape_pct"] == pytest.approx(200 / 3, abs=0.01)


def test_other_devices_state_wider_intervals() -> None:
    own = stored(OWN)["kernels"]["convolution"]["log_error_90"]
    known = {e["kernel"]: e for e in stored("shared")["known_errors"]}
    assert known["convolution (rtx-2080-ti left out)"]["n"] == 59
    assert stored("h100-sxm")["kernels"]["convolution"]["log_error_90"] > own


def test_missing_traces_are_named(tmp_path: Path) -> None:
    for read in (layer_samples, left_out_samples):
        with pytest.raises(ProfileError, match="a fit needs this trace, but it is missing"):
            read(tmp_path)


def test_traces_of_other_networks_or_few_steps_are_refused() -> None:
    with pytest.raises(ProfileError, match="`steps >= 3` must hold, but got 1"):
        matched_samples(DATA / "dlrm_8xv100" / "rank7.pt.trace.json.gz", TRACES[0])
    with pytest.raises(ProfileError, match="the same number of calls of each layer"):
        matched_samples(TRACES[0], DATA / "small_traces" / "toy_GP100_gpu_user_annotation.kineto.json.gz")
