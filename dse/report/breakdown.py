"""Where the time and the memory of exported designs go, predicted again from their files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dse.ranks import differing_text
from perfcore.errors import PerfcoreError
from perfcore.units import BYTES_PER_GIB, US_PER_MS

if TYPE_CHECKING:
    from perfcore.design.hardware import System
    from perfcore.design.model import Model
    from perfcore.design.sharding import ShardingPlan
    from perfcore.design.training import Fusion, Training
    from perfcore.predictor import Prediction
    from perfcore.profile.profile import Profile

HOST = ("T1", "T2", "T3", "T4", "T5", "ops without a launch", "waiting")
COMMUNICATION, IDLE = "exposed communication", "idle"


@dataclass(frozen=True, slots=True)
class Breakdown:
    """One design's iteration; each mapping of times adds up to `iteration_ms`.

    Attributes:
        name: of its file, e.g. `003`.
        iteration_ms: predicted.
        samples_per_second: over all GPUs.
        device_ms: by part of the model, then exposed communication and idle time.
        host_ms: by overhead, the rest is waiting.
        memory_gib: of the fullest rank by kind.
        capacity_gib: of that rank's GPU.
        device: what people call it.
        ranks: which of them differ from the device, in words; empty where none does.
        gpus: ranks.
        global_batch: samples per iteration.
        bound_by: what most of the critical path is.
        bound_share: share of the critical path by resource.
        calibration_share: share of kernel time by what its prediction rests on.
        fallback_ops: ops whose host overheads are the table's default.
    """

    name: str
    iteration_ms: float
    samples_per_second: float
    device_ms: dict[str, float]
    host_ms: dict[str, float]
    memory_gib: dict[str, float]
    capacity_gib: float
    device: str
    ranks: str
    gpus: int
    global_batch: int
    bound_by: str
    bound_share: dict[str, float]
    calibration_share: dict[str, float]
    fallback_ops: int


@dataclass(frozen=True, slots=True)
class KnownErrors:
    """What the profile says of itself: `(kernel, n, gmae_pct, mape_pct, split, source)` rows."""

    profile: str
    rows: tuple[tuple[str, int, float, float, str, str], ...]


@dataclass(frozen=True, slots=True)
class Breakdowns:
    """All breakdowns that could be made, and why others could not."""

    designs: tuple[Breakdown, ...]
    errors: KnownErrors
    failures: tuple[str, ...]


def breakdowns_of(files: list[Path], *, profile: str) -> Breakdowns:
    """Predict each design file with the run's profile; a design that cannot be predicted is named, not fatal."""
    from dse.config import load_design
    from perfcore.predictor import Predictor

    done: list[Breakdown] = []
    failures: list[str] = []
    known: Profile | None = None
    for path in files:
        try:
            design = load_design(path, place=_no_plan)
            known = known or _profile(profile, design.system)
            prediction = Predictor(known).predict(design)
            done.append(breakdown_of(path.stem, prediction, system=design.system))
        except PerfcoreError as err:
            failures.append(f"{path.name}: {err}")
    rows = (
        ()
        if known is None
        else tuple((e.kernel, e.n, e.gmae_pct, e.mape_pct, e.split, e.source) for e in known.known_errors)
    )
    return Breakdowns(tuple(done), KnownErrors(profile, rows), tuple(failures))


def breakdown_of(name: str, prediction: Prediction, *, system: System) -> Breakdown:
    """What one prediction says, in ms and GiB."""
    total = prediction.iteration_time_us / US_PER_MS
    worst, _ = prediction.memory.fullest(system)
    return Breakdown(
        name=name,
        iteration_ms=total,
        samples_per_second=prediction.samples_per_second,
        device_ms=_device_ms(prediction),
        host_ms=_host_ms(prediction),
        memory_gib={k: v / BYTES_PER_GIB for k, v in prediction.memory.by_kind(worst).items()},
        capacity_gib=system.rank_hbm_bytes[worst] / BYTES_PER_GIB,
        device=system.device.description,
        ranks=differing_text(system),
        gpus=system.world_size,
        global_batch=prediction.global_batch,
        bound_by=prediction.bound_by,
        bound_share=dict(prediction.bound_share),
        calibration_share=dict(prediction.calibration_share),
        fallback_ops=sum(prediction.fallback_ops.values()),
    )


def _device_ms(prediction: Prediction) -> dict[str, float]:
    """Busy time without exposed communication is shared out by the kernel time of each part of the model."""
    exposed, idle = prediction.exposed_communication_us, prediction.device_idle_us
    busy = max(prediction.device_active_us - exposed, 0.0)
    by_part: dict[str, float] = {}
    for op in prediction.ops:
        if op.device_us > 0 and not _communicates(op.name, op.module):
            part = _part(op.module, op.phase)
            by_part[part] = by_part.get(part, 0.0) + op.device_us
    scale = busy / max(sum(by_part.values()), 1e-12)
    shares = {part: us * scale / US_PER_MS for part, us in sorted(by_part.items(), key=lambda p: -p[1])}
    return shares | {COMMUNICATION: exposed / US_PER_MS, IDLE: max(idle, 0.0) / US_PER_MS}


def _communicates(name: str, module: str) -> bool:
    return module == "communication" or name.startswith(("nccl:", "c10d::", "record_param_comms"))


def _part(module: str, phase: str) -> str:
    return ("optimizer" if phase == "optimizer" else module or phase or "other").replace("_", " ")


def _host_ms(prediction: Prediction) -> dict[str, float]:
    host = prediction.host
    parts = (host.t1_us, host.t2_us, host.t3_us, host.t4_us, host.t5_us, host.alone_us)
    waiting = max(prediction.iteration_time_us - sum(parts), 0.0)
    return {name: us / US_PER_MS for name, us in zip(HOST, (*parts, waiting), strict=True)}


def _profile(name: str, system: System) -> Profile:
    """The run's profile; for a device without one of its own, the pooled one at its numbers."""
    from perfcore.profile.profile import load_profile, profile_for

    if name == system.device.name:
        return profile_for(system.device, system.node)
    return load_profile(name, device=system.device, node=system.node)


def _no_plan(model: Model, training: Training, system: System, policy: str, fusion: Fusion) -> ShardingPlan:
    """Exported designs carry their plans."""
    from dse.placement import plan_for

    return plan_for(model, training, system, policy, fusion)
