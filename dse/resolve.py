"""Names in a file become values: table sets, nodes and devices, from the catalogue or a person's own files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from dse.errors import ConfigError
from dse.problems import Problems
from dse.schema import DeviceSection, NodeSection, Section, SystemSection, TableEntry
from dse.table_csv import bundled_tables, read_tables, table_of
from dse.yaml_loader import load_yaml
from perfcore.design import hardware
from perfcore.design.hardware import Device, Node, System
from perfcore.design.model import EmbeddingTable
from perfcore.errors import DesignError
from perfcore.units import BYTES_PER_GIB

S = TypeVar("S", bound=Section)
FILE_ENDINGS = (".yaml", ".yml", ".json")


def tables_of(entry: str | Sequence[TableEntry], folder: Path) -> tuple[EmbeddingTable, ...]:
    """Embedding tables from a set's name, a CSV file's path (relative to `folder`) or a list.

    Raises:
        ConfigError: no such set, or mistakes in the file or the list.
    """
    if isinstance(entry, str):
        return read_tables(folder / entry) if entry.endswith(".csv") else bundled_tables(entry)
    names = [t.name for t in entry]
    repeated = [n for i, n in enumerate(names) if n in names[:i]]
    if repeated:
        raise DesignError(f"Table names must be unique, but {repeated[0]!r} occurs more than once.")
    return tuple(table_of(t) for t in entry)


def hardware_of(section: SystemSection, folder: Path, problems: Problems) -> tuple[Device, Node] | None:
    """Device and node of a `system` section; what cannot be found is noted and gives `None`.

    A device without a node takes the catalogue's usual node of it, a node without a device its own.
    """
    node: Node | None = None
    device: Device | None = None
    with problems.at("system", "node"):
        if section.node is not None:
            node = _node(section.node, folder)
    with problems.at("system", "device"):
        if section.device is not None:
            device = _device(section.device, folder)
    if node is None and section.node is None and device is not None:
        with problems.at("system", "device"):
            node = _usual_node(section.device, device, folder)
    if device is None and section.device is None and node is not None:
        with problems.at("system", "node"):
            device = hardware.device(node.device)
    if device is None or node is None:
        return None
    if section.host_gib is not None:
        node = replace(node, host_memory_bytes=section.host_gib * BYTES_PER_GIB)
    return device, node


def system_named(name: str, *, world_size: int) -> System:
    """So many GPUs of a node of the catalogue, of a device's usual node, or of a node's own file.

    Raises:
        HardwareError: no such node or device, or whole machines do not make up the world.
        ConfigError: mistakes in the file.
    """
    if not name.endswith(FILE_ENDINGS) and name in hardware.device_names():
        found = hardware.device(name)
        return System(found, hardware.default_node(name), world_size)
    node = _node(name, Path())
    return System(hardware.device(node.device), node, world_size)


def sets(overrides: Sequence[str], path: str) -> bool:
    """Whether some `section.key=value` sets that path, or something in it."""
    keys = [o.partition("=")[0].strip() for o in overrides]
    return any(k == path or k.startswith(f"{path}.") for k in keys)


def completed_overrides(overrides: Sequence[str], file: Path) -> list[str]:
    """A new device brings its usual node, and a new node its own device, unless both are set.

    A device's own file that names no usual node keeps the links that the design or space has. Hardware and tables that
    are named by a path are looked for where the person is, then beside the design or space.
    """
    found = [_found(o) for o in overrides]
    device, node = sets(found, "system.device"), sets(found, "system.node")
    if device == node:
        return found
    if not device:
        return ["system.device=null", *found]
    return [*_links(found, file), *found]


def _found(override: str) -> str:
    """The override with the path of a file of one's own made absolute, where it is there from here."""
    key, equals, value = override.partition("=")
    path = Path(value.strip())
    named = key.strip() in ("system.device", "system.node", "model.tables") and path.suffix
    return f"{key}{equals}{path.resolve()}" if named and path.is_file() else override


def _links(overrides: Sequence[str], file: Path) -> list[str]:
    """What `system.node` becomes beside a new device: its usual one, or that of the file where it has none."""
    last = [o.partition("=")[2].strip() for o in overrides if o.partition("=")[0].strip() == "system.device"]
    own = file.parent / last[-1] if last and last[-1].endswith(FILE_ENDINGS) else None
    if own is None or not own.is_file() or _plain(own).get("default_node"):
        return ["system.node=null"]
    system = _plain(file).get("system")
    system = system if isinstance(system, dict) else {}
    if system.get("node") or system.get("device") not in hardware.device_names():
        return []
    return [f"system.node={hardware.default_node(str(system['device'])).name}"]


def _plain(path: Path) -> dict[str, Any]:
    """What a file says, unchecked: mistakes are told where it is read for good."""
    import yaml

    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}


def _node(entry: str | NodeSection, folder: Path) -> Node:
    if isinstance(entry, str):
        if not entry.endswith(FILE_ENDINGS):
            return hardware.node(entry)
        entry = _file(folder / entry, NodeSection)
    values = _values(entry)
    if values["input_samples_per_s"] is None:
        values["input_samples_per_s"] = math.inf
    return Node(**values)


def _device(entry: str | DeviceSection, folder: Path) -> Device:
    if isinstance(entry, str):
        if not entry.endswith(FILE_ENDINGS):
            return hardware.device(entry)
        entry = _file(folder / entry, DeviceSection)
    return Device(**_values(entry))


def _usual_node(entry: str | DeviceSection | None, device: Device, folder: Path) -> Node:
    """The catalogue's node that the device's own file names, else that of the catalogue's device."""
    if isinstance(entry, str) and entry.endswith(FILE_ENDINGS):
        entry = _file(folder / entry, DeviceSection)
    if not isinstance(entry, DeviceSection):
        return hardware.default_node(device.name)
    if entry.default_node is None:
        raise ConfigError(
            f"`system.node` must be set, or {device.name}'s description must name a `default_node`.",
            hint="Known nodes: " + ", ".join(hardware.node_names()),
        )
    return hardware.node(entry.default_node)


def _file(path: Path, schema: type[S]) -> S:
    try:
        return load_yaml(path, schema).value
    except ConfigError as err:
        raise ConfigError(err.message, hint="One's own hardware file has the catalogue's keys.") from None


def _values(section: Section) -> dict[str, Any]:
    """What the engine uses; the rest of the catalogue's keys are for people and look-ups."""
    return section.model_dump(exclude=set(hardware.CATALOGUE_KEYS))
