"""How a device is at the moment, read and never changed: clocks, temperature, and who else uses it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from typing import Any

import torch

from perfcore.measure.host import cores

BUSY_PCT = 20


def device_state(device: str) -> dict[str, Any]:
    """How it is now, nothing is changed: clocks, temperature, power and use of a GPU where `nvidia-smi` tells; load."""
    load = {"load": round(os.getloadavg()[0], 2)} if hasattr(os, "getloadavg") else {}
    if not device.startswith("cuda"):
        return load
    query = "clocks.sm,clocks.mem,temperature.gpu,power.draw,utilization.gpu,driver_version"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits", "-i", _smi_id(device)]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return load
    return load | dict(zip(query.split(","), (v.strip() for v in answer.split(",")), strict=False))


def busy_before(state: Mapping[str, Any]) -> str:
    """What else used the device before the first measurement, in a sentence; empty where nothing did."""
    used = str(state.get("utilization.gpu", ""))
    if used.isdecimal():
        return (
            f"The GPU was {used} % in use before: another process is on it." if int(used) >= BUSY_PCT else ""
        )
    load, room = float(state.get("load", 0.0)), cores()
    if load >= room * BUSY_PCT / 100:
        return f"The machine's load was {load:g} on {room} cores before: other programs are running."
    return ""


def _smi_id(device: str) -> str:
    """What `nvidia-smi` calls the device: torch counts only those that it may see."""
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return f"GPU-{uuid}" if uuid else device.partition(":")[2]
