"""Every op that placements change, priced with one shard on a rank.

A launch of an iteration is *affine in shards* when its duration on a rank is a base plus a sum over the rank's shards;
that is found out by putting the same shard on a rank once, twice and three times. A launch that is not
counts for nothing, which keeps every bound a bound. Collectives are kept as bytes: their time bends.

All of this is done for many settings at once: groups of designs with options of their own (other ranks, other columns),
each at the same n batches.

Letters: n batches, p probes (distinct shards, see `dse.placement.design.options`), q probes of all groups, r ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from dse.placement.design.options import DENSE, FLAGS, Options
from dse.placement.design.shard_costs import (
    BY_TABLE,
    PLACED,
    LaunchCost,
    OpCost,
    ShardCosts,
    StayCost,
    replaced,
    single_rank_dims,
)
from dse.placement.solver.problem import Array, Mask
from perfcore.cost.model import CostModel
from perfcore.design.design import Design
from perfcore.design.sharding import Shards
from perfcore.design.training import EmbeddingFusion
from perfcore.graph.communication import replicated_term
from perfcore.graph.dims import Dims, Structure
from perfcore.graph.dlrm import DlrmBuilder
from perfcore.graph.kernels import Collective, CollectiveKind, resolve
from perfcore.graph.ops import Op, Region, Stream
from perfcore.graph.presence import op_present
from perfcore.graph.sizes import Sizes
from perfcore.maxplus import fold
from perfcore.memory import embedding_bytes, host_bytes
from perfcore.overheads import OverheadTable
from perfcore.steps import CLOCK_OF, HOST_CLOCK, Encoder

_AFFINE = 1e-9  # relative; larger differences are no rounding


def shard_costs(options: Options, cost: CostModel, overheads: OverheadTable) -> ShardCosts:
    """Price every probe in every placed region.

    Args:
        options: of the design.
        cost: prices kernels.
        overheads: host times of ops.
    """
    batch = float(options.design.training.global_batch)
    (found,) = costs_at_batches([options], np.array([batch]), cost, overheads)
    return found.at(0)


def costs_at_batches(
    groups: Sequence[Options], batches: Array, cost: CostModel, overheads: OverheadTable
) -> list[ShardCosts]:
    """Price every probe of every group at every batch.

    Args:
        groups: options of designs with the same structure and tables; their own batches do not matter.
        batches: `(n,)` samples.
        cost: prices kernels.
        overheads: host times of ops.

    Returns:
        Costs at n batches, by group.
    """
    listed = _Listed(groups, batches)
    structure, shape = listed.structure, (len(batches), listed.starts[-1], 2)
    graphs = [_placed_regions(listed.dims(c), structure) for c in (1, 2, 3)]
    by_table = structure.fusion.embedding is EmbeddingFusion.PER_TABLE
    names = [n for n in graphs[0] if not (by_table and n in BY_TABLE)]
    prices = [_priced([g[n] for n in names], cost, shape) for g in graphs]
    shown = [
        _priced([_placed_regions(dims, structure)[n] for n in names], cost, (len(batches), *held))
        for dims, held in (listed.whole_tables(c) for c in (1, 2))
    ]
    ops = [
        [
            _op_costs(op, [p[i][k] for p in prices], [s[i][k] for s in shown], listed)
            for k, op in enumerate(graphs[0][name].ops)
        ]
        for i, name in enumerate(names)
    ]
    stays = {n: _stay(graphs[0][n], cost, overheads, shape) for n in BY_TABLE if by_table and n in graphs[0]}
    alone = listed.dims(1)
    terms = replicated_term(Sizes(alone), structure.table_precision)
    flat = [
        np.asarray(terms[0]) if terms else np.zeros(1),
        embedding_bytes(alone, structure),
        host_bytes(alone, structure),
    ]
    flat = [np.broadcast_to(f if f.ndim > 1 else f[:, None], shape)[..., 0] for f in flat]
    return [
        ShardCosts(
            {name: tuple(op[g] for op in ops[i]) for i, name in enumerate(names)},
            {name: replace(s, host=s.host[:, mine], compute=s.compute[:, mine]) for name, s in stays.items()},
            *(f[:, mine] for f in flat),
        )
        for g, mine in enumerate(listed.slices)
    ]


class _Listed:
    """The probes of all groups one after the other, with the settings of their groups; kinds likewise.

    Attributes:
        groups: of options.
        structure: of all of them.
        starts: `(g + 1,)` where a group's probes start.
    """

    def __init__(self, groups: Sequence[Options], batches: Array) -> None:
        """Of groups at `(n,)` batches."""
        self.groups = groups
        self._dims, self.structure = single_rank_dims([groups[0].design])
        self._batches = batches[:, None, None]
        self.starts = np.concatenate([[0], np.cumsum([len(g.probes) for g in groups])]).astype(int).tolist()

    @property
    def slices(self) -> list[slice]:
        """Of the probes, by group."""
        return [slice(a, b) for a, b in itertools.pairwise(self.starts)]

    def dims(self, columns: int) -> Dims:
        """Each probe `columns` times on rank 0; rank 1 is empty. Shards `(q, 2, columns)`."""
        shards = [g.shards(columns) for g in self.groups]
        fields = {
            f: np.concatenate([np.asarray(getattr(s, f)) for s in shards])
            for f in Shards.__dataclass_fields__
        }
        return self._with(Shards(**fields), [len(g.probes) for g in self.groups])

    def whole_tables(self, columns: int) -> tuple[Dims, tuple[int, int]]:
        """One shard of each kind on all ranks that hold such a shard together; how many kinds, and ranks.

        The last rank is empty: it shows what every rank sees of a whole table.
        """
        shards, held = [], [_holders(g) for g in self.groups]
        ranks = max(h.shape[1] for h in held)
        for options, own in zip(self.groups, held, strict=True):
            alone, first = options.shards(columns), options.first_of_flag
            on = np.pad(own, ((0, 0), (0, ranks - own.shape[1])))[:, :, None]
            shards.append(
                {
                    f: np.asarray(getattr(alone, f))[first[first >= 0]][:, :1] * on
                    for f in Shards.__dataclass_fields__
                }
            )
        fields: dict[str, Any] = {f: np.concatenate([s[f] for s in shards]) for f in shards[0]}
        kinds = [len(h) for h in held]
        return self._with(Shards(**fields), kinds), (sum(kinds), ranks)

    def _with(self, shards: Shards, counts: Sequence[int]) -> Dims:
        def along(of: Callable[[Design], float]) -> Array:
            values = [float(of(g.design)) for g in self.groups]
            alike = len(set(values)) == 1
            return np.array(values[:1] if alike else np.repeat(values, counts))[None, :, None]

        return replaced(
            self._dims,
            global_batch=self._batches,
            world_size=along(lambda d: d.system.world_size),
            local_world_size=along(lambda d: d.system.local_world_size),
            bottom_hidden=(),  # no placed region knows the network
            top_hidden=(),
            shards=shards,
        )


def _holders(options: Options) -> Mask:
    """`(kinds, r + 1)`: ranks that hold a whole table together, for each kind that has options."""
    system = options.design.system
    of_kind = np.array([1, system.world_size, system.local_world_size, system.world_size])
    count = of_kind[np.arange(len(FLAGS)) % DENSE][options.first_of_flag >= 0]
    return np.asarray(np.arange(int(count.max()) + 1) < count[:, None])


def _placed_regions(dims: Dims, structure: Structure) -> dict[str, Region]:
    return {r.name: r for r in DlrmBuilder(dims).graph(structure).regions if r.name in PLACED}


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


def _op_costs(
    op: Op, thrice: Sequence[Sequence[Array]], shown: Sequence[Sequence[Array]], listed: _Listed
) -> list[OpCost]:
    """The costs of an op, by group."""
    present = np.broadcast_to(op_present(op), (1, listed.starts[-1], 2))[0, :, 0]
    out, kinds = [], 0
    for options, mine in zip(listed.groups, listed.slices, strict=True):
        launches, end = [], kinds + int((options.first_of_flag >= 0).sum())
        for k, launch in enumerate(op.launches):
            kernel = launch.kernel
            collective = _of_ranks(kernel, present.shape, mine) if isinstance(kernel, Collective) else None
            cost = _launch(collective, [amounts[k][:, mine] for amounts in thrice], present[mine])
            whole = (shown[1][k] - shown[0][k])[:, kinds:end, -1]
            launches.append(_as_often_as_seen(cost, whole, options))
        out.append(OpCost(op.name, present[mine], tuple(launches)))
        kinds = end
    return out


def _of_ranks(kernel: Collective, probes: tuple[int, ...], mine: slice) -> Collective:
    """The collective of one group's ranks, from that of all probes."""

    def own(dim: Any) -> float:
        return float(np.broadcast_to(np.asarray(dim), (1, *probes, 2))[0, mine.start, 0])

    return replace(kernel, world_size=own(kernel.world_size), local_world_size=own(kernel.local_world_size))


