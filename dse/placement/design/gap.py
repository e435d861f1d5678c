"""Lower bounds of many designs at once: those that share their steps share their cuts.

The designs of a search's front are many, but most differ in the widths of their layers alone, which no plan changes: one
linear program a class then serves them all (`ClassBound`).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

import numpy as np

from dse.placement.capacity import rank_capacity_bytes
from dse.placement.design.bound import ClassBound
from dse.placement.design.class_program import DenseCosts
from dse.placement.design.classes import class_bounds
from dse.placement.design.options import Options, options_of
from dse.placement.design.probing import shard_costs
from dse.placement.design.shard_costs import ShardCosts, single_rank_dims
from dse.placement.solver.problem import Array
from perfcore.design.design import Design
from perfcore.graph.dims import structure_of
from perfcore.predictor import Predictor, feed_us

CLOSED = 1e-4  # relative; gaps this small are not worth a round
_ROUNDS = 4  # of cuts, for each design
_PROGRAMS = 12  # that a class's plans are parted by bytes with, beside one for each design
_WORTH = 1e-4  # relative; cuts that say less are not worth a program
_ROUNDED = 1.005  # times priced in bulk are rounded and interpolated


class DesignBounds:
    """Lower bounds of designs' iteration times over all plans, remembered by what they share."""

    def __init__(self, predictor: Predictor) -> None:
        """Nothing is priced yet."""
        self._predictor = predictor
        self._costs: dict[Hashable, tuple[Options, ShardCosts]] = {}
        # Of designs without their plans: bounds by averages, and by ranges of bytes.
        self._known: dict[Hashable, tuple[float, float]] = {}

    def lower_us(self, designs: Sequence[Design], times_us: Array) -> Array:
        """The bounds.

        Args:
            designs: of one device; their own plans do not matter.
            times_us: `(n,)` of the designs with their plans; bounds need not come closer than these.

        Returns:
            `(n,)` µs, at most `times_us`; NaN where a time refutes the bound, so that none may be told.
        """
        keys = [(d.model, d.training, d.fusion, d.system) for d in designs]
        new = [i for i, key in enumerate(keys) if key not in self._known]
        groups: dict[Hashable, list[int]] = {}
        for i in new:
            groups.setdefault(_steps_key(designs[i]), []).append(i)
        for members in groups.values():
            bounds = self._of_group([designs[i] for i in members], times_us[members])
            self._known.update(zip([keys[i] for i in members], bounds, strict=True))
        by_averages, by_bytes = np.array([self._known[key] for key in keys]).reshape(-1, 2).T
        told = by_averages <= times_us * _ROUNDED
        return np.asarray(np.where(told, np.minimum(by_bytes, times_us), np.nan))

    def _of_group(self, designs: Sequence[Design], times_us: Array) -> list[tuple[float, float]]:
        """Bounds of designs with the same steps: by averages, and by ranges of bytes."""
        if designs[0].system.world_size == 1:
            return [(0.0, np.inf)] * len(designs)  # there is one plan, whatever it takes
        cost, overheads = self._predictor.cost, self._predictor.profile.overheads
        options, costs = self._placed(designs[0])
        bounds = class_bounds(
            options,
            costs,
            cost,
            overheads,
            capacity_bytes=np.max([rank_capacity_bytes(d) for d in designs], axis=0),
            dense=DenseCosts(*single_rank_dims(designs), cost),
        )
        fed_us = np.array([feed_us(d) for d in designs])
        for number, time_us in enumerate(times_us):
            _refine(bounds, number, float(time_us))
        by_averages = np.maximum(_least(bounds, len(designs)), fed_us)
        by_bytes = np.maximum(_closer(bounds, times_us), by_averages)
        return list(zip(by_averages.tolist(), by_bytes.tolist(), strict=True))

    def _placed(self, design: Design) -> tuple[Options, ShardCosts]:
        """Options and their costs, which the dense part has no say in."""
        key = _placement_key(design)
        if key not in self._costs:
            options = options_of(design)
            overheads = self._predictor.profile.overheads
            self._costs[key] = options, shard_costs(options, self._predictor.cost, overheads)
        options, costs = self._costs[key]
        return replace(options, design=design), costs


def _least(bounds: Sequence[ClassBound], designs: int) -> Array:
    """`(n,)`: the least bound over classes."""
    return np.array([min((b.lower_of(n) for b in bounds), default=np.inf) for n in range(designs)])


def _closer(bounds: Sequence[ClassBound], times_us: Array) -> Array:
    """`(n,)`: the least bound over classes, those with the least bounds parted first: others need not exceed them."""
    least_us = times_us
    programs = _PROGRAMS + len(times_us)
    for bound in sorted(bounds, key=lambda b: min(b.lower_of(n) / us for n, us in enumerate(times_us))):
        bound.close_in(least_us, programs=programs, seconds_left=lambda: np.inf, worth=_WORTH)
        least_us = np.minimum(least_us, [bound.lower_of(n) for n in range(len(times_us))])
    return least_us


def _refine(bounds: Sequence[ClassBound], number: int, time_us: float) -> None:
    """Cut where a design's least bound is, until it is close to its time."""
    for _ in range(_ROUNDS):
        if not bounds:
            return
        least = min(bounds, key=lambda b: b.lower_of(number))
        if least.lower_of(number) >= time_us * (1 - CLOSED) or least.settled(number):
            return
        least.refine(number, worth=_WORTH)


def _steps_key(design: Design) -> Hashable:
    """What designs share that run the same steps in the same order, on the same tables."""
    model = design.model
    depths = len(model.bottom_hidden), len(model.top_hidden)
    # On ranks of unequal pace the layers' durations are part of what bounds take as given.
    own = design if design.system.slowness else None
    return structure_of(design), _placement_key(design), depths, own


def _placement_key(design: Design) -> Hashable:
    """What the costs of shards follow from."""
    t, fusion = design.training, design.fusion
    tables = t.table_precision, t.table_optimizer, t.index_dtype
    model = design.model.tables, design.model.table_dims
    return model, t.global_batch, tables, fusion.embedding, fusion.communication, design.system
