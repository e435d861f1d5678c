"""What shards cost, read off the graph of an iteration: every op that placements change, priced with one shard on a rank.

A launch of an iteration is *affine in shards* when its duration on a rank is a base plus a sum over the rank's shards;
that is found out by putting the same shard on a rank once, twice and three times. A launch that is not
counts for nothing, which keeps every bound a bound. Collectives are kept as bytes: their time bends.

Letters: p probes (distinct shards, see `design_options`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dse.placement.design.options import DENSE, FLAGS, Options
from dse.placement.solver.problem import Array
from perfcore.cost.model import CostModel
from perfcore.design.design import Design
from perfcore.design.hardware import System
from perfcore.design.sharding import ShardingPlan, Shards
from perfcore.design.training import EmbeddingFusion
from perfcore.graph.communication import replicated_term
from perfcore.graph.dims import Dims, Structure, dims_of, structure_of
from perfcore.graph.dlrm import DlrmBuilder
from perfcore.graph.kernels import Collective, CollectiveKind, resolve
from perfcore.graph.ops import Op, Region, Stream
from perfcore.graph.presence import op_present
from perfcore.graph.sizes import Sizes
from perfcore.maxplus import fold
from perfcore.memory import embedding_bytes, host_bytes
from perfcore.overheads import OverheadTable
from perfcore.steps import CLOCK_OF, HOST_CLOCK, Encoder

Mask = NDArray[np.bool_]

# Regions of the graph whose ops depend on where tables live. All other ops do the same work in every plan.
PLACED = (
    "input_exchange",
    "input_received",
    "lengths_ahead",
    "indices_ahead",
    "fill_ahead",
    "embedding",
    "forward_exchange",
    "forward_wait",
    "backward_exchange",
    "backward_wait",
    "embedding_backward",
    "table_optimizer",
)
# Of these, the ones that have ops for each table where tables are not batched.
BY_TABLE = ("embedding", "embedding_backward", "table_optimizer")
_AFFINE = 1e-9  # relative; larger differences are no rounding


@dataclass(frozen=True, slots=True, eq=False)
class LaunchCost:
    """One launch over probes: µs, or bytes of a collective.

    Attributes:
        base: what a rank pays at least, if it holds anything.
        exact: it pays neither more nor less, and shards add up.
        each: `(p,)` what a shard adds to its rank.
        everywhere: `(p,)` what a shard adds to every rank, wherever it is.
        collective: the kernel, for collectives.
    """

    base: float
    each: Array
    everywhere: Array
    collective: Collective | None
    exact: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class OpCost:
    """One op of a placed region.

    Attributes:
        name: as the profiler prints it.
        present: `(p,)`: where some rank runs it.
        launches: in order.
    """

    name: str
    present: Mask
    launches: tuple[LaunchCost, ...]


@dataclass(frozen=True, slots=True, eq=False)
class StayCost:
    """What the ops of one table add to a clock of its rank that waits for no other, in µs.

    Attributes:
        host: `(p,)`: longest path from the host clock before the ops to the host clock after.
        compute: `(p,)`: likewise of the compute stream.
        host_base: what the host pays once for all tables.
    """

    host: Array
    compute: Array
    host_base: float


@dataclass(frozen=True, slots=True, eq=False)
class ShardCosts:
    """Costs of all probes of a design.

    Attributes:
        ops: of each placed region that is not in `stays`.
        stays: regions with ops for each table.
        reduced_bytes: `(p,)` bytes that a shard adds to the last gradient bucket.
        bytes: `(p,)` device memory of a shard.
        host_bytes: `(p,)` host memory of a shard.
    """

    ops: dict[str, tuple[OpCost, ...]]
    stays: dict[str, StayCost]
    reduced_bytes: Array
    bytes: Array
    host_bytes: Array


def single_rank_dims(designs: Sequence[Design]) -> tuple[Dims, Structure]:
    """Dims of designs with all tables on one rank, but with their own world, `(n, 1)`; and their structure."""
    system: System = designs[0].system
    alone = [
        replace(
            design,
            sharding=ShardingPlan.on_one_rank(design.model),
            system=System(system.device, replace(system.node, gpus=1), 1),
        )
        for design in designs
    ]
    dims = dims_of(alone)
    world, local = np.array([[float(system.world_size)]]), np.array([[float(system.local_world_size)]])
    structure = replace(structure_of(alone[0]), distributed=system.world_size > 1)
    return replaced(dims, world_size=world, local_world_size=local), structure


def replaced(dims: Dims, **values: object) -> Dims:
    """The same dims with other fields."""
    kept = {name: getattr(dims, name) for name in Dims.__dataclass_fields__}
    return Dims(**(kept | values))


def shard_costs(options: Options, cost: CostModel, overheads: OverheadTable) -> ShardCosts:
    """Price every probe in every placed region.

    Args:
        options: of the design.
        cost: prices kernels.
        overheads: host times of ops.
    """
    dims, structure = single_rank_dims([options.design])
    graphs = [_placed_regions(dims, structure, options.shards(columns)) for columns in (1, 2, 3)]
    by_table = structure.fusion.embedding is EmbeddingFusion.PER_TABLE
    names = [n for n in graphs[0] if not (by_table and n in BY_TABLE)]
    shape = len(options.probes), 2
    prices = [_priced([g[n] for n in names], cost, shape) for g in graphs]
    shown = _shown_by_all(options, dims, structure, names, cost)
    ops = {
        name: tuple(
            _op_cost(op, [p[i][k] for p in prices], [s[i][k] for s in shown], options)
            for k, op in enumerate(graphs[0][name].ops)
        )
        for i, name in enumerate(names)
    }
    stays = {}
    if by_table:
        stays = {
            n: _stay(graphs[0][n], cost, overheads, len(options.probes)) for n in BY_TABLE if n in graphs[0]
        }
    alone = replaced(dims, shards=options.shards(1))
    terms = replicated_term(Sizes(alone), structure.table_precision)
    reduced = (
        np.broadcast_to(terms[0], (len(options.probes), 1))[:, 0] if terms else np.zeros(len(options.probes))
    )
    held, on_host = embedding_bytes(alone, structure)[:, 0], host_bytes(alone, structure)[:, 0]
    return ShardCosts(ops, stays, reduced, held, on_host)


def _placed_regions(dims: Dims, structure: Structure, shards: Shards) -> dict[str, Region]:
    graph = DlrmBuilder(replaced(dims, shards=shards)).graph(structure)
    return {r.name: r for r in graph.regions if r.name in PLACED}


def _shown_by_all(
    options: Options, dims: Dims, structure: Structure, names: Sequence[str], cost: CostModel
) -> list[list[list[list[Array]]]]:
    """One shard of each flag on all ranks that hold such a shard together, once and twice; amounts `(7, r)`.

    The last rank is empty: it shows what every rank sees of a whole table.
    """
    system = options.design.system
    of_kind = np.array([1, system.world_size, system.local_world_size, system.world_size])
    count = of_kind[np.arange(len(FLAGS)) % DENSE]
    first = options.first_of_flag
    held = np.arange(int(count.max()) + 1) < count[first >= 0][:, None]
    out = []
    for columns in (1, 2):
        alone = options.shards(columns)
        spread = {
            name: np.asarray(getattr(alone, name))[first[first >= 0]][:, :1] * held[:, :, None]
            for name in Shards.__dataclass_fields__
        }
        graph = _placed_regions(dims, structure, Shards(**spread))
        out.append(_priced([graph[n] for n in names], cost, held.shape))
    return out


def _priced(regions: Sequence[Region], cost: CostModel, shape: tuple[int, ...]) -> list[list[list[Array]]]:
    """µs (bytes of collectives) of every launch, of that shape, by region and op."""
    kernels = [[[resolve(x.kernel) for x in op.launches] for op in r.ops] for r in regions]
    flat = [k for r in kernels for op in r for k in op if not isinstance(k, Collective)]
    durations = iter(cost.predict_us(flat))
    return [
        [
            [
                np.broadcast_to(k.bytes if isinstance(k, Collective) else next(durations), shape)  # type: ignore[arg-type]
                for k in op
            ]
            for op in r
        ]
        for r in kernels
    ]


def _op_cost(
    op: Op, thrice: Sequence[Sequence[Array]], shown: Sequence[Sequence[Array]], options: Options
) -> OpCost:
    present = np.asarray(np.broadcast_to(op_present(op), (len(options.probes), 2))[:, 0])
    launches = []
    for k, launch in enumerate(op.launches):
        cost = _launch(launch.kernel, [amounts[k] for amounts in thrice], present)
        whole = (shown[1][k] - shown[0][k])[:, -1]
        launches.append(_as_often_as_seen(cost, whole, options))
    return OpCost(op.name, present, tuple(launches))


def _as_often_as_seen(cost: LaunchCost, whole: Array, options: Options) -> LaunchCost:
    """What all ranks see of a shard, times the shards of a table that they see, from `(7,)` of whole tables."""
    if not cost.everywhere.any():
        return cost
    first = options.first_of_flag
    one = cost.everywhere[first[first >= 0]]
    times = np.ones(len(first))
    times[first >= 0] = np.where(one > 0, whole / np.maximum(one, np.finfo(float).tiny), 1.0)
    return replace(cost, everywhere=cost.everywhere * times[options.probe_flag])


def _launch(kernel: object, thrice: Sequence[Array], present: Mask) -> LaunchCost:
    """From amounts `(p, 2)` with the shard once, twice and three times on rank 0.

    The base is sure only where every shard brings work: a rank of shards without lookups launches nothing.
    """
    once, twice, three = thrice
    slope, bend = twice - once, np.abs(three - 2 * twice + once)
    affine = bool((bend <= _AFFINE * np.maximum(three, 1.0)).all())
    collective = kernel if isinstance(kernel, Collective) else None
    if not affine:
        nothing = np.zeros(len(once))
        return LaunchCost(0.0, nothing, nothing, collective, exact=False)
    bases = (2 * once - twice)[present, 0]
    sure = bool(len(bases)) and bool((once[present, 0] > 0).all())
    base = max(float(bases.min()), 0.0) if sure else 0.0
    exact = not len(bases) or bool(np.abs(bases - base).max() <= _AFFINE * max(float(once.max()), 1.0))
    # What rank 1 sees of a shard on rank 0, every rank sees; an all-to-all takes as long as its fullest rank.
    shared = collective is None or collective.kind is not CollectiveKind.ALL_TO_ALL
    everywhere = np.maximum(slope[:, 1], 0.0) if shared else np.zeros(len(once))
    each = np.maximum(slope[:, 0] - everywhere, 0.0)
    return LaunchCost(base, each, everywhere, collective, exact)


def _stay(region: Region, cost: CostModel, overheads: OverheadTable, probes: int) -> StayCost:
    """Fold one table's ops; what an op costs once for all tables is taken off and given apart."""
    encoder, launches = Encoder(overheads), []
    for op in region.ops:
        encoder.add(op, captured=False)
        launches += list(op.launches)
    durations = [
        np.broadcast_to(d, (probes, 2))[:, :1] for d in cost.predict_us([resolve(x.kernel) for x in launches])
    ]
    steps = encoder.steps([np.broadcast_to(d, (probes, 2)) for d in durations], num_ranks=2)
    steps = replace(
        steps,
        durations_us=np.ascontiguousarray(steps.durations_us[:, :, :1]),
        masks=np.ascontiguousarray(steps.masks[:, :, :1]),
    )
    matrices = fold(steps)
    compute = CLOCK_OF[Stream.COMPUTE]
    host, base = matrices[:, HOST_CLOCK, HOST_CLOCK], 0.0
    if region.name == "table_optimizer":  # one op for all tables
        times = overheads.of(region.ops[0].name)
        once = times.t1_us + times.t2_us + times.t3_us
        some = np.any([np.broadcast_to(x.present, (probes, 2))[:, 0] for x in launches], axis=0)
        host = np.where(some, host - once + times.t5_us, 0.0)
        base = times.t1_us + min(times.alone_us, times.t2_us + times.t3_us - times.t5_us)
    return StayCost(np.maximum(host, 0.0), np.maximum(matrices[:, compute, compute], 0.0), base)
