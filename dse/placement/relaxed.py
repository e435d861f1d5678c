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
  other kinds (table_wise beside table_row_wise, on several machines) neither is sure.
  Ops that all ranks run count without what a launch costs whatever its size, unless that rank has work in them.
- Of an op that is not sure, only what stays on one clock counts: its launches lengthen their stream by their shards'
  part, without launch, gap or host time. A rank that lacks the op has no such shards.
- Ops for each table (embeddings that are not batched) count on the clock that they stay on: the diagonal of their
  max-plus matrices adds up along the tables of a rank, as a product's diagonal is at least the sum of the diagonals.

Letters: p probes, v variables, S steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dse.placement.design_options import FLAGS, Options
from dse.placement.problem import Array, Ints, Mask
from dse.placement.shard_costs import PLACED, LaunchCost, OpCost, ShardCosts, replaced
from perfcore.cost.model import CostModel
from perfcore.design.sharding import Shards
from perfcore.errors import UnsupportedError
from perfcore.graph.dims import Dims, Structure
from perfcore.graph.dlrm import DlrmBuilder
from perfcore.graph.kernels import Collective, resolve, with_dims
from perfcore.graph.ops import Op, WorkloadGraph
from perfcore.maxplus import fold, steady_state
from perfcore.overheads import OverheadTable
from perfcore.steps import CLOCKS, HOST_CLOCK, STEP, Opcode, Steps, compile_steps
from perfcore.walk import deciding_clocks

