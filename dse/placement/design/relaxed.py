"""A design's iteration on one rank that stands for all: paths through it bound the iteration time of every plan.

The iteration time is the largest cycle mean of a max-plus product: a maximum over cycles through the steps of all
ranks, of a sum of durations. Fix which kinds of sharding occur at all (a *class*): then every rank runs the
same list of steps, but for ops of kinds that it holds no shard of. A cycle changes rank only at a collective. So the
steps that it takes between two collectives (a *segment*) may be taken on any rank, and

    iteration time >= constant + Σ_segments weight · max over ranks of Σ_launches duration + Σ_collectives weight · transfer

for every cycle (a *cut*), whatever the plan. Three things make this hold on the one rank that stands for all:

- *Sure* ops are those of kinds that the rank chosen in a segment holds. Kinds on all ranks (row_wise, data_parallel) are
  sure. The fullest rank of a segment may be taken to hold the only other kind: kinds on all ranks add the same
  everywhere (the bound counts their smallest part), so a rank without a shard of it is no fuller. With two
  other kinds (table_wise beside table_row_wise, on several machines, or beside dense gradients) neither is sure, and
  on ranks of unequal pace none is: a slow rank without a shard may be the last. What runs for some shards of a kind
  alone (those in host memory) is never sure.
  Ops that all ranks run count without what a launch costs whatever its size, unless that rank has work in them.
- Of an op that is not sure, only what stays on one clock counts: its launches lengthen their stream by their shards'
  part, without launch, gap or host time. A rank that lacks the op has no such shards.
- Ops for each table (embeddings that are not batched) count on the clock that they stay on: the diagonal of their
  max-plus matrices adds up along the tables of a rank, as a product's diagonal is at least the sum of the diagonals.

Letters: p probes, v variables, S steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dse.placement.design.shard_costs import Number
from dse.placement.solver.problem import Array, Ints, Mask
from perfcore.cost.model import CostModel
from perfcore.graph.kernels import Collective, with_dims
from perfcore.maxplus import fold, steady_state
from perfcore.steps import CLOCKS, Opcode, Steps
from perfcore.walk import deciding_clocks


class Role(IntEnum):
    """What the shards of a plan make of a variable."""

    RANK = 0  # µs: base + the sum over a rank's shards, + what every rank sees
    FULLEST = 1  # bytes: base + the largest such sum over ranks
    TOTAL = 2  # bytes: base + what every rank sees


@dataclass(frozen=True, slots=True, eq=False)
class Variable:
    """A duration, or bytes of a collective, that the plan decides.

    Attributes:
        label: op name.
        region: of the graph.
        role: how shards add up.
        base: `()` whatever the shards.
        each: `(p,)` what a shard adds to its rank.
        everywhere: `(p,)` what a shard adds to every rank.
        collective: the kernel of a collective.
        exact: durations are these sums, not at least these.

    Of many settings at once bases are `(n, g)`, and the others `(n, q)` (`dse.placement.design.shard_costs.joined`).
    """

    label: str
    region: str
    role: Role
    base: Number
    each: Array
    everywhere: Array
    collective: Collective | None = None
    exact: bool = True


@dataclass(frozen=True, slots=True)
class Cut:
    """One cycle: the iteration time of any plan of the class is at least `value`.

    Attributes:
        constant_us: what no plan changes.
        segments: weight and variables of each stretch between collectives; a variable may occur more than once.
        transfers: weight by variable of the collectives passed.
        steps: weight by step of the program.
    """

    constant_us: float
    segments: tuple[tuple[float, tuple[int, ...]], ...]
    transfers: tuple[tuple[float, int], ...]
    steps: tuple[tuple[float, int], ...]


@dataclass(frozen=True, eq=False)
class Program:
    """The steps of one class of plans on the rank that stands for all.

    Attributes:
        kinds: positions in `FLAGS`, of the class.
        table: `(S,)` records of `perfcore.steps.STEP`; launches numbered through.
        constant_us: `(n, S)` duration or host time of steps that no plan changes, of n designs with these steps.
        variable: `(S,)` the variable of a step, -1 where it is constant.
        variables: `(v,)`.
        need: `(S,)` which of `needs` a step asks for, -1 for none.
        needs: `(p,)` each: a rank without such a shard does not run the step.
    """

    kinds: tuple[int, ...]
    table: NDArray[Any]
    constant_us: Array
    variable: Ints
    variables: tuple[Variable, ...]
    need: Ints
    needs: tuple[Mask, ...]

    def cut(self, values_us: Array, *, number: int = 0) -> tuple[float, Cut]:
        """The iteration time of one of the designs at `(v,)` durations, and the cycle that decides it."""
        steps = self._steps(values_us, self.constant_us[number])
        state = np.empty(CLOCKS)
        period_us, root = steady_state(fold(steps)[0], state)
        sources = deciding_clocks(steps.table, steps.durations_us, steps.masks, 0, state)[:, 0]
        rows, laps = self._cycle(sources, int(root))
        return period_us, self._cut(rows, laps, period_us, values_us)

    def shifted(self, cut: Cut, *, number: int, of: int = 0) -> float:
        """The constant of a cut that was made for design `of`, for another design."""
        rows, weights = [s for _, s in cut.steps], np.array([w for w, _ in cut.steps])
        return cut.constant_us + float(
            weights @ (self.constant_us[number, rows] - self.constant_us[of, rows])
        )

    def _steps(self, values_us: Array, constant_us: Array) -> Steps:
        table = self.table.copy()
        us = (
            constant_us
            if not len(values_us)
            else np.where(self.variable >= 0, values_us[self.variable], constant_us)
        )
        table["us"] = np.where(table["opcode"] == Opcode.HOST, us, 0.0)
        launched = table["launch"] >= 0
        return Steps(
            table=table,
            durations_us=np.ascontiguousarray(us[launched])[:, None, None],
            masks=np.zeros((0, 1, 1), dtype=bool),
            op_names=(),
            launch_ops=(),
            communicates=np.zeros(int(launched.sum()), dtype=bool),
        )

    def _cycle(self, sources: Ints, root: int) -> tuple[list[int], int]:
        """Steps of the critical cycle in order of time, and the iterations that it spans."""
        targets = self.table["target"].tolist()
        by_clock: dict[int, int] = {}
        laps: list[list[int]] = []
        at = root
        while at not in by_clock:
            by_clock[at] = len(laps)
            lap = []
            for i in range(len(targets) - 1, -1, -1):
                if targets[i] == at:
                    lap.append(i)
                    at = int(sources[i])
            laps.append(lap[::-1])
        cycle = laps[by_clock[at] :][::-1]
        return [i for lap in cycle for i in lap], len(cycle)

    def _cut(self, rows: Sequence[int], laps: int, period_us: float, values_us: Array) -> Cut:
        """Segments between the collectives of a cycle; it may begin anywhere, so the first joins the last."""
        segments: list[list[int]] = [[]]
        transfers: dict[int, float] = {}
        constant: dict[int, float] = {}
        passed = False
        for i in rows:
            v = int(self.variable[i])
            if v < 0:
                constant[i] = constant.get(i, 0.0) + 1.0 / laps
            if self.table["opcode"][i] == Opcode.COLLECTIVE:
                passed = True
                segments.append([])
                if v >= 0:
                    transfers[v] = transfers.get(v, 0.0) + 1.0 / laps
            elif v >= 0:
                segments[-1].append(v)
        if passed:
            segments[0] = [*segments.pop(), *segments[0]]
        weights: dict[tuple[int, ...], float] = {}
        for segment in segments:
            if segment:
                key = tuple(sorted(segment))
                weights[key] = weights.get(key, 0.0) + 1.0 / laps
        varying = sum(w * values_us[list(key)].sum() for key, w in weights.items())
        varying += sum(w * values_us[v] for v, w in transfers.items())
        return Cut(
            float(period_us - varying),
            tuple((w, key) for key, w in weights.items()),
            tuple((w, v) for v, w in transfers.items()),
            tuple((w, i) for i, w in constant.items()),
        )


def transfer_us(variable: Variable, bytes_: Array, cost: CostModel) -> Array:
    """`(n,)` time of a variable's collective at `(n,)` bytes."""
    assert variable.collective is not None
    kernel = with_dims(
        variable.collective,
        bytes=np.asarray(bytes_, dtype=np.float64),
        world_size=float(np.asarray(variable.collective.world_size).reshape(-1)[0]),
        local_world_size=float(np.asarray(variable.collective.local_world_size).reshape(-1)[0]),
    )
    return np.asarray(cost.predict_us([kernel])[0])
