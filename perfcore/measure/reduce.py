"""What one device can run of a design: one rank's batch, tables capped to its memory; every change is noted."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from perfcore.design.design import Design
from perfcore.design.sharding import ShardingPlan, ShardingType
from perfcore.design.training import Optimizer, Precision
from perfcore.errors import DesignError

# Copies of a table's size that its training holds: the weights, and the optimizer's state of each row.
TABLE_COPIES = {Optimizer.SGD: 1, Optimizer.ROWWISE_ADAGRAD: 1, Optimizer.ADAGRAD: 2, Optimizer.ADAM: 3}


@dataclass(frozen=True, slots=True)
class Reduced:
    """A design that one device can run.

    Attributes:
        design: what is measured.
        notes: how it differs from what was asked, one sentence each.
    """

    design: Design
    notes: tuple[str, ...] = ()


def reduce_design(
    design: Design,
    *,
    max_batch: int | None = None,
    max_rows: int | None = None,
    max_table_bytes: float | None = None,
    ranks: int = 1,
) -> Reduced:
    """The design with batch and rows capped: on one device (all tables whole, one rank's samples), or on all its ranks.

    Args:
        design: what was asked.
        max_batch: cap on the samples of a rank.
        max_rows: cap on the rows of a table.
        max_table_bytes: cap on the bytes of all tables, copies on several ranks included.
        ranks: 1, or the design's world size.

    Raises:
        DesignError: a cap is below one, or no cap on the rows meets `max_table_bytes`.
    """
    for name, value in (("max_batch", max_batch), ("max_rows", max_rows)):
        if value is not None and value < 1:
            raise DesignError(f"`{name} >= 1` must hold, but got {name}={value}.")
    notes = []
    batch = min(design.local_batch, max_batch or design.local_batch)
    if design.system.world_size > ranks:
        notes.append(
            f"one device with one rank's batch instead of {design.system.world_size}, no collectives"
        )
    if batch < design.local_batch:
        notes.append(f"batch capped to {batch} of {design.local_batch}")
    if design.system.uneven:
        notes.append("devices as they are here, whatever `system.ranks` says of them")
        design = replace(design, system=design.system.even(design.system.world_size))
    if ranks == 1:
        design = replace(
            design,
            training=replace(design.training, global_batch=design.local_batch),
            sharding=ShardingPlan.on_one_rank(design.model),
            system=design.system.even(1),
        )
    rows = _row_cap(design, max_rows=max_rows, max_table_bytes=max_table_bytes)
    capped = sum(t.num_embeddings > rows for t in design.model.tables)
    if capped:
        notes.append(f"rows capped to {rows} in {capped} of {len(design.model.tables)} tables")
    tables = tuple(replace(t, num_embeddings=min(t.num_embeddings, rows)) for t in design.model.tables)
    model = replace(design.model, tables=tables)
    reduced = replace(
        design,
        model=model,
        training=replace(design.training, global_batch=batch * ranks),
    )
    return Reduced(reduced, tuple(notes))


def free_memory_bytes() -> int:
    """Host memory that is free now."""
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def table_bytes(design: Design, *, max_rows: int) -> float:
    """Bytes of the tables and their optimizer's state on all ranks, with at most `max_rows` rows each."""
    model, training = design.model, design.training
    element = 2 if training.table_precision is Precision.BF16 else 4
    copies = [
        design.system.world_size if placed.type is ShardingType.DATA_PARALLEL else 1
        for placed in design.sharding.tables
    ]
    elements = sum(
        min(t.num_embeddings, max_rows) * d * n
        for t, d, n in zip(model.tables, model.table_dims, copies, strict=True)
    )
    return float(elements * element * TABLE_COPIES[training.table_optimizer])


def _row_cap(design: Design, *, max_rows: int | None, max_table_bytes: float | None) -> int:
    """The most rows a table may have: bisection on the bytes, which grow with the cap."""
    largest = max(t.num_embeddings for t in design.model.tables)
    high = min(largest, max_rows or largest)
    if max_table_bytes is None or table_bytes(design, max_rows=high) <= max_table_bytes:
        return high
    if table_bytes(design, max_rows=1) > max_table_bytes:
        raise DesignError(
            f"One row of each table needs {table_bytes(design, max_rows=1):.0f} bytes, but "
            f"max_table_bytes={max_table_bytes:.0f}."
        )
    low = 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (
            (middle, high) if table_bytes(design, max_rows=middle) <= max_table_bytes else (low, middle)
        )
    return low
