"""The end of a search: placements of the front's designs, looked for design by design.

During the search one plan serves all designs that share its settings. Here some designs of the front are searched by their
own critical paths, and every design of the front takes the fastest plan, found or had by any of them, that fits it. Then
the designs with the widest certified gaps are searched, whose critical paths are like none before. All designs are predicted
whole, so that the front says what `dse predict` says of the exported design.

The work is counted, not timed: the same front gives the same plans.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dse.candidate import PLACEMENT_SETTINGS, Place, design_of, settings_at
from dse.placement.design.brief import brief_plans
from dse.placement.design.gap import DesignBounds
from dse.placement.policy.choose import MAX_RANKS, fitting, iteration_times_us
from dse.schema import Policy
from dse.search.found import Found, contained
from dse.search.protocol import Array, Codes, Evaluation
from dse.space import SearchSpace
from perfcore.design.design import Design
from perfcore.design.sharding import ShardingPlan
from perfcore.memory import memory_of
from perfcore.predictor import Predictor

_WORK, _ROUNDS = 20_000, 2  # of each search
_KEPT = 6  # plans of each setting that all its designs are priced with
_WIDE = 0.02  # gaps that are narrower are left alone
_POLICY = "sharding.policy"


@dataclass(frozen=True, slots=True, eq=False)
class Replanned:
    """A front whose designs have plans of their own.

    Attributes:
        codes: `(k, a)` in the order of the objectives.
        evaluation: of them.
        plans: by row; `None` where the placement of the search stands.
        searches: designs whose plans were searched.
        improved: designs that got a faster plan.
    """

    codes: Codes
    evaluation: Evaluation
    plans: tuple[ShardingPlan | None, ...]
    searches: int = 0
    improved: int = 0


@dataclass(frozen=True, slots=True)
class _Member:
    design: Design
    settings: tuple[object, ...]
    free: bool


def replanned(
    space: SearchSpace,
    codes: Codes,
    evaluation: Evaluation,
    *,
    place: Place,
    predictor: Predictor,
    evaluate: Callable[[Codes, Array, Array, Array], Evaluation],
    searches: int,
    bounds: DesignBounds | None = None,
) -> Replanned:
    """The front with better plans where `auto` may choose them; the same front where nothing is open.

    A member under another policy keeps to it, but where the space has `auto` too its twin under `auto` joins.

    Args:
        space: what was searched.
        codes: `(k, a)` of the front.
        evaluation: of the front.
        place: gave the plans so far.
        predictor: of the space's device.
        evaluate: evaluation of `(n, a)` codes with `(n,)` iteration times in µs, bytes of the fullest rank, and bytes
            that it has left.
        searches: designs whose plans are searched, at most.
        bounds: tell where gaps are wide, and up to half as many more are searched there.
    """
    rows = np.concatenate([codes, _twins(space, codes)])
    members = [_member(space, row, place) for row in rows]
    if not searches or not any(m.free for m in members):
        return Replanned(codes, evaluation, (None,) * len(codes))
    before_us = iteration_times_us([m.design for m in members], predictor=predictor)
    chosen = _spread(members, before_us, searches)
    found = [p for m in chosen for p in _searched(m.design, predictor)]
    designs, times_us = _fastest(members, before_us, found, predictor)
    again = 0
    if bounds is not None:
        designs, times_us, again = _narrowed(members, designs, times_us, bounds, predictor, searches // 2)
    evaluated = evaluate(rows, times_us, *np.array([_held_and_left(d) for d in designs]).T)
    front = Found.among(rows, evaluated).codes
    at = [int(np.flatnonzero((rows == row).all(axis=1))[0]) for row in front]
    return Replanned(
        front,
        evaluated.take(np.array(at, dtype=np.int64)),
        tuple(designs[i].sharding for i in at),
        searches=len(chosen) + again,
        improved=sum(bool(times_us[i] < before_us[i]) for i in at),
    )


def _held_and_left(design: Design) -> tuple[float, float]:
    """Bytes of the fullest rank, and what it has left."""
    memory = memory_of(design)
    rank, left = memory.fullest(design.system)
    return float(memory.total[rank]), left


def _twins(space: SearchSpace, codes: Codes) -> Codes:
    """Members under a fixed policy with `auto` in its place, as far as they are no members themselves."""
    if _POLICY not in space:
        return codes[:0]
    axis = space.position(_POLICY)
    if Policy.AUTO not in space.axes[axis].values:
        return codes[:0]
    twins = codes[space.active(codes)[:, axis]].copy()
    twins[:, axis] = space.axes[axis].values.index(Policy.AUTO)
    twins = np.unique(twins, axis=0)
    return twins[~contained(twins, codes)]


def _member(space: SearchSpace, row: Codes, place: Place) -> _Member:
    settings = settings_at(space, row)
    design = design_of(space, row, place)
    free = settings[_POLICY] == Policy.AUTO and 1 < design.system.world_size <= MAX_RANKS
    return _Member(design, tuple(settings[name] for name in PLACEMENT_SETTINGS), free)


def _spread(members: Sequence[_Member], times_us: Array, most: int) -> list[_Member]:
    """Designs to search: of each setting the fastest, then the slowest, then the middle one; large groups first."""
    groups = [sorted(g, key=lambda i: (times_us[i], i)) for g in _by_settings(members)]
    groups.sort(key=lambda g: (-len(g), g[0]))
    turns = [[g[0] for g in groups], [g[-1] for g in groups], [g[len(g) // 2] for g in groups]]
    order = dict.fromkeys(i for turn in turns for i in turn)
    return [members[i] for i in list(order)[:most]]


def _searched(design: Design, predictor: Predictor) -> tuple[ShardingPlan, ...]:
    """Plans of a design by its own critical path."""
    return brief_plans(design, predictor=predictor, work=_WORK, rounds=_ROUNDS)


def _narrowed(
    members: Sequence[_Member],
    designs: Sequence[Design],
    times_us: Array,
    bounds: DesignBounds,
    predictor: Predictor,
    most: int,
) -> tuple[list[Design], Array, int]:
    """Members, with plans of those that have wide gaps where these are faster; their times, and how many were searched."""
    members = [replace(m, design=d) for m, d in zip(members, designs, strict=True)]
    lower_us = bounds.lower_us(designs, times_us)
    left = np.array([m.free for m in members])
    for number in range(most):
        gaps = np.where(left, np.nan_to_num(times_us / lower_us - 1.0), 0.0)
        widest = int(np.argmax(gaps))
        if gaps[widest] < _WIDE:
            return [m.design for m in members], times_us, number
        left[widest] = False
        found = _searched(members[widest].design, predictor)
        faster, times_us = _fastest(members, times_us, found, predictor)
        members = [replace(m, design=d) for m, d in zip(members, faster, strict=True)]
    return [m.design for m in members], times_us, most


def _by_settings(members: Sequence[_Member]) -> list[list[int]]:
    """Positions of the members that may have any plan, by the settings that they share."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for i, member in enumerate(members):
        if member.free:
            groups.setdefault(member.settings, []).append(i)
    return list(groups.values())


