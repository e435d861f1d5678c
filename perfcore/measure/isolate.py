"""Measures designs in processes of their own, one for each rank that trains."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from perfcore.design.design import Design, from_dict, to_dict
from perfcore.errors import DesignError, PerfcoreError
from perfcore.measure.failures import status_of
from perfcore.measure.host import cores
from perfcore.measure.iteration import IterationSample, indexed, measure_iteration
from perfcore.measure.layout import can_run
from perfcore.measure.processes import run_ranks
from perfcore.measure.rank_iteration import measure_rank
from perfcore.measure.record import DesignSample, NamedDesign, Status, sample_from_dict, sample_to_dict
from perfcore.measure.reduce import Reduced, free_memory_bytes, reduce_design
from perfcore.measure.world import World, joined

TABLE_SHARE_OF_MEMORY = 0.5
_POSITIVE = (
    "min_iterations",
    "max_seconds",
    "time_limit_s",
    "max_batch",
    "max_rows",
    "threads",
    "max_ranks",
)
_SEEDS = 2**32


@dataclass(frozen=True, slots=True)
class Settings:
    """How to measure.

    Attributes:
        device: `cpu`, `cuda` or `cuda:<index>`.
        min_iterations: iterations to measure at least.
        max_seconds: time for the iterations of one design.
        time_limit_s: after which a design's processes are ended, model building included.
        max_batch: cap on the samples of an iteration on one rank.
        max_rows: cap on the rows of a table.
        threads: of the CPU's kernels; `None` leaves torch's default.
        seed: of weights and input.
        max_ranks: designs of at most so many ranks are trained by as many processes, others reduced to one rank;
            `None`: as many as there are devices (CPU: cores for the threads of each).
        profile: run a few iterations more under the profiler, for times by class of op.
        traces: folder for the profiler's files of each design, a Kineto trace and an execution trace.
    """

    device: str = "cpu"
    min_iterations: int = 10
    max_seconds: float = 10.0
    time_limit_s: float = 120.0
    max_batch: int | None = None
    max_rows: int | None = None
    threads: int | None = None
    seed: int = 0
    max_ranks: int | None = None
    profile: bool = True
    traces: str | None = None

    def __post_init__(self) -> None:
        """Refuse settings under which nothing can be measured."""
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise DesignError(f"`{name} > 0` must hold, but got {name}={value}.")
        if not 0 <= self.seed < _SEEDS:
            raise DesignError(f"`0 <= seed < 2**32` must hold, but got seed={self.seed}.")


def measure_isolated(named: NamedDesign, settings: Settings) -> DesignSample:
    """Measure one design in processes of its own; whatever goes wrong there is the sample's status."""
    size = ranks_to_run(named.design, settings)
    with tempfile.TemporaryDirectory() as folder:
        request = {
            "name": named.name,
            "design": to_dict(named.design),
            "settings": asdict(settings),
            "size": size,
            "store": str(Path(folder) / "store"),
        }
        ended = run_ranks(
            "one", [request | {"rank": rank} for rank in range(size)], time_limit_s=settings.time_limit_s
        )
    failed = [a for a in ended.answers.values() if a["status"] != Status.OK]
    if failed:
        return sample_from_dict(failed[0])
    if ended.timed_out:
        return DesignSample(
            named.name, named.design, Status.TIMED_OUT, f"not done in {settings.time_limit_s:g} s"
        )
    if ended.crash:
        return DesignSample(named.name, named.design, Status.CRASHED, ended.crash)
    return sample_from_dict(ended.answers[0])


def ranks_to_run(design: Design, settings: Settings) -> int:
    """How many processes train the design: its world size where the machine has room for it, else one."""
    size = design.system.world_size
    if size == 1 or not can_run(design) or size > (settings.max_ranks or _room(settings)):
        return 1
    return size


def _room(settings: Settings) -> int:
    import torch

    if settings.device == "cuda":
        return torch.cuda.device_count()
    if settings.device.startswith("cuda"):
        return 1
    return max(1, cores() // (settings.threads or torch.get_num_threads()))


def measure_here(request: Mapping[str, Any]) -> dict[str, Any]:
    """Serve a request of `measure_isolated` in this process, which is one of its ranks."""
    import torch

    settings = Settings(**request["settings"])
    if settings.threads:
        torch.set_num_threads(settings.threads)
    named = NamedDesign(request["name"], from_dict(request["design"]))
    notes: tuple[str, ...] = ()
    design = named.design
    try:
        if request.get("size", 1) == 1:
            reduced = _reduced(named.design, settings, ranks=1)
            design, notes = reduced.design, reduced.notes
            iteration = _alone(named.name, design, settings)
        else:
            with joined(
                rank=request["rank"],
                size=request["size"],
                device=settings.device,
                store=Path(request["store"]),
                patience_s=settings.time_limit_s,
            ) as world:
                reduced = _agreed(named.design, settings, world)
                design, notes = reduced.design, reduced.notes
                iteration = _together(named.name, design, settings, world)
    except PerfcoreError as err:
        return sample_to_dict(DesignSample(named.name, design, Status.UNSUPPORTED, err.message, notes=notes))
    except (MemoryError, RuntimeError) as err:
        status, why = status_of(err)
        return sample_to_dict(DesignSample(named.name, design, status, why, notes=notes))
    notes = (*notes, *iteration.notes)
    return sample_to_dict(DesignSample(named.name, design, Status.OK, iteration=iteration, notes=notes))


def _alone(name: str, design: Design, settings: Settings) -> IterationSample:
    return measure_iteration(
        design,
        device=settings.device,
        min_iterations=settings.min_iterations,
        max_seconds=settings.max_seconds,
        seed=settings.seed,
        profile=settings.profile,
        keep=_keep(name, settings),
    )


def _together(name: str, design: Design, settings: Settings, world: World) -> IterationSample:
    return measure_rank(
        design,
        world,
        min_iterations=settings.min_iterations,
        max_seconds=settings.max_seconds,
        seed=settings.seed,
        profile=settings.profile,
        keep=_keep(name, settings),
    )


def _keep(name: str, settings: Settings) -> Path | None:
    return None if settings.traces is None else Path(settings.traces) / name


def _reduced(design: Design, settings: Settings, *, ranks: int) -> Reduced:
    devices = ranks if settings.device.startswith("cuda") else 1  # ranks of a CPU share its memory
    return reduce_design(
        design,
        max_batch=settings.max_batch,
        max_rows=settings.max_rows,
        max_table_bytes=TABLE_SHARE_OF_MEMORY * _free_bytes(settings.device) * devices,
        ranks=ranks,
    )


def _agreed(design: Design, settings: Settings, world: World) -> Reduced:
    """The reduced design as rank 0 finds it: free memory differs from rank to rank and from time to time."""
    if world.rank == 0:
        reduced = _reduced(design, settings, ranks=world.size)
        world.store.set("reduced", json.dumps([to_dict(reduced.design), list(reduced.notes)]))
        return reduced
    plain, notes = json.loads(world.store.get("reduced"))
    return Reduced(from_dict(plain), tuple(notes))


def _free_bytes(device: str) -> int:
    import torch

    return torch.cuda.mem_get_info(indexed(device))[0] if device.startswith("cuda") else free_memory_bytes()
