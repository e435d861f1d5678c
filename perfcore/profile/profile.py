"""Profiles: a device's kernel models and host overheads, with where each number came from.

A profile is a folder: `profile.json`, files of trees (`.npz`), `collectives.json`, `overheads.json`. It is looked for
at an explicit path, in `DSE_PROFILE_DIR`, in the user's data folder, then among the bundled ones.
"""

from __future__ import annotations

import difflib
import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from perfcore.cost.model import CostModel, ScaledModel
from perfcore.design import hardware
from perfcore.design.design import Design
from perfcore.design.hardware import Device, Node, System
from perfcore.errors import HardwareError, ProfileError
from perfcore.overheads import OverheadTable, overheads_from_json, scaled
from perfcore.profile.build import kernel_models
from perfcore.profile.schema import SCHEMA_VERSION, KnownError, Section, known_errors, provenance, read_json

BUNDLED = Path(__file__).parent / "data"
POOLED = "shared"  # prices any device by its numbers alone


@dataclass(frozen=True, slots=True)
class Profile:
    """Calibration of one device.

    Attributes:
        name: the profile's name.
        device: the device that it prices.
        overheads: host overheads T1 to T5.
        known_errors: held-out errors of its kernel models.
        provenance: kernel entry to the source of its numbers.
        host_log_error_90: nine in ten hosts' times lie within a factor `exp` of it of the overheads' sum.
        hash: of every file read, the device and the node; equal profiles price alike.
        models: kernel class to model.
    """

    name: str
    device: Device
    overheads: OverheadTable
    known_errors: tuple[KnownError, ...]
    provenance: Mapping[str, str]
    host_log_error_90: float
    hash: str
    models: Mapping[type, Any]

    def cost_model(self) -> CostModel:
        """Prices kernels of every kind."""
        return CostModel(self.models)


def load_profile(name_or_path: str, *, device: Device | None = None, node: Node | None = None) -> Profile:
    """The profile of that name, or of that folder.

    Args:
        name_or_path: a profile's name, or the path of its folder.
        device: prices this device instead of the catalogue's of the profile's name.
        node: links of its machine; the device's default node when omitted.

    Raises:
        ProfileError: not found, or a file is missing or corrupt; the message names the file.
    """
    folder = find_profile(name_or_path)
    data = read_json(folder / "profile.json")
    version = data.number("schema_version")
    if version != SCHEMA_VERSION:
        raise data.error(f"must be {SCHEMA_VERSION}, but got {version:g}", "schema_version")
    device = device or _catalogue_device(data)
    node = node or _own_node(data) or _default_node(device)
    overheads_file = _overheads_file(data, folder)
    models = kernel_models(data, folder, device=device, node=node)  # names what is wrong before all is hashed
    overheads, factor = _overheads(overheads_file), _time_scale(data)
    if factor != 1.0:
        models = {kind: ScaledModel(model, factor) for kind, model in models.items()}
        overheads = scaled(overheads, factor)
    return Profile(
        name=data.text("name"),
        device=device,
        overheads=overheads,
        known_errors=known_errors(data),
        provenance=provenance(data, folder),
        host_log_error_90=data.number("host_log_error_90") if "host_log_error_90" in data else 0.0,
        hash=_hash([*_files(data, folder), overheads_file], device, node),
        models=models,
    )


def profile_for(device: Device, node: Node | None = None) -> Profile:
    """The profile of the device's own name where there is one, else the pooled one priced by its numbers."""
    try:
        find_profile(device.name)
    except ProfileError:
        return load_profile(POOLED, device=device, node=node)
    return load_profile(device.name, device=device, node=node)


def priced(design: Design, name_or_path: str | None) -> tuple[Design, Profile]:
    """The design on what the profile prices, and the profile; the design's own device's where none is named.

    Raises:
        ProfileError: there is no such profile, or it is corrupt.
        HardwareError: the measured machine has no room for the design's world.
    """
    system = design.system
    if name_or_path is None:
        return design, profile_for(system.device, system.node)
    system = priced_system(name_or_path, system)
    return design.with_system(system), load_profile(name_or_path, device=system.device, node=system.node)


def priced_system(name_or_path: str, system: System) -> System:
    """What a profile prices where a job asks for `system`: a measured device is itself, with its memory and its machine.

    A profile of the catalogue prices the device that is asked for.

    Raises:
        ProfileError: there is no such profile, or it is corrupt.
        HardwareError: the measured machine has no room for so many ranks.
    """
    return on_machine(measured_machine(name_or_path), system)


