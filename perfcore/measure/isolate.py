"""One process a design: a crash, a hang or a lack of memory ends that measurement and no other."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from perfcore.design.design import from_dict, to_dict
from perfcore.errors import DesignError, PerfcoreError
from perfcore.measure.iteration import measure_iteration
from perfcore.measure.record import DesignSample, NamedDesign, Status, sample_from_dict, sample_to_dict
from perfcore.measure.reduce import free_memory_bytes, reduce_design

TABLE_SHARE_OF_MEMORY = 0.5


@dataclass(frozen=True, slots=True)
class Settings:
    """How to measure.

    Attributes:
        device: `cpu`, `cuda` or `cuda:<index>`.
        min_iterations: iterations to measure at least, time permitting.
        max_seconds: time for the iterations of one design.
        time_limit_s: after which a design's process is ended, model building included.
        max_batch: cap on the samples of an iteration.
        max_rows: cap on the rows of a table.
        threads: of the CPU's kernels; `None` leaves torch's default.
        seed: of weights and input.
    """

    device: str = "cpu"
    min_iterations: int = 10
    max_seconds: float = 10.0
    time_limit_s: float = 120.0
    max_batch: int | None = None
    max_rows: int | None = None
    threads: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse settings under which nothing can be measured."""
        for name in ("min_iterations", "max_seconds", "time_limit_s", "threads"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise DesignError(f"`{name} > 0` must hold, but got {name}={value}.")


def measure_isolated(named: NamedDesign, settings: Settings) -> DesignSample:
    """Measure one design in a process of its own; whatever goes wrong there is the sample's status."""
    request = {"name": named.name, "design": to_dict(named.design), "settings": asdict(settings)}
    # The package's own folder, so that a copied folder needs no installation.
    path = os.pathsep.join(filter(None, (str(_package_parent()), os.environ.get("PYTHONPATH"))))
    process = subprocess.Popen(
        [sys.executable, "-m", "perfcore.measure", "one"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    )
    try:
        out, err = process.communicate(json.dumps(request), timeout=settings.time_limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return DesignSample(
            named.name, named.design, Status.TIMED_OUT, f"not done in {settings.time_limit_s:g} s"
        )
    except BaseException:
        process.kill()
        raise
    if process.returncode:
        return DesignSample(named.name, named.design, Status.CRASHED, _why(process.returncode, err))
    return sample_from_dict(json.loads(out.splitlines()[-1]))


def measure_here(request: Mapping[str, Any]) -> dict[str, Any]:
    """Serve a request of `measure_isolated` in this process."""
    import torch

    settings = Settings(**request["settings"])
    if settings.threads:
        torch.set_num_threads(settings.threads)
    named = NamedDesign(request["name"], from_dict(request["design"]))
    return sample_to_dict(_measured(named, settings))


def _measured(named: NamedDesign, settings: Settings) -> DesignSample:
    import torch

    design = named.design
    notes: tuple[str, ...] = ()
    try:
        reduced = reduce_design(
            design,
            max_batch=settings.max_batch,
            max_rows=settings.max_rows,
            max_table_bytes=TABLE_SHARE_OF_MEMORY * _free_bytes(settings.device),
        )
        design, notes = reduced.design, reduced.notes
        iteration = measure_iteration(
            design,
            device=settings.device,
            min_iterations=settings.min_iterations,
            max_seconds=settings.max_seconds,
            seed=settings.seed,
        )
    except PerfcoreError as err:
        return DesignSample(named.name, design, Status.UNSUPPORTED, err.message, notes=notes)
    except (MemoryError, RuntimeError) as err:
        if not isinstance(err, (MemoryError, torch.OutOfMemoryError)) and "allocate memory" not in str(err):
            raise
        return DesignSample(
            named.name, design, Status.OUT_OF_MEMORY, str(err).strip().splitlines()[0], notes=notes
        )
    return DesignSample(named.name, design, Status.OK, iteration=iteration, notes=(*notes, *iteration.notes))


def _free_bytes(device: str) -> int:
    import torch

    return torch.cuda.mem_get_info(device)[0] if device.startswith("cuda") else free_memory_bytes()


def _package_parent() -> Path:
    return Path(__file__).resolve().parents[2]


def _why(returncode: int, err: str) -> str:
    if returncode < 0:
        name = signal.Signals(-returncode).name
        return f"ended by {name}" + (" (often a lack of memory)" if name == "SIGKILL" else "")
    lines = [line for line in err.splitlines() if line.strip()]
    return lines[-1] if lines else f"ended with exit code {returncode}"
