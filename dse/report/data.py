"""The files of a run, read and checked.

| file | holds |
|---|---|
| `manifest.json` | what was asked; `resolved` lists objectives, axes and limits, one a line |
| `pareto.csv` | `row, knee, design`, then metrics, then axes; one row a front member, the first objective's best first |
| `designs/NNN.yaml` | the designs of some rows, with their plan |
| `candidates.csv` | optional: `feasible`, metrics, axes of a uniform sample of the space, infeasible ones included |
| `study.journal` | optional: the trials; used where there is no sample |
| `validation.json` | optional: predicted beside measured |

An axis that does not matter for a row is empty there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dse.errors import StorageError
from dse.manifest import Manifest, read_manifest
from dse.search.outputs import CANDIDATES

if TYPE_CHECKING:
    import pandas as pd

KNEE = "knee"


@dataclass(frozen=True, slots=True)
class ObjectiveColumn:
    """One objective: a metric's column, and whether less is better."""

    metric: str
    minimize: bool


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """Priced candidates beside the front.

    Attributes:
        table: one row each: `feasible`, objectives at least, axes.
        uniform: drawn uniformly over the space; otherwise they are what a sampler asked for.
    """

    table: pd.DataFrame
    uniform: bool


@dataclass(frozen=True, slots=True, eq=False)
class RunFiles:
    """One run.

    Attributes:
        run_dir: its folder.
        manifest: what was asked.
        objectives: in order.
        axes: names of everything that varied.
        limits: one text a constraint.
        front: `pareto.csv`.
        candidates: a sample of what was priced, if any was kept.
        validation: predicted beside measured, if measured.
    """

    run_dir: Path
    manifest: Manifest
    objectives: tuple[ObjectiveColumn, ...]
    axes: tuple[str, ...]
    limits: tuple[str, ...]
    front: pd.DataFrame
    candidates: Candidates | None
    validation: Mapping[str, Any] | None

    @property
    def knee(self) -> int | None:
        """Index of the front's knee."""
        marked = np.flatnonzero(self.front[KNEE].to_numpy() == 1)
        return int(marked[0]) if len(marked) else None


def read_run(run_dir: Path) -> RunFiles:
    """All files of a run.

    Raises:
        StorageError: a needed file is missing, or one is corrupt; the message names it.
    """
    manifest = read_manifest(run_dir)
    facts = [line.partition(" ") for line in manifest.resolved]
    objectives = tuple(
        ObjectiveColumn(text.rpartition(": ")[0], text.endswith("minimize"))
        for kind, _, text in facts
        if kind == "objective"
    )
    axes = tuple(text.partition(": ")[0] for kind, _, text in facts if kind == "axis")
    front = _csv(run_dir / "pareto.csv", needs=["row", KNEE, "design", *(o.metric for o in objectives)])
    if front.empty or not objectives:
        raise StorageError(
            f"{run_dir}: a report needs at least one objective and one design, but there is none."
        )
    return RunFiles(
        run_dir=run_dir,
        manifest=manifest,
        objectives=objectives,
        axes=tuple(a for a in axes if a in front),
        limits=tuple(text for kind, _, text in facts if kind == "constraint"),
        front=front,
        candidates=_candidates(run_dir, objectives),
        validation=_json(run_dir / "validation.json"),
    )


def row_of(run: RunFiles, index: int) -> dict[str, Any]:
    """One row of the front by column; NaN where it is empty."""
    return {str(k): v for k, v in run.front.iloc[index].to_dict().items()}


def _csv(path: Path, *, needs: list[str]) -> pd.DataFrame:
    import pandas as pd

    try:
        table = pd.read_csv(path)
    except FileNotFoundError:
        raise StorageError(
            f"{path} is missing, but a report needs it.",
            hint="Let `dse run` finish; --resume goes on with it.",
        ) from None
    except (OSError, ValueError) as err:
        raise StorageError(f"{path} cannot be read: {err}.") from err
    missing = [name for name in needs if name not in table]
    if missing:
        raise StorageError(f"{path} needs the column {missing[0]!r}, but it is missing.")
    return table


def _json(path: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as err:
        raise StorageError(f"{path} cannot be read: {err}.") from err
    return found


def _candidates(run_dir: Path, objectives: tuple[ObjectiveColumn, ...]) -> Candidates | None:
    path = run_dir / CANDIDATES
    if path.exists():
        return Candidates(_csv(path, needs=["feasible", *(o.metric for o in objectives)]), uniform=True)
    if (run_dir / "study.journal").exists():
        return _trials(run_dir, objectives)
    return None


def _trials(run_dir: Path, objectives: tuple[ObjectiveColumn, ...]) -> Candidates | None:
    """Trials of the journal as candidates; what local search made of them is left out."""
    import pandas as pd

    from dse.search.storage import StudyStorage

    storage = StudyStorage(run_dir, name=run_dir.resolve().name, objectives=[o.metric for o in objectives])
    rows = []
    for trial in storage.trials():
        if trial.state.name != "COMPLETE" or trial.user_attrs.get("origin") != "asked":
            continue
        margins = [v for k, v in trial.user_attrs.items() if k.startswith("margin: ")]
        signed = {o.metric: v if o.minimize else -v for o, v in zip(objectives, trial.values, strict=True)}
        rows.append({"feasible": int(max(margins, default=0.0) <= 0)} | signed | trial.params)
    return Candidates(pd.DataFrame(rows), uniform=False) if rows else None
