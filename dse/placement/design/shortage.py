"""Which changes of a design would do where its tables fit nowhere; each of them is tried out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from dse.placement.capacity import rank_capacity_bytes, tables_capacity_bytes
from dse.placement.instances.estimate import memory_of_tables
from dse.placement.instances.labels import Labels
from dse.placement.instances.shortage import Solve, fullest_share
from dse.placement.solver.problem import Problem
from perfcore.design import hardware
from perfcore.design.design import Design
from perfcore.design.model import EmbeddingTable
from perfcore.design.sharding import ShardingPlan
from perfcore.design.training import Optimizer, Precision
from perfcore.errors import PerfcoreError
from perfcore.units import BYTES_PER_GIB

MOST_GPUS_TIMES = 16  # how many times the GPUs of a design to try
_SMALLEST_BATCH_PARTS = (2, 4, 8, 16)


def tables_problem(design: Design) -> tuple[Problem, Labels]:
    """Every way to split the tables of a design, with memory alone."""
    problem, labels = memory_of_tables(
        _tables(design),
        design.training,
        design.system,
        capacity_bytes=tables_capacity_bytes(design),
        fusion=design.fusion,
    )
    return replace(problem, capacity_bytes=rank_capacity_bytes(design)), labels


def _tables(design: Design) -> list[EmbeddingTable]:
    return [
        replace(t, embedding_dim=dim)
        for t, dim in zip(design.model.tables, design.model.table_dims, strict=True)
    ]


def fits(design: Design, solve: Solve) -> bool:
    """Whether a placement of the design's tables was found that fits."""
    problem, _ = tables_problem(design)
    if problem.capacity_bytes.min() <= 0 or least_bytes(problem) > problem.capacity_bytes.sum():
        return False
    return fullest_share(problem, solve) <= 1


def least_bytes(problem: Problem) -> float:
    """Device memory of all tables, each in its smallest way."""
    totals = np.add.reduceat(problem.bytes, problem.first_shard[:-1])
    return float(np.minimum.reduceat(totals, problem.first_option[:-1]).sum())


def design_remedies(design: Design, solve: Solve) -> Iterator[str]:
    """Changes of a design with which its tables fit."""
    ways = (_more_gpus, _bf16, _smaller_state, _smaller_batch, _larger_gpu)
    found = [remedy for way in ways if (remedy := way(design, solve)) is not None]
    yield from found
    if not found:
        both = _bf16_and_more_gpus(design, solve)
        if both is not None:
            yield both


def _more_gpus(design: Design, solve: Solve) -> str | None:
    now = design.system.world_size
    for size in _sizes(design):
        if fits(_with_gpus(design, size), solve):
            return f"{size} GPUs instead of {now} (--set system.world_size={size})."
    return None


def _sizes(design: Design) -> Iterator[int]:
    """World sizes above the design's own, rising: parts of a machine, then whole machines; the batch divides by them."""
    now, gpus = design.system.world_size, design.system.node.gpus
    sizes = [*range(now + 1, gpus + 1), *range(2 * gpus, MOST_GPUS_TIMES * max(now, gpus) + 1, gpus)]
    tried = [s for s in sizes if s > now and design.training.global_batch % s == 0]
    yield from tried[:12]


def _with_gpus(design: Design, size: int) -> Design:
    return replace(
        design,
        sharding=ShardingPlan.on_one_rank(design.model),
        system=design.system.resized(size),
    )


def _bf16(design: Design, solve: Solve) -> str | None:
    smaller = _in_bf16(design)
    if smaller is None or not fits(smaller, solve):
        return None
    return f"bf16 tables: saves {_saved(design, smaller)} (--set training.table_precision=bf16)."


def _in_bf16(design: Design) -> Design | None:
    if design.training.table_precision is Precision.BF16:
        return None
    return replace(design, training=replace(design.training, table_precision=Precision.BF16))


def _smaller_state(design: Design, solve: Solve) -> str | None:
    for optimizer in (Optimizer.ROWWISE_ADAGRAD, Optimizer.SGD):
        if design.training.table_optimizer in (optimizer, Optimizer.SGD):
            continue
        smaller = replace(design, training=replace(design.training, table_optimizer=optimizer))
        if fits(smaller, solve):
            saved = _saved(design, smaller)
            return f"{optimizer} for the tables: saves {saved} (--set training.table_optimizer={optimizer})."
    return None


def _smaller_batch(design: Design, solve: Solve) -> str | None:
    for parts in _SMALLEST_BATCH_PARTS:
        batch, rest = divmod(design.training.global_batch, parts)
        if rest or batch % design.system.world_size:
            return None
        smaller = replace(design, training=replace(design.training, global_batch=batch))
        if fits(smaller, solve):
            return (
                f"a global batch of {batch:,} instead of {design.training.global_batch:,} "
                f"(--set training.global_batch={batch})."
            )
    return None


def _larger_gpu(design: Design, solve: Solve) -> str | None:
    """The catalogue's GPU with the least memory that is enough."""
    own = design.system.device
    larger = sorted((hardware.device(n) for n in hardware.device_names()), key=lambda d: d.hbm_bytes)
    for device in larger:
        if device.hbm_bytes <= own.hbm_bytes:
            continue
        try:
            system = replace(design.system, device=device, node=hardware.default_node(device.name))
        except PerfcoreError:
            continue  # its machines do not make up this world
        if fits(replace(design, system=system), solve):
            there = device.hbm_bytes / BYTES_PER_GIB
            return (
                f"GPUs with more memory: {device.name}, {there:.0f} GiB instead of {own.hbm_bytes / BYTES_PER_GIB:.0f} "
                f"(--set system.device={device.name})."
            )
    return None


def _bf16_and_more_gpus(design: Design, solve: Solve) -> str | None:
    smaller = _in_bf16(design) or design
    for size in _sizes(design):
        if fits(_with_gpus(smaller, size), solve):
            return f"bf16 tables and {size} GPUs (--set training.table_precision=bf16 --set system.world_size={size})."
    return None


def _saved(design: Design, smaller: Design) -> str:
    """What the tables need less, each in its smallest way."""
    saved = least_bytes(tables_problem(design)[0]) - least_bytes(tables_problem(smaller)[0])
    return f"{saved / BYTES_PER_GIB:,.1f} GiB"