def measured_machine(name_or_path: str) -> tuple[Device, Node | None] | None:
    """The device that a profile describes itself, and its machine; `None` for a profile of the catalogue.

    Raises:
        ProfileError: there is no such profile, or it is corrupt.
    """
    data = read_json(find_profile(name_or_path) / "profile.json")
    if "device" not in data or not isinstance(data.raw("device"), dict):
        return None
    return _catalogue_device(data), _own_node(data)


def on_machine(machine: tuple[Device, Node | None] | None, system: System) -> System:
    """The system with as many ranks on another machine, where there is one.

    Raises:
        HardwareError: the machine has no room for so many ranks.
    """
    if machine is None:
        return system
    device, node = machine
    return replace(system, device=device, node=node or system.node)


def profile_names() -> list[str]:
    """Names of all profiles that can be loaded by name."""
    return sorted({p.parent.name for root in _roots() for p in root.glob("*/profile.json")} - {POOLED})


def find_profile(name_or_path: str) -> Path:
    """The folder of a profile.

    Raises:
        ProfileError: no such folder; the hint names the nearest and where was looked.
    """
    explicit = Path(name_or_path).expanduser()
    if explicit.parent != Path() or explicit.is_absolute() or (explicit / "profile.json").is_file():
        if not explicit.is_dir():
            raise ProfileError(f"A profile is a folder, but {name_or_path!r} is none.")
        return explicit
    for root in _roots():
        if (root / name_or_path / "profile.json").is_file():
            return root / name_or_path
    names = profile_names()
    near = difflib.get_close_matches(name_or_path, names, n=1)
    raise ProfileError(
        f"Profile {name_or_path!r} is not known.",
        hint=(f"Did you mean {near[0]!r}? " if near else "") + "Known: " + ", ".join(names),
    )


def _roots() -> Iterator[Path]:
    if os.environ.get("DSE_PROFILE_DIR"):
        yield Path(os.environ["DSE_PROFILE_DIR"])
    data_home = os.environ.get("XDG_DATA_HOME") or Path("~/.local/share").expanduser()
    yield Path(data_home) / "dlrm-dse" / "profiles"
    yield BUNDLED


def _catalogue_device(data: Section) -> Device:
    if "device" not in data:
        raise data.error("is null: this profile prices any device and needs one, pass device=", "device")
    try:
        if isinstance(data.raw("device"), dict):
            return hardware.from_mapping(Device, data.raw("device"))
        return hardware.device(data.text("device"))
    except HardwareError as err:
        raise data.error(f"names no device: {err.message}", "device") from None


def _time_scale(data: Section) -> float:
    """A correction of all times; `time_scale_source` says where it comes from."""
    factor = data.number("time_scale") if "time_scale" in data else 1.0
    if not factor > 0:
        raise data.error(f"must be positive, but got {factor:g}", "time_scale")
    return factor


def _own_node(data: Section) -> Node | None:
    """The machine that a measured profile describes."""
    if "node" not in data:
        return None
    try:
        return hardware.from_mapping(Node, data.raw("node"))
    except HardwareError as err:
        raise data.error(f"is no machine: {err.message}", "node") from None


def _default_node(device: Device) -> Node | None:
    try:
        return hardware.default_node(device.name)
    except HardwareError:
        return None


def _overheads_file(data: Section, folder: Path) -> Path:
    own = folder / "overheads.json"
    if own.is_file():
        return own
    if "overheads_from" not in data:
        raise data.error(f"is required where {own.name} is missing", "overheads_from")
    return find_profile(data.text("overheads_from")) / "overheads.json"


def _overheads(path: Path) -> OverheadTable:
    data = read_json(path)
    try:
        return overheads_from_json({key: data.raw(key) for key in data.names()})
    except ProfileError as err:
        raise ProfileError(f"{path}: {err.message}", hint=err.hint) from None


def _files(data: Section, folder: Path) -> list[Path]:
    kernels = data.section("kernels")
    entries = [kernels.section(name) for name in kernels.names()]
    named = [e.text("correction") for e in entries if "correction" in e]
    if "collectives" in data:
        named.append(data.text("collectives"))
    return [folder / "profile.json", *(folder / n for n in named)]


def _hash(files: list[Path], device: Device, node: Node | None) -> str:
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.read_bytes())
    digest.update(repr((asdict(device), asdict(node) if node else None)).encode())
    return digest.hexdigest()
