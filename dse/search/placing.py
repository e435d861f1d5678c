"""Placements for a space: by policy, and `auto` by the predicted time of the leanest designs.

A plan serves every design that shares its settings (`PLACEMENT_SETTINGS`). It decides the iteration time where little
hides it: with a small network, fused ops and few launches. So `auto` compares plans by the leanest design that the space
has, and takes memory for the widest. Among the plans compared are those that a brief search by the design's own critical path
finds at a few *anchors*, settings spread over the space: what is good there is mostly good around.

Settings are placed in the order of what their bounds promise. Some designs of those that are placed are predicted at once;
settings that cannot beat them any more (`dse.search.prospects`) get no plan of their own but tables spread evenly.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from dse.candidate import PLACEMENT_SETTINGS, Request, design_of, even_plan, values_of
from dse.placement.design.averages import lower_bounds_us
from dse.placement.design.brief import brief_plans
from dse.placement.policy.choose import (
    MAX_RANKS,
    Candidate,
    Case,
    by_policies,
    fastest,
    fitting,
    placed,
)
from dse.placement.policy.options import Policy
from dse.search.incumbents import many_networks
from dse.search.prospects import Prospects, beaten_by
from dse.search.protocol import Array
from dse.space import Codes, SearchSpace
from perfcore.design.design import Design
from perfcore.design.hardware import System
from perfcore.design.model import Model
from perfcore.design.sharding import ShardingPlan
from perfcore.design.training import EmbeddingFusion, Fusion, Launches, Training, can_capture
from perfcore.errors import UnsupportedError
from perfcore.graph.dims import structure_of
from perfcore.predictor import Predictor
from perfcore.profile.profile import Profile

BATCH = "training.global_batch"
# Where anchors lie among the batches of the space, the largest being 1; columns are the middle ones.
_ANCHORS = (1 / 3, 2 / 3, 1.0)
_MOST_SEARCHED = 2_000  # ranks times tables; beyond, a search is no longer brief
_FEW = 24  # settings that are placed before the others are looked at again
_ROUNDED = 1.005  # times priced in bulk are rounded and interpolated


class SpacePlanner:
    """Places the tables of a space's candidates; what was asked before is remembered."""

    def __init__(self, space: SearchSpace, profile: Profile, *, prospects: Prospects | None = None) -> None:
        """Nothing is placed yet; `placed` counts the settings that got a plan of their own.

        Args:
            space: whose candidates are asked for.
            profile: prices them.
            prospects: tells which settings are not worth a placement; `None` places all.
        """
        self._space, self._predictor, self._prospects = space, Predictor(profile), prospects
        self._known: dict[Hashable, ShardingPlan] = {}
        self.placed = 0
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
        """Place many at once: the same plans as one by one, priced together, but for settings without prospects."""
        fresh = {_key(r): r for r in requests if _key(r) not in self._known}
        if self._prospects is None or len(fresh) < _FEW:
            self._place(list(fresh.values()))
        else:
            self._place_promising(list(fresh.values()), self._prospects)

    def _place_promising(self, requests: Sequence[Request], prospects: Prospects) -> None:
        """In the order of what their bounds promise, until what is left cannot beat what is known."""
        rows = np.array([self._row(r, self._rest_row) for r in requests])
        best = prospects.best(rows, self._lower_us(requests) / _ROUNDED)
        beaten = beaten_by(best)
        left = np.lexsort([np.array([r[3] != Policy.AUTO for r in requests]), beaten])
        size, learned = max(_FEW, int((beaten == 0).sum())), False
        while len(left):
            now, left = left[:size], left[size:]
            self._place([requests[i] for i in now])
            if not learned:
                learned = True
                self._learn([requests[i] for i in now], prospects)
            hopeless = prospects.hopeless(best[left])
            self._known |= {_key(requests[i]): _evenly(*requests[i]) for i in left[hopeless]}
            left, size = left[~hopeless], max(_FEW, len(left) // 8)

    def _learn(self, requests: Sequence[Request], prospects: Prospects) -> None:
        """Price many networks at settings that have plans; at those under `auto`, where the space has it."""
        automatic = [r for r in requests if r[3] == Policy.AUTO]
        alike: dict[Hashable, list[Request]] = {}
        for r in automatic or requests:
            _, training, system, policy, fusion = r
            tables = training.table_precision, training.table_optimizer
            alike.setdefault((system.world_size, policy, *tables, fusion.embedding), []).append(r)
        for group in alike.values():
            plans = {(r[0].embedding_dim, r[1].global_batch): self._known[_key(r)] for r in group}
            row = self._row(group[0], self._middle_row)
            if self._space.allowed(row[None])[0]:
                prospects.learn(*many_networks(self._space, self._predictor.profile, row, plans))

    def _row(self, request: Request, row: Codes) -> Codes:
        """The `(a,)` codes of a design with a request's settings."""
        model, training, system, policy, fusion = request
        row = row.copy()
        values = {
            "system.world_size": system.world_size,
            BATCH: training.global_batch,
            "model.embedding_dim": model.embedding_dim,
            "sharding.policy": policy,
            "training.table_precision": training.table_precision,
            "training.table_optimizer": training.table_optimizer,
            "fusion.embedding": fusion.embedding,
        }
        for name, value in values.items():
            if name in self._space:
                axis = self._space.position(name)
                row[axis] = self._space.axes[axis].values.index(value)
        return row

    def _lower_us(self, requests: Sequence[Request]) -> Array:
        """`(n,)` least bounds of the leanest designs; a policy's plan serves all fusions of embeddings."""
        fusions = [EmbeddingFusion(str(v)) for v in values_of(self._space, "fusion.embedding")]
        asked: dict[Hashable, Design] = {}
        keys = []
        for model, training, system, policy, fusion in requests:
            own = [fusion.embedding] if policy == Policy.AUTO else fusions
            pairs = list(itertools.product(own, range(len(self._leanest))))
            keys.append([(model.embedding_dim, training, system, *pair) for pair in pairs])
            for key, (f, i) in zip(keys[-1], pairs, strict=True):
                if key not in asked:
                    plan = _evenly(model, training, system, Policy.TABLE_WISE, fusion)
                    design = Design(model, training, replace(fusion, embedding=f), plan, system)
                    asked[key] = _leaned(design, self._leanest[i])
        found = lower_bounds_us(list(asked.values()), predictor=self._predictor)
        lower_us = dict(zip(asked, found.tolist(), strict=True))
        return np.array([min(lower_us[key] for key in of_request) for of_request in keys])

    def _place(self, requests: Sequence[Request]) -> None:
        self.placed += len(requests)
        auto = [r for r in requests if r[3] == Policy.AUTO]
        for model, training, system, policy, fusion in requests:
            if policy != Policy.AUTO:
                key = _key((model, training, system, policy, fusion))
                self._known[key] = placed(model, training, system, policy).plan
        plans = fastest([self._case(r) for r in auto], predictor=self._predictor)
        self._known |= {_key(r): plan for r, plan in zip(auto, plans, strict=True)}

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
        return _leaned(design, self._rest)

    @cached_property
    def _rest(self) -> Design:
        """The leanest design."""
        return design_of(self._space, self._rest_row, _evenly)

    @cached_property
    def _leanest(self) -> list[Design]:
        """The leanest designs where columns and batches are few and many: other names may be the fastest there."""
        corners = itertools.product((0.0, 1.0), repeat=2)
        rows = {tuple(self._fastest_at(0.0, columns=c, batch=b).tolist()) for c, b in corners}
        designs = [design_of(self._space, np.array(row, dtype=np.int16), _evenly) for row in sorted(rows)]
        named = {(structure_of(d), d.model.bottom_hidden, d.model.top_hidden): d for d in designs}
        return list(named.values())

    @cached_property
    def _rest_row(self) -> Codes:
        """`(a,)`: the smallest of every number, of names the one predicted to be fastest, axis by axis."""
        return self._fastest_at(0.0)

    @cached_property
    def _middle_row(self) -> Codes:
        """`(a,)`: likewise of a network of middle size."""
        return self._fastest_at(0.5)

    def _fastest_at(self, network: float, *, columns: float = 0.0, batch: float = 1.0) -> Codes:
        """`(a,)`: numbers so large, from 0 to 1, on most ranks; names predicted to be fastest, axis by axis."""
        level = {"system.world_size": 1.0, BATCH: batch, "model.embedding_dim": columns}
        row = np.zeros(len(self._space.axes), dtype=np.int16)
        for i, axis in enumerate(self._space.axes):
            if axis.ordered:
                order = np.argsort([float(v) for v in axis.values])
                row[i] = order[round(level.get(axis.name, network) * (len(order) - 1))]
            elif EmbeddingFusion.TABLE_BATCHED in axis.values:
                row[i] = axis.values.index(EmbeddingFusion.TABLE_BATCHED)
        for i, axis in enumerate(self._space.axes):
            if not axis.ordered and axis.name not in PLACEMENT_SETTINGS:
                row = self._fastest_of(row, i)
        return row

    def _fastest_of(self, row: Codes, axis: int) -> Codes:
        """The row with the value of one axis that is predicted to be fastest; where none can be told, the row."""
        rows = np.repeat(row[None], len(self._space.axes[axis].values), axis=0)
        rows[:, axis] = np.arange(len(rows))
        rows = rows[self._space.allowed(rows)]
        best, best_us = row, np.inf
        for other in rows:
            with contextlib.suppress(UnsupportedError):
                (time_us,) = self._predictor.iteration_times_us([design_of(self._space, other, _evenly)])
                if time_us < best_us:
                    best, best_us = other, time_us
        return best


def _leaned(design: Design, rest: Design) -> Design:
    """Everything that no placement depends on taken from another design."""
    own = design.training
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


def _evenly(model: Model, training: Training, system: System, policy: str, fusion: Fusion) -> ShardingPlan:
    return even_plan(
        model, policy=policy, world_size=system.world_size, local_world_size=system.local_world_size
    )


def _key(request: Request) -> Hashable:
    """What a plan depends on: only `auto` looks at the fusion."""
    model, training, system, policy, fusion = request
    return model, training, system, policy, fusion if policy == Policy.AUTO else None
