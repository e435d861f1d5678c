"""Overheads of traces as a profile, and the device that a trace names."""

from dataclasses import replace
from pathlib import Path

import pytest

from perfcore.errors import TraceError
from perfcore.profile.profile import load_profile
from perfcore.trace.device import device_of
from perfcore.trace.extract import Overhead, extract_overheads, merge
from perfcore.trace.kineto import read_kineto
from perfcore.trace.write_profile import overheads_of, write_profile

DATA = Path(__file__).parents[2] / "data"
TRACES = [read_kineto(DATA / "dlrm_8xv100" / f"rank{r}.pt.trace.json.gz") for r in (2, 6)]


@pytest.mark.parametrize(
    ("name", "gib", "device"),
    [
        ("Tesla V100-SXM2-32GB", 32, "v100-sxm2-32gb"),
        ("Tesla V100-DGXS-32GB", 32, "v100-sxm2-32gb"),
        ("Tesla V100-SXM2-16GB", 16, "v100-sxm2-16gb"),
        ("NVIDIA A100-PG509-200", 40, "a100-sxm4-40gb"),
        ("NVIDIA A100 80GB PCIe", 80, "a100-sxm4-80gb"),
        ("NVIDIA H200", 141, "h200-sxm"),
    ],
)
def test_devices_are_named_by_cuda_or_by_family_and_memory(name: str, gib: float, device: str) -> None:
    trace = replace(TRACES[0], device_name=name, device_bytes=gib * 2**30)
    assert device_of([trace]).name == device


@pytest.mark.parametrize("names", [("AMD Radeon Graphics",), ("",), ("NVIDIA H200", "Tesla T4")])
def test_devices_that_the_catalogue_lacks_or_that_differ(names: tuple[str, ...]) -> None:
    with pytest.raises(TraceError, match="must name one device of the catalogue"):
        device_of([replace(TRACES[0], device_name=n) for n in names])


def test_own_ops_have_the_traces_means_and_others_the_bundled_ones() -> None:
    bundled = load_profile("v100-sxm2-32gb").overheads
    table = overheads_of(TRACES, bundled)
    pooled = merge(extract_overheads(t) for t in TRACES)
    per_event_us = table.provenance["profiler_us_per_event"]
    raw = pooled["aten::linear"][Overhead.T2]
    assert table.of("aten::linear").t2_us == pytest.approx(
        raw.mean_us(profiler_us_per_event=per_event_us), abs=0.01
    )
    assert 0 < table.of("aten::linear").t2_us < raw.mean_us()
    lacking = next(op for op in bundled.by_op if op not in pooled)
    assert table.of(lacking) == bundled.of(lacking)
    assert table.launch_latency_us == pytest.approx(7.0, abs=3.0)
    assert len(table.provenance["sources"]) == 2


def test_a_profile_is_replaced_and_a_bundled_one_never(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSE_PROFILE_DIR", str(tmp_path))
    folder = write_profile(TRACES[:1], "mine")
    before = (folder / "overheads.json").read_text()
    assert write_profile(TRACES, "mine") == folder == tmp_path / "mine"
    assert (folder / "overheads.json").read_text() != before
    profile = load_profile("mine")
    assert (profile.name, profile.device.name) == ("mine", "v100-sxm2-32gb")
    assert profile.cost_model().predict_us([]) == []
