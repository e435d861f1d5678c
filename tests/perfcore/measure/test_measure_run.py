from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from measure_designs import EAGER, small

import perfcore
from perfcore.design.design import Design, to_dict
from perfcore.design.model import EmbeddingTable
from perfcore.design.training import EmbeddingFusion, Launches, Optimizer, Precision
from perfcore.errors import DesignError, UnsupportedError
from perfcore.measure.__main__ import main
from perfcore.measure.isolate import Settings, measure_here, measure_isolated
from perfcore.measure.iteration import IterationSample, check_device, measure_iteration
from perfcore.measure.record import (
    DesignSample,
    NamedDesign,
    Status,
    environment,
    read_designs,
    read_samples,
    sample_from_dict,
    sample_to_dict,
    write_designs,
    write_samples,
)
from perfcore.measure.reduce import reduce_design, table_bytes

QUICK = Settings(min_iterations=2, max_seconds=0.05, time_limit_s=300, threads=1)


def test_iterations_are_measured_after_warm_up() -> None:
    sample = measure_iteration(small(), min_iterations=5, max_seconds=2.0)
    assert len(sample.iterations_us) >= 5
    assert 1 <= sample.warm_up <= 3
    assert min(sample.iterations_us) > 0
    assert min(sample.iterations_us) <= sample.median_us <= max(sample.iterations_us)
    assert sample.peak_memory_bytes > 0
    assert 0 < sample.final_loss < 10
    assert sample.clock in ("cpu_time", "wall")
    assert sample.notes == ()


def test_what_a_cpu_lacks_is_noted() -> None:
    captured = replace(EAGER, embedding=EmbeddingFusion.TABLE_BATCHED, launches=Launches.CUDA_GRAPH)
    design = small(captured, precision=Precision.TF32)
    sample = measure_iteration(design, min_iterations=2, max_seconds=0.05)
    assert sample.notes[-2:] == (
        "launched eagerly: a CPU has no CUDA graphs",
        "computed in fp32: a CPU has no TF32",
    )


def test_spread_is_the_interquartile_range() -> None:
    assert IterationSample((90.0, 100.0, 110.0), 1, 1, 0.5, "wall").spread_pct == pytest.approx(10)


@pytest.mark.parametrize("device", ["tpu", "", "cuda:x", "cpu:", "CUDA"])
def test_unknown_devices_are_refused(device: str) -> None:
    with pytest.raises(UnsupportedError, match="must be cpu, cuda or cuda:<index>"):
        check_device(device)


def test_an_absent_gpu_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"needs a CUDA GPU, but torch .* sees"):
        check_device("cuda:99")


def test_reduction_notes_every_change() -> None:
    design = small(batch=64, world_size=8)
    reduced = reduce_design(design, max_batch=4, max_rows=20)
    assert reduced.design.system.world_size == 1
    assert reduced.design.training.global_batch == 4
    assert [t.num_embeddings for t in reduced.design.model.tables] == [20, 7, 20]
    assert reduced.notes == (
        "one device with one rank's batch instead of 8, no collectives",
        "batch capped to 4 of 8",
        "rows capped to 20 in 2 of 3 tables",
    )


def test_a_design_that_fits_is_left_alone() -> None:
    assert reduce_design(small(), max_batch=16, max_rows=200).design == small()
    assert reduce_design(small()).notes == ()


@given(
    rows=st.lists(st.integers(1, 10**9), min_size=1, max_size=5),
    budget=st.floats(1e3, 1e12),
    optimizer=st.sampled_from(Optimizer),
)
@settings(max_examples=50, deadline=None)
def test_the_row_cap_is_the_largest_that_fits(rows: list[int], budget: float, optimizer: Optimizer) -> None:
    tables = tuple(EmbeddingTable(f"t{i}", n) for i, n in enumerate(rows))
    design = small(tables=tables, table_optimizer=optimizer)
    reduced = reduce_design(design, max_table_bytes=budget).design
    cap = max(t.num_embeddings for t in reduced.model.tables)
    assert table_bytes(design, max_rows=cap) <= budget
    assert cap == max(rows) or table_bytes(design, max_rows=cap + 1) > budget


@pytest.mark.parametrize("caps", [{"max_batch": 0}, {"max_rows": -1}, {"max_table_bytes": 8.0}])
def test_caps_below_one_are_refused(caps: dict[str, float]) -> None:
    with pytest.raises(DesignError, match=r"must hold, but got|One row of each table"):
        reduce_design(small(), **caps)


@pytest.mark.parametrize(
    "bad",
    [
        {"min_iterations": 0}, {"max_seconds": -1.0}, {"time_limit_s": float("nan")}, {"max_batch": 0},
        {"max_rows": -5}, {"max_ranks": 0}, {"threads": 0},
    ],
)  # fmt: skip
def test_settings_that_measure_nothing_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(DesignError, match="> 0` must hold"):
        Settings(**bad)


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_seeds_that_no_generator_takes_are_refused(seed: int) -> None:
    with pytest.raises(DesignError, match=r"`0 <= seed < 2\*\*32` must hold"):
        Settings(seed=seed)


