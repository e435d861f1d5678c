"""Host overheads T1 to T5 per op (see `docs/architecture.md`): a table with a counted fall-back.

In a profile they are a JSON file, `overheads.json`:

    schema_version      1
    provenance          method, date, sources, factors, ... and `constants`: one source per constant below
    launch_latency_us, kernel_gap_us, graph_gap_us, graph_launch_us, queue_depth
    default             t1_us, t2_us, t3_us, t4_us, t5_us, alone_us, count
    by_op               op name to the same seven keys
    aliases             op name to the name in `by_op` whose overheads it takes (optional)
    kernels_block_host  true for a CPU, which runs its kernels itself (optional)
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from perfcore.errors import ProfileError

SCHEMA_VERSION = 1
CONSTANTS = ("launch_latency_us", "kernel_gap_us", "graph_gap_us", "graph_launch_us", "queue_depth")


@dataclass(frozen=True, slots=True)
class OpOverheads:
    """Mean host times of one top-level op.

    Attributes:
        t1_us: between the end of the op before and this one's start.
        t2_us: from its start to its first launch.
        t3_us: from its last launch to its end.
        t4_us: of one launch call.
        t5_us: between two launches.
        alone_us: the whole host time of an op that launches nothing.
        count: how often the op was seen; 0 where the source does not say.
    """

    t1_us: float
    t2_us: float
    t3_us: float
    t4_us: float
    t5_us: float
    alone_us: float
    count: int = 0


@dataclass(frozen=True, slots=True)
class OverheadTable:
    """Overheads of one host and framework.

    Attributes:
        by_op: op name to overheads.
        default: for every op that `by_op` lacks.
        launch_latency_us: from a launch call's start to the kernel's earliest start.
        kernel_gap_us: between queued kernels of a stream.
        graph_gap_us: between kernels inside a CUDA graph.
        graph_launch_us: host time of one graph launch.
        queue_depth: launches in flight before the launch call blocks.
        provenance: where the numbers come from; plain JSON values.
        kernels_block_host: the host runs the kernels itself, one after the other: a CPU. Launches of CUDA's
            implementations alone are left out, and there are no CUDA graphs.
    """

    by_op: Mapping[str, OpOverheads]
    default: OpOverheads
    launch_latency_us: float
    kernel_gap_us: float
    graph_gap_us: float
    graph_launch_us: float
    queue_depth: int
    provenance: Mapping[str, Any] = field(default_factory=dict)
    kernels_block_host: bool = False

    def of(self, op: str) -> OpOverheads:
        """The op's overheads, or the default."""
        return self.by_op.get(op, self.default)

    def unknown(self, ops: Iterable[str]) -> dict[str, int]:
        """How often the fall-back was taken, by op name."""
        counts: dict[str, int] = {}
        for op in ops:
            if op not in self.by_op:
                counts[op] = counts.get(op, 0) + 1
        return counts


def scaled(table: OverheadTable, factor: float) -> OverheadTable:
    """The table with every time multiplied."""

    def times(op: OpOverheads) -> OpOverheads:
        values = {f.name: getattr(op, f.name) * factor for f in fields(op) if f.name != "count"}
        return OpOverheads(**values, count=op.count)

    constants = {name: getattr(table, name) * factor for name in CONSTANTS if name != "queue_depth"}
    by_op = {name: times(op) for name, op in table.by_op.items()}
    return replace(table, by_op=by_op, default=times(table.default), **constants)


def to_json(table: OverheadTable) -> dict[str, Any]:
    """Plain JSON values; `overheads_from_json` is the inverse (aliases are written out)."""
    return {
        "schema_version": SCHEMA_VERSION,
        "provenance": dict(table.provenance),
        **{name: getattr(table, name) for name in CONSTANTS},
        "default": asdict(table.default),
        "by_op": {name: asdict(op) for name, op in sorted(table.by_op.items())},
        "kernels_block_host": table.kernels_block_host,
    }


def overheads_from_json(data: Any) -> OverheadTable:
    """The table in parsed JSON.

    Raises:
        ProfileError: a key is missing or unknown, a number is impossible, or a constant has no source.
    """
    optional = ("aliases", "kernels_block_host")
    keys = ("schema_version", "provenance", *CONSTANTS, "default", "by_op", *optional)
    _check_keys(data, keys, optional=optional, at="overheads")
    if data["schema_version"] != SCHEMA_VERSION:
        raise ProfileError(
            f"overheads.schema_version must be {SCHEMA_VERSION}, but got {data['schema_version']!r}.",
            hint="Write the profile again with this version.",
        )
    _check_provenance(data["provenance"])
    by_op = {
        name: _op(op, at=f"overheads.by_op.{name}")
        for name, op in _mapping(data["by_op"], at="overheads.by_op").items()
    }
    return OverheadTable(
        by_op=by_op | _aliased(by_op, data.get("aliases", {})),
        default=_op(data["default"], at="overheads.default"),
        queue_depth=_whole(data["queue_depth"], low=1, at="overheads.queue_depth"),
        provenance=data["provenance"],
        kernels_block_host=_flag(data.get("kernels_block_host", False), at="overheads.kernels_block_host"),
        **{name: _time(data[name], at=f"overheads.{name}") for name in CONSTANTS if name != "queue_depth"},
    )


def _aliased(by_op: Mapping[str, OpOverheads], aliases: Any) -> dict[str, OpOverheads]:
    found = {}
    for name, target in _mapping(aliases, at="overheads.aliases").items():
        if target not in by_op:
            raise ProfileError(f"overheads.aliases.{name} must name an op of by_op, but got {target!r}.")
        if name in by_op:
            raise ProfileError(f"overheads.aliases.{name} must not be in by_op as well.")
        found[name] = by_op[target]
    return found


def _op(data: Any, *, at: str) -> OpOverheads:
    names = tuple(f.name for f in fields(OpOverheads))
    _check_keys(data, names, optional=("count",), at=at)
    count = _whole(data.get("count", 0), low=0, at=f"{at}.count")
    times = {name: _time(data[name], at=f"{at}.{name}") for name in names if name != "count"}
    return OpOverheads(**times, count=count)


def _check_provenance(data: Any) -> None:
    constants = _mapping(
        _mapping(data, at="overheads.provenance").get("constants"), at="overheads.provenance.constants"
    )
    for name in CONSTANTS:
        if not isinstance(constants.get(name), str) or not constants[name]:
            raise ProfileError(f"overheads.provenance.constants.{name} must name the source of {name}.")


def _check_keys(data: Any, known: tuple[str, ...], *, optional: tuple[str, ...], at: str) -> None:
    for key in _mapping(data, at=at):
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else None
            raise ProfileError(f"{at} has no key {key!r}.", hint=hint)
    for key in known:
        if key not in data and key not in optional:
            raise ProfileError(f"{at} needs the key {key!r}, but it is missing.")


def _mapping(data: Any, *, at: str) -> Mapping[str, Any]:
    if not isinstance(data, Mapping):
        raise ProfileError(f"{at} must be a mapping, but got {data!r}.")
    return data


def _time(value: Any, *, at: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ProfileError(f"`0 <= {at} < inf` must hold, but got {value!r}.")
    return float(value)


def _flag(value: Any, *, at: str) -> bool:
    if not isinstance(value, bool):
        raise ProfileError(f"{at} must be true or false, but got {value!r}.")
    return value


def _whole(value: Any, *, low: int, at: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ProfileError(f"`{at} >= {low}` must hold for an integer, but got {value!r}.")
    return value
