"""The study driver: it owns the study and tells it in order; workers only price candidates."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np

from dse.errors import StudyError
from dse.search.asking import Asker
from dse.search.checkpoint import Checkpoint
from dse.search.enumerate import chunk_count, enumerate_space
from dse.search.executor import InProcessExecutor
from dse.search.found import Found, contained
from dse.search.protocol import (
    Codes,
    Evaluation,
    EvaluatorFactory,
    Executor,
    Pool,
    Space,
)
from dse.search.refine import Expand, Price, Refine, Refined, Sample, spread_goal
from dse.search.sampler import DEFAULT_SAMPLER, check_sampler

if TYPE_CHECKING:
    from dse.search.storage import StudyStorage

logger = logging.getLogger(__name__)

SAMPLING, ASKING, REFINING, EXPANDING, POLISHING = range(5)
CHUNKS_PER_CHECKPOINT = 32
PICTURING = 6  # 5 is taken by repairs
PICTURED = 4_096


class Method(StrEnum):
    """How the front was found, hence what it promises."""

    EXACT = "exact"
    SEARCH = "search"


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much is priced around each trial; part of what makes a study what it is.

    Attributes:
        enumeration_limit: spaces of at most this size are enumerated exactly.
        sample: candidates drawn over the whole space before the first trial.
        batch: trials asked at once, and the population of the sampler.
        refine_rounds: steps of the local search of each trial.
        refine_pairs: random double moves in each step.
        expand: front members whose neighbourhoods are priced after each batch.
        expand_pairs: random double moves of each.
        polish_rounds: how often the final front is expanded until it stands still.
        chunk: trials or front members handed to a worker at once.
        sample_chunk: candidates of the sample handed to a worker at once.
        replan: designs of the front whose placements are searched at the end.
    """

    enumeration_limit: int = 2_000_000
    sample: int = 2**18
    batch: int = 50
    refine_rounds: int = 24
    refine_pairs: int = 64
    expand: int = 64
    expand_pairs: int = 192
    polish_rounds: int = 12
    chunk: int = 10
    sample_chunk: int = 2**14
    replan: int = 0


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a study stands.

    Attributes:
        trials: asked and told; for an enumeration, chunks done.
        trials_total: to be asked; for an enumeration, chunks in all.
        found: everything found so far.
        unit: what is counted.
    """

    trials: int
    trials_total: int
    found: Found
    unit: str = "trials"


@dataclass(frozen=True, slots=True, eq=False)
class StudyResult:
    """The front, its prices, and how it was found.

    Attributes:
        method: `exact` when every candidate was priced.
        codes: `(k, a)` of the front, in the order of the objectives.
        evaluation: of the front.
        found: everything found, counts included.
        trials: asked and told.
        nearest: evaluation of the nearest infeasible candidate, `found.nearest`.
        resumed_from: trials that were read from the storage.
        priced_before: candidates that had been priced by then.
        preparing_s: wall time in which the workers got ready (their tables were built).
        searching_s: wall time after that.
        picture: codes and prices of a uniform sample of the space.
    """

    method: Method
    codes: Codes
    evaluation: Evaluation
    found: Found
    trials: int
    nearest: Evaluation
    resumed_from: int = 0
    priced_before: int = 0
    preparing_s: float = 0.0
    searching_s: float = 0.0
    picture: tuple[Codes, Evaluation] | None = None


def run_study(
    space: Space,
    evaluator_factory: EvaluatorFactory,
    *,
    objectives: Sequence[str],
    trials: int,
    seed: int,
    margins: Sequence[str] = (),
    sampler: str = DEFAULT_SAMPLER,
    executor: Executor | None = None,
    storage: StudyStorage | None = None,
    effort: Effort | None = None,
    on_batch: Callable[[Progress], None] | None = None,
) -> StudyResult:
    """Search the space; the same arguments give the same result, whatever the executor and interruptions.

    Args:
        space: what is searched.
        evaluator_factory: builds the evaluator, once.
        objectives: names of the `m` objectives, all minimised.
        trials: to be asked of the sampler; ignored when the space is enumerated.
        seed: of everything random.
        margins: names of the `c` constraints, in order.
        sampler: one of `sampler_names()`.
        executor: where candidates are priced; in this process by default.
        storage: where trials are kept, and from where an interrupted study goes on; `None` keeps nothing.
        effort: how much is priced around each trial.
        on_batch: called after every batch, once it is stored.

    Raises:
        StudyError: the request cannot be served.
        StorageError: the storage cannot be written; what it holds is intact.
    """
    effort = effort or Effort()
    check_sampler(sampler, objectives=len(objectives), axes=space.axes)
    if trials < 1:
        raise StudyError(f"`trials >= 1` must hold, but got {trials}.")
    report = on_batch or (lambda progress: None)
    asker = Asker(space, objectives, margins, sampler=sampler, seed=seed, population=effort.batch)
    started = time.monotonic()
    with (executor or InProcessExecutor()).start(space, evaluator_factory) as pool:
        ready = time.monotonic()
        if space.size <= effort.enumeration_limit:
            result = _enumerate(space, pool, asker, storage, report)
        else:
            result = _Search(space, pool, asker, storage, effort, seed, trials, report).run()
        picture = _picture(space, pool, seed)
        done = time.monotonic()
        return replace(result, picture=picture, preparing_s=ready - started, searching_s=done - ready)


def _picture(space: Space, pool: Pool, seed: int) -> tuple[Codes, Evaluation]:
    """A uniform sample of the whole space with its prices: what the front is seen against."""
    codes = space.sample(np.random.default_rng((seed, PICTURING)), PICTURED)
    return codes, _price(pool, codes)


def _enumerate(
    space: Space, pool: Pool, asker: Asker, storage: StudyStorage | None, report: Callable[[Progress], None]
) -> StudyResult:
    chunks = chunk_count(space)
    found = Found.nothing(axes=len(space.axes), objectives=len(asker.objectives))
    state = storage.checkpoint() if storage else None
    first, found = (0, found) if state is None else (state.batch, state.found)
    for done, part in enumerate(enumerate_space(space, pool, first=first), start=first + 1):
        found += part
        if storage is not None and (done % CHUNKS_PER_CHECKPOINT == 0 or done == chunks):
            storage.save(Checkpoint(done, 0, 0, found, found.codes[:0]))
        report(Progress(done, chunks, found, "chunks"))
    front, nearest = _price(pool, found.codes), _price(pool, found.nearest)
    if storage is not None:
        storage.append(asker.trials_of(found.codes, front, origin="enumerated"), first=0)
    before = 0 if state is None else state.found.evaluated
    return StudyResult(Method.EXACT, found.codes, front, found, 0, nearest, priced_before=before)


def _price(pool: Pool, codes: Codes) -> Evaluation:
    return next(iter(pool.map([Price(codes)])))


@dataclass(frozen=True, slots=True, eq=False)
class _Search:
    """Asks in batches, refines each, tells both, and keeps the front of everything priced."""

    space: Space
    pool: Pool
    asker: Asker
    storage: StudyStorage | None
    effort: Effort
    seed: int
    trials: int
    report: Callable[[Progress], None]

    def run(self) -> StudyResult:
        state = self._resumed() or self._sampled()
        resumed_from, priced_before = state.asked, state.found.evaluated if state.asked else 0
        while state.asked < self.trials:
            state = self._next_batch(state)
        found = self._polished(state)
        front, nearest = _price(self.pool, found.codes), _price(self.pool, found.nearest)
        return StudyResult(
            Method.SEARCH, found.codes, front, found, state.asked, nearest, resumed_from, priced_before
        )

    def _resumed(self) -> Checkpoint | None:
        state = self.storage.checkpoint() if self.storage else None
        if self.storage is None or state is None:
            return None
        trials = self.storage.trials()
        if len(trials) < state.trials:
            logger.warning(
                "%d of %d trials are lost: the study is repeated from its start",
                state.trials - len(trials),
                state.trials,
            )
            return None
        self.asker.restore(trials[: state.trials], state.study_attrs)
        self.report(Progress(state.asked, self.trials, state.found))
        return state

    def _sampled(self) -> Checkpoint:
        """Batch 0: a uniform sample of the whole space."""
        found, effort = self._nothing(), self.effort
        for chunk, part in enumerate(
            self.pool.map(
                Sample((self.seed, SAMPLING, chunk), min(effort.sample_chunk, effort.sample - start))
                for chunk, start in enumerate(range(0, effort.sample, effort.sample_chunk))
            )
        ):
            found += part
            if chunk % 4 == 0:
                self.report(Progress(0, self.trials, found))
        return self._saved(Checkpoint(0, 0, 0, found, found.codes[:0]))

    def _next_batch(self, state: Checkpoint) -> Checkpoint:
        batch = state.batch + 1
        count = min(self.effort.batch, self.trials - state.asked)
        asked = self.asker.ask(count, batch=batch)
        refined = self._refine(asked, state.found, batch)
        prices = _price(self.pool, asked)
        self.asker.tell(prices, refined)
        if self.storage is not None:
            self.storage.append(self.asker.trials_from(state.trials), first=state.trials)
        found = sum((r.found for r in refined), start=state.found)
        found, explored = self._expand(found, state.explored, (EXPANDING, batch), limit=self.effort.expand)
        return self._saved(
            Checkpoint(
                batch, self.asker.count, state.asked + count, found, explored, self.asker.study_attrs()
            )
        )

    def _refine(self, asked: Codes, found: Found, batch: int) -> list[Refined]:
        effort, stage = self.effort, (self.seed, REFINING, batch)
        goal = spread_goal(found, len(asked), rng=np.random.default_rng(stage))
        tasks = []
        for start in range(0, len(asked), effort.chunk):
            part = slice(start, start + effort.chunk)
            starts, aims = asked[part], goal.of(part)
            tasks.append(Refine(starts, aims, effort.refine_rounds, effort.refine_pairs, (*stage, start)))
        return list(self.pool.map(tasks))

    def _expand(
        self, found: Found, explored: Codes, stage: tuple[int, int], *, limit: int
    ) -> tuple[Found, Codes]:
        """Price the neighbourhoods of up to `limit` front members that have not been expanded yet."""
        rng = np.random.default_rng((self.seed, *stage))
        fresh = found.codes[~contained(found.codes, explored)]
        chosen = fresh[np.sort(rng.permutation(len(fresh))[:limit])]
        effort = self.effort
        tasks = [
            Expand(chosen[start : start + effort.chunk], effort.expand_pairs, (self.seed, *stage, start))
            for start in range(0, len(chosen), effort.chunk)
        ]
        found = sum(self.pool.map(tasks), start=found)
        known = np.concatenate([explored, chosen])
        return found, known[contained(known, found.codes)]

    def _polished(self, state: Checkpoint) -> Found:
        """Expand the front until no member has a better neighbour, or the rounds are used up."""
        found, explored = state.found, state.explored
        for turn in range(self.effort.polish_rounds):
            if contained(found.codes, explored).all():
                break
            found, explored = self._expand(found, explored, (POLISHING, turn), limit=8 * self.effort.expand)
            self.report(Progress(state.asked, self.trials, found))
        return found

    def _saved(self, state: Checkpoint) -> Checkpoint:
        if self.storage is not None:
            self.storage.save(state)
        self.report(Progress(state.asked, self.trials, state.found))
        return state

    def _nothing(self) -> Found:
        return Found.nothing(axes=len(self.space.axes), objectives=len(self.asker.objectives))
