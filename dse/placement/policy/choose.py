"""The policy `auto` by predicted time: the plans of all policies, and whatever others are offered, compared.

Each kind of sharding on a rank brings kernels and collectives of its own. Their fixed cost is no sum over
shards, and may hide behind the host or other kernels; only the whole iteration knows what it costs.

Letters: n designs, r ranks.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from dse.placement.capacity import rank_capacity_bytes
from dse.placement.policy.options import ALL_KINDS, Policy
from dse.placement.policy.place import Array, Placement, place
from perfcore.design.design import Design
from perfcore.design.hardware import System
from perfcore.design.model import Model
from perfcore.design.sharding import ShardingPlan, ShardingType, Shards, shards_of
from perfcore.design.training import Training
from perfcore.graph.dims import Dims, dims_of, structure_of
from perfcore.memory import embedding_bytes
from perfcore.predictor import Predictor

POOLED = frozenset({ShardingType.TABLE_WISE, ShardingType.COLUMN_WISE})
ROW_SPLIT = frozenset({ShardingType.ROW_WISE, ShardingType.TABLE_ROW_WISE})
REPLICATED = frozenset({ShardingType.DATA_PARALLEL})
# Times so close are taken as equal; the smaller load then decides, which helps where less hides it.
SAME_TIME = 0.001
# The folded matrix of an iteration grows with the square of the ranks; beyond this, loads alone decide.
MAX_RANKS = 64
_REMEMBERED = 4096  # placements; a space asks for all policies of hundreds of combinations of settings
_PRICED_AT_ONCE = 4e5  # designs times ranks times tables


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan that fits, and its largest load by the cost of policies; infinite where that is not known."""

    plan: ShardingPlan
    load_us: float = np.inf


@dataclass(frozen=True, slots=True)
class Case:
    """A choice to make.

    Attributes:
        design: predicted with each plan; its own plan does not matter.
        candidates: to choose from, one at least.
    """

    design: Design
    candidates: tuple[Candidate, ...]


def fastest(cases: Sequence[Case], *, predictor: Predictor) -> list[ShardingPlan]:
    """The plan of each case whose iteration is predicted to be the shortest; all cases are priced together.

    Args:
        cases: of the predictor's device.
        predictor: predicts.

    Raises:
        DesignError: a batch does not divide by the ranks, or a plan is none of the design's.
    """
    open_cases = [c for c in cases if len(c.candidates) > 1]
    designs = [replace(c.design, sharding=x.plan) for c in open_cases for x in c.candidates]
    ends = np.cumsum([len(c.candidates) for c in open_cases])
    times_us = iter(np.split(iteration_times_us(designs, predictor=predictor), ends[:-1]))
    return [
        _best(c.candidates, next(times_us)) if len(c.candidates) > 1 else c.candidates[0].plan for c in cases
    ]


def _best(candidates: Sequence[Candidate], times_us: Array) -> ShardingPlan:
    close = np.flatnonzero(times_us <= times_us.min() * (1 + SAME_TIME)).tolist()
    return candidates[min(close, key=lambda i: (candidates[i].load_us, times_us[i]))].plan


def iteration_times_us(designs: Sequence[Design], *, predictor: Predictor) -> Array:
    """`(n,)` predicted iteration times of any designs of a device; those of a kind are priced as one list."""
    kinds: dict[Hashable, list[int]] = {}
    for i, d in enumerate(designs):
        # Depths too: the slots of absent layers would change sums over layers by rounding.
        depths = len(d.model.bottom_hidden), len(d.model.top_hidden)
        key = structure_of(d), d.model.tables, d.model.num_dense_features, d.system, depths
        kinds.setdefault(key, []).append(i)
    times_us = np.empty(len(designs))
    for members in kinds.values():
        first = designs[members[0]]
        step = max(1, int(_PRICED_AT_ONCE / (first.system.world_size * len(first.model.tables))))
        for start in range(0, len(members), step):
            part = members[start : start + step]
            times_us[part] = predictor.iteration_times_us([designs[i] for i in part])
    return times_us


def fitting(design: Design, plans: Sequence[ShardingPlan]) -> list[ShardingPlan]:
    """Of plans for a design's ranks and tables those that fit its columns and its memory."""
    dim_of = dict(zip((t.name for t in design.model.tables), design.model.table_dims, strict=True))
    even = [
        p for p in plans if all(t.type not in POOLED or dim_of[t.table] % len(t.ranks) == 0 for t in p.tables)
    ]
    if not even:
        return []
    system = design.system
    shards = [
        shards_of(p, design.model, world_size=system.world_size, local_world_size=system.local_world_size)
        for p in even
    ]
    dims, structure = dims_of([design]), structure_of(design)
    names = {name: getattr(dims, name) for name in Dims.__dataclass_fields__}
    names["shards"] = Shards(
        **{f: np.stack([getattr(s, f) for s in shards]) for f in Shards.__dataclass_fields__}
    )
    over = (embedding_bytes(Dims(**names), structure) - rank_capacity_bytes(design)).max(axis=1)
    return [p for p, most in zip(even, over.tolist(), strict=True) if most <= 0]


def by_policies(model: Model, training: Training, system: System) -> list[Placement]:
    """The plans of all policies that fit, and the solver's mix with and without replicas; the mix is the first.

    Ranks that differ in pace are placed on as if they were equal as well. Where the mix does not fit it is the only one,
    and so it is on one rank or on very many.
    """
    mixed = placed(model, training, system, Policy.AUTO)
    if not mixed.feasible or not 1 < system.world_size <= MAX_RANKS:
        return [mixed]
    # On one machine table_row_wise is row_wise.
    one_machine = system.world_size == system.local_world_size
    plain = [p for p in Policy if p is not Policy.AUTO and not (one_machine and p is Policy.TABLE_ROW_WISE)]
    found = [mixed, *(placed(model, training, system, p) for p in plain)]
    if any(t.type in REPLICATED for t in mixed.plan.tables):
        found.append(placed(model, training, system, Policy.AUTO, kinds=POOLED | ROW_SPLIT))
    if system.slowness:
        found += _as_if_alike(model, training, system, [Policy.AUTO, *plain])
    return [*{p.plan: p for p in found if p.feasible}.values()]


def _as_if_alike(
    model: Model, training: Training, system: System, policies: Sequence[Policy]
) -> list[Placement]:
    """Plans that forget the ranks' pace: exchanges, which no pace slows, may weigh more than lookups."""
    alike, slowness = replace(system, slowness=()), np.array(system.slowness)
    found = [placed(model, training, alike, policy) for policy in policies]
    return [replace(p, load_us=p.load_us * slowness) for p in found]


@lru_cache(maxsize=_REMEMBERED)
def placed(
    model: Model,
    training: Training,
    system: System,
    policy: str,
    *,
    kinds: frozenset[ShardingType] = ALL_KINDS,
) -> Placement:
    """As `place`, remembered: `auto` looks at the plans of all policies."""
    return place(model, training, system, policy=policy, kinds=kinds)
