"""The most memory that a measurement held."""

from __future__ import annotations

import contextlib
import resource
from dataclasses import dataclass
from pathlib import Path

import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_CLEAR_PEAK = "5"  # man 5 proc


@dataclass(frozen=True, slots=True)
class MemoryWatch:
    """Watches one device's memory from the moment it is made.

    Attributes:
        device: `cpu`: of this process; `cuda...`: what torch allocates there.
        before_bytes: resident before, of a CPU.
    """

    device: str
    before_bytes: int

    @classmethod
    def begin(cls, device: str) -> MemoryWatch:
        """Watch from now on."""
        if device.startswith("cuda"):
            torch.cuda.reset_peak_memory_stats(device)
            return cls(device, 0)
        _load_libraries()
        with contextlib.suppress(OSError):  # then the peak before counts as well
            _CLEAR.write_text(_CLEAR_PEAK, encoding="ascii")
        return cls(device, _resident("VmRSS"))

    def peak_bytes(self) -> int:
        """All of it: on a CPU with interpreter and libraries."""
        if self.device.startswith("cuda"):
            return int(torch.cuda.max_memory_allocated(self.device))
        return _resident("VmHWM")

    def added_bytes(self) -> int:
        """What building and training added."""
        return max(0, self.peak_bytes() - self.before_bytes)


def _load_libraries() -> None:
    """Run what brings the libraries' own pages into memory: they are not the model's."""
    layer = torch.nn.Linear(64, 64)
    layer(torch.ones(64, 64)).relu().sum().backward()


def _resident(key: str) -> int:
    lines = _STATUS.read_text(encoding="utf-8").splitlines() if _STATUS.exists() else []
    for line in lines:
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
