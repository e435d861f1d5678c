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

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np

from dse.placement.design.class_program import DenseCosts, program_of
from dse.placement.design.families import Families
from dse.placement.design.options import Options, options_of
from dse.placement.design.probing import costs_at_batches
from dse.placement.design.relaxed import Cut, Program, Role, Variable
from dse.placement.design.shard_costs import at_batches, joined, single_rank_dims
from dse.placement.solver.problem import Array, Mask
from perfcore.design.design import Design
from perfcore.graph.kernels import with_dims
from perfcore.predictor import Predictor, feed_us

_GRID, _NEAR, _NEARBY = 64, 32, 2.0  # points of a collective's curve, and of them near the bytes in question
_SLOPES = np.array([0.0, 0.4, 0.7, 0.85, 0.95, 1.0, 1.1])  # of the curve's there
_STARTS, _ROUNDS = 2, 2  # settings that cuts are made for, and cuts of each


def lower_bounds_us(designs: Sequence[Design], batches: Sequence[int], predictor: Predictor) -> Array:
    """Lower bounds of iteration times over all plans, whether they fit into memory or not.

    Args:
        designs: g of one structure and the same tables, on several ranks that are alike; all on one machine, or each
            on several. Their own batches and plans do not matter.
        batches: n of each of them; one that a world size does not divide is bounded as if it did.
        predictor: of their device.

    Returns:
        `(n, g)` µs.

    Raises:
        UnsupportedError: the ops of a class do not follow from the kinds of its shards.
    """
    samples = np.array(batches, dtype=np.float64)
    lower = _Averages([options_of(d) for d in designs], samples, predictor).bounds_us()
    fed_us = np.array([feed_us(d) / d.training.global_batch for d in designs])
    return np.asarray(np.maximum(lower, fed_us * samples[:, None]))


class _Averages:
    """All settings, priced."""

    def __init__(self, groups: Sequence[Options], batches: Array, predictor: Predictor) -> None:
        self.cost, self._overheads = predictor.cost, predictor.profile.overheads
        self._costs = joined(costs_at_batches(groups, batches, self.cost, self._overheads))
        self._joint = replace(groups[0], probes=tuple(p for g in groups for p in g.probes))
        dims, structure = single_rank_dims([g.design for g in groups])
        self._dense = DenseCosts(at_batches(dims, batches), structure, self.cost)
        self.families = Families.of(groups)
        self.shape = len(batches), len(groups)

    def bounds_us(self) -> Array:
        """`(n, g)`: the least over classes."""
        kinds = np.unique(self.families.flag).tolist()
        most = min(len(kinds), self.families.tables)
        classes = [c for size in range(1, most + 1) for c in combinations(kinds, size)]
        return np.asarray(np.min([self._class_us(c) for c in classes], axis=0))

    def _class_us(self, kinds: tuple[int, ...]) -> Array:
        """`(n, g)`: the best of some cuts of one class; infinite where a table has no way in it."""
        program = program_of(self._joint, kinds, self._costs, self._dense, self._overheads)
        own = _Class(program, self, np.isin(self.families.flag, kinds))
        best = np.zeros(self.shape)
        for number in self._spread():
            shares = own.first_shares()
            for turn in range(_ROUNDS):
                cut = program.cut(own.values_us(shares, number), number=number)[1]
                lower, cheapest = own.bound(cut, number, shares)
                best = np.maximum(best, lower)
                shares = shares + (cheapest - shares) / (turn + 2)
        return best

    def _spread(self) -> list[int]:
        """Settings from the smallest batch of the first to the largest of the last."""
        n, g = self.shape
        at = np.linspace(0, 1, _STARTS)
        return sorted({round(a * (n - 1)) * g + round(a * (g - 1)) for a in at.tolist()})


class _Class:
    """One class of plans, at all settings."""

    def __init__(self, program: Program, all_: _Averages, kept: Mask) -> None:
        self._program, self._all, self._kept = program, all_, kept
        self._families = all_.families
        self._curves: dict[int, tuple[Array, Array]] = {}

    def first_shares(self) -> Array:
        """`(n, f)`: of each table the first family of the class."""
        return self._chosen(np.broadcast_to(np.zeros(len(self._kept)), (self._all.shape[0], len(self._kept))))

    def values_us(self, shares: Array, number: int) -> Array:
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
                value = self._transfer_us(variable, np.full((*self._all.shape, 1), value))[n, g, 0]
            values.append(value)
        return np.array(values)

    def bound(self, cut: Cut, number: int, shares: Array) -> tuple[Array, Array]:
        """What a cut made for one setting says of all.

        Returns:
            `(n, g)` µs, and `(n, f)` the families at which it is that.
        """
        variables = self._program.variables
        lower = self._constant_us(cut, number)
        each = np.zeros((self._all.shape[0], len(self._families.probes)))
        everywhere = each.copy()
        weights: dict[int, Array] = {}
        for weight, key in cut.segments:
            for v in key:
                weights[v] = weights.get(v, np.zeros(self._all.shape)) + weight
        for weight, v in cut.transfers:
            intercept, slope = self._line(v, self._at(variables[v], shares))
            lower = lower + weight * intercept
            weights[v] = weight * slope
        for v, factor in weights.items():
            lower = lower + factor * variables[v].base
            of_probe = factor[:, self._families.probes]
            each += of_probe * variables[v].each
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
        if v not in self._curves:
            variable, families = self._program.variables[v], self._families
            flags = np.unique(families.flag[self._kept])
            amounts = np.asarray(variable.each + variable.everywhere)
            uses = [k for k in flags.tolist() if (amounts[:, families.probe_flag == k] > 0).any()]
            mine = np.where(np.isin(families.probe_flag, uses), amounts, np.inf)
            starts = np.searchsorted(families.probes, np.arange(self._all.shape[1]))
            least = np.minimum.reduceat(mine, starts, axis=1)
            pieces = np.arange(1, families.probe.shape[1] + 1)
            widest = (amounts[:, families.probe].max(axis=-1) / pieces).max(axis=-1) * families.pieces
            widest = np.where(self._kept, widest * families.copies, 0.0)
            most = np.maximum.reduceat(widest, families.first, axis=1)
            most = np.add.reduceat(most, np.arange(0, most.shape[1], families.tables), axis=1)
            low = variable.base + np.where(np.isfinite(least), least, 0.0)
            self._curves[v] = low, np.maximum(variable.base + most, np.maximum(low, 1.0))
        return self._curves[v]

    def _transfer_us(self, variable: Variable, bytes_: Array) -> Array:
        """`(n, g, k)` times of a collective at so many bytes."""
        kernel = variable.collective
        assert kernel is not None
        n, g = self._all.shape

        def along(dim: Any) -> Array:
            values = np.asarray(dim, dtype=np.float64).reshape(-1)
            return values.reshape(n, g, 1) if len(values) == n * g else values.reshape(1, -1, 1)

        asked = with_dims(
            kernel,
            bytes=bytes_,
            world_size=along(kernel.world_size),
            local_world_size=along(kernel.local_world_size),
        )
        return np.array(self._all.cost.predict_us([asked])[0])
