"""Iteration times of plans of one design, on however many ranks.

Few ranks are predicted like any design. The matrix of an iteration grows with the square of the ranks, so on many ranks
the clocks are walked instead, iteration after iteration, with durations that are sums of the shards' own
(`dse.placement.design.shard_costs`). For any clocks v before an iteration and w after it, the iteration time is at most
max(w - v) (Collatz and Wielandt's bound, in max-plus algebra); it is reached when the spacing repeats.

Letters: r ranks, v variables, L launches, p probes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from dse.placement.design.class_program import DenseCosts, program_of
from dse.placement.design.options import Options
from dse.placement.design.relaxed import Program, Role, transfer_us
from dse.placement.design.shard_costs import ShardCosts, single_rank_dims
from dse.placement.solver.problem import Array, Ints
from perfcore.design.design import Design
from perfcore.design.sharding import ShardingPlan
from perfcore.design.training import EmbeddingFusion
from perfcore.predictor import Predictor, feed_us
from perfcore.ranks import SHOWN, merged
from perfcore.steps import CLOCKS, Opcode, Steps
from perfcore.walk import walk_from

_CHUNK = 4e5  # plans times ranks times tables that are priced in one call
_WARM_UP = 6  # iterations before the spacing is looked at
_MOST_WALKED = 60  # iterations
_LONGEST_PERIOD = 4
_STEADY = 1e-7  # relative; closer to its limit a spacing need not come


@dataclass(eq=False)
class PlanTimes:
    """Predicts plans of one design.

    Attributes:
        predictor: of its device.
        design: its own plan does not matter.
        options: the ways to split its tables.
        costs: of their shards.
    """

    predictor: Predictor
    design: Design
    options: Options
    costs: ShardCosts
    _programs: dict[tuple[int, ...], Program] = field(default_factory=dict)

    def __call__(self, plans: Sequence[ShardingPlan]) -> Array:
        """`(n,)` predicted iteration times in µs; on many ranks these are upper bounds, closed but for rounding."""
        if not self.walks:
            return self._predicted(plans)
        return np.array([max(self._walked(p), feed_us(self.design)) for p in plans])

    @property
    def walks(self) -> bool:
        """The ranks are many, and launches are sums of their shards."""
        batched = self.design.fusion.embedding is EmbeddingFusion.TABLE_BATCHED
        exact = all(x.exact for ops in self.costs.ops.values() for op in ops for x in op.launches)
        return self.design.system.world_size > SHOWN and batched and exact

    def _predicted(self, plans: Sequence[ShardingPlan]) -> Array:
        size = self.design.system.world_size * len(self.design.model.tables)
        step = max(1, int(_CHUNK / size))
        times = [
            self.predictor.iteration_times_us([replace(self.design, sharding=p) for p in plans[i : i + step]])
            for i in range(0, len(plans), step)
        ]
        return np.concatenate(times) if times else np.empty(0)

    def _walked(self, plan: ShardingPlan) -> float:
        steps, _ = merged(self._steps(plan))
        return spacing_us(steps)

    def _steps(self, plan: ShardingPlan) -> Steps:
        """The plan's iteration on all ranks."""
        held = _held(self.options, plan)
        kinds = tuple(sorted({int(f) for f in self.options.probe_flag[held.probe]}))
        program = self._program(kinds)
        system = self.design.system
        slowness = np.array(system.slowness or np.ones(system.world_size))
        return _all_ranks(program, held, self.predictor, slowness)

    def _program(self, kinds: tuple[int, ...]) -> Program:
        if kinds not in self._programs:
            cost, overheads = self.predictor.cost, self.predictor.profile.overheads
            dense = DenseCosts(*single_rank_dims([self.design]), cost)
            self._programs[kinds] = program_of(self.options, kinds, self.costs, dense, overheads, whole=True)
        return self._programs[kinds]


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    """Shards of a plan, pieces of a table that share a rank being one.

    Attributes:
        rank: `(s,)`.
        probe: `(s,)`.
        once: `(s,)`: 1, or 0 for all but one of the shards that show every rank the same.
        ranks: of the world.
    """

    rank: Ints
    probe: Ints
    once: Array
    ranks: int


