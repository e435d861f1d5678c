"""What shards cost, as `dse.placement.design.probing` reads it off the graph of an iteration.

Letters: n batches, g settings of anything else, p probes (distinct shards, see `dse.placement.design.options`), q probes
of all g.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dse.placement.solver.problem import Array
from perfcore.design.design import Design
from perfcore.design.hardware import System
from perfcore.design.model import Interaction, Loss
from perfcore.design.sharding import ShardingPlan, Shards
from perfcore.design.training import InteractionFusion, MlpFusion, Optimizer, OptimizerFusion, Precision
from perfcore.graph.dims import Dims, Structure, dims_of, structure_of
from perfcore.graph.kernels import Collective

Mask = NDArray[np.bool_]
Number: TypeAlias = "float | Array"

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


@dataclass(frozen=True, slots=True, eq=False)
class LaunchCost:
    """One launch over probes: µs, or bytes of a collective.

    Attributes:
        base: `()` what a rank pays at least, if it holds anything.
        exact: it pays neither more nor less, and shards add up.
        each: `(p,)` what a shard adds to its rank.
        everywhere: `(p,)` what a shard adds to every rank, wherever it is.
        collective: the kernel, for collectives.
    """

    base: Number
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
        host_base: `()` what the host pays once for all tables.
    """

    host: Array
    compute: Array
    host_base: float


@dataclass(frozen=True, slots=True, eq=False)
class ShardCosts:
    """Costs of all probes of a design; or, every array with a further first axis, of a design at n batches.

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

    def at(self, batch: int) -> ShardCosts:
        """Of costs at n batches those at one."""

        def launch(x: LaunchCost) -> LaunchCost:
            base = float(np.asarray(x.base)[batch])
            return replace(x, base=base, each=x.each[batch], everywhere=x.everywhere[batch])

        ops = {
            name: tuple(replace(op, launches=tuple(map(launch, op.launches))) for op in of_region)
            for name, of_region in self.ops.items()
        }
        stays = {
            name: replace(s, host=s.host[batch], compute=s.compute[batch]) for name, s in self.stays.items()
        }
        return ShardCosts(ops, stays, self.reduced_bytes[batch], self.bytes[batch], self.host_bytes[batch])


def single_rank_dims(designs: Sequence[Design]) -> tuple[Dims, Structure]:
    """Dims of designs with all tables on one rank, but each with its own world, `(n, 1)`; and their structure."""
    alone = [
        replace(
            design,
            sharding=ShardingPlan.on_one_rank(design.model),
            system=System(design.system.device, replace(design.system.node, gpus=1), 1),
        )
        for design in designs
    ]
    dims, systems = dims_of(alone), [d.system for d in designs]
    world = np.array([[float(s.world_size)] for s in systems])
    local = np.array([[float(s.local_world_size)] for s in systems])
    structure = replace(structure_of(alone[0]), distributed=systems[0].world_size > 1)
    return replaced(dims, world_size=world, local_world_size=local), structure


def replaced(dims: Dims, **values: object) -> Dims:
    """The same dims with other fields."""
    kept = {name: getattr(dims, name) for name in Dims.__dataclass_fields__}
    return Dims(**(kept | values))


def exchanges_of(structure: Structure) -> Structure:
    """The structure with one network's ops for all: equal for structures that exchange and look up embeddings alike."""
    fusion = replace(
        structure.fusion,
        mlp=MlpFusion.EAGER,
        interaction=InteractionFusion.EAGER,
        optimizer=OptimizerFusion.FOR_LOOP,
    )
    return replace(
        structure,
        interaction=Interaction.DOT,
        cross_layers=0,
        loss=Loss.BCE,
        precision=Precision.FP32,
        optimizer=Optimizer.SGD,
        fusion=fusion,
    )


def at_batches(dims: Dims, batches: Array) -> Dims:
    """`(n g, 1)`: the dims of g designs at n batches, batch by batch."""

    def repeated(values: Any) -> Any:
        if isinstance(values, tuple):
            return tuple(map(repeated, values))
        if isinstance(values, Shards):
            return Shards(**{f: repeated(getattr(values, f)) for f in Shards.__dataclass_fields__})
        alike = np.ndim(values) == 0 or len(values) == 1
        return values if alike else np.tile(values, (len(batches), *[1] * (values.ndim - 1)))

    settings = len(dims.global_batch)
    kept = {name: repeated(getattr(dims, name)) for name in Dims.__dataclass_fields__}
    return replaced(dims, **(kept | {"global_batch": np.repeat(batches, settings)[:, None]}))


def joined(costs: Sequence[ShardCosts]) -> ShardCosts:
    """Costs of all settings side by side: of probes `(n, q)`, of launches' bases `(n, g)`."""
    first = costs[0]

    def beside(values: Sequence[Array]) -> Array:
        return np.concatenate(values, axis=1)

    ops = {}
    for name, of_region in first.ops.items():
        ops[name] = tuple(
            replace(
                op,
                present=np.concatenate([c.ops[name][i].present for c in costs]),
                launches=tuple(
                    _joined_launch([c.ops[name][i].launches[k] for c in costs])
                    for k in range(len(op.launches))
                ),
            )
            for i, op in enumerate(of_region)
        )
    stays = {
        name: replace(
            s,
            host=beside([c.stays[name].host for c in costs]),
            compute=beside([c.stays[name].compute for c in costs]),
        )
        for name, s in first.stays.items()
    }
    arrays = (beside([getattr(c, n) for c in costs]) for n in ("reduced_bytes", "bytes", "host_bytes"))
    return ShardCosts(ops, stays, *arrays)


def _joined_launch(launches: Sequence[LaunchCost]) -> LaunchCost:
    kernel = launches[0].collective
    if kernel is not None:
        kernel = replace(
            kernel,
            world_size=np.array([x.collective.world_size for x in launches if x.collective]),
            local_world_size=np.array([x.collective.local_world_size for x in launches if x.collective]),
        )
    return LaunchCost(
        np.stack([np.asarray(x.base) for x in launches], axis=1),
        np.concatenate([x.each for x in launches], axis=1),
        np.concatenate([x.everywhere for x in launches], axis=1),
        kernel,
        all(x.exact for x in launches),
    )
