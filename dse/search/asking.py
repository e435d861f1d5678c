"""Batched ask and tell on an Optuna study in memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dse.search.protocol import Codes, Evaluation, Space
from dse.search.refine import Refined, repair
from dse.search.sampler import Translation, make_sampler

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial, Trial

REPAIRING = 5  # a stream of random numbers of its own


class Asker:
    """An Optuna study in memory, whose every answer depends on the seed, the batch and the told trials alone."""

    def __init__(
        self,
        space: Space,
        objectives: Sequence[str],
        margins: Sequence[str],
        *,
        sampler: str,
        seed: int,
        population: int,
    ) -> None:
        """An empty study.

        Args:
            space: what is searched.
            objectives: names of the `m` objectives.
            margins: names of the `c` constraints; where it is too short, they are numbered.
            sampler: name of Optuna's sampler.
            seed: of the study.
            population: trials that make up a generation.
        """
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.objectives, self._margins = tuple(objectives), tuple(margins)
        self._space, self._translation = space, Translation(space)
        self._sampler, self._seed, self._population = sampler, seed, population
        self._memory = optuna.storages.InMemoryStorage()
        self._study = optuna.create_study(storage=self._memory, directions=["minimize"] * len(objectives))
        self._asked: list[Trial] = []

    @property
    def count(self) -> int:
        """Trials in the study."""
        return len(self._study.get_trials(deepcopy=False))

    def restore(self, trials: Iterable[FrozenTrial], study_attrs: Mapping[str, Any]) -> None:
        """Put an empty study where another one stood."""
        self._study.add_trials(trials)
        for key, value in study_attrs.items():
            self._memory.set_study_system_attr(self._study_id, key, value)

    def study_attrs(self) -> dict[str, Any]:
        """What the sampler keeps at the study; JSON values."""
        return dict(self._memory.get_study_system_attrs(self._study_id))

    @property
    def _study_id(self) -> int:
        return self._memory.get_study_id_from_name(self._study.study_name)

    def ask(self, count: int, *, batch: int) -> Codes:
        """`(count, a)` codes of the next trials; a combination that is no candidate is repaired to one nearby."""
        self._study.sampler = make_sampler(
            self._sampler, seed=self._seed, batch=batch, population=self._population
        )
        self._asked = [self._study.ask(dict(self._translation.distributions)) for _ in range(count)]
        codes = np.stack([self._translation.codes(trial.params) for trial in self._asked])
        return repair(self._space, codes, seed=(self._seed, REPAIRING, batch))

    def tell(self, prices: Evaluation, refined: Sequence[Refined]) -> None:
        """Tell every asked trial its own price, in order, then add what became of it as a trial of its own."""
        from optuna.trial import TrialState

        for trial, objectives, margins in zip(self._asked, prices.objectives, prices.margins, strict=True):
            known = bool(np.isfinite(objectives).all() and not np.isnan(margins).any())
            for key, value in self._attributes(margins, "asked").items():
                trial.set_user_attr(key, value)
            for name, margin in self._constraints(margins).items():
                trial.set_constraint(name, margin)
            if known:
                self._study.tell(trial, objectives.tolist())
            else:
                self._study.tell(trial, state=TrialState.FAIL)
        generations = [self._generation(trial) for trial in self._asked]
        start = 0
        for part in refined:
            stop = start + len(part.codes)
            self._study.add_trials(
                self.trials_of(
                    part.codes, part.evaluation, origin="refined", system_attrs=generations[start:stop]
                )
            )
            start = stop

    def _generation(self, trial: Trial) -> dict[str, Any]:
        """The generation of an asked trial, which its refined one shares, or NSGA-II would ignore it."""
        attrs = self._study.get_trials(deepcopy=False)[trial.number].system_attrs
        return {k: v for k, v in attrs.items() if k.endswith(":generation")}

    def trials_of(
        self,
        codes: Codes,
        evaluation: Evaluation,
        *,
        origin: str,
        system_attrs: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[FrozenTrial]:
        """Finished trials of `(n, a)` priced candidates; those without a price are left out."""
        from optuna.trial import create_trial

        attrs = system_attrs or [{}] * len(codes)

        return [
            create_trial(
                params=self._translation.params(code),
                distributions=dict(self._translation.distributions),
                values=objectives.tolist(),
                user_attrs=self._attributes(margins, origin),
                system_attrs=dict(system),
                constraints=self._constraints(margins),
            )
            for code, objectives, margins, system in zip(
                codes, evaluation.objectives, evaluation.margins, attrs, strict=True
            )
            if np.isfinite(objectives).all() and not np.isnan(margins).any()
        ]

    def trials_from(self, first: int) -> list[FrozenTrial]:
        """The study's trials from that number on."""
        return self._study.get_trials(deepcopy=False)[first:]

    def _constraints(self, margins: np.ndarray[Any, Any]) -> dict[str, float]:
        """Margins by name, without those that are NaN, which Optuna refuses."""
        return {
            k: float(v) for k, v in zip(self._names(len(margins)), margins, strict=True) if not np.isnan(v)
        }

    def _attributes(self, margins: np.ndarray[Any, Any], origin: str) -> dict[str, Any]:
        """Margins again, as numbers, since dashboards show no constraints."""
        return {f"margin: {k}": v for k, v in self._constraints(margins).items()} | {"origin": origin}

    def _names(self, count: int) -> list[str]:
        return [*self._margins, *(f"constraint_{i}" for i in range(len(self._margins), count))]
