"""The hardware catalogue: every entry loads, every number has a source, and the numbers make sense."""

import json
from dataclasses import fields, replace

import pytest

from perfcore.design.hardware import (
    CATALOGUE,
    Device,
    Node,
    System,
    default_node,
    device,
    device_names,
    device_of_cuda_name,
    from_mapping,
    node,
    node_names,
    sources,
)
from perfcore.errors import HardwareError

DEVICES = [
    "a100-sxm4-40gb",
    "a100-sxm4-80gb",
    "b200-sxm",
    "h100-sxm",
    "h200-sxm",
    "l40s",
    "p100-pcie-16gb",
    "t4",
    "titan-xp",
    "v100-sxm2-16gb",
    "v100-sxm2-32gb",
]
# FP32 lanes of a streaming multiprocessor, by compute capability (CUDA programming guide).
FP32_LANES = {6.0: 64, 6.1: 128, 7.0: 64, 7.5: 64, 8.0: 64, 8.9: 128, 9.0: 128, 10.0: 128}


def numbers(entry: Device | Node) -> dict[str, float]:
    return {f.name: v for f in fields(entry) if not isinstance(v := getattr(entry, f.name), str)}


def test_the_catalogue_holds_the_announced_devices() -> None:
    assert device_names() == DEVICES


@pytest.mark.parametrize("name", DEVICES)
def test_device_loads_under_its_own_name_with_a_source_for_every_number(name: str) -> None:
    entry = device(name)
    assert entry.name == name
    assert set(sources(Device, name)) == set(numbers(entry))
    assert all(len(text) > 5 for text in sources(Device, name).values())


@pytest.mark.parametrize("name", node_names())
def test_node_loads_under_its_own_name_with_a_source_for_every_number(name: str) -> None:
    entry = node(name)
    assert entry.name == name
    assert device(entry.device).name == entry.device
    assert set(sources(Node, name)) == set(numbers(entry)) - {"input_samples_per_s"}


@pytest.mark.parametrize("name", node_names())
def test_a_node_without_a_price_says_so(name: str) -> None:
    source = sources(Node, name)["price_per_gpu_hour"]
    assert (node(name).price_per_gpu_hour == 0) == source.startswith("0: no public list price")
    assert source.startswith("0") or "list price of 20" in source


@pytest.mark.parametrize("name", DEVICES)
def test_faster_formats_are_faster_and_caches_beat_memory(name: str) -> None:
    gpu = device(name)
    assert gpu.bf16_flops_per_s >= gpu.tf32_flops_per_s >= gpu.fp32_flops_per_s
    assert gpu.l2_bytes_per_s > gpu.hbm_bytes_per_s > gpu.h2d_bytes_per_s
    assert gpu.hbm_bytes > 100 * gpu.l2_bytes


@pytest.mark.parametrize("name", DEVICES)
def test_fp32_peak_is_what_lanes_and_clock_give(name: str) -> None:
    gpu = device(name)
    peak = gpu.sm_count * FP32_LANES[gpu.compute_capability] * 2 * gpu.clock_hz
    assert gpu.fp32_flops_per_s == pytest.approx(peak, rel=0.01)


@pytest.mark.parametrize("name", DEVICES)
def test_the_name_states_the_memory_size(name: str) -> None:
    gib = device(name).hbm_bytes / 2**30
    stated = float(device(name).description.split()[-2]) if "GB" in device(name).description else gib
    assert 0.92 * stated < gib <= stated


@pytest.mark.parametrize("name", DEVICES)
def test_the_default_node_has_that_device(name: str) -> None:
    assert default_node(name).device == name


@pytest.mark.parametrize("name", node_names())
def test_links_inside_a_machine_beat_those_between(name: str) -> None:
    entry = node(name)
    assert entry.intra_bytes_per_s > entry.inter_bytes_per_s
    assert entry.host_memory_bytes >= 2 * device(entry.device).hbm_bytes


