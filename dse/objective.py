"""Metrics of priced candidates, and the objectives made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from perfcore.units import BYTES_PER_GIB, S_PER_H, US_PER_S

Array: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Metric:
    """A number that every priced candidate has.

    Attributes:
        name: as files write it; the unit is in it.
        label: as people read it.
        minimize: whether less is better, where nothing else is said.
        needs: what there must be: `dataset`, `price`, `quality`, `memories` (GPUs of several), or nothing.
    """

    name: str
    label: str
    minimize: bool
    needs: tuple[Literal["dataset", "price", "quality", "memories"], ...] = ()


METRICS: Mapping[str, Metric] = {
    m.name: m
    for m in (
        Metric("iteration_time_ms", "iteration time (ms)", minimize=True),
        Metric("time_per_sample_us", "time per sample (µs)", minimize=True),
        Metric("time_per_sample_ns", "time per sample (ns)", minimize=True),
        Metric("samples_per_second", "samples per second", minimize=False),
        Metric("gpu_time_per_sample_us", "GPU time per sample (µs)", minimize=True),
        Metric("hours_per_epoch", "hours per epoch", minimize=True, needs=("dataset",)),
        Metric("gpu_hours_per_epoch", "GPU hours per epoch", minimize=True, needs=("dataset",)),
        Metric("cost_per_epoch_usd", "cost per epoch (US$)", minimize=True, needs=("dataset", "price")),
        Metric("hbm_gib", "memory of the fullest GPU (GiB)", minimize=True),
        Metric("hbm_left_gib", "memory left on the fullest GPU (GiB)", minimize=False, needs=("memories",)),
        Metric("quality_loss", "relative loss (proxy)", minimize=True, needs=("quality",)),
        Metric("quality_std", "uncertainty of the relative loss", minimize=True, needs=("quality",)),
        Metric("global_batch", "global batch (samples)", minimize=False),
        Metric("world_size", "GPUs", minimize=True),
    )
}


@dataclass(frozen=True, slots=True)
class Objective:
    """One metric to make small or large."""

    metric: str
    minimize: bool = True

    @property
    def direction(self) -> Literal["minimize", "maximize"]:
        """The direction in Optuna's words."""
        return "minimize" if self.minimize else "maximize"


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What turns times into rates, hours and money.

    Attributes:
        gpus_per_node: GPUs of one machine.
        price_per_gpu_hour: in US dollars; 0 when unknown.
        node_samples_per_s: what the data loader of one machine can feed; infinite when no limit.
        input_samples_per_s: what the data loader of the whole job can feed; infinite when no limit.
        dataset_samples: samples of one epoch; NaN when unknown.
    """

    gpus_per_node: int = 8
    price_per_gpu_hour: float = 0.0
    node_samples_per_s: float = np.inf
    input_samples_per_s: float = np.inf
    dataset_samples: float = np.nan


def metrics_of(
    iteration_time_us: Array,
    hbm_bytes: Array,
    *,
    global_batch: Array,
    world_size: Array,
    circumstances: Circumstances,
    left_bytes: Array | None = None,
    quality_loss: Array | None = None,
    quality_std: Array | None = None,
) -> dict[str, Array]:
    """Every metric of n candidates.

    Args:
        iteration_time_us: `(n,)` predicted.
        hbm_bytes: `(n,)` of the fullest rank: the one with the least memory left.
        global_batch: `(n,)` samples.
        world_size: `(n,)` GPUs.
        circumstances: prices and limits.
        left_bytes: `(n,)` what that rank has left, where GPUs differ in memory.
        quality_loss: `(n,)` relative loss, if a proxy is in use.
        quality_std: `(n,)` its standard deviation.

    Returns:
        `(n,)` by metric name; NaN where a metric needs what is not known.
    """
    us = np.maximum(iteration_time_us, _input_us(global_batch, world_size, circumstances))
    samples_per_s = global_batch / us * US_PER_S
    hours = circumstances.dataset_samples / samples_per_s / S_PER_H
    price = circumstances.price_per_gpu_hour or np.nan
    unknown = np.full(us.shape, np.nan)
    return {
        "iteration_time_ms": us / 1e3,
        "time_per_sample_us": us / global_batch,
        "time_per_sample_ns": us / global_batch * 1e3,
        "samples_per_second": samples_per_s,
        "gpu_time_per_sample_us": us / global_batch * world_size,
        "hours_per_epoch": hours,
        "gpu_hours_per_epoch": hours * world_size,
        "cost_per_epoch_usd": hours * world_size * price,
        "hbm_gib": hbm_bytes / BYTES_PER_GIB,
        "hbm_left_gib": unknown if left_bytes is None else left_bytes / BYTES_PER_GIB,
        "quality_loss": unknown if quality_loss is None else quality_loss,
        "quality_std": unknown if quality_std is None else quality_std,
        "global_batch": np.asarray(global_batch, dtype=np.float64),
        "world_size": np.asarray(world_size, dtype=np.float64),
    }


def _input_us(global_batch: Array, world_size: Array, circumstances: Circumstances) -> Array:
    """`(n,)`: the time in which the data loader feeds one batch; 0 without a limit."""
    machines = np.ceil(world_size / circumstances.gpus_per_node)
    limit = np.minimum(circumstances.input_samples_per_s, circumstances.node_samples_per_s * machines)
    return np.asarray(global_batch / limit * US_PER_S, dtype=np.float64)


def objective_values(objectives: Sequence[Objective], metrics: Mapping[str, Array]) -> Array:
    """`(n, m)`: the objectives, all to be minimised (a metric to be maximised is negated)."""
    return np.stack([metrics[o.metric] * (1.0 if o.minimize else -1.0) for o in objectives], axis=1)