def _held(options: Options, plan: ShardingPlan) -> _Held:
    chosen = options.chosen(plan)
    assert chosen is not None, "a plan takes its options"
    rank: list[Ints] = []
    probe: list[Ints] = []
    once: list[Array] = []
    for placed, o in zip(plan.tables, chosen, strict=True):
        option = options.options[o]
        at = np.asarray(placed.ranks, dtype=np.int64)
        shards = options.shard_probe[options.first_shard[o] : options.first_shard[o + 1]]
        if option.pieces > 1:
            at, shards = options.joined(int(o), at)
        rank.append(at)
        probe.append(shards)
        # Row parts and copies show every rank the same once; column pieces of a machine likewise.
        shown = np.zeros(len(at))
        shown[:: max(option.parts * option.copies, 1)] = 1.0
        once.append(shown)
    return _Held(
        np.concatenate(rank), np.concatenate(probe), np.concatenate(once), options.design.system.world_size
    )


def _all_ranks(program: Program, held: _Held, predictor: Predictor, slowness: Array) -> Steps:
    each_of = np.stack([v.each for v in program.variables], axis=1)
    everywhere_of = np.stack([v.everywhere for v in program.variables], axis=1)
    loads = np.zeros((held.ranks, len(program.variables)))
    np.add.at(loads, held.rank, each_of[held.probe])
    # A launch on a rank without work in it takes no time.
    sized = np.array([v.role is Role.RANK and bool(v.each.any()) for v in program.variables])
    loads += np.where(sized & (loads == 0), 0.0, np.array([v.base for v in program.variables]))
    loads += (held.once[:, None] * everywhere_of[held.probe]).sum(axis=0)
    for i, variable in enumerate(program.variables):
        if variable.role is not Role.RANK:
            bytes_ = loads[:, i].max()
            loads[:, i] = transfer_us(variable, np.array([bytes_]), predictor.cost)[0] if bytes_ > 0 else 0.0
    table = program.table.copy()
    us = np.where(program.variable[:, None] >= 0, loads.T[program.variable], program.constant_us[0][:, None])
    launched = table["launch"] >= 0
    us[launched & (table["opcode"] != Opcode.COLLECTIVE)] *= slowness
    table["us"] = np.where(table["opcode"] == Opcode.HOST, us[:, 0], 0.0)
    table["mask"] = program.need
    masks = np.zeros((len(program.needs), 1, held.ranks), dtype=bool)
    for row, need in enumerate(program.needs):
        masks[row, 0, held.rank[need[held.probe]]] = True
    return Steps(
        table=table,
        durations_us=np.ascontiguousarray(us[launched])[:, None, :],
        masks=masks,
        op_names=(),
        launch_ops=(),
        communicates=np.zeros(int(launched.sum()), dtype=bool),
    )


def spacing_us(steps: Steps) -> float:
    """The spacing of iterations: an upper bound by walking, which is reached when the spacing repeats."""
    states = [np.zeros(CLOCKS * steps.num_ranks)]
    best = np.inf
    for number in range(_MOST_WALKED):
        states.append(walk_from(steps.table, steps.durations_us, steps.masks, 0, states[-1]))
        if number < _WARM_UP:
            continue
        for period in range(1, _LONGEST_PERIOD + 1):
            rate = (states[-1].max() - states[-1 - period].max()) / period
            # The largest of the clocks of one period, each brought back to its beginning.
            clocks = np.max([s - k * rate for k, s in enumerate(states[-1 - period : -1])], axis=0)
            after = walk_from(steps.table, steps.durations_us, steps.masks, 0, clocks)
            best = min(best, float((after - clocks).max()))
            if best <= rate * (1 + _STEADY):
                return best
    return best
