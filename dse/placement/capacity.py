"""What a design leaves of its ranks' device memory for its tables."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from perfcore.design.design import Design
from perfcore.design.hardware import System
from perfcore.design.model import Model
from perfcore.design.sharding import ShardingPlan
from perfcore.design.training import Fusion, Training
from perfcore.graph.dims import Dims, Structure, dims_of, structure_of
from perfcore.graph.kernels import Total
from perfcore.memory import memory_terms


@lru_cache(maxsize=8)
def without_tables(
    model: Model, training: Training, fusion: Fusion, system: System
) -> tuple[Dims, Structure, float]:
    """A design's dims and structure, and the bytes of a rank that it needs whatever the placement."""
    design = Design(model, training, fusion, ShardingPlan.on_one_rank(model), system)
    dims, structure = dims_of([design]), structure_of(design)
    terms = memory_terms(dims, structure)
    needed = (t.value() if isinstance(t, Total) else t for name, t in terms.items() if name != "embedding")
    return dims, structure, float(sum(v.item() for v in needed))


def rest_bytes(design: Design) -> float:
    """What every rank needs whatever the placement."""
    return without_tables(design.model, design.training, design.fusion, design.system)[2]


def rank_capacity_bytes(design: Design) -> NDArray[np.float64]:
    """`(r,)` memory of each rank's GPU less what every rank needs whatever the placement; may be negative."""
    return np.array(design.system.rank_hbm_bytes) - rest_bytes(design)


def tables_capacity_bytes(design: Design) -> float:
    """The same of the rank that has most."""
    return float(rank_capacity_bytes(design).max())
