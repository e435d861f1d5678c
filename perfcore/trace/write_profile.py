"""Host overheads of traces as a profile: the device's own kernel models with T1 to T5 of another machine.

Means are untrimmed and less the profiler's cost; T4 is a median, because a full launch queue blocks the call. What the
traces lack is taken from the device's bundled overheads.
"""

from __future__ import annotations

import datetime
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from perfcore.errors import ProfileError
from perfcore.overheads import CONSTANTS, OpOverheads, OverheadTable, overheads_from_json, to_json
from perfcore.profile.overhead_sources import profiler_us_per_event
from perfcore.profile.profile import BUNDLED, POOLED, find_profile, load_profile
from perfcore.trace.device import device_of
from perfcore.trace.extract import Overhead, Samples, extract_overheads, merge
from perfcore.trace.records import KinetoTrace
from perfcore.trace.replay import device_times

_FIELDS = ("t1", "t2", "t3", "t4", "t5", "alone")
Pooled = Mapping[str, Mapping[Overhead, Samples]]


def write_profile(traces: Sequence[KinetoTrace], name: str, *, skip_steps: int = 0) -> Path:
    """Write the profile `name` into the user's data folder, or `DSE_PROFILE_DIR`; a former one is replaced.

    Returns:
        The profile's folder.

    Raises:
        ProfileError: the name is a bundled profile's, or is no plain name.
        TraceError: the traces' device is not in the catalogue.
    """
    device = device_of(traces)
    folder = _folder(name)
    base = find_profile(device.name) if _known(device.name) else find_profile(POOLED)
    bundled = load_profile(str(base), device=device).overheads
    table = overheads_of(traces, bundled, skip_steps=skip_steps)
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(base, folder)
    entry = json.loads((base / "profile.json").read_text(encoding="utf-8"))
    entry = _absolute(entry, base) | {"name": name, "device": device.name}
    entry.pop("overheads_from", None)
    (folder / "profile.json").write_text(json.dumps(entry, indent=1) + "\n", encoding="utf-8")
    (folder / "overheads.json").write_text(json.dumps(to_json(table), indent=1) + "\n", encoding="utf-8")
    return folder


def overheads_of(
    traces: Sequence[KinetoTrace], bundled: OverheadTable, *, skip_steps: int = 0
) -> OverheadTable:
    """Shared overheads of the traces; ops that they lack keep the bundled ones."""
    pooled = merge(
        extract_overheads(t, skip_steps=skip_steps if len(t.steps) > skip_steps else 0) for t in traces
    )
    per_event_us = profiler_us_per_event(traces)
    every = _together(pooled)
    default = _means(every, bundled.default, per_event_us)
    by_op = {op: _means(kinds_, default, per_event_us) for op, kinds_ in pooled.items()}
    device = device_times(traces)
    latency_us, gap_us, own = bundled.launch_latency_us, bundled.kernel_gap_us, False
    if device.latency_us > per_event_us:
        latency_us, gap_us, own = device.latency_us - per_event_us, device.gap_us, True
    table = replace(
        bundled,
        by_op={**bundled.by_op, **by_op},
        default=default,
        launch_latency_us=latency_us,
        kernel_gap_us=gap_us,
        provenance=_provenance(traces, bundled, per_event_us, own_constants=own),
    )
    return overheads_from_json(json.loads(json.dumps(to_json(table))))


def _means(of_op: Mapping[Overhead, Samples], otherwise: OpOverheads, per_event_us: float) -> OpOverheads:
    times: dict[str, float] = {}
    for field in _FIELDS:
        samples = of_op.get(Overhead(field))
        if samples is None:
            continue
        typical = samples.median_us if field == "t4" else samples.mean_us
        times[f"{field}_us"] = typical(profiler_us_per_event=per_event_us)
    count = max((len(s.us) for s in of_op.values()), default=0)
    if "alone_us" not in times and {"t2_us", "t3_us"} <= times.keys():
        times["alone_us"] = times["t2_us"] + times["t3_us"]
    return replace(otherwise, **times, count=count)


def _together(pooled: Pooled) -> dict[Overhead, Samples]:
    """All ops as one; the time after the last op is none."""
    ops = [{"any": kinds_} for op, kinds_ in pooled.items() if not op.startswith(("(", "enumerate"))]
    return merge(ops)["any"]


def _provenance(
    traces: Sequence[KinetoTrace], bundled: OverheadTable, per_event_us: float, *, own_constants: bool
) -> dict[str, Any]:
    known = dict(bundled.provenance.get("constants", {}))
    constants = {c: str(known.get(c, "bundled")) for c in CONSTANTS}
    if own_constants:
        constants |= dict.fromkeys(("launch_latency_us", "kernel_gap_us"), "the traces' median")
    return {
        "device": traces[0].device_name,
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "command": "dse trace FILES --write-profile NAME",
        "method": "untrimmed means per op less the profiler's cost per event; T4 is a median",
        "profiler_us_per_event": round(per_event_us, 3),
        "sources": [f"{t.name}: {len(t.steps)} steps, rank {t.rank} of {t.world_size}" for t in traces],
        "lent": "ops that the traces lack: the device's bundled overheads",
        "constants": constants,
    }


def _folder(name: str) -> Path:
    if not name or Path(name).name != name or name.startswith("."):
        raise ProfileError(f"A profile needs a plain name, but got {name!r}.")
    if (BUNDLED / name).exists():
        raise ProfileError(f"{name!r} is the name of a bundled profile.", hint="Choose another name.")
    own = os.environ.get("DSE_PROFILE_DIR")
    data_home = os.environ.get("XDG_DATA_HOME") or Path("~/.local/share").expanduser()
    return (Path(own) if own else Path(data_home) / "dlrm-dse" / "profiles") / name


def _known(name: str) -> bool:
    try:
        find_profile(name)
    except ProfileError:
        return False
    return True


def _absolute(entry: Any, base: Path) -> Any:
    """The entry with files outside of its folder named by their full paths."""
    if isinstance(entry, dict):
        return {key: _absolute(value, base) for key, value in entry.items()}
    if isinstance(entry, str) and entry.startswith("../"):
        return str((base / entry).resolve())
    return entry
