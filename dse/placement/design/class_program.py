"""The steps of one class of plans on the rank that stands for all: a reference plan's, with variables where plans differ.

Letters: p probes, n designs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dse.placement.design.options import FLAGS, Options
from dse.placement.design.relaxed import Program, Role, Variable
from dse.placement.design.shard_costs import PLACED, LaunchCost, OpCost, ShardCosts, replaced
from dse.placement.solver.problem import Array, Mask
from perfcore.cost.model import CostModel
from perfcore.design.sharding import Shards
from perfcore.errors import UnsupportedError
from perfcore.graph.dims import Dims, Structure
from perfcore.graph.dlrm import DlrmBuilder
from perfcore.graph.kernels import Collective, resolve
from perfcore.graph.ops import Op, WorkloadGraph
from perfcore.overheads import OverheadTable
from perfcore.steps import HOST_CLOCK, STEP, Opcode, compile_steps

POOLED, ROW_SPLIT, STAGED, REPLICATED = range(len(FLAGS))
_COMPUTE = 1
# The first op of an exchange puts a rank's own samples in order, whose lookups are those of all tables.
LOCAL_PERMUTES = (("input_exchange", 0), ("lengths_ahead", 0))


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
