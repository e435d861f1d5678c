"""A folder of samples: measured kernels line by line, training loops, traces, and where they were measured.

    kernels.jsonl       a line of environment for each session, and a line a timed kernel
    collectives.jsonl   a line a timed collective, where the machine has room for several ranks
    loops.json          designs and their iteration times, as `perfcore.measure run` writes them
    traces/NAME.json.gz what torch.profiler recorded of the loop of that name (CUDA)

Lines are appended at once, so that what was measured survives an interruption.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np

from perfcore.errors import ProfileError
from perfcore.graph import kernels as k
from perfcore.measure.files import append_line, cannot_write
from perfcore.measure.kernels import Timing

FORMAT = 1
KERNELS, COLLECTIVES, LOOPS, TRACES = "kernels.jsonl", "collectives.jsonl", "loops.json", "traces"
_CLASSES = {c.__name__: c for c in k.Kernel.__args__}
_ENUMS: dict[str, type[StrEnum]] = {"dtype": k.DType, "layout": k.GemmLayout}
_KINDS: dict[str, dict[str, type[StrEnum]]] = {
    "Memcpy": {"kind": k.CopyKind},
    "Collective": {"kind": k.CollectiveKind},
}


@dataclass(frozen=True, slots=True, eq=False)
class KernelSample:
    """A kernel and how long it took."""

    kernel: k.Kernel
    timing: Timing


class SampleFolder:
    """Reads and appends to one folder of samples."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.kernels, self.collectives = path / KERNELS, path / COLLECTIVES
        self.loops, self.traces = path / LOOPS, path / TRACES

    def create(self) -> None:
        """Make the folder; in one that is there, drop the last line if it was not written to its end.

        Raises:
            ProfileError: it cannot be made.
        """
        try:
            self.traces.mkdir(parents=True, exist_ok=True)
            for file in (self.kernels, self.collectives):
                if file.exists():
                    text = file.read_bytes()
                    file.write_bytes(text[: text.rfind(b"\n") + 1])
        except OSError as err:
            raise cannot_write(self.path, err) from None

    def add_environment(self, environment: Mapping[str, Any]) -> None:
        """Append where the lines that follow were measured."""
        append_line(self.kernels, _json({"format": FORMAT, "environment": dict(environment)}))

    def add(self, sample: KernelSample) -> None:
        """Append one sample."""
        timing = sample.timing
        line = {
            "kernel": kernel_to_dict(sample.kernel),
            "cache": timing.cache,
            "method": timing.method,
            "us": round(timing.median_us, 4),
            "runs_us": [round(us, 4) for us in timing.runs_us],
        }
        collective = isinstance(sample.kernel, k.Collective)
        append_line(self.collectives if collective else self.kernels, _json(line))

    def environments(self) -> list[dict[str, Any]]:
        """One a session, in order."""
        return [line["environment"] for line in _lines(self.kernels) if "environment" in line]

    def samples(self) -> list[KernelSample]:
        """All timed kernels.

        Raises:
            ProfileError: the file is missing, or a line does not fit.
        """
        return [_sample(line, self.kernels) for line in _lines(self.kernels) if "environment" not in line]

    def collective_samples(self) -> list[KernelSample]:
        """All timed collectives; none where there is no room for several ranks.

        Raises:
            ProfileError: a line does not fit.
        """
        if not self.collectives.exists():
            return []
        return [_sample(line, self.collectives) for line in _lines(self.collectives)]


def _json(data: Mapping[str, Any]) -> str:
    return json.dumps(data, separators=(",", ":"))


def _sample(line: Mapping[str, Any], path: Path) -> KernelSample:
    try:
        timing = Timing(tuple(map(float, line["runs_us"])), line["cache"], line["method"])
        return KernelSample(kernel_from_dict(line["kernel"]), timing)
    except (KeyError, TypeError, ValueError) as err:
        raise ProfileError(f"{path}: a line is no sample: {err!r} in {line!r}.") from None


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as err:
        raise ProfileError(
            f"{path}: samples are needed, but it cannot be read: {err.strerror}.",
            hint="Measure with `python3 -m perfcore.measure collect`.",
        ) from None
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        try:
            yield json.loads(line)
        except ValueError:
            if number == len(lines):  # measuring was ended while it was written
                return
            raise ProfileError(f"{path}:{number}: must be JSON, but is {line[:60]!r}.") from None


def kernel_to_dict(kernel: k.Kernel) -> dict[str, Any]:
    """Plain JSON values, the class under `type`; `kernel_from_dict` is its inverse."""
    values = {f.name: getattr(kernel, f.name) for f in fields(kernel)}
    plain = {n: v.tolist() if isinstance(v, np.ndarray) else v for n, v in values.items()}
    return {"type": type(kernel).__name__, **plain}


def kernel_from_dict(data: Mapping[str, Any]) -> k.Kernel:
    """A kernel from plain values.

    Raises:
        KeyError: no class of that name.
        TypeError: a field is missing or unknown.
    """
    values = {n: np.asarray(v) if isinstance(v, list) else v for n, v in data.items() if n != "type"}
    enums = _ENUMS | _KINDS.get(data["type"], {})
    for name in values.keys() & enums.keys():
        values[name] = enums[name](str(values[name]))
    kernel: k.Kernel = _CLASSES[data["type"]](**values)
    return kernel
