"""Runs beside each other: which designs of all of them nothing beats, and what one run is worth beside another.

Runs that differ in the machine, in the tables, or in what may vary answer questions that no single space asks: which
GPU, how many, with which network.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dse.errors import StudyError
from dse.pareto import hypervolume, pareto_mask
from dse.report.data import ObjectiveColumn, RunFiles
from dse.search.outputs import MAX_HYPERVOLUME_OBJECTIVES

if TYPE_CHECKING:
    import pandas as pd

Array = NDArray[np.float64]
RUN = "run"


@dataclass(frozen=True, slots=True, eq=False)
class RunShare:
    """One run among those compared.

    Attributes:
        name: its folder's name, with the folders above it as far as names need them.
        gpu: catalogue name of its GPUs.
        members: designs on its own front.
        joint: how many of them are on the joint front.
        best: its best value of each objective, in their order.
        hypervolume_pct: what its front covers of what the joint front covers; NaN for more than three objectives.
        own: facts of its space that not all runs share, one text each.
    """

    name: str
    gpu: str
    members: int
    joint: int
    best: tuple[float, ...]
    hypervolume_pct: float
    own: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Ratio:
    """What run `a` needs beside run `b` where it is no worse by every further objective.

    Attributes:
        a: name of the one run.
        b: name of the other.
        median: first objective of the best such design of `a` over that of a member of `b`; the median over members.
            Below 1 `a` is smaller, which is better where the objective is minimised. NaN if no member can be matched.
        matched: members of `b` that a design of `a` matches by every further objective.
        of: members of `b`.
    """

    a: str
    b: str
    median: float
    matched: int
    of: int


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """Several runs with the same objectives.

    Attributes:
        objectives: in order.
        runs: one a run.
        front: joint front, the first objective's best first; `run`, `row` and `design` say where a design is.
        fronts: each run's own front, by name.
        ratios: of each ordered pair.
    """

    objectives: tuple[ObjectiveColumn, ...]
    runs: tuple[RunShare, ...]
    front: pd.DataFrame
    fronts: dict[str, pd.DataFrame]
    ratios: tuple[Ratio, ...]

    def settings(self, index: int) -> dict[str, object]:
        """What the axes of a design of the joint front are at; those that do not matter there are missing."""
        row = self.front.iloc[index].to_dict()
        return {str(k): _whole(v) for k, v in row.items() if "." in str(k) and v == v}  # NaN is not itself

    def shared_settings(self) -> dict[str, object]:
        """Settings in which all designs of the joint front agree."""
        first, *others = (self.settings(i) for i in range(len(self.front)))
        return {k: v for k, v in first.items() if all(other.get(k) == v for other in others)}


def compare_runs(runs: Sequence[RunFiles]) -> Comparison:
    """The runs beside each other.

    Raises:
        StudyError: fewer than two runs, one of them twice, or runs with different objectives.
    """
    objectives = _common_objectives(runs)
    names = run_names(runs)
    values = [_values(run, objectives) for run in runs]
    everything = np.concatenate(values)
    on_front = pareto_mask(everything)
    source = np.repeat(np.arange(len(runs)), [len(v) for v in values])
    covered = _covered(values, everything, on_front)
    own = _own_facts([run.manifest.resolved for run in runs])
    shares = tuple(
        RunShare(
            name=names[i],
            gpu=gpu_of(run),
            members=len(values[i]),
            joint=int(on_front[source == i].sum()),
            best=tuple(float(s) for s in _signs(objectives) * np.nanmin(values[i], axis=0)),
            hypervolume_pct=covered[i],
            own=own[i],
        )
        for i, run in enumerate(runs)
    )
    return Comparison(
        objectives,
        shares,
        _joint(runs, names, everything, on_front),
        {name: run.front for name, run in zip(names, runs, strict=True)},
        _ratios(names, values),
    )


def run_names(runs: Sequence[RunFiles]) -> list[str]:
    """A name for each run: its folder's, with as many folders above it as tell all runs apart.

    Raises:
        StudyError: a run is given twice.
    """
    parts = [run.run_dir.resolve().parts for run in runs]
    if len(set(parts)) < len(parts):
        raise StudyError("Runs that are compared must differ, but one is given twice.")
    depth = 1
    while len({p[-depth:] for p in parts}) < len(parts):
        depth += 1
    return ["/".join(p[-depth:]) for p in parts]


def gpu_of(run: RunFiles) -> str:
    """Catalogue name of the GPUs that a run was about."""
    found = re.search(r"^Device\(name='([^']*)'", "\n".join(run.manifest.resolved), re.MULTILINE)
    return found[1] if found else run.manifest.profile


def _common_objectives(runs: Sequence[RunFiles]) -> tuple[ObjectiveColumn, ...]:
    if len(runs) < 2:
        raise StudyError(f"At least two runs are compared, but got {len(runs)}.")
    first = runs[0]
    for other in runs[1:]:
        if other.objectives != first.objectives:
            raise StudyError(
                f"Runs are compared by the same objectives, but {first.run_dir} has {_said(first)} and "
                f"{other.run_dir} has {_said(other)}."
            )
    return first.objectives


def _said(run: RunFiles) -> str:
    return ", ".join(f"{o.metric} ({'minimize' if o.minimize else 'maximize'})" for o in run.objectives)


def _signs(objectives: Sequence[ObjectiveColumn]) -> Array:
    return np.array([1.0 if o.minimize else -1.0 for o in objectives])


def _values(run: RunFiles, objectives: Sequence[ObjectiveColumn]) -> Array:
    """`(k, m)` objectives of the run's front, all to be minimised."""
    table = run.front[[o.metric for o in objectives]].to_numpy(dtype=np.float64)
    return np.asarray(table * _signs(objectives))


