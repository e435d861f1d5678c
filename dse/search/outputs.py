"""What a run leaves for people: the front as a table, and its designs as files."""

from __future__ import annotations

import csv
import io
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dse.manifest import write_atomically
from dse.objective import Objective
from dse.pareto import hypervolume, knee_point
from dse.search.checkpoint import cannot_write
from dse.search.protocol import Array, Codes, Evaluation
from dse.space import SearchSpace

PARETO = "pareto.csv"
CANDIDATES = "candidates.csv"
DESIGNS = "designs"
MAX_HYPERVOLUME_OBJECTIVES = 3
GAP = "certified_gap_pct"  # by how much a better placement could at most shorten the iteration, in percent


@dataclass(frozen=True, slots=True, eq=False)
class Front:
    """The front as people read it: row 1 is the best by the first objective.

    Attributes:
        settings: axis name to value, one mapping a row; an axis that does not matter there is missing.
        metrics: `(k,)` by name.
        knee: index of the knee; `None` for an empty front.
        exported: indices of the rows that become files.
    """

    settings: Sequence[Mapping[str, Any]]
    metrics: Mapping[str, Array]
    knee: int | None
    exported: Sequence[int]

    def __len__(self) -> int:
        return len(self.settings)

    def row(self, index: int) -> dict[str, Any]:
        """One row's known metrics and its settings."""
        known = {k: float(v[index]) for k, v in self.metrics.items() if np.isfinite(v[index])}
        return known | dict(self.settings[index])


def front_of(space: SearchSpace, codes: Codes, evaluation: Evaluation, *, designs: int) -> Front:
    """The front of `(k, a)` codes with their evaluation."""
    settings = settings_of(space, codes)
    knee = knee_point(evaluation.objectives)
    return Front(settings, evaluation.metrics, knee, spread(len(codes), knee, designs))


def settings_of(space: SearchSpace, codes: Codes) -> list[dict[str, Any]]:
    """One mapping a row of `(k, a)` codes, without axes that do not matter there."""
    active = space.active(codes) if len(codes) else np.empty((0, len(space.axes)), bool)
    return [
        {a.name: a.values[c] for a, c, on in zip(space.axes, row, mask, strict=True) if on}
        for row, mask in zip(codes.tolist(), active, strict=True)
    ]


def spread(count: int, knee: int | None, designs: int) -> list[int]:
    """Up to `designs` rows: evenly over the front, its ends and its knee among them."""
    if count <= designs:
        return list(range(count))
    even = np.linspace(0, count - 1, max(designs - 1, 1)).round().astype(int).tolist()
    return sorted({*even, *([] if knee is None else [knee])})[:designs]


def write_pareto(front: Front, axes: Sequence[str], run_dir: Path) -> None:
    """`pareto.csv`: one row a design, with metrics, settings, the knee and the exported file.

    Raises:
        StorageError: the folder cannot be written.
    """
    metrics = [name for name, values in front.metrics.items() if np.isfinite(values).any()]
    text = io.StringIO()
    writer = csv.DictWriter(text, ["row", "knee", "design", *metrics, *axes], lineterminator="\n")
    writer.writeheader()
    for index in range(len(front)):
        known = {name: float(front.metrics[name][index]) for name in metrics}
        place = {"row": index + 1, "knee": int(index == front.knee)}
        file = {"design": f"{DESIGNS}/{design_file(index)}"} if index in front.exported else {}
        writer.writerow(place | file | known | dict(front.settings[index]))
    write_atomically(run_dir / PARETO, text.getvalue())


def write_candidates(space: SearchSpace, codes: Codes, evaluation: Evaluation, run_dir: Path) -> None:
    """`candidates.csv`: a uniform sample of the space, feasible or not, with metrics and settings.

    Raises:
        StorageError: the folder cannot be written.
    """
    metrics = [name for name, values in evaluation.metrics.items() if np.isfinite(values).any()]
    text = io.StringIO()
    writer = csv.DictWriter(text, ["feasible", *metrics, *(a.name for a in space.axes)], lineterminator="\n")
    writer.writeheader()
    feasible = evaluation.feasible
    for index, settings in enumerate(settings_of(space, codes)):
        known = {name: float(evaluation.metrics[name][index]) for name in metrics}
        writer.writerow({"feasible": int(feasible[index])} | known | settings)
    write_atomically(run_dir / CANDIDATES, text.getvalue())


def design_file(index: int) -> str:
    """Name of the file of a row."""
    return f"{index + 1:03d}.yaml"


def write_designs(front: Front, text_of: Callable[[int], str], run_dir: Path) -> None:
    """`designs/NNN.yaml` of the exported rows; those of an earlier end of the run are removed.

    Raises:
        StorageError: the folder cannot be written.
    """
    folder = run_dir / DESIGNS
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    except OSError as err:
        raise cannot_write(folder, err) from err
    for index in front.exported:
        write_atomically(folder / design_file(index), text_of(index))


def covered(objectives: Array, reference: NDArray[np.float64]) -> float | None:
    """Hypervolume of the front up to `reference`; `None` for more objectives than it can be had for."""
    if objectives.shape[1] > MAX_HYPERVOLUME_OBJECTIVES or not len(objectives):
        return None if len(objectives) else 0.0
    return hypervolume(objectives, reference)


def people_value(objective: Objective, value: float) -> float:
    """An objective's value with the sign that people know."""
    return value if objective.minimize else -value
