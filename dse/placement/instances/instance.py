"""Cost instances: tables with priced options, as files.

The format is JSON, plain or gzipped: `ws` ranks, `lws` ranks per machine, `cap` GiB per rank, and `tables`, a list of lists of
options with `type`, `kernel`, `part` (`uniform`, `device`, `host`) and `sh`, the shards: `[forward compute ms, forward communication
ms, backward compute ms, backward communication ms, GiB]`. Optional: `names`, one a table; and in an option `n`, how many equal
shards each entry of `sh` stands for, so that a table on every rank of 1,024 is one entry. A sixth number of a shard is GiB of its
machine's memory, of which `hcap` GiB may be used.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np

from dse.errors import SpaceError
from dse.placement.solver.problem import Array, Ints, Problem, Where, homogeneous
from perfcore.units import BYTES_PER_GIB

COSTS = ("forward compute", "forward communication", "backward compute", "backward communication")
_FIELDS = (len(COSTS) + 1, len(COSTS) + 2)  # and memory; and the machine's
_MOST_RANKS = _MAX_REPEATS = 65_536  # as many as a system may have
_ON_ALL_OF_A_HOST = ("table_row_wise", "grid_shard")
_COMPUTE, _COMMUNICATION = (0, 2), (1, 3)


class Objective(StrEnum):
    """What is minimised over an instance, in ms.

    `RATING`: the largest sum of a rank's costs. `CRITICAL_PATH`: compute, and the communication of each sharding
    type, wait for their slowest rank; forward and backward.
    """

    RATING = "rating"
    CRITICAL_PATH = "critical_path"


@dataclass(frozen=True, slots=True, eq=False)
class Instance:
    """Priced options of every table. Letters: t tables, o options, s shards.

    Attributes:
        names: of the tables.
        types: `(o,)` sharding type of each option, in TorchRec's words.
        kernels: `(o,)` compute kernel of each option.
        where: `(o,)` a `Where`.
        first_option: `(t + 1,)` options of table `t` are `first_option[t]` to `first_option[t + 1] - 1`.
        first_shard: `(o + 1,)` shards of option `o` likewise.
        cost_ms: `(s, 4)` in the order of `COSTS`.
        bytes: `(s,)` device memory.
        capacity_bytes: what a rank can give to tables.
        num_ranks: ranks.
        ranks_per_host: ranks of a machine.
        host_bytes: `(s,)` memory of the shard's machine; `None` where no table lies there.
        host_capacity_bytes: what a machine can give to tables.
    """

    names: tuple[str, ...]
    types: tuple[str, ...]
    kernels: tuple[str, ...]
    where: Ints
    first_option: Ints
    first_shard: Ints
    cost_ms: Array
    bytes: Array
    capacity_bytes: float
    num_ranks: int
    ranks_per_host: int
    host_bytes: Array | None = None
    host_capacity_bytes: float = np.inf

    def problem(self, objective: Objective) -> Problem:
        """The instance as the solver's problem, in ms."""
        problem = homogeneous(
            first_option=self.first_option,
            first_shard=self.first_shard,
            where=self.where,
            cost=self._rating() if objective is Objective.RATING else self._critical_path()[1],
            bytes_=self.bytes,
            capacity_bytes=self.capacity_bytes,
            num_ranks=self.num_ranks,
            ranks_per_host=self.ranks_per_host,
        )
        if self.host_bytes is None:
            return problem
        machines = np.full(self.num_ranks // self.ranks_per_host, self.host_capacity_bytes)
        return replace(problem, host_bytes=self.host_bytes, host_capacity_bytes=machines)

    def events(self, objective: Objective) -> tuple[str, ...]:
        """What the terms of an objective's problem are called."""
        return ("all",) if objective is Objective.RATING else self._critical_path()[0]

    def _rating(self) -> Array:
        total: Array = self.cost_ms.sum(axis=1, keepdims=True)
        return total

    def _critical_path(self) -> tuple[tuple[str, ...], Array]:
        """Names and `(s, e)` costs: forward and backward compute, then both communications of each type present.

        Events to which no shard adds are left out.
        """
        present = sorted(set(self.types))
        names = [COSTS[c] for c in _COMPUTE] + [f"{COSTS[c]}, {t}" for t in present for c in _COMMUNICATION]
        type_of_option = np.array([present.index(name) for name in self.types])
        type_of_shard = np.repeat(type_of_option, np.diff(self.first_shard))
        events = np.zeros((len(self.bytes), len(names)))
        events[:, :2] = self.cost_ms[:, _COMPUTE]
        rows = np.arange(len(self.bytes))
        for i, column in enumerate(_COMMUNICATION):
            events[rows, 2 + 2 * type_of_shard + i] = self.cost_ms[:, column]
        used = np.asarray(events.any(axis=0))
        used[0] |= not used.any()
        return tuple(n for n, u in zip(names, used, strict=True) if u), events[:, used]


def read_instance(path: Path) -> Instance:
    """The instance of a file.

    Raises:
        SpaceError: the file is no instance; says which table and option is wrong.
    """
    raw = path.read_bytes()
    try:
        data = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
    except (OSError, EOFError, ValueError, zlib.error) as err:
        raise SpaceError(f"{path.name} is no instance: {err}.") from None
    except RecursionError:
        raise SpaceError(f"{path.name} is no instance: its lists lie too deep in one another.") from None
    return instance_of_json(data)


def instance_of_json(data: Any) -> Instance:
    """The instance of the format's plain values.

    Raises:
        SpaceError: a key is missing, or a value is impossible; says which table and option is wrong.
    """
    if not isinstance(data, Mapping) or not {"ws", "lws", "cap", "tables"} <= data.keys():
        raise SpaceError("An instance needs the keys `ws`, `lws`, `cap` and `tables`, but one is missing.")
    ranks, local, tables = data["ws"], data["lws"], data["tables"]
    if not (type(ranks) is int and type(local) is int and ranks > 0 and local > 0) or ranks % local:
        raise SpaceError(f"`ws` must be a positive multiple of `lws`, but got ws={ranks!r}, lws={local!r}.")
    if ranks > _MOST_RANKS:
        raise SpaceError(f"`ws` must be at most {_MOST_RANKS}, but got {ranks}.")
    if not np.isfinite(_number(data["cap"])):
        raise SpaceError(f"`cap` must be a number of GiB, but got {data['cap']!r}.")
    if not _number(data.get("hcap", 0)) >= 0:
        raise SpaceError(f"`hcap` must be a number of GiB >= 0, but got {data['hcap']!r}.")
    if not isinstance(tables, list) or not tables:
        raise SpaceError("An instance needs at least one table, but `tables` is empty.")
    names = _names(data.get("names"), len(tables))
    options = [
        _option(o, f"table {name!r}, option {i}", ranks, local)
        for name, table in zip(names, tables, strict=True)
        for i, o in enumerate(_options(table, name))
    ]
    shards = np.concatenate([shards for _, _, _, shards in options])
    return Instance(
        names=names,
        types=tuple(o[0] for o in options),
        kernels=tuple(o[1] for o in options),
        where=np.array([o[2] for o in options], dtype=np.int64),
        first_option=_starts([len(t) for t in tables]),
        first_shard=_starts([len(o[3]) for o in options]),
        cost_ms=np.ascontiguousarray(shards[:, : len(COSTS)]),
        bytes=shards[:, len(COSTS)] * BYTES_PER_GIB,
        capacity_bytes=float(data["cap"]) * BYTES_PER_GIB,
        num_ranks=ranks,
        ranks_per_host=local,
        host_bytes=shards[:, -1] * BYTES_PER_GIB if shards[:, -1].any() else None,
        host_capacity_bytes=float(data.get("hcap", np.inf)) * BYTES_PER_GIB,
    )


def _number(value: Any) -> float:
    """The value as a float; NaN where it is none, or too large for one."""
    try:
        return float(value) if type(value) in (int, float) else np.nan
    except OverflowError:
        return np.nan


def _names(given: Any, tables: int) -> tuple[str, ...]:
    """A name a table, by which limits call it."""
    if given is None:
        return tuple(f"table_{i}" for i in range(tables))
    if not isinstance(given, list) or len(given) != tables:
        there = f"there are {len(given)} for {tables} tables" if isinstance(given, list) else f"got {given!r}"
        raise SpaceError(f"`names` must be a list of one name a table, but {there}.")
    names = tuple(str(n) for n in given)
    if twice := [n for n, count in Counter(names).items() if count > 1]:
        raise SpaceError(f"`names` must differ from one another, but {twice[0]!r} is there twice.")
    return names


def write_instance(instance: Instance, path: Path) -> None:
    """Write the format of `read_instance`, equal shards once; gzipped without a time stamp when the name ends in `.gz`."""
    text = json.dumps(json_of_instance(instance), separators=(",", ":")).encode()
    path.write_bytes(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)


def json_of_instance(instance: Instance) -> dict[str, Any]:
    """The format's plain values; `instance_of_json` is its inverse."""
    memory = [instance.bytes] if instance.host_bytes is None else [instance.bytes, instance.host_bytes]
    shards = np.column_stack([instance.cost_ms, *(b / BYTES_PER_GIB for b in memory)])
    starts, counts = _runs(shards, instance.first_shard)
    rows, at = shards[starts].tolist(), np.searchsorted(starts, instance.first_shard)
    options = [
        _plain_option(instance, o, rows[at[o] : at[o + 1]], counts[at[o] : at[o + 1]])
        for o in range(len(instance.types))
    ]
    first = instance.first_option
    host = (
        {"hcap": instance.host_capacity_bytes / BYTES_PER_GIB}
        if np.isfinite(instance.host_capacity_bytes)
        else {}
    )
    return host | {
        "ws": instance.num_ranks,
        "lws": instance.ranks_per_host,
        "cap": instance.capacity_bytes / BYTES_PER_GIB,
        "names": list(instance.names),
        "tables": [options[first[t] : first[t + 1]] for t in range(len(instance.names))],
    }


def _runs(shards: Array, first_shard: Ints) -> tuple[Ints, Ints]:
    """Where runs of equal rows begin, and how long they are; none goes beyond its option."""
    begins = np.ones(len(shards), dtype=bool)
    begins[1:] = (shards[1:] != shards[:-1]).any(axis=1)
    begins[first_shard[:-1]] = True
    starts = np.flatnonzero(begins).astype(np.int64)
    return starts, np.diff(starts, append=len(shards)).astype(np.int64)


def _plain_option(instance: Instance, option: int, rows: list[list[float]], counts: Ints) -> dict[str, Any]:
    part = {Where.ANY: "device", Where.ALL: "uniform", Where.HOST: "host", Where.WITHIN: "host"}
    repeated = {"n": counts.tolist()} if bool((counts > 1).any()) else {}
    return {
        "type": instance.types[option],
        "kernel": instance.kernels[option],
        "part": part[Where(int(instance.where[option]))],
        "sh": rows,
        **repeated,
    }


def _options(table: Any, name: str) -> Sequence[Any]:
    if not isinstance(table, list) or not table:
        raise SpaceError(f"A table needs at least one option, but table {name!r} has none.")
    return table


def _option(data: Any, where: str, ranks: int, local: int) -> tuple[str, str, Where, Array]:
    if not isinstance(data, Mapping) or not {"type", "part", "sh"} <= data.keys():
        raise SpaceError(f"An option needs the keys `type`, `part` and `sh`, but one is missing in {where}.")
    try:
        shards = np.array(data["sh"], dtype=np.float64)
    except (TypeError, ValueError):
        shards = np.zeros(0)
    if shards.ndim != 2 or shards.shape[1] not in _FIELDS or not len(shards):
        raise SpaceError(
            f"Shards are lists of {_FIELDS[0]} or {_FIELDS[1]} numbers, but those of {where} have the shape {shards.shape}."
        )
    if not (np.isfinite(shards).all() and (shards >= 0).all()):
        raise SpaceError(f"Costs and memory must be finite and >= 0, but those of {where} are not.")
    if shards.shape[1] < _FIELDS[1]:
        shards = np.pad(shards, ((0, 0), (0, 1)))
    if "n" in data:
        shards = np.repeat(shards, _counts(data["n"], len(shards), where), axis=0)
    placed = _placed(str(data["part"]), str(data["type"]), where)
    if placed is Where.ALL and len(shards) != ranks:
        raise SpaceError(f"A uniform option needs {ranks} shards, one a rank, but {where} has {len(shards)}.")
    if placed is Where.HOST and len(shards) % local:
        raise SpaceError(f"{data['type']} needs a multiple of {local} shards, but {where} has {len(shards)}.")
    return str(data["type"]), str(data.get("kernel", "fused")), placed, shards


def _counts(data: Any, entries: int, where: str) -> list[int]:
    sound = isinstance(data, list) and all(type(n) is int and 1 <= n <= _MAX_REPEATS for n in data)
    if not sound or len(data) != entries:
        raise SpaceError(
            f"`n` must have a count from 1 to {_MAX_REPEATS} for each of the {entries} entries of `sh`, but not in {where}."
        )
    return list(data)


def _placed(part: str, kind: str, where: str) -> Where:
    match part:
        case "uniform":
            return Where.ALL
        case "device":
            return Where.ANY
        case "host":
            return Where.HOST if kind in _ON_ALL_OF_A_HOST else Where.WITHIN
    raise SpaceError(f"`part` must be uniform, device or host, but {where} has {part!r}.")


def _starts(counts: Sequence[int]) -> Ints:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
