"""Which device of the catalogue a trace was recorded on."""

from __future__ import annotations

from collections.abc import Sequence

from perfcore.design import hardware
from perfcore.design.hardware import Device
from perfcore.errors import TraceError
from perfcore.trace.records import KinetoTrace


def device_of(traces: Sequence[KinetoTrace]) -> Device:
    """The catalogue's device: by CUDA's name, else of the family in the name the one of nearest memory.

    Raises:
        TraceError: the traces name several devices, or one of a family that the catalogue lacks.
    """
    names = sorted({t.device_name for t in traces})
    found = hardware.device_of_cuda_name(names[0]) or _of_family(names[0], traces[0].device_bytes)
    if len(names) != 1 or found is None:
        raise TraceError(
            f"The traces must name one device of the catalogue, but got {names}.",
            hint="Known: " + ", ".join(hardware.device_names()),
        )
    return found


def _of_family(name: str, device_bytes: float) -> Device | None:
    lower = name.lower().replace(" ", "-")
    known = [hardware.device(n) for n in hardware.device_names()]
    family = [d for d in known if d.name.split("-")[0] in lower.split("-")]
    return min(family, key=lambda d: abs(d.hbm_bytes - device_bytes), default=None)