def _as_often_as_seen(cost: LaunchCost, whole: Array, options: Options) -> LaunchCost:
    """What all ranks see of a shard, times the shards of a table that they see, from whole tables by kind."""
    if not cost.everywhere.any():
        return cost
    there = options.first_of_flag >= 0
    one = cost.everywhere[:, options.first_of_flag[there]]
    times = np.ones((len(one), len(there)))
    times[:, there] = np.where(one > 0, whole / np.maximum(one, np.finfo(float).tiny), 1.0)
    return replace(cost, everywhere=cost.everywhere * times[:, options.probe_flag])


def _launch(collective: Collective | None, thrice: Sequence[Array], present: Mask) -> LaunchCost:
    """From amounts `(n, p, 2)` with the shard once, twice and three times on rank 0.

    The base is sure only where every shard brings work: a rank of shards without lookups launches nothing.
    """
    once, twice, three = thrice
    slope, bend = twice - once, np.abs(three - 2 * twice + once)
    nothing = np.zeros(once.shape[:2])
    if not (bend <= _AFFINE * np.maximum(three, 1.0)).all():
        return LaunchCost(nothing[:, 0], nothing, nothing, collective, exact=False)
    base, exact = nothing[:, 0], True
    if present.any():
        bases = (2 * once - twice)[:, present, 0]
        sure = (once[:, present, 0] > 0).all(axis=1)
        base = np.where(sure, np.maximum(bases.min(axis=1), 0.0), 0.0)
        off = np.abs(bases - base[:, None]).max(axis=1)
        exact = bool((off <= _AFFINE * np.maximum(once.max(axis=(1, 2)), 1.0)).all())
    # What rank 1 sees of a shard on rank 0, every rank sees; an all-to-all takes as long as its fullest rank.
    shared = collective is None or collective.kind is not CollectiveKind.ALL_TO_ALL
    everywhere = np.maximum(slope[..., 1], 0.0) if shared else nothing
    each = np.maximum(slope[..., 0] - everywhere, 0.0)
    return LaunchCost(base, each, everywhere, collective, exact)


