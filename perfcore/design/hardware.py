"""Devices and nodes: what a data sheet, or a measurement at locked clocks, says of them.

The catalogue is data (`perfcore/profile/data/devices/*.json`, `.../nodes/*.json`), each number with
its source; a user's own file has the same keys.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from perfcore.errors import HardwareError

CATALOGUE = Path(__file__).parent.parent / "profile" / "data"
CATALOGUE_KEYS = ("sources", "default_node", "cuda_names")


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator, in base units.

    Attributes:
        name: catalogue name, e.g. `a100-sxm4-80gb`.
        description: what a person calls it.
        hbm_bytes: device memory.
        hbm_bytes_per_s: device memory bandwidth (data sheet).
        l2_bytes: last-level cache.
        l2_bytes_per_s: last-level cache bandwidth.
        sm_count: streaming multiprocessors.
        clock_hz: boost clock.
        fp32_flops_per_s: FP32 peak outside tensor cores.
        tf32_flops_per_s: TF32 tensor-core peak, dense; the FP32 peak where there is none.
        bf16_flops_per_s: BF16 (or FP16, where there is no BF16) tensor-core peak, dense.
        h2d_bytes_per_s: host-to-device copy bandwidth.
        compute_capability: CUDA compute capability, 0 where there is none.
        power_w: board power limit.
    """

    name: str
    description: str
    hbm_bytes: float
    hbm_bytes_per_s: float
    l2_bytes: float
    l2_bytes_per_s: float
    sm_count: int
    clock_hz: float
    fp32_flops_per_s: float
    tf32_flops_per_s: float
    bf16_flops_per_s: float
    h2d_bytes_per_s: float
    compute_capability: float = 0.0
    power_w: float = 0.0

    def __post_init__(self) -> None:
        """Refuse numbers that no device has."""
        _check_numbers(self, may_be_zero=("compute_capability", "power_w"))


@dataclass(frozen=True, slots=True)
class Node:
    """Machines of equal GPUs, and the links among them.

    Attributes:
        name: catalogue name, e.g. `dgx-a100-80gb`.
        description: what a person calls it.
        device: catalogue name of its GPUs.
        gpus: GPUs in one machine (`local_world_size`).
        intra_bytes_per_s: per GPU and direction, inside the machine (NVLink or PCIe).
        intra_latency_us: smallest time of a collective inside the machine.
        inter_bytes_per_s: per GPU and direction, between machines (InfiniBand).
        inter_latency_us: added by a step between machines.
        host_memory_bytes: of one machine.
        price_per_gpu_hour: in US dollars; 0 when unknown.
        input_samples_per_s: what the data loader of one machine can feed; infinite when no limit.
    """

    name: str
    description: str
    device: str
    gpus: int
    intra_bytes_per_s: float
    intra_latency_us: float
    inter_bytes_per_s: float
    inter_latency_us: float
    host_memory_bytes: float
    price_per_gpu_hour: float = 0.0
    input_samples_per_s: float = math.inf

    def __post_init__(self) -> None:
        """Refuse numbers that no machine has."""
        _check_numbers(self, may_be_zero=("price_per_gpu_hour",))


@dataclass(frozen=True, slots=True)
class System:
    """What a design runs on: the GPUs of one node type, `world_size` of them.

    Attributes:
        device: of every rank.
        node: of every machine.
        world_size: ranks.
        slowness: how many times as long the launches of each rank take as the device's, collectives apart (older or
            throttled GPUs among the others); empty where all ranks are alike.
        hbm_bytes: memory of each rank's GPU, `None` where it is the device's; empty where that is so on all.
    """

    device: Device
    node: Node
    world_size: int = 1
    slowness: tuple[float, ...] = ()
    hbm_bytes: tuple[float | None, ...] = ()

    def __post_init__(self) -> None:
        """Refuse a world that whole machines do not make up."""
        gpus = self.node.gpus
        if self.world_size < 1 or (self.world_size > gpus and self.world_size % gpus):
            raise HardwareError(
                f"`world_size` must be 1 to {gpus}, or a multiple of the node's {gpus} GPUs, "
                f"but got world_size={self.world_size}."
            )
        for name in ("slowness", "hbm_bytes"):
            values = getattr(self, name)
            if values and len(values) != self.world_size:
                raise HardwareError(
                    f"`{name}` must name every rank or none, but got {len(values)} for "
                    f"world_size={self.world_size}."
                )
            known = [v for v in values if v is not None]
            if not all(0 < v < math.inf for v in known):
                raise HardwareError(f"`0 < {name} < inf` must hold, but got {min(known)} to {max(known)}.")

    @property
    def local_world_size(self) -> int:
        """Ranks on one machine."""
        return min(self.world_size, self.node.gpus)

    @property
    def rank_hbm_bytes(self) -> tuple[float, ...]:
        """Memory of each rank's GPU."""
        own = self.device.hbm_bytes
        return tuple(own if b is None else b for b in self.hbm_bytes or (None,) * self.world_size)

    @property
    def uneven(self) -> bool:
        """Whether some rank's GPU is said to differ from the device."""
        return bool(self.slowness or self.hbm_bytes)

    def even(self, world_size: int) -> System:
        """So many ranks, all of them as the device is."""
        return System(self.device, self.node, world_size)

    def resized(self, world_size: int) -> System:
        """So many ranks: the first of these, and beyond them what the device is."""
        more = max(world_size - self.world_size, 0)
        return System(
            self.device,
            self.node,
            world_size,
            (self.slowness + (1.0,) * more)[:world_size] if self.slowness else (),
            (self.hbm_bytes + (None,) * more)[:world_size] if self.hbm_bytes else (),
        )


