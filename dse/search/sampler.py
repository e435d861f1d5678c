"""Optuna's samplers by name, and the translation between codes and Optuna's parameters."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dse.errors import StudyError
from dse.search.protocol import Axis, Codes, Space
from perfcore.errors import MissingPackageError

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.samplers import BaseSampler

DEFAULT_SAMPLER = "nsga2"


def sampler_names() -> list[str]:
    """The names that `make_sampler` knows."""
    return sorted(_MAKERS)


def check_sampler(name: str, *, objectives: int, axes: Sequence[Axis]) -> None:
    """Refuse a sampler that cannot serve the study.

    Raises:
        StudyError: unknown name (the hint names the nearest), or a sampler that serves fewer objectives or
            kinds of axes.
        MissingPackageError: the sampler needs a package that is not installed.
    """
    if name not in _MAKERS:
        near = difflib.get_close_matches(name, _MAKERS, n=1)
        raise StudyError(
            f"`sampler` must be one of {', '.join(sampler_names())}, but got {name!r}.",
            hint=f"Did you mean {near[0]!r}?" if near else None,
        )
    if name == "cmaes":
        _check_cmaes(objectives, axes)


def _check_cmaes(objectives: int, axes: Sequence[Axis]) -> None:
    if objectives > 1:
        raise StudyError(
            f"The cmaes sampler serves one objective, but the space has {objectives}.", hint="Use nsga2."
        )
    names = [axis.name for axis in axes if _labels(axis) is not None]
    if names:
        raise StudyError(
            f"The cmaes sampler serves axes of numbers, but the choices of {', '.join(names)} are none.",
            hint="Use nsga2 or tpe, or fix those settings.",
        )
    try:
        __import__("cmaes")
    except ImportError as err:
        raise MissingPackageError("The cmaes sampler needs a package.", hint="pip install cmaes") from err


def make_sampler(name: str, *, seed: int, batch: int, population: int) -> BaseSampler:
    """A fresh sampler for one batch, so that what it asks depends on the seed, batch and history alone.

    Args:
        name: one of `sampler_names()`.
        seed: of the study.
        batch: number of the batch about to be asked.
        population: trials that make up a generation (`nsga2`, `nsga3`).
    """
    # A quasi-random sequence must be scrambled the same way in every batch; Optuna keeps its position.
    words = [seed] if name == "qmc" else [seed, batch]
    state = int(np.random.SeedSequence(words).generate_state(1)[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Optuna marks half of these options as experimental
        return _MAKERS[name](state, population)


def _nsga2(seed: int, population: int) -> BaseSampler:
    from optuna.samplers import NSGAIISampler

    return NSGAIISampler(seed=seed, population_size=population)


def _nsga3(seed: int, population: int) -> BaseSampler:
    from optuna.samplers import NSGAIIISampler

    return NSGAIIISampler(seed=seed, population_size=population)


def _tpe(seed: int, _population: int) -> BaseSampler:
    from optuna.samplers import TPESampler

    return TPESampler(seed=seed, multivariate=True, constant_liar=True)


def _random(seed: int, _population: int) -> BaseSampler:
    from optuna.samplers import RandomSampler

    return RandomSampler(seed=seed)


def _gp(seed: int, _population: int) -> BaseSampler:
    from optuna.samplers import GPSampler

    return GPSampler(seed=seed, deterministic_objective=True)


def _qmc(seed: int, _population: int) -> BaseSampler:
    from optuna.samplers import QMCSampler

    return QMCSampler(
        seed=seed, scramble=True, warn_asynchronous_seeding=False, warn_independent_sampling=False
    )


def _cmaes(seed: int, _population: int) -> BaseSampler:
    from optuna.samplers import CmaEsSampler

    return CmaEsSampler(seed=seed, warn_independent_sampling=False)


_MAKERS: dict[str, Callable[[int, int], BaseSampler]] = {
    "nsga2": _nsga2,
    "nsga3": _nsga3,
    "tpe": _tpe,
    "random": _random,
    "gp": _gp,
    "qmc": _qmc,
    "cmaes": _cmaes,
}


class Translation:
    """Codes as Optuna's parameters: a numeric axis is an ordered code, any other one a choice by name."""

    def __init__(self, space: Space) -> None:
        from optuna.distributions import CategoricalDistribution, IntDistribution

        self._labels = [_labels(axis) for axis in space.axes]
        self._names = [axis.name for axis in space.axes]
        self.distributions: Mapping[str, BaseDistribution] = {
            axis.name: IntDistribution(0, len(axis.values) - 1)
            if labels is None
            else CategoricalDistribution(labels)
            for axis, labels in zip(space.axes, self._labels, strict=True)
        }

    def codes(self, params: Mapping[str, Any]) -> Codes:
        """`(a,)` codes of one trial's parameters."""
        values = [params[name] for name in self._names]
        pairs = zip(values, self._labels, strict=True)
        return np.array([v if labels is None else labels.index(v) for v, labels in pairs], dtype=np.int16)

    def params(self, codes: Codes) -> dict[str, Any]:
        """One trial's parameters of `(a,)` codes."""
        triples = zip(self._names, self._labels, codes.tolist(), strict=True)
        return {name: code if labels is None else labels[code] for name, labels, code in triples}


def _labels(axis: Axis) -> list[str] | None:
    """What Optuna shows of a non-numeric axis' choices; `None` for a numeric one."""
    if all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in axis.values):
        return None
    labels = [str(v) for v in axis.values]
    return labels if len(set(labels)) == len(labels) else [f"{i}: {v}" for i, v in enumerate(labels)]
