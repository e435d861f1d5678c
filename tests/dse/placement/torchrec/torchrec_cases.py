"""Designs for the tests of the bridge."""

from dataclasses import replace

from hypothesis import strategies as st

from perfcore.design.design import Design
from perfcore.design.hardware import System, device, node
from perfcore.design.model import EmbeddingTable, Interaction, Model
from perfcore.design.sharding import ComputeKernel, ShardingPlan, ShardingType, TableSharding
from perfcore.design.training import Fusion, Training

KINDS = [*ShardingType]


def design_of(shardings, *, world=4, gpus=2, rows=None, dims=None):
    """A small design of `gpus` ranks a machine; tables are named for their place in `shardings`."""
    count = len(shardings)
    sizes = zip(rows or [40] * count, dims or [32] * count, strict=True)
    tables = tuple(
        EmbeddingTable(f"table_{i}", n, 2.0, embedding_dim=dim) for i, (n, dim) in enumerate(sizes)
    )
    model = Model(4, tables, 32, (8,), (8,), interaction=Interaction.CAT)
    system = System(device("a100-sxm4-80gb"), replace(node("dgx-a100-80gb"), gpus=gpus), world)
    plan = ShardingPlan(tuple(replace(s, table=f"table_{i}") for i, s in enumerate(shardings)))
    return Design(model, Training(8 * world), Fusion(), plan, system)


def sharding(kind, ranks, kernel=ComputeKernel.FUSED, cache_ratio=None):
    return TableSharding("", kind, tuple(ranks), kernel, cache_ratio)


def every_kind(world=4, gpus=2):
    """One table of each kind, column pieces that share a rank among them."""
    host = range(gpus, 2 * gpus) if world > gpus else range(gpus)
    return [
        sharding(ShardingType.TABLE_WISE, [1]),
        sharding(ShardingType.COLUMN_WISE, [1, 0]),
        sharding(ShardingType.COLUMN_WISE, [1, 0, 1]),
        sharding(ShardingType.TABLE_COLUMN_WISE, [host[1], host[0]]),
        sharding(ShardingType.ROW_WISE, range(world)),
        sharding(ShardingType.TABLE_ROW_WISE, host),
        sharding(ShardingType.GRID_SHARD, [*host, *range(gpus)]),
        sharding(ShardingType.DATA_PARALLEL, range(world)),
    ]


@st.composite
def shardings(draw, *, world, gpus):
    """Any placement of a table of 32 columns."""
    kind = draw(st.sampled_from(KINDS))
    some = draw(st.integers(0, world // gpus - 1)) * gpus
    host = range(some, some + gpus)
    match kind:
        case ShardingType.TABLE_WISE:
            ranks = [draw(st.integers(0, world - 1))]
        case ShardingType.COLUMN_WISE:
            ranks = draw(st.lists(st.integers(0, world - 1), min_size=1, max_size=8))
        case ShardingType.TABLE_COLUMN_WISE:
            ranks = draw(st.lists(st.sampled_from(host), min_size=1, max_size=8))
        case ShardingType.TABLE_ROW_WISE:
            ranks = host
        case ShardingType.GRID_SHARD:
            hosts = draw(st.lists(st.integers(0, world // gpus - 1), min_size=1, max_size=4))
            ranks = [r for h in hosts for r in range(h * gpus, (h + 1) * gpus)]
        case _:
            ranks = range(world)
    if kind is ShardingType.DATA_PARALLEL:
        return sharding(kind, ranks)
    kernel = draw(st.sampled_from([*ComputeKernel]))
    cached = kernel is ComputeKernel.FUSED_UVM_CACHING
    return sharding(kind, ranks, kernel, 0.25 if cached else None)
