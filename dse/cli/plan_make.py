"""`dse plan --make-instance`: a cost instance of a table set."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from dse.errors import DseError, StorageError

if TYPE_CHECKING:
    from dse.placement.instances.instance import Instance
    from perfcore.design.hardware import System
    from perfcore.design.model import EmbeddingTable

ESTIMATORS = ("ours", "torchrec")
_STEP = 4  # columns that FBGEMM reads at once


@dataclass(frozen=True, slots=True)
class Wish:
    """What instance is wanted.

    Attributes:
        tables: a CSV file, or a bundled set's name.
        gpus: ranks.
        batch_per_gpu: samples per rank.
        dim: columns of tables that name none.
        system: a node or a device of the catalogue, or a file.
        estimator: one of `ESTIMATORS`.
        cache_ratios: caches in front of tables in host memory.
        profile: prices kernels; the device's own if `None`.
    """

    tables: str
    gpus: int
    batch_per_gpu: int
    dim: int
    system: str
    estimator: str
    cache_ratios: tuple[float, ...]
    profile: str | None


def make(wish: Wish, out: Path, *, as_json: bool) -> None:
    """Write the instance and say what it holds.

    Raises:
        ConfigError, HardwareError: the tables or the system cannot be read, or do not go together.
        MissingPackageError: TorchRec's estimator needs torchrec.
    """
    from dse.placement.instances.instance import write_instance

    if wish.estimator not in ESTIMATORS:
        raise DseError(f"`--estimator` must be one of {', '.join(ESTIMATORS)}, but got {wish.estimator!r}.")
    if wish.cache_ratios and wish.estimator != "ours":
        raise DseError("`--cache-ratio` goes with `--estimator ours` alone.")
    if wish.batch_per_gpu < 1 or wish.dim < 1:
        raise DseError("`--batch-per-gpu` and `--dim` must be at least 1.")
    tables = _tables(wish)
    instance = _estimated(wish, tables, _system(wish))
    try:
        write_instance(instance, out)
    except OSError as err:
        raise StorageError(f"{out} cannot be written: {err.strerror or err}.") from err
    for line in _remarks(tables):
        typer.echo(line, err=True)
    said = {
        "file": str(out),
        "tables": len(instance.names),
        "ranks": instance.num_ranks,
        "ranks_per_host": instance.ranks_per_host,
        "options": len(instance.types),
        "shards": len(instance.bytes),
        "capacity_gib": instance.capacity_bytes / 2**30,
        "estimator": wish.estimator,
        "bytes": out.stat().st_size,
    }
    if as_json:
        typer.echo(json.dumps(said))
    else:
        typer.echo(
            f"{out}: {said['tables']} table{'s' * (len(tables) > 1)} on {said['ranks']} rank{'s' * (wish.gpus > 1)}, {said['options']:,} options with {said['shards']:,} "
            f"shards, {said['capacity_gib']:.1f} GiB for tables on each rank. Next: dse plan --instance {out}"
        )


def _tables(wish: Wish) -> list[EmbeddingTable]:
    from dse.table_csv import bundled_tables, read_tables

    path = Path(wish.tables)
    found = read_tables(path) if path.suffix == ".csv" else bundled_tables(wish.tables)
    return [t if t.embedding_dim else replace(t, embedding_dim=wish.dim) for t in found]


def _system(wish: Wish) -> System:
    """The system asked for, or the measured machine that the profile describes."""
    from dse.resolve import system_named
    from perfcore.profile.profile import priced_system

    system = system_named(wish.system, world_size=wish.gpus)
    return system if wish.profile is None else priced_system(wish.profile, system)


def _estimated(wish: Wish, tables: list[EmbeddingTable], system: System) -> Instance:
    if wish.estimator == "torchrec":
        from dse.placement.torchrec import Job, estimate, machine_of

        return estimate(Job(tuple(tables), wish.batch_per_gpu, machine_of(system)))
    from dse.placement.instances.estimate import estimated_instance
    from perfcore.design.training import Training
    from perfcore.profile.profile import load_profile, profile_for

    device, node = system.device, system.node
    profile = (
        load_profile(wish.profile, device=device, node=node) if wish.profile else profile_for(device, node)
    )
    training = Training(global_batch=wish.batch_per_gpu * system.world_size)
    return estimated_instance(tables, training, system, profile.cost_model(), cache_ratios=wish.cache_ratios)


def _remarks(tables: list[EmbeddingTable]) -> list[str]:
    """What a person should know of unusual tables."""
    odd = [t.name for t in tables if (t.embedding_dim or 0) % _STEP]
    idle = [t.name for t in tables if t.pooling_factor == 0]
    remarks = []
    if odd:
        remarks.append(
            f"note: columns not divisible by {_STEP}, which FBGEMM's kernels need: {_some(odd)}. Priced as they are; "
            "their columns are not split."
        )
    if idle:
        remarks.append(
            f"note: no lookups at all in {_some(idle)}: they cost memory and their exchange alone."
        )
    return remarks


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
