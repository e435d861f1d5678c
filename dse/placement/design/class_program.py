"""The steps of one class of plans on the rank that stands for all: a reference plan's, with variables where plans differ.

Letters: p probes, n designs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dse.placement.design.options import (
    DENSE,
    POOLED,
    REPLICATED,
    ROW_SPLIT,
    STAGED,
    Options,
    flag_fields,
    shard_kind,
)
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

_COMPUTE = 1
_SOME_CACHE = 0.5  # of the reference's tables in host memory: their ops are the same whatever the share
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
    slowness: Array | None = None,
) -> Program:
    """The steps of all plans that have shards of exactly these kinds.

    Args:
        options: of the design.
        kinds: positions in `FLAGS`; at most as many as there are tables.
        costs: of all probes.
        dense: of what no plan changes.
        overheads: host times of ops.
        whole: for times rather than bounds: with the ops that not every rank is sure to run.
        slowness: `(r,)` of ranks that differ: any may be the last, and what no plan changes is a variable as well.

    Raises:
        UnsupportedError: the ops of a class do not follow those of its shards.
    """
    columns = dense.dims.shards.dim
    dims = replaced(dense.dims, shards=reference_shards(options, kinds, columns))
    graph = DlrmBuilder(dims).graph(dense.structure)
    reduced = reduced_bytes_of_reference(options, kinds, columns)
    builder = _Builder(graph, options, kinds, costs, reduced_bytes=reduced, whole=whole, slowness=slowness)
    return builder.program(dense.durations_us(graph), overheads)


class DenseCosts:
    """Durations of what no plan changes, of n designs of one structure; priced once for all classes.

    Attributes:
        dims: of the designs, `(n, 1)`; of the shards the columns alone count.
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


def reference_shards(options: Options, kinds: tuple[int, ...], columns: Array) -> Shards:
    """`(n, 2, t)`, for `(n, 1, t)` columns of the tables: they take the kinds in turn; row_split and replicated are on both ranks, the others on rank 0.

    Where some shard of a kind may have a cache, all of the reference's have one: what runs for a cache is told by who needs it.
    """
    model = options.design.model
    tables = len(model.tables)
    flags = np.array([kinds[t % len(kinds)] for t in range(tables)])
    flag = shard_kind(flags)
    both = np.isin(flag, (ROW_SPLIT, REPLICATED))
    held = np.stack([np.ones(tables, dtype=bool), both])[None]
    cached = options.probe_flag[(options.probe_share > 0) & (options.probe_share < 1)]
    on_host = held & np.isin(flags, cached)
    rows = np.array([float(t.num_embeddings) for t in model.tables])
    pooling = np.array([t.pooling_factor for t in model.tables])
    # Lookups of a whole table are those of its row parts together, its columns those of all machines.
    local = np.where(flag == STAGED, float(options.design.system.local_world_size), 1.0)
    parts = np.where(flag == ROW_SPLIT, 2.0, local)
    return Shards(
        rows=held * np.maximum(rows / parts, 1.0),
        dim=held * columns * local,
        pooling=held * pooling / parts,
        skew=np.broadcast_to([t.skew for t in model.tables], held.shape),
        host=on_host,
        cache_ratio=np.where(on_host, _SOME_CACHE, 1.0),
        **flag_fields(flags, held),
    )