def _fastest(
    members: Sequence[_Member], before_us: Array, found: Sequence[ShardingPlan], predictor: Predictor
) -> tuple[list[Design], Array]:
    """Each member with the fastest of its own plan and those of any; the best for its setting are tried."""
    found = list(dict.fromkeys(found))
    designs, times_us = [m.design for m in members], before_us.copy()
    for group in _by_settings(members):
        plans = [p for p in found if _same_ranks(p, members[group[0]].design)]
        best = _tried(members[group[0]].design, plans, predictor)[:_KEPT]
        trials = [(i, p) for i in group for p in fitting(members[i].design, best)]
        tried = [replace(members[i].design, sharding=p) for i, p in trials]
        for (i, _), design, us in zip(
            trials, tried, iteration_times_us(tried, predictor=predictor).tolist(), strict=True
        ):
            if us < times_us[i]:
                designs[i], times_us[i] = design, us
    return designs, times_us


def _same_ranks(plan: ShardingPlan, design: Design) -> bool:
    """Whether a plan can be one of a design's: found for as many ranks as far as it shows."""
    ranks = design.system.world_size
    return all(
        max(t.ranks) < ranks and (t.type.value not in ("row_wise", "data_parallel") or len(t.ranks) == ranks)
        for t in plan.tables
    )


def _tried(design: Design, plans: Sequence[ShardingPlan], predictor: Predictor) -> list[ShardingPlan]:
    """Plans that fit, the fastest first."""
    fits = fitting(design, plans)
    times_us = iteration_times_us([replace(design, sharding=p) for p in fits], predictor=predictor)
    return [fits[i] for i in np.argsort(times_us, kind="stable")]