def test_a_copy_of_a_catalogue_file_is_a_valid_user_file() -> None:
    for path in (CATALOGUE / "devices").glob("*.json"):
        assert from_mapping(Device, json.loads(path.read_text())).name == path.stem
    for path in (CATALOGUE / "nodes").glob("*.json"):
        assert from_mapping(Node, json.loads(path.read_text())).name == path.stem


def test_unknown_names_are_answered_with_the_nearest() -> None:
    with pytest.raises(HardwareError, match="Device 'h100-smx' is not in the catalogue") as caught:
        device("h100-smx")
    assert caught.value.hint is not None
    assert "Did you mean 'h100-sxm'?" in caught.value.hint
    assert "titan-xp" in caught.value.hint
    with pytest.raises(HardwareError, match="Node 'dgx-a100' is not in the catalogue"):
        node("dgx-a100")
    with pytest.raises(HardwareError, match="Device 'tpu' is not in the catalogue"):
        default_node("tpu")


def test_unknown_and_missing_keys_are_named() -> None:
    entry = {f.name: getattr(device("t4"), f.name) for f in fields(Device)}
    with pytest.raises(HardwareError, match="A device has no key 'hbm_byte'") as caught:
        from_mapping(Device, entry | {"hbm_byte": 1})
    assert caught.value.hint == "Did you mean 'hbm_bytes'?"
    del entry["sm_count"]
    with pytest.raises(HardwareError, match="A device needs the key 'sm_count', but it is missing"):
        from_mapping(Device, entry)


@pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan")])
def test_impossible_numbers_are_refused(value: float) -> None:
    with pytest.raises(HardwareError, match=r"'t4': `hbm_bytes_per_s > 0` must hold, but got"):
        replace(device("t4"), hbm_bytes_per_s=value)
    with pytest.raises(HardwareError, match=r"'dgx-h100': `gpus > 0` must hold, but got"):
        replace(node("dgx-h100"), gpus=value)  # type: ignore[arg-type]


def test_a_price_may_be_zero_but_not_negative() -> None:
    assert replace(node("dgx-h100"), price_per_gpu_hour=0.0).input_samples_per_s == float("inf")
    with pytest.raises(HardwareError, match="'dgx-h100': `price_per_gpu_hour > 0` must hold, but got -1"):
        replace(node("dgx-h100"), price_per_gpu_hour=-1.0)
    with pytest.raises(HardwareError, match="'dgx-h100': `input_samples_per_s > 0` must hold, but got -1"):
        replace(node("dgx-h100"), input_samples_per_s=-1.0)


def test_numbers_in_quotes_are_refused() -> None:
    entry = {f.name: getattr(device("t4"), f.name) for f in fields(Device)}
    with pytest.raises(HardwareError, match=r"`sm_count` must be a number, but got True"):
        from_mapping(Device, entry | {"sm_count": True})
    with pytest.raises(HardwareError, match=r"`hbm_bytes` must be a number, but got '16 GB'"):
        from_mapping(Device, entry | {"hbm_bytes": "16 GB"})


@pytest.mark.parametrize("world_size", [1, 3, 8, 16, 64])
def test_worlds_of_whole_machines_or_less_are_accepted(world_size: int) -> None:
    system = System(device("h100-sxm"), node("dgx-h100"), world_size)
    assert system.local_world_size == min(world_size, 8)


@pytest.mark.parametrize("world_size", [0, -8, 9, 12])
def test_other_worlds_are_refused(world_size: int) -> None:
    with pytest.raises(HardwareError, match=r"or a multiple of the node's 8 GPUs, but got world_size="):
        System(device("h100-sxm"), node("dgx-h100"), world_size)


@pytest.mark.parametrize(
    ("name", "known"), [("NVIDIA H100 80GB HBM3", "h100-sxm"), ("Tesla T4", "t4"), ("NVIDIA H100 PCIe", None)]
)
def test_a_device_is_found_by_the_name_that_cuda_has_for_it(name, known):
    found = device_of_cuda_name(name)
    assert (found and found.name) == known
