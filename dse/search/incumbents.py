"""Designs that are known early: many networks at settings whose tables are placed, priced in bulk.

Letters: n candidates, a axes.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np

from dse.candidate import PLACEMENT_SETTINGS, column, even_plan
from dse.search.bulk_times import BulkTimes
from dse.search.protocol import Array, Codes
from dse.search.subspace import held_at, in_whole
from dse.space import SearchSpace
from perfcore.design.hardware import System
from perfcore.design.model import Model
from perfcore.design.sharding import ShardingPlan
from perfcore.design.training import Fusion, Training
from perfcore.profile.profile import Profile

_SAMPLED = 2**14
_VARIED = ("model.embedding_dim", "training.global_batch")


def many_networks(
    space: SearchSpace, profile: Profile, row: Codes, plans: Mapping[tuple[int, int], ShardingPlan]
) -> tuple[Codes, Array, Array, Array]:
    """Some networks of all sizes at settings that differ in columns and batch alone.

    Args:
        space: of the candidates.
        profile: prices them.
        row: `(a,)` codes of a design with the names and the other settings of all of them.
        plans: by columns and batch.

    Returns:
        `(n, a)` codes, and `(n,)` iteration times in µs, bytes of the fullest rank, and bytes that it has left.
    """

    def place(model: Model, training: Training, system: System, policy: str, fusion: Fusion) -> ShardingPlan:
        """Settings that have no plan are priced with some, and left out."""
        local = system.local_world_size
        known = plans.get((model.embedding_dim, training.global_batch))
        return known or even_plan(model, policy=policy, world_size=system.world_size, local_world_size=local)

    held = {a.name for a in space.axes if not a.ordered or a.name in PLACEMENT_SETTINGS} - set(_VARIED)
    part = held_at(space, row, frozenset(held))
    codes = np.unique(np.concatenate([part.sample(np.random.default_rng(0), _SAMPLED), _ends(part)]), axis=0)
    whole = in_whole(space, part, codes, row)
    columns, batches = (column(space, whole, name).tolist() for name in _VARIED)
    kept = space.allowed(whole) & np.array([pair in plans for pair in zip(columns, batches, strict=True)])
    return whole[kept], *BulkTimes(part, profile, place).price(codes[kept])


def _ends(space: SearchSpace) -> Codes:
    """`(n, a)`: the smallest and the largest network with all columns and batches."""
    order = [np.argsort([float(v) for v in a.values]) for a in space.axes]
    varied = [i for i, a in enumerate(space.axes) if a.name in _VARIED]
    rows = []
    for end in (0, -1):
        for chosen in itertools.product(*(range(len(order[i])) for i in varied)):
            row = np.array([o[end] for o in order], dtype=np.int16)
            row[varied] = [order[i][c] for i, c in zip(varied, chosen, strict=True)]
            rows.append(row)
    return space.canonical(np.array(rows, dtype=np.int16).reshape(len(rows), len(space.axes)))
