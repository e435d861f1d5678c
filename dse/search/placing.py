"""Placements for a space: by policy, and `auto` by the predicted time of the leanest designs.

A plan serves every design that shares its settings (`PLACEMENT_SETTINGS`). It decides the iteration time where little
hides it: with a small network, fused ops and few launches. So `auto` compares plans by the leanest design that the space
has, and takes memory for the widest. Among the plans compared are those that a brief search by the design's own critical path
finds at a few *anchors*, settings spread over the space: what is good there is mostly good around.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from dse.candidate import PLACEMENT_SETTINGS, Request, design_of, even_plan, values_of
from dse.placement.design.brief import brief_plans
from dse.placement.policy.choose import MAX_RANKS, Candidate, Case, by_policies, fastest, fitting, placed
from dse.placement.policy.options import Policy
from dse.space import Codes, SearchSpace
from perfcore.design.design import Design
from perfcore.design.hardware import System
from perfcore.design.model import Model
from perfcore.design.sharding import ShardingPlan
from perfcore.design.training import EmbeddingFusion, Fusion, Launches, Training, can_capture
from perfcore.errors import UnsupportedError
from perfcore.predictor import Predictor
from perfcore.profile.profile import Profile

BATCH = "training.global_batch"
# Where anchors lie among the batches of the space, the largest being 1; columns are the middle ones.
_ANCHORS = (1 / 3, 2 / 3, 1.0)
_MOST_SEARCHED = 2_000  # ranks times tables; beyond, a search is no longer brief


class SpacePlanner:
    """Places the tables of a space's candidates; what was asked before is remembered."""

    def __init__(self, space: SearchSpace, profile: Profile) -> None:
        """Nothing is placed yet."""
        self._space, self._predictor = space, Predictor(profile)
        self._known: dict[Hashable, ShardingPlan] = {}
        self._pools: dict[Hashable, tuple[ShardingPlan, ...]] = {}

    def __call__(
        self, model: Model, training: Training, system: System, policy: str, fusion: Fusion
    ) -> ShardingPlan:
        """The plan; where nothing fits, the one with the least overflow, which memory limits refuse.

        Raises:
            SpaceError: the policy is unknown.
        """
        request = model, training, system, policy, fusion
        self.ahead([request])
        return self._known[_key(request)]

    def ahead(self, requests: Sequence[Request]) -> None:
        """Place many at once: the same plans as one by one, priced together."""
        fresh = {_key(r): r for r in requests if _key(r) not in self._known}
        auto = {k: r for k, r in fresh.items() if r[3] == Policy.AUTO}
        for key, (model, training, system, policy, _) in fresh.items():
            if key not in auto:
                self._known[key] = placed(model, training, system, policy).plan
        plans = fastest([self._case(r) for r in auto.values()], predictor=self._predictor)
        self._known |= dict(zip(auto, plans, strict=True))

    def _case(self, request: Request) -> Case:
        """What `auto` chooses from."""
        model, training, system, _, fusion = request
        found = by_policies(model, training, system)
        candidates = [Candidate(p.plan, float(p.load_us.max())) for p in found]
        asked = Design(model, training, fusion, found[0].plan, system)
        if len(found) > 1:
            known = {p.plan for p in found}
            pool = [p for p in self._pool(request) if p not in known]
            candidates += [Candidate(p) for p in fitting(asked, pool)]
        return Case(self._lean(asked), tuple(candidates))

    def _pool(self, request: Request) -> tuple[ShardingPlan, ...]:
        """Plans found at the anchors with the same ranks and the same format and optimizer of tables."""
        model, training, system, _, fusion = request
        key = system.world_size, training.table_precision, training.table_optimizer
        if key not in self._pools:
            asked = Design(model, training, fusion, placed(model, training, system, Policy.AUTO).plan, system)
            plans = [p for d in self._anchors(asked) for p in brief_plans(d, predictor=self._predictor)]
            self._pools[key] = tuple(dict.fromkeys(plans))
        return self._pools[key]

    def _anchors(self, design: Design) -> list[Design]:
        """The leanest design at settings spread over the space; none where a search would take long."""
        ranks = design.system.world_size
        if ranks > MAX_RANKS or ranks * len(design.model.tables) > _MOST_SEARCHED:
            return []
        batches = [int(b) for b in sorted(values_of(self._space, BATCH)) if not int(b) % ranks]
        dims = sorted(int(d) for d in values_of(self._space, "model.embedding_dim"))
        model = replace(design.model, embedding_dim=dims[len(dims) // 2])
        fusion = replace(design.fusion, embedding=self._rest.fusion.embedding)
        chosen = sorted({batches[round(at * (len(batches) - 1))] for at in _ANCHORS})
        trainings = (replace(design.training, global_batch=b) for b in chosen)
        return [self._lean(replace(design, model=model, training=t, fusion=fusion)) for t in trainings]

    def _lean(self, design: Design) -> Design:
        """The leanest design of the space with the same placement settings and the same plan."""
        rest, own = self._rest, design.training
        launches = rest.fusion.launches
        if not can_capture(launches, design.fusion.embedding):
            launches = Launches.EAGER
        return replace(
            design,
            model=replace(rest.model, embedding_dim=design.model.embedding_dim),
            training=replace(
                rest.training,
                global_batch=own.global_batch,
                table_precision=own.table_precision,
                table_optimizer=own.table_optimizer,
            ),
            fusion=replace(rest.fusion, embedding=design.fusion.embedding, launches=launches),
        )

    @cached_property
    def _rest(self) -> Design:
        """The leanest design: the smallest of every number, of names the one predicted to be fastest, axis by axis."""
        space = self._space
        row = np.zeros(len(space.axes), dtype=np.int16)
        for i, axis in enumerate(space.axes):
            if axis.ordered:
                order = np.argsort([float(v) for v in axis.values])
                large = axis.name in ("system.world_size", BATCH)
                row[i] = order[-1] if large else order[0]
            elif EmbeddingFusion.TABLE_BATCHED in axis.values:
                row[i] = axis.values.index(EmbeddingFusion.TABLE_BATCHED)
        for i, axis in enumerate(space.axes):
            if not axis.ordered and axis.name not in PLACEMENT_SETTINGS:
                row = self._fastest_of(row, i)
        return design_of(space, row, _evenly)

    def _fastest_of(self, row: Codes, axis: int) -> Codes:
        """The row with the value of one axis that is predicted to be fastest; where none can be told, the row."""
        rows = np.repeat(row[None], len(self._space.axes[axis].values), axis=0)
        rows[:, axis] = np.arange(len(rows))
        rows = rows[self._space.allowed(rows)]
        best, best_us = row, np.inf
        for other in rows:
            with contextlib.suppress(UnsupportedError):
                time_us = self._predictor.iteration_time_us(design_of(self._space, other, _evenly))
                if time_us < best_us:
                    best, best_us = other, time_us
        return best


def _evenly(model: Model, training: Training, system: System, policy: str, fusion: Fusion) -> ShardingPlan:
    return even_plan(
        model, policy=policy, world_size=system.world_size, local_world_size=system.local_world_size
    )


def _key(request: Request) -> Hashable:
    """What a plan depends on: only `auto` looks at the fusion."""
    model, training, system, policy, fusion = request
    return model, training, system, policy, fusion if policy == Policy.AUTO else None
