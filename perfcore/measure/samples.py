"""A folder of samples: measured kernels line by line, training loops, traces, and where they were measured.

    kernels.jsonl       a line of environment for each session, and a line a timed kernel
    loops.json          designs and their iteration times, as `perfcore.measure run` writes them
    traces/NAME.json.gz what torch.profiler recorded of the loop of that name (CUDA)

Lines are appended at once, so that what was measured survives an interruption.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from perfcore.errors import ProfileError
from perfcore.graph import kernels as k
from perfcore.measure.kernels import Timing

FORMAT = 1
KERNELS, LOOPS, TRACES = "kernels.jsonl", "loops.json", "traces"
_CLASSES = {c.__name__: c for c in k.Kernel.__args__}
_ENUMS = {"dtype": k.DType, "layout": k.GemmLayout}


@dataclass(frozen=True, slots=True, eq=False)
class KernelSample:
    """A kernel and how long it took."""

    kernel: k.Kernel
    timing: Timing


class SampleFolder:
    """Reads and appends to one folder of samples."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.kernels, self.loops, self.traces = path / KERNELS, path / LOOPS, path / TRACES

    def create(self) -> None:
        """Make the folder; in one that is there, drop the last line if it was not written to its end.

        Raises:
            ProfileError: it cannot be made.
        """
        try:
            self.traces.mkdir(parents=True, exist_ok=True)
            if self.kernels.exists():
                text = self.kernels.read_bytes()
                self.kernels.write_bytes(text[: text.rfind(b"\n") + 1])
        except OSError as err:
            raise ProfileError(f"{self.path}: cannot be made: {err.strerror}.") from None

    def add_environment(self, environment: Mapping[str, Any]) -> None:
        """Append where the lines that follow were measured."""
        self._append({"format": FORMAT, "environment": dict(environment)})

    def add(self, sample: KernelSample) -> None:
        """Append one sample."""
        timing = sample.timing
        self._append(
            {
                "kernel": kernel_to_dict(sample.kernel),
                "cache": timing.cache,
                "method": timing.method,
                "us": round(timing.median_us, 4),
                "runs_us": [round(us, 4) for us in timing.runs_us],
            }
        )

    def environments(self) -> list[dict[str, Any]]:
        """One a session, in order."""
        return [line["environment"] for line in self._lines() if "environment" in line]

    def samples(self) -> list[KernelSample]:
        """All timed kernels.

        Raises:
            ProfileError: the file is missing, or a line does not fit.
        """
        return [self._sample(line) for line in self._lines() if "environment" not in line]

    def _sample(self, line: Mapping[str, Any]) -> KernelSample:
        try:
            timing = Timing(tuple(map(float, line["runs_us"])), line["cache"], line["method"])
            return KernelSample(kernel_from_dict(line["kernel"]), timing)
        except (KeyError, TypeError, ValueError) as err:
            raise ProfileError(f"{self.kernels}: a line is no sample: {err!r} in {line!r}.") from None

    def _lines(self) -> Iterator[dict[str, Any]]:
        try:
            text = self.kernels.read_text(encoding="utf-8")
        except OSError as err:
            raise ProfileError(
                f"{self.kernels}: samples are needed, but it cannot be read: {err.strerror}.",
                hint="Measure with `python3 -m perfcore.measure collect`.",
            ) from None
        lines = text.splitlines()
        for number, line in enumerate(lines, 1):
            try:
                yield json.loads(line)
            except ValueError:
                if number == len(lines):  # measuring was ended while it was written
                    return
                raise ProfileError(f"{self.kernels}:{number}: must be JSON, but is {line[:60]!r}.") from None

    def _append(self, data: Mapping[str, Any]) -> None:
        try:
            with self.kernels.open("a", encoding="utf-8") as file:
                file.write(json.dumps(data, separators=(",", ":")) + "\n")
        except OSError as err:
            raise ProfileError(
                f"{self.kernels}: cannot be written: {err.strerror}.",
                hint="What was measured before is kept; run the same command again to go on.",
            ) from None


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
    enums = _ENUMS | ({"kind": k.CopyKind} if data["type"] == "Memcpy" else {})
    for name in values.keys() & enums.keys():
        values[name] = enums[name](str(values[name]))
    kernel: k.Kernel = _CLASSES[data["type"]](**values)
    return kernel
