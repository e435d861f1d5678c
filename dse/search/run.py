"""One run: its folder, its study, and the files that it leaves."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from dse.constraints import labels_of
from dse.errors import NoFeasibleCandidateError, StudyError, StudyInterruptedError
from dse.manifest import FILE as MANIFEST
from dse.manifest import Manifest, check_same, read_manifest, write_manifest
from dse.search import checkpoint as checkpoints
from dse.search.checkpoint import cannot_write
from dse.search.executor import InProcessExecutor, RayExecutor
from dse.search.lock import run_lock
from dse.search.outputs import (
    CANDIDATES,
    DESIGNS,
    GAP,
    PARETO,
    Front,
    covered,
    design_file,
    front_of,
    people_value,
    settings_of,
    write_candidates,
    write_designs,
    write_pareto,
)
from dse.search.protocol import Array, Codes, Evaluation, EvaluatorFactory, Executor
from dse.search.replan import Replanned
from dse.search.request import Plan, RunRequest, manifest_of, plan_run
from dse.search.storage import JOURNAL, Existing, StudyStorage
from dse.search.study import Progress, StudyResult, run_study
from dse.study_config import StudyConfig, load_space, on_profile
from perfcore.design.sharding import ShardingPlan
from perfcore.units import US_PER_MS


class Pricing(Protocol):
    """What prices the candidates of a study."""

    @property
    def profile(self) -> str:
        """Name of the profile."""

    @property
    def profile_hash(self) -> str:
        """Of everything that the profile says."""

    @property
    def factory(self) -> EvaluatorFactory:
        """Builds the evaluator; picklable."""

    def design_text(self, codes: np.ndarray[Any, Any], plan: ShardingPlan | None = None) -> str:
        """The design file of one candidate, `(a,)` codes, with a plan of its own or that of the search."""

    def gaps_pct(
        self, codes: Codes, time_us: Array, plans: Sequence[ShardingPlan | None] | None = None
    ) -> Array:
        """`(k,)` certified gaps of the placements of `(k, a)` candidates with these iteration times."""

    def replanned(self, codes: Codes, evaluation: Evaluation, *, searches: int) -> Replanned:
        """The front, `(k, a)` codes, with placements looked for design by design."""


@dataclass(frozen=True, slots=True, eq=False)
class RunSummary:
    """What a run found; `summary` holds plain values for a machine."""

    run_dir: Path
    front: Front
    config: StudyConfig
    summary: dict[str, Any]


def run_space(
    request: RunRequest,
    *,
    pricing_of: Callable[[StudyConfig, str | None], Pricing],
    on_batch: Callable[[StudyConfig, Progress], None] | None = None,
) -> RunSummary:
    """Search a space file's space and write the run folder.

    Args:
        request: what is asked.
        pricing_of: prices of a study, from its config and the profile asked for.
        on_batch: called after every batch.

    Raises:
        DseError: the request is wrong, or nothing is feasible; the error knows its exit code.
    """
    config = on_profile(load_space(request.space_file, overrides=request.overrides), request.profile)
    plan = plan_run(config, request)
    pricing = pricing_of(config, request.profile)
    name = request.name or config.name
    manifest = manifest_of(
        config, request, plan, name=name, profile=pricing.profile, profile_hash=pricing.profile_hash
    )
    run_dir = request.runs_dir / name
    _make(run_dir)
    with run_lock(run_dir):
        manifest = _started(manifest, run_dir, request)
        started = time.monotonic()
        result = _study(config, plan, request, pricing, run_dir, on_batch)
        better = pricing.replanned(result.codes, result.evaluation, searches=plan.effort.replan)
        result = replace(result, codes=better.codes, evaluation=better.evaluation)
        wall_s = time.monotonic() - started
        return _finished(config, pricing, result, better, manifest, run_dir, wall_s, request)


def _make(run_dir: Path) -> None:
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as err:
        raise cannot_write(run_dir, err) from err


def _started(manifest: Manifest, run_dir: Path, request: RunRequest) -> Manifest:
    """The manifest of the run that goes on, or of the new one, which is written."""
    there = (run_dir / MANIFEST).exists()
    if there and request.resume:
        old = read_manifest(run_dir)
        check_same(old, manifest)
        return old
    if request.resume:
        raise StudyError(f"There is no run in {run_dir} to go on with.", hint="Start it without --resume.")
    if there and not request.overwrite:
        raise StudyError(
            f"{run_dir} holds a run already.",
            hint="Go on with it by --resume, replace it by --overwrite, or give another --name.",
        )
    _clear(run_dir)
    write_manifest(manifest, run_dir)
    return manifest


def _clear(run_dir: Path) -> None:
    """Remove what a run writes, and nothing else that may lie there."""
    try:
        for name in (JOURNAL, checkpoints.FILE, MANIFEST, PARETO, CANDIDATES, "report.html"):
            (run_dir / name).unlink(missing_ok=True)
        shutil.rmtree(run_dir / DESIGNS, ignore_errors=True)
    except OSError as err:
        raise cannot_write(run_dir, err) from err


def _study(
    config: StudyConfig,
    plan: Plan,
    request: RunRequest,
    pricing: Pricing,
    run_dir: Path,
    on_batch: Callable[[StudyConfig, Progress], None] | None,
) -> StudyResult:
    objectives = [o.metric for o in config.objectives]
    existing = Existing.REPLACE if request.overwrite else Existing.REFUSE
    storage = StudyStorage(
        run_dir,
        name=run_dir.name,
        objectives=objectives,
        url=request.storage,
        existing=Existing.GO_ON if request.resume else existing,
    )
    with _resumable(run_dir):
        return run_study(
            config.space,
            pricing.factory,
            objectives=objectives,
            margins=labels_of(config.constraints),
            trials=plan.trials,
            seed=plan.seed,
            sampler=plan.sampler,
            effort=plan.effort,
            executor=_executor(request),
            storage=storage,
            on_batch=partial(on_batch, config) if on_batch else None,
        )


@contextmanager
def _resumable(run_dir: Path) -> Any:
    try:
        yield
    except KeyboardInterrupt:
        raise StudyInterruptedError(
            "Interrupted; every finished batch is stored.",
            hint=f"Go on with the same command and --resume ({run_dir}).",
        ) from None


def _executor(request: RunRequest) -> Executor:
    if request.workers == 1 and request.address is None:
        return InProcessExecutor()
    return RayExecutor(request.workers, address=request.address)


def _finished(
    config: StudyConfig,
    pricing: Pricing,
    result: StudyResult,
    better: Replanned,
    manifest: Manifest,
    run_dir: Path,
    wall_s: float,
    request: RunRequest,
) -> RunSummary:
    with_gaps = _with_gaps(result, better.plans, pricing)
    front = front_of(config.space, result.codes, with_gaps, designs=request.designs)
    summary = _summary(config, result, front, run_dir, wall_s)
    summary["replanned"] = {"searches": better.searches, "improved": better.improved}
    counts = {
        k: summary[k] for k in ("space_size", "trials", "candidates_evaluated", "feasible", "front_size")
    }
    write_manifest(manifest.finished(wall_s=wall_s, method=result.method.value, counts=counts), run_dir)
    if not len(front):
        raise _nothing_feasible(config, result)
    write_pareto(front, [a.name for a in config.space.axes], run_dir)
    if result.picture is not None:
        write_candidates(config.space, *result.picture, run_dir)

    def text_of(index: int) -> str:
        return _design_text(front, index, pricing.design_text(result.codes[index], better.plans[index]))

    write_designs(front, text_of, run_dir)
    return RunSummary(run_dir, front, config, summary)


def _with_gaps(result: StudyResult, plans: Sequence[ShardingPlan | None], pricing: Pricing) -> Evaluation:
    """The front's evaluation with the certified gap of each placement among its metrics."""
    evaluation = result.evaluation
    if not len(result.codes):
        return evaluation
    time_us = evaluation.metrics["iteration_time_ms"] * US_PER_MS
    gaps = {GAP: pricing.gaps_pct(result.codes, time_us, plans)}
    return replace(evaluation, metrics=dict(evaluation.metrics) | gaps)