H = TypeVar("H", Device, Node)


def device(name: str) -> Device:
    """The catalogue's device of that name.

    Raises:
        HardwareError: unknown name; the hint names the nearest.
    """
    return _from_catalogue(Device, name)


def node(name: str) -> Node:
    """The catalogue's node of that name.

    Raises:
        HardwareError: unknown name; the hint names the nearest.
    """
    return _from_catalogue(Node, name)


def default_node(device_name: str) -> Node:
    """The node that a job on that device runs in when none is named.

    The device's file names it under `default_node`, a key of the catalogue alone.

    Raises:
        HardwareError: unknown device; the hint names the nearest.
    """
    return node(str(_read(Device, device_name)["default_node"]))


def device_names() -> list[str]:
    """Names of all devices in the catalogue."""
    return sorted(p.stem for p in (CATALOGUE / "devices").glob("*.json"))


def device_of_cuda_name(name: str) -> Device | None:
    """The catalogue's device that CUDA calls so, `None` where it has none."""
    for known in device_names():
        if name in _read(Device, known)["cuda_names"]:
            return device(known)
    return None


def node_names() -> list[str]:
    """Names of all nodes in the catalogue."""
    return sorted(p.stem for p in (CATALOGUE / "nodes").glob("*.json"))


def sources(kind: type[Device] | type[Node], name: str) -> dict[str, str]:
    """Where each number of a catalogue entry comes from: field name to source."""
    return {k: str(v) for k, v in _read(kind, name)["sources"].items()}


def _from_catalogue(kind: type[H], name: str) -> H:
    return from_mapping(kind, _read(kind, name))


def from_mapping(kind: type[H], entry: Mapping[str, Any]) -> H:
    """A device or node from the keys of its file (those of the catalogue alone are allowed and ignored).

    Raises:
        HardwareError: an unknown or missing key, or an impossible number.
    """
    what = kind.__name__.lower()
    known = {f.name: f for f in fields(kind)}
    for key in entry:
        if key not in known and key not in CATALOGUE_KEYS:
            near = difflib.get_close_matches(key, known, n=1)
            raise HardwareError(
                f"A {what} has no key {key!r}.", hint=f"Did you mean {near[0]!r}?" if near else None
            )
    missing = [n for n, f in known.items() if f.default is MISSING and n not in entry]
    if missing:
        raise HardwareError(f"A {what} needs the key {missing[0]!r}, but it is missing.")
    return kind(**{k: v for k, v in entry.items() if k not in CATALOGUE_KEYS})


def _read(kind: type[Device] | type[Node], name: str) -> dict[str, Any]:
    what = f"{kind.__name__.lower()}s"
    path = CATALOGUE / what / f"{name}.json"
    names = sorted(p.stem for p in path.parent.glob("*.json"))
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        raise HardwareError(
            f"{kind.__name__} {name!r} is not in the catalogue.",
            hint=(f"Did you mean {near[0]!r}? " if near else "") + "Known: " + ", ".join(names),
        )
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return data


def _check_numbers(entry: Device | Node, *, may_be_zero: tuple[str, ...]) -> None:
    for f in fields(entry):
        value = getattr(entry, f.name)
        if f.type in ("str", str):
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise HardwareError(f"{entry.name!r}: `{f.name}` must be a number, but got {value!r}.")
        if f.name in may_be_zero and value == 0:
            continue
        if not value > 0 or (math.isinf(value) and f.default != math.inf):
            raise HardwareError(f"{entry.name!r}: `{f.name} > 0` must hold, but got {value!r}.")
