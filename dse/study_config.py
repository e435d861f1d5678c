"""Space files: `load_space` reads one into a space and the settings of its study."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dse.axes import WORLD_SIZE, Setting, build_space, check_settings, settings_of
from dse.candidate import values_of
from dse.constraints import LEFT, Constraint, fits
from dse.limits import check_tables_fit
from dse.objective import METRICS, Circumstances, Objective
from dse.problems import Problems
from dse.ranks import check_ranks, groups_in
from dse.resolve import completed_overrides, hardware_of, tables_of
from dse.schema_space import SearchEntry, SpaceFile
from dse.space import SearchSpace
from dse.validation_text import nearest
from dse.yaml_loader import Document, load_yaml
from perfcore.design.hardware import System
from perfcore.design.model import EmbeddingTable
from perfcore.profile.profile import priced_system
from perfcore.units import BYTES_PER_GIB

STAND_IN: tuple[EmbeddingTable, ...] = (EmbeddingTable("a", 1),)


@dataclass(frozen=True, slots=True)
class SearchSettings:
    """How the space is searched.

    Attributes:
        method: `auto`, `exact`, or a sampler's name.
        trials: outer trials.
        batch: trials asked at once.
        seed: of everything random.
        refine: rounds of local refinement of each batch; 0 for none.
        exact_up_to: `auto` enumerates a space of at most this many designs.
        prune: settings that bounds rule out get no placement of their own.
    """

    method: str = "auto"
    trials: int = 500
    batch: int = 50
    seed: int = 0
    refine: int = 20
    exact_up_to: int = 2_000_000
    prune: bool = False


@dataclass(frozen=True, slots=True)
class StudyConfig:
    """What a space file says.

    Attributes:
        name: of the study and its folder.
        description: for people.
        space: what varies.
        objectives: in the file's order.
        constraints: that the memory suffices, then the file's own.
        search: how to search.
        quality: name of the accuracy proxy, `none` without one.
        circumstances: prices, data set and input limits.
        profile: name or path of the profile; `None` takes the device's.
    """

    name: str
    description: str
    space: SearchSpace
    objectives: tuple[Objective, ...]
    constraints: tuple[Constraint, ...]
    search: SearchSettings
    quality: str
    circumstances: Circumstances
    profile: str | None


def load_space(path: Path, *, overrides: Sequence[str] = ()) -> StudyConfig:
    """The study that a space file describes.

    Args:
        path: a space file.
        overrides: `section.key=value` each, applied before the check. A new `system.device` brings its usual
            node, a new `system.node` its own device.

    Raises:
        ConfigError: the file has mistakes, or an axis has a value that fits no design: all of them, one a line.
        NoFeasibleCandidateError: a table is too large for every design of the space.
    """
    return study_of_document(
        load_yaml(path, SpaceFile, overrides=completed_overrides(overrides, path)), folder=path.parent
    )


def on_profile(config: StudyConfig, source: str | None) -> StudyConfig:
    """The study on what its profile prices: a measured device brings its own memory and its machine.

    Args:
        config: the study.
        source: the profile asked for; `None` takes the file's.

    Raises:
        ProfileError: there is no such profile, or it is corrupt.
        HardwareError: the measured machine has no room for a world of the space.
    """
    name, space = source or config.profile, config.space
    if name is None:
        return config
    worlds = values_of(space, "system.world_size")
    systems = [priced_system(name, System(space.device, space.node, int(w))) for w in worlds]
    device, node = systems[0].device, systems[0].node
    if (device, node) == (space.device, space.node):
        return config
    there = replace(space, device=device, node=node)
    circumstances = replace(
        config.circumstances, gpus_per_node=node.gpus, node_samples_per_s=node.input_samples_per_s
    )
    return replace(
        config,
        space=there,
        constraints=(memory_suffices(there), *config.constraints[1:]),
        circumstances=circumstances,
    )


def memory_suffices(space: SearchSpace) -> Constraint:
    """The constraint that every search has."""
    return LEFT if space.unequal_memory else fits(space.device.hbm_bytes / BYTES_PER_GIB)


def study_of_document(document: Document[SpaceFile], *, folder: Path) -> StudyConfig:
    """As `load_space`, from a checked document; relative paths start at `folder`."""
    entry, problems = document.value, Problems(document)
    space = _space(entry, folder, problems)
    price = space.node.price_per_gpu_hour if space is not None else 1.0
    known = {
        "quality": entry.quality.model != "none",
        "dataset": entry.dataset.samples is not None,
        "price": price > 0,
        "memories": any(e.hbm_gib is not None for e in entry.system.ranks),
    }
    for i, o in enumerate(entry.objectives):
        _check_metric(("objectives", i, "metric"), o.metric, known, problems)
        if o.metric in [other.metric for other in entry.objectives[:i]]:
            problems.add(("objectives", i, "metric"), f"`{o.metric}` is already an objective")
    for i, c in enumerate(entry.constraints):
        _check_metric(("constraints", i, "metric"), c.metric, known, problems)
    profile = _profile(entry.profile, folder, problems)
    problems.check()
    assert space is not None
    check_tables_fit(space, where=document.problem(("model", "tables"), "")[2])
    return StudyConfig(
        name=entry.name,
        description=entry.description.strip(),
        space=space,
        objectives=tuple(
            Objective(o.metric, minimize=(o.direction or _direction(o.metric)) == "minimize")
            for o in entry.objectives
        ),
        constraints=(
            memory_suffices(space),
            *(Constraint(c.metric, min=c.min, max=c.max) for c in entry.constraints),
        ),
        search=_search(entry.search),
        quality=entry.quality.model,
        circumstances=Circumstances(
            gpus_per_node=space.node.gpus,
            price_per_gpu_hour=price,
            node_samples_per_s=space.node.input_samples_per_s,
            input_samples_per_s=entry.input.samples_per_s or math.inf,
            dataset_samples=entry.dataset.samples or math.nan,
        ),
        profile=profile,
    )


def _space(entry: SpaceFile, folder: Path, problems: Problems) -> SearchSpace | None:
    settings: list[Setting] = settings_of(entry)
    tables = STAND_IN  # so that the other settings are checked all the same
    with problems.at("model", "tables"):
        tables = tables_of(entry.model.tables, folder)
    found = hardware_of(entry.system, folder, problems)
    before = len(problems)
    worlds = next(s.values for s in settings if s.name == WORLD_SIZE)
    check_ranks(entry.system.ranks, max(int(w) for w in worlds), problems, "system", "ranks")
    if found is None:
        return None
    check_settings(settings, tables, found, problems)
    if len(problems) > before:
        return None
    return build_space(entry.name, settings, tables, found, problems, ranks=groups_in(entry.system.ranks))


def _check_metric(
    loc: tuple[str | int, ...], metric: str, known: dict[str, bool], problems: Problems
) -> None:
    if metric not in METRICS:
        problems.add(loc, f"unknown metric `{metric}`; {nearest(metric, list(METRICS))}")
        return
    remedies = {
        "quality": "set `quality.model: capacity_law`",
        "dataset": "set `dataset.samples`",
        "price": "give the node a `price_per_gpu_hour`",
        "memories": "all GPUs have the same memory, so `hbm_gib` says as much",
    }
    for need in METRICS[metric].needs:
        if not known[need]:
            problems.add(loc, f"`{metric}` cannot be computed; {remedies[need]}")


def _direction(metric: str) -> str:
    return "minimize" if METRICS[metric].minimize else "maximize"


def _search(entry: SearchEntry) -> SearchSettings:
    return SearchSettings(**dict(entry))


def _profile(entry: str | None, folder: Path, problems: Problems) -> str | None:
    """A path is taken relative to the file; a name stays as it is."""
    if entry is None or ("/" not in entry and not (folder / entry).exists()):
        return entry
    if not (folder / entry).exists():
        problems.add(("profile",), f"{folder / entry} does not exist")
    return str(folder / entry)
