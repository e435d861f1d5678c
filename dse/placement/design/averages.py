"""Lower bounds of hundreds of settings at once, by averages alone and without linear programs.

A search asks before it places tables: can any plan at this setting still be of interest? So a bound has to take a small
part of the time in which plans are found. Two things make it cheap: all settings are priced as one list, and a cut is
answered table by table. For each class of plans (which kinds of sharding occur at all) and each cut of its iteration
(`dse.placement.design.relaxed`)

    T >= constant + Σ weight · M_segment + Σ weight · D_collective          whatever the plan
    M >= base + average over ranks of the shards' sum + what every rank sees
    D >= intercept + slope · B,  B >= likewise in bytes                     a line that the collective is nowhere below

so T is at least a constant plus a sum over tables of what each costs in the way in which it is split. Let each table take
its cheapest way, its columns in pieces of any widths that add up: that bounds the class. The best of several cuts
counts, and the least over classes. Memory and the largest shard are left out, which lowers the bound: it holds for
plans that do not fit as well.

The line: transfers grow with bytes, so on a grid `b_0 < b_1 < ...` the curve between two points is above the time at the
left one; of a slope the largest intercept is taken with which the line at each right point is not. The grid ends
where all shards of all tables are on one rank.

Letters: n batches, g settings of anything else, v variables, q probes of all g, f families of all g, m column pieces.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from dse.placement.design.class_program import DenseCosts, program_of
from dse.placement.design.conditions import Conditions
from dse.placement.design.families import Families
from dse.placement.design.options import Options, options_of
from dse.placement.design.probing import costs_at_batches
from dse.placement.design.relaxed import Cut, Program, Role, Variable
from dse.placement.design.shard_costs import (
    Number,
    ShardCosts,
    at_batches,
    exchanges_of,
    joined,
    single_rank_dims,
)
from dse.placement.solver.problem import Array, Mask
from perfcore.design.design import Design
from perfcore.errors import UnsupportedError
from perfcore.graph.dims import structure_of
from perfcore.graph.kernels import with_dims
from perfcore.predictor import Predictor, feed_us

_GRID, _NEAR, _NEARBY = 64, 32, 2.0  # points of a collective's curve, and of them near the bytes in question
_SLOPES = np.array([0.0, 0.4, 0.7, 0.85, 0.95, 1.0, 1.1])  # of the curve's there
_BOUNDED_AT_ONCE = 2e4  # batches times settings times tables
_STARTS, _ROUNDS = (0.5, 0.0, 1.0), 2  # settings that cuts are made for, and cuts of each


def lower_bounds_us(designs: Sequence[Design], *, predictor: Predictor) -> Array:
    """Lower bounds of iteration times over all plans, whether they fit into memory or not.

    Designs that differ in batch, columns or number of ranks alone are bounded together.

    Args:
        designs: any; their plans do not matter.
        predictor: of their device.

    Returns:
        `(n,)` µs; 0 on one rank, on ranks of unequal pace, and where the ops of a plan do not follow from its kinds.
    """
    lower = np.zeros(len(designs))
    kinds: dict[Hashable, list[int]] = {}
    for i, d in enumerate(designs):
        if d.system.world_size > 1 and not Conditions.of(d).uneven:
            several = d.system.world_size > d.system.local_world_size
            depths = len(d.model.bottom_hidden), len(d.model.top_hidden)
            key = structure_of(d), d.model.tables, d.model.num_dense_features, depths, several
            kinds.setdefault(key, []).append(i)
    priced: dict[Hashable, ShardCosts] = {}
    for members in kinds.values():
        with contextlib.suppress(UnsupportedError):
            lower[members] = _of_a_kind([designs[i] for i in members], predictor, priced)
    return lower


def _of_a_kind(designs: Sequence[Design], predictor: Predictor, priced: dict[Hashable, ShardCosts]) -> Array:
    """`(n,)` bounds of designs of one structure; shards that were priced for another network are not priced again."""
    batches = {b: n for n, b in enumerate(sorted({d.training.global_batch for d in designs}))}
    settings: dict[Hashable, int] = {}
    at = [settings.setdefault(_at_any_batch(d), len(settings)) for d in designs]
    firsts = [designs[at.index(g)] for g in range(len(settings))]
    step = max(1, int(_BOUNDED_AT_ONCE / (len(batches) * len(firsts[0].model.tables))))
    parts = [
        bounds_at_batches_us(firsts[start : start + step], list(batches), predictor, priced)
        for start in range(0, len(firsts), step)
    ]
    table = np.concatenate(parts, axis=1)
    return np.array([table[batches[d.training.global_batch], g] for d, g in zip(designs, at, strict=True)])


def _at_any_batch(design: Design) -> Hashable:
    m = design.model
    return m.embedding_dim, m.bottom_hidden, m.top_hidden, m.cross_rank, design.system


def bounds_at_batches_us(
    designs: Sequence[Design],
    batches: Sequence[int],
    predictor: Predictor,
    priced: dict[Hashable, ShardCosts] | None = None,
) -> Array:
    """Likewise, of designs that are each taken at every batch.

    Args:
        designs: g of one structure and the same tables, on several ranks that are alike; all on one machine, or each
            on several. Their own batches and plans do not matter.
        batches: n of each of them; one that a world size does not divide is bounded as if it did.
        predictor: of their device.
        priced: costs of shards so far, by what they follow from; grows.

    Returns:
        `(n, g)` µs.

    Raises:
        UnsupportedError: the ops of a class do not follow from the kinds of its shards.
    """
    samples = np.array(batches, dtype=np.float64)
    groups, priced = [options_of(d) for d in designs], {} if priced is None else priced
    key = exchanges_of(structure_of(designs[0])), tuple(map(_columns_and_ranks, designs)), tuple(batches)
    if key not in priced:
        priced[key] = joined(costs_at_batches(groups, samples, predictor.cost, predictor.profile.overheads))
    lower = _Averages(groups, samples, predictor, priced[key]).bounds_us()
    fed_us = np.array([feed_us(d) / d.training.global_batch for d in designs])
    return np.asarray(np.maximum(lower, fed_us * samples[:, None]))


def _columns_and_ranks(design: Design) -> Hashable:
    return design.model.tables, design.model.table_dims, design.system


class _Averages:
    """All settings, priced."""

    def __init__(
        self, groups: Sequence[Options], batches: Array, predictor: Predictor, costs: ShardCosts
    ) -> None:
        self.cost, self._overheads, self._costs = predictor.cost, predictor.profile.overheads, costs
        self._joint = replace(groups[0], probes=tuple(p for g in groups for p in g.probes))
        dims, structure = single_rank_dims([g.design for g in groups])
        self._dense = DenseCosts(at_batches(dims, batches), structure, self.cost)
        self.families = Families.of(groups)
        self.shape = len(batches), len(groups)
        self._widest: dict[tuple[int, int], Array] = {}

    def bounds_us(self) -> Array:
        """`(n, g)`: the least over classes; those that decide anywhere get more cuts."""
        kinds = np.unique(self.families.flag).tolist()
        most = min(len(kinds), self.families.tables)
        sets = (c for size in range(1, most + 1) for c in itertools.combinations(kinds, size))
        classes = [self._class(c) for c in sets]
        first, *others = self._spread()
        for one in classes:
            one.refine(first)
        waiting = set(range(len(classes)))
        while chosen := waiting & set(np.unique(np.argmin([c.lower_us for c in classes], axis=0)).tolist()):
            for i, number in itertools.product(sorted(chosen), others):
                classes[i].refine(number)
            waiting -= chosen
        return np.asarray(np.min([c.lower_us for c in classes], axis=0))

    def _class(self, kinds: tuple[int, ...]) -> _Class:
        program = program_of(self._joint, kinds, self._costs, self._dense, self._overheads)
        return _Class(program, self, np.isin(self.families.flag, kinds))

    def _spread(self) -> list[int]:
        """Settings from the smallest batch of the first to the largest of the last, the middle one first."""
        n, g = self.shape
        return list(dict.fromkeys(round(at * (n - 1)) * g + round(at * (g - 1)) for at in _STARTS))

    def widest(self, variable: Variable) -> Array:
        """`(n, f)`: the most that a variable grows by if all shards of a family are on one rank."""
        key = id(variable.each), id(variable.everywhere)  # shared by classes, and kept alive by the costs
        if key not in self._widest:
            families = self.families
            amounts = (variable.each + variable.everywhere)[:, families.probe].max(axis=-1)
            pieces = np.arange(1, families.probe.shape[1] + 1)
            self._widest[key] = (amounts / pieces).max(axis=-1) * families.pieces * families.copies
        return self._widest[key]


class _Class:
    """One class of plans, at all settings."""

    def __init__(self, program: Program, all_: _Averages, kept: Mask) -> None:
        self._program, self._all, self._kept = program, all_, kept
        self._families = all_.families
        self._ranges: dict[int, tuple[Array, Array]] = {}
        self.lower_us = np.zeros(all_.shape)

    def refine(self, number: int) -> None:
        """Some cuts made for one setting; `lower_us`, `(n, g)`, has the best so far, infinite without plans."""
        shares = self._first_shares()
        for turn in range(_ROUNDS):
            cut = self._program.cut(self._values_us(shares, number), number=number)[1]
            lower, cheapest = self._bound(cut, number, shares)
            self.lower_us = np.maximum(self.lower_us, lower)
            shares = shares + (cheapest - shares) / (turn + 2)

    def _first_shares(self) -> Array:
        """`(n, f)`: of each table the first family of the class."""
        return self._chosen(np.broadcast_to(np.zeros(len(self._kept)), (self._all.shape[0], len(self._kept))))

    def _values_us(self, shares: Array, number: int) -> Array:
        """`(v,)` durations at one setting, with `(n, f)` shares of families, tables whole."""
        n, g = divmod(number, self._all.shape[1])
        mine = np.flatnonzero((self._families.setting == g) & (shares[n] > 0))
        probe = self._families.whole[mine]
        spread = (self._families.copies / self._families.ranks)[mine]
        values = []
        for variable in self._program.variables:
            added = variable.each[n, probe] * spread + variable.everywhere[n, probe]
            base = np.broadcast_to(variable.base, self._all.shape)[n, g]
            value = float(base + shares[n, mine] @ added)
            if variable.role is not Role.RANK:
                value = float(self._transfer_us(variable, np.array([[[value]]]), at=(n, g))[0, 0, 0])
            values.append(value)
        return np.array(values)

    def _bound(self, cut: Cut, number: int, shares: Array) -> tuple[Array, Array]:
        """What a cut made for one setting says of all.

        Returns:
            `(n, g)` µs, and `(n, f)` the families at which it is that.
        """
        variables = self._program.variables
        lower = self._constant_us(cut, number)
        each = np.zeros((self._all.shape[0], len(self._families.probes)))
        everywhere = each.copy()
        weights: dict[int, Number] = {}
        for weight, key in cut.segments:
            for v in key:
                weights[v] = weights.get(v, 0.0) + weight
        for weight, v in cut.transfers:
            intercept, slope = self._line(v, self._at(variables[v], shares))
            lower = lower + weight * intercept
            weights[v] = weight * slope
        for v, factor in weights.items():
            lower = lower + factor * variables[v].base
            of_probe = factor if isinstance(factor, float) else factor[:, self._families.probes]
            each += of_probe * variables[v].each
            if variables[v].everywhere.any():
                everywhere += of_probe * variables[v].everywhere
        costs = self._families.cheapest(each, everywhere)
        chosen = self._chosen(costs)
        least = np.add.reduceat(
            np.minimum.reduceat(np.where(self._kept, costs, np.inf), self._families.first, axis=1),
            np.arange(0, len(self._families.first), self._families.tables),
            axis=1,
        )
        return lower + least, chosen

    def _chosen(self, costs: Array) -> Array:
        """`(n, f)`: one at the first cheapest family of each table, from `(n, f)` costs."""
        first = self._families.first
        costs = np.where(self._kept, costs, np.inf)
        least = np.minimum.reduceat(costs, first, axis=1)
        size = np.diff(np.append(first, costs.shape[1]))
        equal = (costs == np.repeat(least, size, axis=1)).astype(np.int64)
        before = np.cumsum(equal, axis=1) - equal
        one = (equal > 0) & (before == np.repeat(before[:, first], size, axis=1))
        return np.asarray(one, dtype=np.float64)

    def _constant_us(self, cut: Cut, number: int) -> Array:
        """`(n, g)`: what no plan changes."""
        rows, weights = [s for _, s in cut.steps], np.array([w for w, _ in cut.steps])
        constants = self._program.constant_us[:, rows]
        shifted = cut.constant_us + (constants - constants[number]) @ weights
        return np.asarray(shifted.reshape(self._all.shape))

    def _at(self, variable: Variable, shares: Array) -> Array:
        """`(n, g)`: a variable with `(n, f)` shares of families, tables whole."""
        families = self._families
        added = shares * families.average(variable.each, variable.everywhere, families.whole)
        starts = families.first[:: families.tables]
        return np.asarray(variable.base + np.add.reduceat(added, starts, axis=1))

    def _line(self, v: int, bytes_: Array) -> tuple[Array, Array]:
        """`(n, g)` intercepts and slopes of lines under a collective's curve, high near `(n, g)` bytes."""
        variable = self._program.variables[v]
        low, high = self._range(v)
        near = np.clip(bytes_, low, high)
        ends = np.geomspace(1 / _NEARBY, _NEARBY, _NEAR)
        start = np.maximum(low, high * 1e-9)
        grid = np.concatenate([np.geomspace(start, high, _GRID, axis=-1), near[..., None] * ends], axis=-1)
        grid = np.sort(np.clip(grid, start[..., None], high[..., None]), axis=-1)
        times = self._transfer_us(variable, grid)
        times[..., 0] = np.where(low > 0, times[..., 0], 0.0)
        beside = self._transfer_us(variable, near[..., None] * np.array([1 / 1.5, 1.5]))
        local = (beside[..., 1] - beside[..., 0]) / np.maximum(near * (1.5 - 1 / 1.5), 1e-9)
        slopes = np.maximum(local, 0.0)[..., None] * _SLOPES
        room = times[..., None, :-1] - slopes[..., None] * grid[..., None, 1:]
        intercepts = room.min(axis=-1)
        best = (intercepts + slopes * near[..., None]).argmax(axis=-1)[..., None]
        return (
            np.take_along_axis(intercepts, best, axis=-1)[..., 0],
            np.take_along_axis(slopes, best, axis=-1)[..., 0],
        )

    def _range(self, v: int) -> tuple[Array, Array]:
        """`(n, g)` least and most bytes of a collective in plans of the class."""
        if v not in self._ranges:
            variable, families = self._program.variables[v], self._families
            flags = np.unique(families.flag[self._kept])
            amounts = np.asarray(variable.each + variable.everywhere)
            uses = [k for k in flags.tolist() if (amounts[:, families.probe_flag == k] > 0).any()]
            mine = np.where(np.isin(families.probe_flag, uses), amounts, np.inf)
            starts = np.searchsorted(families.probes, np.arange(self._all.shape[1]))
            least = np.minimum.reduceat(mine, starts, axis=1)
            widest = np.where(self._kept, self._all.widest(variable), 0.0)
            most = np.maximum.reduceat(widest, families.first, axis=1)
            most = np.add.reduceat(most, np.arange(0, most.shape[1], families.tables), axis=1)
            low = variable.base + np.where(np.isfinite(least), least, 0.0)
            self._ranges[v] = low, np.maximum(variable.base + most, np.maximum(low, 1.0))
        return self._ranges[v]

    def _transfer_us(self, variable: Variable, bytes_: Array, *, at: tuple[int, int] | None = None) -> Array:
        """`(n, g, k)` times of a collective at so many bytes; `(1, 1, k)` at one setting."""
        kernel = variable.collective
        assert kernel is not None
        n, g = self._all.shape

        def along(dim: Any) -> Array:
            values = np.asarray(dim, dtype=np.float64).reshape(-1)
            each = values.reshape(n, g, 1) if len(values) == n * g else values.reshape(1, -1, 1)
            return each if at is None else np.broadcast_to(each, (n, g, 1))[at].reshape(1, 1, 1)

        asked = with_dims(
            kernel,
            bytes=bytes_,
            world_size=along(kernel.world_size),
            local_world_size=along(kernel.local_world_size),
        )
        return np.array(self._all.cost.predict_us([asked])[0])