def test_a_design_is_measured_in_its_own_process() -> None:
    sample = measure_isolated(NamedDesign("x", small(batch=32)), replace(QUICK, max_batch=8))
    assert sample.status is Status.OK, sample.detail
    assert sample.design.training.global_batch == 8
    assert sample.notes == ("batch capped to 8 of 32",)
    assert sample.iteration is not None
    assert sample.iteration.final_loss > 0


def here(design: Design, how: Settings) -> DesignSample:
    request = {"name": "x", "design": to_dict(design), "settings": asdict(replace(how, threads=None))}
    return sample_from_dict(measure_here(request))


def test_a_hang_is_recorded() -> None:
    sample = measure_isolated(NamedDesign("x", small()), replace(QUICK, time_limit_s=0.01))
    assert (sample.status, sample.detail) == (Status.TIMED_OUT, "not done in 0.01 s")


def test_a_refusal_is_recorded() -> None:
    sample = here(small(), replace(QUICK, device="tpu"))
    assert (sample.status, sample.iteration) == (Status.UNSUPPORTED, None)
    assert "'tpu'" in sample.detail


def test_a_crash_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    sample = measure_isolated(NamedDesign("x", small()), QUICK)
    assert (sample.status, sample.detail) == (Status.CRASHED, "ended with exit code 1")


def test_a_lack_of_memory_is_recorded() -> None:
    hungry = small(batch=2**31 - 1, num_dense_features=1_000_000)
    sample = here(hungry, QUICK)
    assert sample.status is Status.OUT_OF_MEMORY
    assert sample.detail


def test_samples_come_back_as_written(tmp_path: Path) -> None:
    samples = [
        DesignSample(
            "a", small(), Status.OK, "", IterationSample((1.0, 2.0), 3, 4, 0.5, "wall", ("n",)), ("m",)
        ),
        DesignSample("b", small(batch=4), Status.CRASHED, "why"),
    ]
    write_samples(tmp_path / "s.json", samples, environment=environment("cpu"))
    assert read_samples(tmp_path / "s.json") == samples
    assert [sample_from_dict(sample_to_dict(s)) for s in samples] == samples


def test_an_environment_names_versions_and_nobody() -> None:
    found = environment("cpu")
    assert set(found) == {"device", "device_kind", "torch", "cuda", "python", "threads", "cores"}
    assert os.uname().nodename not in json.dumps(found)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read as JSON"),
        ('{"designs": []}', "holds no design"),
        ("[]", "a list `designs`"),
        ('{"designs": [{"name": "x"}]}', "a list `designs`"),
        ('{"designs": [{"name": "x", "design": {}}]}', "needs the key 'model'"),
    ],
)
def test_bad_design_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "designs.json"
    path.write_text(text)
    with pytest.raises(DesignError, match=message):
        read_designs(path)


def test_the_command_refuses_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_designs(tmp_path / "d.json", [NamedDesign("x", small())])
    command = ["run", str(tmp_path / "d.json"), "--out", str(tmp_path / "s.json")]
    assert main([*command, "--device", "cuda:99"]) == 2
    assert "needs a CUDA GPU" in capsys.readouterr().err
    assert main([*command, "--max-seconds", "0"]) == 2
    assert "`max_seconds > 0` must hold" in capsys.readouterr().err


def test_a_copied_folder_runs_with_torch_and_numpy_alone(tmp_path: Path) -> None:
    shutil.copytree(
        Path(perfcore.__file__).parent, tmp_path / "perfcore", ignore=shutil.ignore_patterns("data")
    )
    write_designs(tmp_path / "d.json", [NamedDesign("x", small())])
    command = [
        "run",
        "d.json",
        "--out",
        "s.json",
        "--min-iterations",
        "2",
        "--max-seconds",
        "0.05",
        "--threads",
        "1",
    ]
    code = (
        "import sys\n"
        "class Only:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in {'pandas','scipy','catboost','numba','pydantic','yaml','optuna','ray','typer','dse'}:\n"
        "            raise ImportError(name)\n"
        "sys.meta_path.insert(0, Only())\n"
        "from perfcore.measure.__main__ import main\n"
        "code = main(sys.argv[1:])\n"
        "import perfcore.measure.model, perfcore.measure.isolate\n"
        "heavy = sorted({m.split('.')[0] for m in sys.modules} & {'pandas','scipy','catboost','numba','dse'})\n"
        "assert not heavy, heavy\n"
        "raise SystemExit(code)\n"
    )
    environ = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    subprocess.run([sys.executable, "-c", code, *command], cwd=tmp_path, env=environ, check=True, timeout=400)
    assert [(s.name, s.status) for s in read_samples(tmp_path / "s.json")] == [("x", "ok")]
