"""A profile of a measured device: its memory and machine come along, its collectives are priced, its errors stated."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from dse.cli import app
from dse.config import load_design
from dse.placement import plan_for
from dse.study_config import load_space, on_profile
from perfcore.design.design import Design
from perfcore.design.hardware import System, default_node, device
from perfcore.errors import HardwareError
from perfcore.graph import kernels as k
from perfcore.measure.kernels import Timing
from perfcore.measure.samples import KernelSample, SampleFolder, kernel_from_dict, kernel_to_dict
from perfcore.predictor import Predictor
from perfcore.profile.fit_collectives import collective_curves, collective_errors
from perfcore.profile.fit_samples import fit_profile
from perfcore.profile.profile import load_profile, priced, priced_system

DESIGN = Path("spaces/designs/dlrm_default.yaml")
MEMORY_GIB = 3.0


def timed(kernel: k.Kernel, us: float) -> KernelSample:
    return KernelSample(kernel, Timing((us,) * 3, "cold", "wall"))


def exchange(size: float, us: float, kind: k.CollectiveKind = k.CollectiveKind.ALL_TO_ALL) -> KernelSample:
    return timed(k.Collective(kind, size, 2.0, 2.0), us)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A profile fitted to a few made-up samples: 1 GB/s, 1 µs a call."""
    from perfcore.cost.work import work_of
    from perfcore.measure.collect import all_cases, system_to_dict
    from perfcore.measure.iteration import IterationSample
    from perfcore.measure.loops import host_bound
    from perfcore.measure.record import DesignSample, Status, environment, write_samples

    folder = tmp_path_factory.mktemp("measured")
    samples = SampleFolder(folder / "samples")
    samples.create()
    t4 = device("t4")
    own = replace(t4, name="abacus", description="an abacus", hbm_bytes=MEMORY_GIB * 2**30)
    node = replace(default_node("t4"), name="desk", device="abacus", gpus=2)
    here = environment("cpu") | {"device": "an abacus", "threads": 1}
    samples.add_environment(here | {"system": system_to_dict(System(own, node, 1))})
    kinds: dict[str, int] = {}
    for case in all_cases("cpu"):
        work = work_of(case.kernel)
        kinds[work.kind] = kinds.get(work.kind, 0) + 1
        if kinds[work.kind] <= 8:
            samples.add(timed(case.kernel, 1.0 + float(work.amounts.sum()) / 1e3))
    for i in range(6):
        samples.add(exchange(256.0 * 4**i, 100.0 + 256.0 * 4**i / 1e3))
    loops = [
        DesignSample(d.name, d.design, Status.OK, iteration=IterationSample((us,) * 3, 1, 1, 0.5, "cpu_time"))
        for us, d in enumerate(host_bound(System(t4, default_node("t4"), 1))[:10], 500)
    ]
    write_samples(samples.loops, loops, environment=here)
    fit_profile(folder / "samples", folder / "my-abacus")
    return folder / "my-abacus"


def test_collectives_survive_json_and_lie_apart(tmp_path: Path) -> None:
    sample = exchange(64.0, 3.0)
    back = kernel_from_dict(json.loads(json.dumps(kernel_to_dict(sample.kernel))))
    assert back.kind is k.CollectiveKind.ALL_TO_ALL  # type: ignore[union-attr]
    folder = SampleFolder(tmp_path)
    folder.create()
    assert folder.collective_samples() == []
    folder.add(sample)
    assert not folder.kernels.exists()
    assert [s.timing.median_us for s in folder.collective_samples()] == [3.0]


def test_curves_go_through_the_medians() -> None:
    samples = [exchange(256.0 * 4**i, 10.0 * 2**i) for i in range(5)]
    found = collective_curves(samples, source="a test")
    assert found is not None
    (curve,) = found["curves"]
    assert (curve["kind"], curve["num_gpus"]) == ("all_to_all", 2)
    assert curve["bytes"] == [256.0 * 4**i for i in range(5)]
    assert curve["us"] == [10.0 * 2**i for i in range(5)]
    (error,) = collective_errors(samples, source="a test")
    assert error.n == 3
    assert 0 <= error.mape_pct < 20
    assert collective_curves(samples[:1], source="a test") is None
    again = collective_curves([*samples, exchange(256.0, 1000.0), exchange(256.0, 12.0)], source="a test")
    assert again is not None
    assert again["curves"][0]["us"][0] == 12.0  # a disturbed session does not count


def test_the_profile_prices_what_was_measured(measured: Path) -> None:
    profile = load_profile(str(measured))
    kernel = k.Collective(k.CollectiveKind.ALL_TO_ALL, np.full((1, 1), 1024.0), 2.0, 2.0)
    (us,) = profile.cost_model().predict_us([kernel])
    assert float(us.item()) == pytest.approx(101.02, rel=1e-3)
    assert "all_to_all of 2 ranks" in {e.kernel for e in profile.known_errors}


def test_a_measured_device_comes_along(measured: Path) -> None:
    design = load_design(DESIGN, place=plan_for)
    moved, profile = priced(design, str(measured))
    assert (moved.system.device.name, moved.system.node.name) == ("abacus", "desk")
    assert moved.system.world_size == design.system.world_size
    assert moved.model == design.model
    prediction = Predictor(profile).predict(moved)
    assert prediction.fits is (float(prediction.memory.total.max()) <= MEMORY_GIB * 2**30)
    other = System(device("t4"), default_node("t4"), 1)
    assert priced_system("v100-sxm2-16gb", other) == other  # a catalogue profile prices what is asked for
    assert priced(design, None)[0] == design
    with pytest.raises(HardwareError, match="`world_size` must be 1 to 2"):
        priced_system(str(measured), System(device("t4"), default_node("a100-sxm4-80gb"), 3))


def test_an_interval_is_stated(measured: Path) -> None:
    design, profile = priced(load_design(DESIGN, place=plan_for), str(measured))
    predictor = Predictor(profile)
    prediction = predictor.predict(design)
    low, high = predictor.interval_us(prediction)
    assert low < prediction.iteration_time_us < high


@pytest.mark.parametrize("command", ["predict", "explain"])
def test_commands_name_the_measured_device(measured: Path, command: str) -> None:
    result = CliRunner().invoke(app, [command, str(DESIGN), "--profile", str(measured), "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["device"] == "abacus"
    assert found["device_hbm_gib"] == pytest.approx(MEMORY_GIB)


def test_a_study_is_limited_by_the_measured_memory(measured: Path) -> None:
    study = on_profile(load_space(Path("spaces/dlrm_small.yaml")), str(measured))
    assert (study.space.device.name, study.space.node.gpus) == ("abacus", 2)
    assert study.constraints[0].max == pytest.approx(MEMORY_GIB)
    plain = load_space(Path("spaces/dlrm_small.yaml"))
    assert on_profile(plain, None) == plain


def test_a_run_exports_designs_of_the_measured_device(measured: Path, tmp_path: Path) -> None:
    command = [
        "run",
        "spaces/dlrm_small.yaml",
        "--profile",
        str(measured),
        "-n",
        "8",
        "--runs-dir",
        str(tmp_path),
    ]
    result = CliRunner().invoke(app, [*command, "--json"])
    assert result.exit_code == 0, result.output
    (run,) = tmp_path.iterdir()
    design: Design = load_design(sorted((run / "designs").glob("*.yaml"))[0], place=plan_for)
    assert design.system.device.name == "abacus"
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "is not known" not in page
    assert "an abacus" in page or "abacus" in page
