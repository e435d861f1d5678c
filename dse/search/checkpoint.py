"""The driver's state after a batch, as one file that is replaced atomically."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dse.errors import StorageError
from dse.search.found import Found
from dse.search.protocol import Codes

FILE = "checkpoint.npz"


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """All that a resumed study needs besides its trials.

    Attributes:
        batch: batches told, the sampling pass being batch 0; of an enumeration, chunks done.
        trials: trials stored up to here, refined ones included.
        asked: trials asked and told.
        found: everything found.
        explored: `(e, a)` codes of front members whose neighbourhoods have been priced.
        study_attrs: what the sampler keeps at the study.
    """

    batch: int
    trials: int
    asked: int
    found: Found
    explored: Codes
    study_attrs: Mapping[str, Any] = field(default_factory=dict)


def save(checkpoint: Checkpoint, path: Path) -> None:
    """Replace `path` by the checkpoint; a kill at any moment leaves the old or the new one.

    Raises:
        StorageError: the place cannot be written.
    """
    found = checkpoint.found
    numbers = {
        "batch": checkpoint.batch,
        "trials": checkpoint.trials,
        "asked": checkpoint.asked,
        "evaluated": found.evaluated,
        "feasible": found.feasible,
        "study_attrs": checkpoint.study_attrs,
    }
    arrays = {
        "codes": found.codes,
        "objectives": found.objectives,
        "worst": found.worst,
        "nearest": found.nearest,
        "nearest_violation": np.array(found.nearest_violation),
        "explored": checkpoint.explored,
        "numbers": np.array(json.dumps(numbers)),
    }
    draft = path.with_name(f"{path.name}.new")
    try:
        with draft.open("wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type] # numpy's stub takes `allow_pickle` for an array
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError as err:
        raise cannot_write(path, err) from err


def load(path: Path) -> Checkpoint | None:
    """The checkpoint at `path`, `None` where there is none.

    Raises:
        StorageError: the file is corrupt or cannot be read.
    """
    if not path.exists():
        return None
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            numbers = json.loads(str(arrays["numbers"]))
            found = Found(
                codes=arrays["codes"],
                objectives=arrays["objectives"],
                worst=arrays["worst"],
                nearest=arrays["nearest"],
                nearest_violation=float(arrays["nearest_violation"]),
                evaluated=numbers["evaluated"],
                feasible=numbers["feasible"],
            )
            return Checkpoint(
                numbers["batch"],
                numbers["trials"],
                numbers["asked"],
                found,
                arrays["explored"],
                numbers["study_attrs"],
            )
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as err:
        raise StorageError(
            f"{path} is not a checkpoint of a study, or is corrupt: {err}.",
            hint="Start again with --overwrite.",
        ) from err


def cannot_write(path: Path | str, err: OSError) -> StorageError:
    """The error for a place that refuses a write."""
    return StorageError(
        f"{path} cannot be written: {err.strerror or err}.",
        hint="Free some space or name a writable place with --runs-dir; then go on with --resume.",
    )
