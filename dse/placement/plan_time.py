"""Iteration times of plans of one design."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dse.placement.problem import Array
from perfcore.design.design import Design
from perfcore.design.sharding import ShardingPlan
from perfcore.predictor import Predictor

_CHUNK = 4e5  # plans times ranks times tables that are priced in one call


def plan_times_us(predictor: Predictor, design: Design, plans: Sequence[ShardingPlan]) -> Array:
    """`(n,)` predicted iteration times of a design with other plans."""
    size = design.system.world_size * len(design.model.tables)
    step = max(1, int(_CHUNK / size))
    times = [
        predictor.iteration_times_us([replace(design, sharding=p) for p in plans[i : i + step]])
        for i in range(0, len(plans), step)
    ]
    return np.concatenate(times) if times else np.empty(0)
