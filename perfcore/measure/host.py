"""The device that measures, described in the catalogue's terms: what its makers say, else what is measured."""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch

from perfcore.design.hardware import Device, Node, System, device_of_cuda_name, node_names
from perfcore.design.hardware import node as catalogue_node

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_UNKNOWN_CACHE_BYTES = 32e6
_UNKNOWN_CLOCK_HZ = 2e9
_COPY_CACHES = 4  # a copy this many times larger than the cache runs at memory's speed
_PRODUCT = 1024


def measured_system(device_name: str) -> System:
    """One device of this machine, alone."""
    on_cuda = device_name.startswith("cuda")
    found = _cuda_device(device_name) if on_cuda else _cpu()
    nodes = [catalogue_node(n) for n in node_names()]
    own = [n for n in nodes if n.device == found.name]
    return System(found, own[0] if own else _machine(found, on_cuda=on_cuda), 1)


def cache_bytes(device_name: str) -> float:
    """The last-level cache."""
    if device_name.startswith("cuda"):
        return float(
            getattr(torch.cuda.get_device_properties(device_name), "L2_cache_size", _UNKNOWN_CACHE_BYTES)
        )
    sizes = [_size(p.read_text()) for p in _CACHES.glob("index*/size")] if _CACHES.exists() else []
    return max(sizes, default=_UNKNOWN_CACHE_BYTES)


def _cuda_device(device_name: str) -> Device:
    """The catalogue's device of that name and memory, or one of measured rates."""
    properties = torch.cuda.get_device_properties(device_name)
    known = device_of_cuda_name(properties.name)
    if known is not None:
        return known
    clock_hz = float(getattr(properties, "clock_rate", 0)) * 1e3 or _UNKNOWN_CLOCK_HZ
    return _measured(
        properties.name.lower().replace(" ", "-"),
        properties.name,
        device_name,
        memory_bytes=float(properties.total_memory),
        units=properties.multi_processor_count,
        clock_hz=clock_hz,
        capability=float(f"{properties.major}.{properties.minor}"),
    )


def _cpu() -> Device:
    return _measured(
        "cpu",
        cpu_name(),
        "cpu",
        memory_bytes=_physical_bytes(),
        units=torch.get_num_threads(),
        clock_hz=_cpu_clock_hz(),
        capability=0.0,
    )


def _measured(
    name: str,
    description: str,
    device_name: str,
    *,
    memory_bytes: float,
    units: int,
    clock_hz: float,
    capability: float,
) -> Device:
    """A device whose peaks are what a large copy and a large product reach."""
    size = _COPY_CACHES * cache_bytes(device_name)
    x = torch.ones(int(size) // 4, device=device_name)
    y = torch.empty_like(x)
    small = x[: int(cache_bytes(device_name)) // 32]
    into = y[: len(small)]
    bandwidth = 2 * size / _seconds(lambda: y.copy_(x), device_name)
    cached = 8 * len(small) / _seconds(lambda: into.copy_(small), device_name)
    flops = {}
    for dtype in (torch.float32, torch.bfloat16):
        a = torch.ones(_PRODUCT, _PRODUCT, device=device_name, dtype=dtype)
        flops[dtype] = 2 * _PRODUCT**3 / _seconds(lambda a=a: a @ a, device_name)  # type: ignore[misc]
    return Device(
        name=name,
        description=description,
        hbm_bytes=memory_bytes,
        hbm_bytes_per_s=bandwidth,
        l2_bytes=cache_bytes(device_name),
        l2_bytes_per_s=max(cached, bandwidth),
        sm_count=units,
        clock_hz=clock_hz,
        fp32_flops_per_s=flops[torch.float32],
        tf32_flops_per_s=flops[torch.float32],
        bf16_flops_per_s=flops[torch.bfloat16],
        h2d_bytes_per_s=bandwidth,
        compute_capability=capability,
    )


def _seconds(call: Callable[[], object], device_name: str) -> float:
    """The shortest of a few runs."""
    times = []
    for _ in range(4):
        _wait(device_name)
        start = time.perf_counter()
        call()
        _wait(device_name)
        times.append(time.perf_counter() - start)
    return min(times)


def _wait(device_name: str) -> None:
    if device_name.startswith("cuda"):
        torch.cuda.synchronize(device_name)


def _machine(found: Device, *, on_cuda: bool) -> Node:
    """This machine; where collectives were measured, its links are never used."""
    ranks = torch.cuda.device_count() if on_cuda else max(1, cores() // torch.get_num_threads())
    return Node(
        name=f"this-{found.name}",
        description=f"{found.description}, room for {ranks} ranks",
        device=found.name,
        gpus=ranks,
        intra_bytes_per_s=found.hbm_bytes_per_s,
        intra_latency_us=1.0,
        inter_bytes_per_s=found.hbm_bytes_per_s,
        inter_latency_us=1.0,
        host_memory_bytes=_physical_bytes(),
        input_samples_per_s=math.inf,
    )


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _physical_bytes() -> float:
    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def cpu_name() -> str:
    """As the kernel names it."""
    names = _cpu_lines("model name")
    return names[0] if names else platform.machine()


def _cpu_clock_hz() -> float:
    clocks = [float(c) * 1e6 for c in _cpu_lines("cpu MHz")]
    return clocks[0] if clocks else _UNKNOWN_CLOCK_HZ


def _cpu_lines(key: str) -> list[str]:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    return [line.partition(":")[2].strip() for line in lines if line.startswith(key)]


def _size(text: str) -> float:
    """Bytes of `32768K`."""
    number, unit = text.strip()[:-1], text.strip()[-1]
    return float(number) * {"K": 2**10, "M": 2**20, "G": 2**30}[unit]
