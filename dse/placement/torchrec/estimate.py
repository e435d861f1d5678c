"""Cost instances by TorchRec's own enumerator and estimators."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

from dse.placement.instances.instance import Instance, instance_of_json
from dse.placement.torchrec.job import Job
from dse.placement.torchrec.packages import quiet, require
from perfcore.units import BYTES_PER_GIB


def estimate(job: Job, *, column_widths: Sequence[int | None] = (None,)) -> Instance:
    """The options of every table as TorchRec's planner sees them, with its own prices.

    Args:
        job: tables, batch and machine.
        column_widths: the narrowest column pieces (`min_partition`), a search space for each; `None` is TorchRec's
            default of 128 columns. Options that several of them have are listed once.

    Returns:
        An instance whose options stand in TorchRec's order.

    Raises:
        MissingPackageError: TorchRec is not installed.
        SpaceError: there is no column width.
    """
    require()
    return instance_of_json(json_of_estimate(job, column_widths))


def json_of_estimate(job: Job, column_widths: Sequence[int | None]) -> dict[str, Any]:
    """The instance's plain values; TorchRec must be there."""
    tables: list[dict[tuple[str, str, int], dict[str, Any]]] = [{} for _ in job.tables]
    for width, ratio in product(dict.fromkeys(column_widths), job.cache_ratios or (None,)):
        for table, option in _priced(job, width, ratio):
            tables[table].setdefault((option["type"], option["kernel"], sum(option["n"])), option)
    host = {"hcap": job.machine.host_gib} if job.cache_ratios else {}
    return {
        **host,
        "ws": job.machine.num_ranks,
        "lws": job.machine.local_ranks,
        "cap": job.machine.capacity_gib,
        "names": [table.name for table in job.tables],
        "tables": [list(options.values()) for options in tables],
    }


def _priced(
    job: Job, column_width: int | None, cache_ratio: float | None
) -> list[tuple[int, dict[str, Any]]]:
    from dse.placement.torchrec import objects

    with quiet():
        space = objects.space_of(job, column_width, cache_ratio, whole=False)
    of_name = {objects.name_of(t): t for t in range(len(job.tables))}
    return [
        (of_name[o.name], _plain(o, objects.kernel_of(o), lengths, on_host=bool(job.cache_ratios)))
        for o, lengths in zip(space.options, space.runs, strict=True)
    ]


def _plain(option: Any, kernel: str, lengths: Sequence[int], *, on_host: bool) -> dict[str, Any]:
    return {
        "type": option.sharding_type,
        "kernel": kernel,
        "part": option.partition_by,
        "n": list(lengths),
        "sh": [[*_times(s.perf), *_gib(s.storage, on_host=on_host)] for s in option.shards],
    }


def _times(perf: Any) -> tuple[float, float, float, float]:
    """As TorchRec sums them: what fetches rows into a cache is waited for."""
    return perf.fwd_compute + perf.prefetch_compute, perf.fwd_comms, perf.bwd_compute, perf.bwd_comms


def _gib(storage: Any, *, on_host: bool) -> list[float]:
    device = storage.hbm / BYTES_PER_GIB
    return [device, storage.ddr / BYTES_PER_GIB] if on_host else [device]