POOLED, ROW_SPLIT, STAGED, REPLICATED = range(len(FLAGS))
_COMPUTE = 1
# The first op of an exchange puts a rank's own samples in order, whose lookups are those of all tables.
LOCAL_PERMUTES = (("input_exchange", 0), ("lengths_ahead", 0))


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
        base: whatever the shards.
        each: `(p,)` what a shard adds to its rank.
        everywhere: `(p,)` what a shard adds to every rank.
        collective: the kernel of a collective.
        exact: durations are these sums, not at least these.
    """

    label: str
    region: str
    role: Role
    base: float
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


def program_of(
    options: Options,
    kinds: tuple[int, ...],
    costs: ShardCosts,
    dense: DenseCosts,
    overheads: OverheadTable,
    *,
    whole: bool = False,
) -> Program:
    """The steps of all plans that have shards of exactly these kinds.

    Args:
        options: of the design.
        kinds: positions in `FLAGS`; at most as many as there are tables.
        costs: of all probes.
        dense: of what no plan changes.
        overheads: host times of ops.
        whole: for times rather than bounds: with the ops that not every rank is sure to run.

    Raises:
        UnsupportedError: the ops of a class do not follow those of its shards.
    """
    dims = replaced(dense.dims, shards=reference_shards(options, kinds))
    graph = DlrmBuilder(dims).graph(dense.structure)
    builder = _Builder(graph, options, kinds, costs, whole=whole)
    return builder.program(dense.durations_us(graph), overheads)


class DenseCosts:
    """Durations of what no plan changes, of n designs of one structure; priced once for all classes.

    Attributes:
        dims: of the designs, `(n, 1)`; the shards are of no account.
        structure: of all of them.
    """

    def __init__(self, dims: Dims, structure: Structure, cost: CostModel) -> None:
        self.dims, self.structure = dims, structure
        self._cost = cost
        self._known: dict[tuple[str, int, int], Array] = {}

    def durations_us(self, graph: WorkloadGraph) -> list[Array]:
        """`(n, 1)` by launch; those that plans decide are 0, for they are replaced."""
        launches = [
            ((region.name, k, i), x.kernel)
            for region in graph.regions
            for k, op in enumerate(region.ops)
            for i, x in enumerate(op.launches)
        ]
        new = {key: resolve(kernel) for key, kernel in launches if self._asks(key)}
        self._known.update(zip(new, self._cost.predict_us([*new.values()]), strict=True))
        # The buckets of gradients close elsewhere where replicated tables are among them.
        own = {key: resolve(kernel) for key, kernel in launches if key[0].startswith("all_reduce/")}
        reduced = dict(zip(own, self._cost.predict_us([*own.values()]), strict=True))
        nothing = np.zeros((1, 1))
        return [reduced.get(key, self._known.get(key, nothing)) for key, _ in launches]

    def _asks(self, key: tuple[str, int, int]) -> bool:
        region, op, _ = key
        placed = region in PLACED and (region, op) not in LOCAL_PERMUTES
        return not placed and key not in self._known and not region.startswith("all_reduce/")


def reference_shards(options: Options, kinds: tuple[int, ...]) -> Shards:
    """`(1, 2, t)`: tables take the kinds in turn; row_split and replicated are on both ranks, the others on rank 0."""
    model = options.design.model
    tables = len(model.tables)
    flag = np.array([kinds[t % len(kinds)] for t in range(tables)])
    both = np.isin(flag, (ROW_SPLIT, REPLICATED))
    held = np.stack([np.ones(tables, dtype=bool), both])[None]
    rows = np.array([float(t.num_embeddings) for t in model.tables])
    pooling = np.array([t.pooling_factor for t in model.tables])
    # Lookups of a whole table are those of its row parts together, its columns those of all machines.
    local = np.where(flag == STAGED, float(options.design.system.local_world_size), 1.0)
    parts = np.where(flag == ROW_SPLIT, 2.0, local)
    return Shards(
        rows=held * np.maximum(rows / parts, 1.0),
        dim=held * np.array(model.table_dims, dtype=np.float64) * local,
        pooling=held * pooling / parts,
        skew=np.broadcast_to([t.skew for t in model.tables], held.shape),
        **{name: held & (flag == i) for i, name in enumerate(FLAGS)},
    )


def replicated_in_reference(options: Options, kinds: tuple[int, ...]) -> Mask:
    """`(t,)`: tables that `reference_shards` replicates."""
    tables = len(options.design.model.tables)
    return np.array([kinds[t % len(kinds)] == REPLICATED for t in range(tables)])


@dataclass(frozen=True, slots=True)
class _Place:
    """Where an op of the reference graph comes from."""

    region: str
    position: int
    op: Op | None


class _Builder:
    """Turns the steps of a reference plan's rank 0 into a program."""

    def __init__(
        self,
        graph: WorkloadGraph,
        options: Options,
        kinds: tuple[int, ...],
        costs: ShardCosts,
        *,
        whole: bool,
    ) -> None:
        self._graph, self._options, self._kinds, self._costs = graph, options, kinds, costs
        self._of_class = np.isin(options.probe_flag, kinds)
        self._variables: list[Variable] = []
        self._rows: list[tuple[Any, Array | float, int, int]] = []
        self._needs: list[Mask] = []
        self._need = -1
        self._places = _places(graph)
        self._op_costs = {name: self._aligned(name) for name in costs.ops}
        self._unsure = {POOLED, STAGED} <= set(kinds) and not whole
        # The bucket that takes in the gradients of replicated tables.
        buckets = [r.name for r in graph.regions if r.name.startswith("all_reduce/")]
        self._last_bucket = buckets[-1] if REPLICATED in kinds and buckets else ""

    def program(self, constants_us: Sequence[Array], overheads: OverheadTable) -> Program:
        """The program with its variables."""
        steps = compile_steps(self._graph, constants_us, overheads)
        first_launch = {op: i for i, op in reversed(list(enumerate(steps.launch_ops)))}
        stayed = set[str]()
        table = steps.table
        taken = [bool(m < 0 or steps.masks[m, 0, 0]) for m in table["mask"].tolist()]
        elsewhere = [bool(m < 0 or steps.masks[m, 0, 1]) for m in table["mask"].tolist()]
        for i, (op, launch, us) in enumerate(
            zip(table["op"].tolist(), table["launch"].tolist(), table["us"].tolist(), strict=True)
        ):
            if not taken[i]:
                continue
            place, self._need = self._places[op], -1
            constant: Array | float = steps.durations_us[launch, :, 0] if launch >= 0 else us
            if place.region in self._costs.stays:
                if place.region not in stayed:
                    self._stay(place.region)
                stayed.add(place.region)
            elif place.region in self._op_costs and (place.region, place.position) not in LOCAL_PERMUTES:
                sure = not self._unsure or elsewhere[i]
                self._need = -1 if elsewhere[i] else self._needed(place)
                self._placed(table[i], place, constant, launch - first_launch.get(op, 0), sure=sure)
            elif place.region == self._last_bucket:
                self._bucket(table[i], place, constant)
            else:
                self._append(table[i], constant, -1)
        return self._built(steps.num_candidates)

    def _built(self, designs: int) -> Program:
        table = np.array([row[0] for row in self._rows], dtype=self._rows[0][0].dtype)
        launched = table["launch"] >= 0
        table["launch"] = np.where(launched, np.cumsum(launched) - 1, -1)
        table["mask"] = -1
        return Program(
            self._kinds,
            table,
            np.stack([np.broadcast_to(row[1], designs) for row in self._rows], axis=1),
            np.array([row[2] for row in self._rows], dtype=np.int64),
            tuple(self._variables),
            np.array([row[3] for row in self._rows], dtype=np.int64),
            tuple(self._needs),
        )

    def _aligned(self, region: str) -> list[OpCost]:
        """The costs of a region's ops in this class."""
        found = [c for c in self._costs.ops[region] if bool(c.present[self._of_class].any())]
        names = [p.op.name for p in self._places if p.region == region and p.op is not None]
        if names != [c.name for c in found]:
            raise UnsupportedError(
                f"The ops of {region!r} cannot be told apart by kind of sharding: {names} are not {[c.name for c in found]}."
            )
        return found

    def _placed(
        self, step: Any, place: _Place, constant: Array | float, position: int, *, sure: bool
    ) -> None:
        """A step of an op whose launches plans decide."""
        if step["launch"] < 0:
            if sure:
                self._append(step, constant, -1)
            return
        cost = self._op_costs[place.region][place.position]
        launch = cost.launches[position]
        if sure:
            if self._unsure and launch.each.any() and not self._on_the_fullest(cost):
                launch = replace(launch, base=0.0)  # a rank without such a shard has no work in it
            self._append(step, 0.0, self._variable(place.region, cost.name, launch))
        else:
            staying = step.copy()
            staying["opcode"], staying["launch"], staying["awaited"] = Opcode.HOST, -1, 0
            launch = replace(launch, base=0.0)
            self._append(staying, 0.0, self._variable(place.region, cost.name, launch))

    def _on_the_fullest(self, cost: OpCost) -> bool:
        """Whether the fullest rank of a segment holds a shard that an op has work with, whichever it is."""
        flags = set(self._options.probe_flag[cost.present & self._of_class].tolist())
        return bool(flags & {ROW_SPLIT, REPLICATED}) or {POOLED, STAGED} <= flags

    def _needed(self, place: _Place) -> int:
        """Which shards a rank must hold to run an op."""
        present = self._op_costs[place.region][place.position].present
        for i, known in enumerate(self._needs):
            if known is present:
                return i
        self._needs.append(present)
        return len(self._needs) - 1

    def _append(self, step: Any, constant: Array | float, variable: int) -> None:
        self._rows.append((step, constant, variable, self._need))

    def _variable(self, region: str, name: str, launch: LaunchCost) -> int:
        role = Role.RANK
        if launch.collective is not None:
            role = Role.FULLEST if launch.each.any() else Role.TOTAL
        self._variables.append(
            Variable(
                name,
                region,
                role,
                launch.base,
                launch.each,
                launch.everywhere,
                launch.collective,
                launch.exact,
            )
        )
        return len(self._variables) - 1

    def _stay(self, region: str) -> None:
        """Two steps that lengthen the host's clock and the compute stream's by the tables of a rank."""
        stay = self._costs.stays[region]
        nothing = np.zeros(len(stay.host))
        for clock, each, base in ((HOST_CLOCK, stay.host, stay.host_base), (_COMPUTE, stay.compute, 0.0)):
            step = np.zeros((), dtype=STEP)
            step["opcode"], step["target"], step["launch"], step["mask"] = Opcode.HOST, clock, -1, -1
            self._variables.append(Variable(region, region, Role.RANK, base, each, nothing, exact=False))
            self._append(step[()], 0.0, len(self._variables) - 1)

    def _bucket(self, step: Any, place: _Place, constant: Array | float) -> None:
        if step["launch"] < 0:
            self._append(step, constant, -1)
            return
        assert place.op is not None
        kernel = resolve(place.op.launches[0].kernel)
        assert isinstance(kernel, Collective)
        own = self._reference_reduced_bytes()
        base = max(float(np.asarray(kernel.bytes).min()) - own, 0.0)
        reduced = self._costs.reduced_bytes
        self._variables.append(
            Variable(place.op.name, place.region, Role.TOTAL, base, np.zeros(len(reduced)), reduced, kernel)
        )
        self._append(step, 0.0, len(self._variables) - 1)

    def _reference_reduced_bytes(self) -> float:
        """Gradient bytes of the tables that the reference plan replicates."""
        model = self._options.design.model
        replicated = replicated_in_reference(self._options, self._kinds)
        size = 2.0 if self._options.design.training.table_precision.value == "bf16" else 4.0
        return sum(
            t.num_embeddings * d * size
            for t, d, r in zip(model.tables, model.table_dims, replicated, strict=True)
            if r
        )


def _places(graph: WorkloadGraph) -> list[_Place]:
    """By op index of `Steps`, which counts a CUDA graph's launches as ops of their own."""
    places: list[_Place] = []
    for number, region in enumerate(graph.regions):
        if number == graph.captured_from:
            places.append(_Place("", 0, None))
        places += [_Place(region.name, k, op) for k, op in enumerate(region.ops)]
    return [*places, _Place("", 0, None)]


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
