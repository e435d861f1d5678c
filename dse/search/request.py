"""What a person asks of a run, and what follows from it and the space file together."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from dse.constraints import labels_of
from dse.errors import StudyError
from dse.manifest import Manifest, host, text_hash, versions
from dse.ranks import ranks_text
from dse.schema_space import NAME
from dse.search.sampler import DEFAULT_SAMPLER, check_sampler
from dse.search.study import Effort
from dse.study_config import StudyConfig

MAX_EXACT = 10**9
MAX_SEED = 2**32
# A placement searched anew takes about as long as the pricing of a dozen trials.
TRIALS_PER_REPLAN, LEAST_REPLANNED = 20, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """One call of `dse run`; `None` takes what the space file says.

    Attributes:
        space_file: the space.
        overrides: `section.key=value` each.
        trials: to be asked.
        workers: processes that price; 1 stays in this one.
        address: of a Ray cluster; starts Ray here when `None` and `workers > 1`.
        storage: URL of the trials' storage; the run folder's journal when `None`.
        seed: of everything random.
        resume: go on with the run of that name.
        overwrite: throw the run of that name away first.
        profile: name or path of the profile.
        runs_dir: where run folders lie.
        name: of the run.
        designs: designs to export at most.
        replan: search placements of the front's designs anew at the end.
        command: as typed, for the manifest.
        started: UTC, ISO 8601, for the manifest.
    """

    space_file: Path
    overrides: Sequence[str] = ()
    trials: int | None = None
    workers: int = 1
    address: str | None = None
    storage: str | None = None
    seed: int | None = None
    resume: bool = False
    overwrite: bool = False
    profile: str | None = None
    runs_dir: Path = Path("runs")
    name: str | None = None
    designs: int = 20
    replan: bool = True
    command: Sequence[str] = ()
    started: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The request and the file, resolved.

    Attributes:
        trials: to be asked.
        seed: of everything random.
        sampler: Optuna's, by name.
        effort: how much is priced around each trial.
    """

    trials: int
    seed: int
    sampler: str
    effort: Effort


def plan_run(config: StudyConfig, request: RunRequest) -> Plan:
    """What is searched how; the command line goes before the file.

    Raises:
        StudyError: a number is impossible.
    """
    search = config.search
    trials = search.trials if request.trials is None else request.trials
    seed = search.seed if request.seed is None else request.seed
    for name, value, least in (("trials", trials, 1), ("seed", seed, 0), ("workers", request.workers, 1)):
        if value < least:
            raise StudyError(f"`{name} >= {least}` must hold, but got {value}.")
    if seed >= MAX_SEED:
        raise StudyError(f"`seed < {MAX_SEED}` must hold, but got {seed}.")
    if request.name is not None and not re.fullmatch(NAME, request.name):
        raise StudyError(
            f"A run's name is the name of its folder: letters, digits and `._-`, but got {request.name!r}.",
            hint="Say with --runs-dir where the folder lies.",
        )
    if request.resume and request.overwrite:
        raise StudyError("--resume goes on with a run and --overwrite throws it away: give one of them.")
    if search.method == "exact" and config.space.size > MAX_EXACT:
        raise StudyError(
            f"`search.method: exact` prices {MAX_EXACT:.3g} designs at most, but the space has {config.space.size:.3g}.",
            hint="Use `search.method: auto`, or fewer values.",
        )
    limit = {"auto": search.exact_up_to, "exact": MAX_EXACT}.get(search.method, 0)
    searches = max(LEAST_REPLANNED, trials // TRIALS_PER_REPLAN) if request.replan else 0
    effort = replace(
        Effort(), enumeration_limit=limit, batch=search.batch, refine_rounds=search.refine, replan=searches
    )
    sampler = DEFAULT_SAMPLER if search.method in ("auto", "exact") else search.method
    check_sampler(sampler, objectives=len(config.objectives), axes=config.space.axes)
    return Plan(trials=trials, seed=seed, sampler=sampler, effort=effort)


def manifest_of(
    config: StudyConfig, request: RunRequest, plan: Plan, *, name: str, profile: str, profile_hash: str
) -> Manifest:
    """The manifest of a run that starts."""
    resolved = resolved_lines(config)
    return Manifest(
        name=name,
        space_hash=text_hash("\n".join(resolved)),
        space=request.space_file.read_text(encoding="utf-8"),
        overrides=list(request.overrides),
        resolved=resolved,
        profile=profile,
        profile_hash=profile_hash,
        seed=plan.seed,
        sampler=plan.sampler,
        effort=asdict(plan.effort),
        command=list(request.command),
        started=request.started,
        versions=versions(),
        host=host(),
    )


def resolved_lines(config: StudyConfig) -> list[str]:
    """Everything that decides what a candidate is and what it costs, one fact a line."""
    space = config.space
    axes = [f"axis {a.name}: {list(a.values)} {a.condition or ''}".rstrip() for a in space.axes]
    fixed = [f"{name}: {value}" for name, value in sorted(space.fixed.items())]
    tables = [f"table {i}: {table}" for i, table in enumerate(space.tables)]
    objectives = [f"objective {o.metric}: {o.direction}" for o in config.objectives]
    limits = [f"constraint {label}" for label in labels_of(config.constraints)]
    rest = [f"{space.device}", f"{space.node}", f"{config.circumstances}", f"quality: {config.quality}"]
    ranks = [
        f"ranks {ranks_text(g.ranks)}: slowness {g.slowness}, hbm_bytes {g.hbm_bytes}" for g in space.ranks
    ]
    return [*axes, *fixed, *tables, *objectives, *limits, *rest, *ranks]
