"""TorchRec's objects for a job. Importing this module imports TorchRec."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner.constants import DEFAULT_PERF_ESTIMATOR
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.estimator import EmbeddingPerfEstimatorFactory
from torchrec.distributed.planner.shard_estimators import EmbeddingStorageEstimator
from torchrec.distributed.planner.types import (
    HardwareConfig,
    KernelConfig,
    ParameterConstraints,
    Shard,
    TopologyFactory,
    TrainerConfig,
)
from torchrec.distributed.types import CacheParams
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from dse.placement.torchrec.job import Job, Machine
from perfcore.design.training import Optimizer, Precision
from perfcore.units import BYTES_PER_GIB

KERNELS, CACHED = ("fused", "dense"), "fused_uvm_caching"
_MS_PER_S = 1000
_OPTIMIZERS = {
    Optimizer.SGD: torch.optim.SGD,
    Optimizer.ADAGRAD: torch.optim.Adagrad,
    Optimizer.ADAM: torch.optim.Adam,
}


def name_of(table: int) -> str:
    """A table's name inside TorchRec: modules cannot have every name that a person may give."""
    return f"t{table}"


def collection_of(job: Job) -> Any:
    """An `EmbeddingBagCollection` of the job's tables that takes no memory."""
    kind = DataType.BF16 if job.table_precision is Precision.BF16 else DataType.FP32
    configs = [
        EmbeddingBagConfig(
            name=name_of(t),
            feature_names=[f"f{t}"],
            num_embeddings=table.num_embeddings,
            embedding_dim=table.embedding_dim,
            data_type=kind,
        )
        for t, table in enumerate(job.tables)
    ]
    collection = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
    for weight in collection.parameters():
        weight._optimizer_classes = [_optimizer(job.table_optimizer)]
    return collection


def sharders() -> list[Any]:
    """What shards a collection."""
    return [EmbeddingBagCollectionSharder()]


def topology_of(machine: Machine) -> Any:
    """TorchRec's `Topology`; its bandwidths are in bytes a millisecond."""
    per_ms = BYTES_PER_GIB / _MS_PER_S
    return TopologyFactory.create_topology(
        TrainerConfig(world_size=machine.num_ranks, local_world_size=machine.local_ranks),
        HardwareConfig(
            hbm_cap_bytes=round(machine.hbm_gib * BYTES_PER_GIB),
            ddr_cap_bytes=round(machine.host_gib / machine.local_ranks * BYTES_PER_GIB),
            hbm_mem_bw=machine.hbm_gib_per_s * per_ms,
            intra_host_bw=machine.intra_gib_per_s * per_ms,
            inter_host_bw=machine.inter_gib_per_s * per_ms,
            hbm_to_ddr_mem_bw=machine.host_gib_per_s * per_ms,
        ),
        KernelConfig(compute_device="cuda", use_hardware_based_bandwidth=True),
    )


def constraints_of(job: Job, column_width: int | None, cache_ratio: float | None = None) -> dict[str, Any]:
    """Mean lookups of each table, the narrowest column piece, and the kernels: on the device, or behind a cache."""
    cached = [] if cache_ratio is None else [CACHED]
    return {
        name_of(t): ParameterConstraints(
            pooling_factors=[table.pooling_factor],
            min_partition=column_width,
            compute_kernels=[*KERNELS, *cached],
            cache_params=CacheParams(load_factor=cache_ratio) if cached else None,
        )
        for t, table in enumerate(job.tables)
    }


def kernel_of(option: Any) -> str:
    """An option's kernel as instances name it: a cache with its ratio."""
    kernel: str = option.compute_kernel
    return f"{kernel}@{option.cache_load_factor:g}" if kernel == CACHED else kernel


@dataclass(frozen=True, slots=True, eq=False)
class Space:
    """The options that TorchRec's enumerator gives a job, estimated; TorchRec's planner takes it for an enumerator.

    Attributes:
        collection: the module whose options they are.
        topology: as TorchRec's planner wants it.
        constraints: likewise.
        options: TorchRec's `ShardingOption`s.
        runs: lengths of the runs of equal shards of each option.
        wall_s: time that it took.
    """

    collection: Any
    topology: Any
    constraints: dict[str, Any]
    options: list[Any]
    runs: list[list[int]]
    wall_s: float

    def enumerate(self, module: Any, sharders: Any) -> list[Any]:
        """The options."""
        return self.options


def space_of(job: Job, column_width: int | None, cache_ratio: float | None, *, whole: bool = True) -> Space:
    """TorchRec's options of a job; with one shard a run of equal shards when not `whole`."""
    start = time.monotonic()
    collection, topology = collection_of(job), topology_of(job.machine)
    constraints = constraints_of(job, column_width, cache_ratio)
    once = _OncePerSize(
        EmbeddingPerfEstimatorFactory.create(
            DEFAULT_PERF_ESTIMATOR, topology=topology, constraints=constraints
        ),
        EmbeddingStorageEstimator(topology=topology, constraints=constraints),
    )
    enumerator = EmbeddingEnumerator(topology, job.batch_per_rank, constraints, estimator=[once])
    options = enumerator.enumerate(collection, sharders())
    if whole:
        once.expand(options)
    return Space(collection, topology, constraints, options, once.runs, time.monotonic() - start)


class _OncePerSize:
    """TorchRec's estimators, asked once for each run of equal shards: the same numbers in a fraction of the time."""

    def __init__(self, *inner: Any) -> None:
        self._inner = inner
        self._whole: list[list[Any]] = []
        self.runs: list[list[int]] = []

    def estimate(self, sharding_options: Sequence[Any], sharder_data_map: Any) -> None:
        """Leave one shard a run, with its `perf` and `storage`."""
        self._whole = [option.shards for option in sharding_options]
        self.runs = [_runs(shards) for shards in self._whole]
        for option, lengths in zip(sharding_options, self.runs, strict=True):
            option.shards = _firsts(option.shards, lengths)
        for estimator in self._inner:
            estimator.estimate(sharding_options, sharder_data_map=sharder_data_map)

    def expand(self, sharding_options: Sequence[Any]) -> None:
        """Give the options all their shards again, each with the estimate of its run."""
        for option, shards, lengths in zip(sharding_options, self._whole, self.runs, strict=True):
            option.shards = _expanded(shards, option.shards, lengths)


def _runs(shards: Sequence[Any]) -> list[int]:
    lengths: list[int] = []
    for i, shard in enumerate(shards):
        if i and shard.size == shards[i - 1].size:
            lengths[-1] += 1
        else:
            lengths.append(1)
    return lengths


def _firsts(shards: Sequence[Any], lengths: Sequence[int]) -> list[Any]:
    firsts, at = [], 0
    for length in lengths:
        firsts.append(shards[at])
        at += length
    return firsts


def _expanded(shards: Sequence[Any], firsts: Sequence[Any], lengths: Sequence[int]) -> list[Any]:
    estimated = [first for first, length in zip(firsts, lengths, strict=True) for _ in range(length)]
    return [
        Shard(size=shard.size, offset=shard.offset, storage=known.storage, perf=known.perf)
        for shard, known in zip(shards, estimated, strict=True)
    ]


def _optimizer(optimizer: Optimizer) -> Any:
    if optimizer is Optimizer.ROWWISE_ADAGRAD:
        from torchrec.optim import RowWiseAdagrad

        return RowWiseAdagrad
    return _OPTIMIZERS[optimizer]