def _stay(region: Region, cost: CostModel, overheads: OverheadTable, shape: tuple[int, int, int]) -> StayCost:
    """Fold one table's ops, at `(n, q, 2)` with one rank empty; what an op costs once for all tables is taken off and given apart."""
    encoder, launches = Encoder(overheads), []
    for op in region.ops:
        encoder.add(op, captured=False)
        launches += list(op.launches)

    durations = [np.broadcast_to(d, shape) for d in cost.predict_us([resolve(x.kernel) for x in launches])]
    compute = CLOCK_OF[Stream.COMPUTE]
    host, own = np.empty(shape[:2]), np.empty(shape[:2])
    for i in range(shape[0]):
        steps = encoder.steps([d[i] for d in durations], num_ranks=2)
        matrices = fold(
            replace(
                steps,
                durations_us=np.ascontiguousarray(steps.durations_us[:, :, :1]),
                masks=np.ascontiguousarray(steps.masks[:, :, :1]),
            )
        )
        host[i], own[i] = matrices[:, HOST_CLOCK, HOST_CLOCK], matrices[:, compute, compute]
    base = 0.0
    if region.name == "table_optimizer":  # one op for all tables
        times = overheads.of(region.ops[0].name)
        once = times.t1_us + times.t2_us + times.t3_us
        some = np.any([np.broadcast_to(x.present, (1, *shape[1:]))[0, :, 0] for x in launches], axis=0)
        host = np.where(some, host - once + times.t5_us, 0.0)
        base = times.t1_us + min(times.alone_us, times.t2_us + times.t3_us - times.t5_us)
    return StayCost(np.maximum(host, 0.0), np.maximum(own, 0.0), base)