def reduced_bytes_of_reference(options: Options, kinds: tuple[int, ...], columns: Array) -> Array:
    """`(n,)` gradient bytes of the tables that `reference_shards` replicates."""
    tables = options.design.model.tables
    size = 2.0 if options.design.training.table_precision.value == "bf16" else 4.0
    rows = [t.num_embeddings * (kinds[i % len(kinds)] == REPLICATED) for i, t in enumerate(tables)]
    return np.asarray(columns[:, 0] @ np.array(rows, dtype=np.float64) * size)


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
        reduced_bytes: Array,
        whole: bool,
        slowness: Array | None,
    ) -> None:
        self._graph, self._options, self._kinds, self._costs = graph, options, kinds, costs
        self._of_class = np.isin(options.probe_flag, kinds)
        self._variables: list[Variable] = []
        self._rows: list[tuple[Any, Array | float, int, int]] = []
        self._needs: list[Mask] = []
        self._need = -1
        self._places = _places(graph)
        self._op_costs = {name: self._aligned(name) for name in costs.ops}
        # Kinds of which a rank may have a shard, or none.
        self._chosen = frozenset(k for k in kinds if k % DENSE in (POOLED, STAGED))
        self._whole, self._uneven, self._reduced_of_tables = whole, slowness is not None, reduced_bytes
        # What stays on a clock is not all of a device's pace: it counts as on the fastest, and is not slowed.
        self._unslowed = 1.0 if slowness is None else min(float(slowness.min()), 1.0) / float(slowness.max())
        # The bucket that takes in the gradients of replicated tables.
        buckets = [r.name for r in graph.regions if r.name.startswith("all_reduce/")]
        self._last_bucket = buckets[-1] if REPLICATED in kinds and buckets else ""

    def program(self, constants_us: Sequence[Array], overheads: OverheadTable) -> Program:
        """The program with its variables."""
        steps = compile_steps(self._graph, constants_us, overheads)
        first_launch = {op: i for i, op in reversed(list(enumerate(steps.launch_ops)))}
        stayed = set[str]()
        # Only what all designs run: the buckets of their gradients may close elsewhere, or not at all.
        table, run = steps.table, np.all(steps.masks, axis=1)
        taken, elsewhere = ([bool(m < 0 or run[m, r]) for m in table["mask"].tolist()] for r in (0, 1))
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
                self._placed(
                    table[i], place, constant, launch - first_launch.get(op, 0), everywhere=elsewhere[i]
                )
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
        self, step: Any, place: _Place, constant: Array | float, position: int, *, everywhere: bool
    ) -> None:
        """A step of an op whose launches plans decide; `everywhere`: the reference's ranks run it without such a shard."""
        cost = self._op_costs[place.region][place.position]
        kinds = self._kinds_of(cost)
        for_all = everywhere and bool(kinds)
        choice = bool(self._chosen) and self._chosen <= kinds  # and the fullest rank has one of these
        on_the_fullest = bool(kinds - self._chosen) or (choice and not self._uneven)
        self._need = -1 if for_all else self._needed(cost)
        sure = self._whole or for_all or on_the_fullest
        if step["launch"] < 0:
            if sure:
                self._append(step, constant, -1)
            return
        launch = cost.launches[position]
        if not self._whole and launch.each.any() and not on_the_fullest:
            launch = replace(launch, base=0.0)  # a rank without such a shard has no work in it
        if not sure:
            launch = replace(launch, base=0.0)
            step = step.copy()
            step["opcode"], step["launch"], step["awaited"] = Opcode.HOST, -1, 0
        self._append(step, 0.0, self._variable(place.region, cost.name, launch))

    def _kinds_of(self, cost: OpCost) -> set[int]:
        """Kinds of the class of which every shard makes an op run."""
        lacking = set(self._options.probe_flag[self._of_class & ~cost.present].tolist())
        return set(self._kinds) - lacking

    def _needed(self, cost: OpCost) -> int:
        """Which shards a rank must hold to run an op."""
        for i, known in enumerate(self._needs):
            if known is cost.present:
                return i
        self._needs.append(cost.present)
        return len(self._needs) - 1

    def _append(self, step: Any, constant: Array | float, variable: int) -> None:
        if self._uneven and variable < 0 and step["launch"] >= 0 and step["opcode"] != Opcode.COLLECTIVE:
            nothing = np.zeros(len(self._options.probes))
            base = float(np.asarray(constant).reshape(-1)[0])
            self._variables.append(Variable("", "dense", Role.RANK, base, nothing, nothing))
            constant, variable = 0.0, len(self._variables) - 1
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
        nothing = np.zeros_like(stay.host)
        clocks = ((HOST_CLOCK, stay.host, stay.host_base), (_COMPUTE, stay.compute, 0.0))
        for clock, each, base in ((c, e * self._unslowed, b * self._unslowed) for c, e, b in clocks):
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
        base = max(float((np.asarray(kernel.bytes).min(axis=-1) - self._reduced_of_tables).min()), 0.0)
        reduced = self._costs.reduced_bytes
        self._variables.append(
            Variable(place.op.name, place.region, Role.TOTAL, base, np.zeros_like(reduced), reduced, kernel)
        )
        self._append(step, 0.0, len(self._variables) - 1)


def _places(graph: WorkloadGraph) -> list[_Place]:
    """By op index of `Steps`, which counts a CUDA graph's launches as ops of their own."""
    places: list[_Place] = []
    for number, region in enumerate(graph.regions):
        if number == graph.captured_from:
            places.append(_Place("", 0, None))
        places += [_Place(region.name, k, op) for k, op in enumerate(region.ops)]
    return [*places, _Place("", 0, None)]
