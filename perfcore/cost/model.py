"""The contract of kernel models, and the cost model that dispatches to them.

A kernel model prices one kind of kernel. It is pure; durations are positive and finite where the kernel
has work, 0 where it has none (an absent shard), and broadcasting: many candidates at once equal one by one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from perfcore.graph.kernels import Kernel

Array = NDArray[np.float64]
K_contra = TypeVar("K_contra", contravariant=True)


class Calibration(StrEnum):
    """On what a duration rests, from best to worst."""

    MEASURED = "measured"  # inside the range of measurements of this device
    EXTRAPOLATED = "extrapolated"  # a fitted model outside its range of shapes or devices
    ANALYTIC = "analytic"  # data-sheet numbers and a formula, no measurement of this kernel


class KernelModel(Protocol[K_contra]):
    """Prices one kind of kernel on one device."""

    def predict_us(self, kernels: Sequence[K_contra]) -> list[Array]:
        """One array per kernel, of the broadcast shape of its dims (tables axis `t` summed)."""
        ...

    def calibration(self, kernel: K_contra) -> Calibration:
        """On what the duration of this kernel rests (the worst over its elements)."""
        ...


class ScaledModel:
    """A model whose every duration takes a factor."""

    def __init__(self, model: KernelModel[Kernel], factor: float) -> None:
        self._model, self._factor = model, factor

    def predict_us(self, kernels: Sequence[Kernel]) -> list[Array]:
        """As the model's, times the factor."""
        return [us * self._factor for us in self._model.predict_us(kernels)]

    def calibration(self, kernel: Kernel) -> Calibration:
        """As the model's."""
        return self._model.calibration(kernel)

    def log_error_90(self, kernel: Kernel) -> float:
        """As the model's: a factor on all durations changes no ratio."""
        return _log_error_90(self._model, kernel)


@runtime_checkable
class Bounded(Protocol[K_contra]):
    """A kernel model that says how far off it is."""

    def log_error_90(self, kernel: K_contra) -> float:
        """Nine in ten measurements lie within a factor `exp` of it of the duration."""
        ...


class CostModel:
    """Prices kernels of every kind, each by the model registered for its class."""

    def __init__(self, models: Mapping[type, KernelModel[Kernel]]) -> None:
        self._models = dict(models)

    def predict_us(self, kernels: Sequence[Kernel]) -> list[Array]:
        """One array per kernel, in order; kernels of one kind are priced in one call."""
        durations: list[Array] = [np.empty(0)] * len(kernels)
        places: dict[type, list[int]] = {}
        for i, kernel in enumerate(kernels):
            places.setdefault(type(kernel), []).append(i)
        for kind, at in places.items():
            for i, us in zip(at, self._models[kind].predict_us([kernels[i] for i in at]), strict=True):
                durations[i] = us
        return durations

    def calibration(self, kernel: Kernel) -> Calibration:
        """On what the duration of this kernel rests."""
        return self._models[type(kernel)].calibration(kernel)

    def log_error_90(self, kernel: Kernel) -> float:
        """Nine in ten measurements lie within a factor `exp` of it of the duration; 0 where a model says nothing."""
        return _log_error_90(self._models[type(kernel)], kernel)


def _log_error_90(model: KernelModel[Kernel], kernel: Kernel) -> float:
    return model.log_error_90(kernel) if isinstance(model, Bounded) else 0.0