def _design_text(front: Front, index: int, text: str) -> str:
    """A design's file, headed by what is proven of its placement."""
    return f"# {GAP}: {float(front.metrics[GAP][index]):.4g}\n{text}"


def _summary(
    config: StudyConfig, result: StudyResult, front: Front, run_dir: Path, wall_s: float
) -> dict[str, Any]:
    found = result.found
    best: dict[str, Any] = {}
    if len(front):
        best = front.row(0) | {"design": str(run_dir / DESIGNS / design_file(0))}
    return {
        "name": run_dir.name,
        "run_dir": str(run_dir),
        "method": result.method.value,
        "space_size": config.space.size,
        "trials": result.trials,
        "candidates_evaluated": found.evaluated,
        "candidates_per_s": round(
            (found.evaluated - result.priced_before) / max(result.searching_s, 1e-9), 1
        ),
        "wall_s": round(wall_s, 3),
        "preparing_s": round(result.preparing_s, 3),
        "feasible": found.feasible,
        "front_size": len(front),
        "objectives": [o.metric for o in config.objectives],
        "hypervolume": covered(result.evaluation.objectives, found.worst),
        "hypervolume_reference": [
            people_value(o, float(w)) if np.isfinite(w) else None
            for o, w in zip(config.objectives, found.worst, strict=True)
        ],
        "best": best,
        "knee": front.row(front.knee) if front.knee is not None else {},
        "front": [front.row(i) for i in range(len(front))],
    }


def _nothing_feasible(config: StudyConfig, result: StudyResult) -> NoFeasibleCandidateError:
    labels = labels_of(config.constraints)
    if not len(result.found.nearest):
        return NoFeasibleCandidateError("No design meets the limits, and none could be priced.")
    nearest: Evaluation = result.nearest
    (settings,) = settings_of(config.space, result.found.nearest)
    broken = []
    for label, margin in zip(labels, nearest.margins[0], strict=True):
        metric = label.split()[0]
        if margin > 0:
            broken.append(f"`{label}`: its {metric} is {nearest.metrics[metric][0]:.4g}")
    chosen = ", ".join(f"{k}={v}" for k, v in settings.items())
    return NoFeasibleCandidateError(
        f"None of {result.found.evaluated} designs meets the limits. The nearest one ({chosen}) breaks "
        + "; ".join(broken)
        + ".",
        hint="Relax that limit, or add values to the axes on which it depends.",
    )