def _covered(values: Sequence[Array], everything: Array, on_front: NDArray[np.bool_]) -> list[float]:
    """Percent of the joint front's hypervolume that each front has, up to the worst value of any of them."""
    if everything.shape[1] > MAX_HYPERVOLUME_OBJECTIVES:
        return [np.nan] * len(values)
    low, high = everything.min(axis=0), everything.max(axis=0)
    reference = high + 0.01 * np.where(high > low, high - low, 1.0)
    whole = hypervolume(everything[on_front], reference)
    return [100.0 * hypervolume(v, reference) / whole for v in values]


def _joint(
    runs: Sequence[RunFiles], names: Sequence[str], everything: Array, on_front: NDArray[np.bool_]
) -> pd.DataFrame:
    import pandas as pd

    tables = [run.front.assign(**{RUN: name}) for run, name in zip(runs, names, strict=True)]
    joined = pd.concat(tables, ignore_index=True)
    order = np.flatnonzero(on_front)[np.lexsort(everything[on_front].T[::-1])]
    columns = [RUN, *(c for c in joined if c not in (RUN, "knee"))]
    return joined.loc[order, columns].reset_index(drop=True)


def _ratios(names: Sequence[str], values: Sequence[Array]) -> tuple[Ratio, ...]:
    found = []
    for i, a in enumerate(names):
        for j, b in enumerate(names):
            if i != j:
                shares = matched_shares(values[i], values[j])
                known = shares[np.isfinite(shares)]
                median = float(np.median(known)) if len(known) else np.nan
                found.append(Ratio(a, b, median, len(known), len(shares)))
    return tuple(found)


def matched_shares(mine: Array, theirs: Array) -> Array:
    """For each member of `theirs` the best first objective of `mine` that is no worse by the others, over its own.

    Args:
        mine: `(k, m)` objectives, all to be minimised.
        theirs: `(n, m)` likewise.

    Returns:
        `(n,)`; NaN where none is no worse.
    """
    no_worse = np.all(mine[None, :, 1:] <= theirs[:, None, 1:], axis=2)
    first = np.where(no_worse, mine[None, :, 0], np.inf).min(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(np.any(no_worse, axis=1), first / theirs[:, 0], np.nan)


def _own_facts(resolved: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    """For each run the lines that not all have; of a machine its name alone, of tables their number."""
    shared = set(resolved[0]).intersection(*resolved[1:])
    return [tuple(_brief([line for line in lines if line not in shared])) for lines in resolved]


def _whole(value: object) -> object:
    """A width that a table with gaps holds as 128.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _brief(lines: Sequence[str]) -> list[str]:
    tables = sum(line.startswith("table ") for line in lines)
    brief = [f"{tables} other tables"] if tables else []
    for line in lines:
        named = re.match(r"(Device|Node)\(name='([^']*)'", line)
        if named:
            brief.append(f"{named[1].lower()} {named[2]}")
        elif not line.startswith(("table ", "Circumstances(")):
            brief.append(line)
    return brief
