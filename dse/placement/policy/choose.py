"""The policy `auto` by predicted time: the plans of all policies, compared.

Each kind of sharding on a rank brings kernels and collectives of its own. Their fixed cost is no sum over
shards, and may hide behind the host or other kernels; only the whole iteration knows what it costs.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from dse.placement.policy.options import Policy
from dse.placement.policy.place import Placement, place
from perfcore.design.design import Design
from perfcore.design.hardware import System
from perfcore.design.model import Model
from perfcore.design.sharding import ShardingType
from perfcore.design.training import Fusion, Training
from perfcore.predictor import Predictor

POOLED = frozenset({ShardingType.TABLE_WISE, ShardingType.COLUMN_WISE})
ROW_SPLIT = frozenset({ShardingType.ROW_WISE, ShardingType.TABLE_ROW_WISE})
REPLICATED = frozenset({ShardingType.DATA_PARALLEL})
# Times so close are taken as equal; the smaller load then decides, which helps where less hides it.
SAME_TIME = 0.005
# The folded matrix of an iteration grows with the square of the ranks; beyond this, loads alone decide.
MAX_RANKS = 64
_REMEMBERED = 64  # placements; a space asks for all policies of one combination of settings in a row


def fastest(
    model: Model, training: Training, system: System, fusion: Fusion, *, predictor: Predictor
) -> Placement:
    """The placement whose iteration is predicted to be the shortest.

    Compared are the plans of all policies, and the solver's mix without replicas.

    Args:
        model: whose tables to place.
        training: batch, number formats and optimizers.
        system: ranks, memory and links.
        fusion: which ops are fused.
        predictor: of the system's device.

    Returns:
        The best placement; when nothing fits, the one with the least overflow and `feasible=False`.

    Raises:
        DesignError: the batch does not divide by the ranks.
    """
    mixed = placed(model, training, system, Policy.AUTO)
    if not mixed.feasible or not 1 < system.world_size <= MAX_RANKS:
        return mixed
    found = {p.plan: p for p in _candidates(model, training, system, mixed) if p.feasible}
    plans = [*found.values()]
    times_us = predictor.iteration_times_us([Design(model, training, fusion, p.plan, system) for p in plans])
    close = np.flatnonzero(times_us <= times_us.min() * (1 + SAME_TIME))
    return min((plans[i] for i in close), key=lambda p: float(p.load_us.max()))


@lru_cache(maxsize=_REMEMBERED)
def placed(model: Model, training: Training, system: System, policy: str) -> Placement:
    """As `place`, remembered for a while: `auto` looks at the plans of all policies."""
    return place(model, training, system, policy=policy)


def _candidates(model: Model, training: Training, system: System, mixed: Placement) -> Iterator[Placement]:
    yield mixed
    one_machine = system.world_size == system.local_world_size
    for policy in Policy:
        # On one machine table_row_wise is row_wise.
        if policy is not Policy.AUTO and not (one_machine and policy is Policy.TABLE_ROW_WISE):
            yield placed(model, training, system, policy)
    if any(t.type in REPLICATED for t in mixed.plan.tables):
        yield place(model, training, system, policy=Policy.AUTO, kinds=POOLED | ROW_SPLIT)
