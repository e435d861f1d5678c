"""Designs in, samples out, as JSON; nothing in it names a person or a machine."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from perfcore.design.design import Design, from_dict, to_dict
from perfcore.errors import DesignError
from perfcore.measure.files import write_whole
from perfcore.measure.iteration import IterationSample, indexed

FORMAT = 1


class Status(StrEnum):
    """How measuring a design ended."""

    OK = "ok"
    OUT_OF_MEMORY = "out_of_memory"
    UNSUPPORTED = "unsupported"
    TIMED_OUT = "timed_out"
    CRASHED = "crashed"


@dataclass(frozen=True, slots=True)
class NamedDesign:
    """A design and what it is called."""

    name: str
    design: Design


@dataclass(frozen=True, slots=True)
class DesignSample:
    """What became of measuring one design.

    Attributes:
        name: the design's.
        design: what was measured.
        status: how it ended.
        detail: why, where it did not end well.
        iteration: the measurement, where it did.
        notes: how `design` differs from the design of that name.
    """

    name: str
    design: Design
    status: Status
    detail: str = ""
    iteration: IterationSample | None = None
    notes: tuple[str, ...] = ()


def sample_to_dict(sample: DesignSample) -> dict[str, Any]:
    """Plain JSON values; `sample_from_dict` is its inverse."""
    iteration = sample.iteration
    return {
        "name": sample.name,
        "status": sample.status.value,
        "detail": sample.detail,
        "notes": list(sample.notes),
        "median_us": iteration.median_us if iteration else None,
        "spread_pct": iteration.spread_pct if iteration else None,
        "iteration": asdict(iteration) if iteration else None,
        "design": to_dict(sample.design),
    }


def sample_from_dict(data: Mapping[str, Any]) -> DesignSample:
    """A sample from plain JSON values.

    Raises:
        DesignError: a key is missing or unknown.
    """
    try:
        values = data["iteration"]
        iteration = None if values is None else IterationSample(**values | _tuples(values))
        return DesignSample(
            data["name"],
            from_dict(data["design"]),
            Status(data["status"]),
            data["detail"],
            iteration,
            tuple(data["notes"]),
        )
    except (KeyError, TypeError, ValueError) as err:
        raise DesignError(f"A sample's keys or values do not fit: {err!r}.") from None


def read_designs(path: Path) -> list[NamedDesign]:
    """The designs of a file: `{"designs": [{"name": ..., "design": {...}}]}`.

    Raises:
        DesignError: unreadable, empty, or not of that form.
    """
    data = _read(path)
    try:
        designs = [NamedDesign(str(d["name"]), from_dict(d["design"])) for d in data["designs"]]
    except (KeyError, TypeError) as err:
        raise DesignError(
            f"{path}: a list `designs` of `name` and `design` is needed, but {err} does not fit."
        ) from None
    if not designs:
        raise DesignError(f"{path}: `designs` holds no design.")
    return designs


def write_designs(path: Path, designs: Sequence[NamedDesign]) -> None:
    """Write what `read_designs` reads."""
    rows = [{"name": d.name, "design": to_dict(d.design)} for d in designs]
    _write(path, {"format": FORMAT, "designs": rows})


def write_samples(path: Path, samples: Sequence[DesignSample], *, environment: Mapping[str, Any]) -> None:
    """Write what `read_samples` reads, and where it was measured."""
    rows = [sample_to_dict(s) for s in samples]
    _write(path, {"format": FORMAT, "environment": dict(environment), "samples": rows})


def read_samples(path: Path) -> list[DesignSample]:
    """The samples of a file.

    Raises:
        DesignError: unreadable, or not a file of samples.
    """
    data = _read(path)
    if not isinstance(data, dict) or not isinstance(data.get("samples"), list):
        raise DesignError(f"{path}: a list `samples` is needed, but there is none.")
    return [sample_from_dict(s) for s in data["samples"]]


def middle_samples(samples: Sequence[DesignSample]) -> list[DesignSample]:
    """Of each name one sample: that of the median time, the lower of two, where it was measured at all."""
    by_name: dict[str, list[DesignSample]] = {}
    for sample in samples:
        by_name.setdefault(sample.name, []).append(sample)
    out = []
    for found in by_name.values():
        timed = sorted(
            (s for s in found if s.iteration is not None),
            key=lambda s: s.iteration.median_us,  # type: ignore[union-attr]
        )
        out.append(timed[(len(timed) - 1) // 2] if timed else found[0])
    return out


def environment(device: str) -> dict[str, Any]:
    """Versions and the device, so that a sample can be understood elsewhere; no user, host or path."""
    import torch

    on_cuda = device.startswith("cuda")
    return {
        "device": torch.cuda.get_device_name(indexed(device)) if on_cuda else _cpu_name(),
        "device_kind": "cuda" if on_cuda else "cpu",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _tuples(values: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    return {k: tuple(v) for k, v in values.items() if isinstance(v, list)}


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as err:
        raise DesignError(f"{path}: cannot be read as JSON: {err}.") from None


def _write(path: Path, data: Mapping[str, Any]) -> None:
    write_whole(path, json.dumps(data, indent=1) + "\n")
