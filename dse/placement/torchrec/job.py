"""What TorchRec's planner is told: tables, batch, and a machine in its own terms."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dse.errors import SpaceError
from dse.ranks import differing_text
from perfcore.design.design import Design
from perfcore.design.hardware import System
from perfcore.design.model import EmbeddingTable
from perfcore.design.training import Optimizer, Precision
from perfcore.units import BYTES_PER_GIB, GIGA

CACHE_RATIOS = (0.2, 0.05)  # TorchRec's default, and less for larger tables


@dataclass(frozen=True, slots=True)
class Machine:
    """Ranks, memory and links. TorchRec counts 1024³ bytes as a GB; so do these fields.

    The defaults are an A100 80 GB in hosts of eight with one 200 Gb/s adapter a GPU, as TorchRec's users write it
    (the data sheet's 2039, 300 and 25 GB/s, taken as GiB), TorchRec's own host memory and link, and its usual reserve:
    15 % of the memory is left to the rest of the job.

    Attributes:
        num_ranks: ranks.
        ranks_per_host: ranks of a machine; all when there are fewer.
        hbm_gib: device memory.
        reserved_share: share of it that tables may not take.
        hbm_gib_per_s: device memory bandwidth.
        intra_gib_per_s: per GPU, inside a machine.
        inter_gib_per_s: per GPU, between machines.
        host_gib: memory of a machine for tables behind caches.
        host_gib_per_s: per GPU, between that memory and the device.
    """

    num_ranks: int
    ranks_per_host: int = 8
    hbm_gib: float = 80.0
    reserved_share: float = 0.15
    hbm_gib_per_s: float = 2039.0
    intra_gib_per_s: float = 300.0
    inter_gib_per_s: float = 25.0
    host_gib: float = 1024.0
    host_gib_per_s: float = 32.0

    def __post_init__(self) -> None:
        """Refuse a machine that cannot be."""
        if self.num_ranks < 1 or self.ranks_per_host < 1 or self.num_ranks % self.local_ranks:
            raise SpaceError(
                f"Ranks must make up whole machines, but got num_ranks={self.num_ranks}, "
                f"ranks_per_host={self.ranks_per_host}."
            )
        if not 0 <= self.reserved_share < 1:
            raise SpaceError(f"`0 <= reserved_share < 1` must hold, but got {self.reserved_share}.")
        positive = (
            "hbm_gib",
            "hbm_gib_per_s",
            "intra_gib_per_s",
            "inter_gib_per_s",
            "host_gib",
            "host_gib_per_s",
        )
        for name in positive:
            if not getattr(self, name) > 0:
                raise SpaceError(f"`{name} > 0` must hold, but got {getattr(self, name)}.")

    @property
    def local_ranks(self) -> int:
        """Ranks of one machine."""
        return min(self.num_ranks, self.ranks_per_host)

    @property
    def capacity_gib(self) -> float:
        """What tables may take on a rank."""
        return self.hbm_gib * (1 - self.reserved_share)


@dataclass(frozen=True, slots=True)
class Job:
    """Tables and how they are trained.

    Attributes:
        tables: each with its own `embedding_dim`.
        batch_per_rank: samples per rank and iteration.
        machine: what they run on.
        table_precision: storage of the tables.
        table_optimizer: whose state takes memory beside them.
        cache_ratios: shares of a table's rows that a cache on the device may hold, the table itself lying in the host's
            memory; none keeps all tables on the device.
    """

    tables: tuple[EmbeddingTable, ...]
    batch_per_rank: int
    machine: Machine
    table_precision: Precision = Precision.FP32
    table_optimizer: Optimizer = Optimizer.SGD
    cache_ratios: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Refuse a job without tables or samples, and a table without columns."""
        if not self.tables:
            raise SpaceError("A job needs at least one table, but `tables` is empty.")
        if self.batch_per_rank < 1:
            raise SpaceError(f"`batch_per_rank >= 1` must hold, but got {self.batch_per_rank}.")
        for ratio in self.cache_ratios:
            if not 0 < ratio < 1:
                raise SpaceError(f"`0 < cache_ratio < 1` must hold, but got {ratio}.")
        for table in self.tables:
            if table.embedding_dim is None:
                raise SpaceError(f"Each table needs its own embedding_dim, but {table.name!r} has none.")


def machine_of(system: System) -> Machine:
    """The machine that a design's system is, with TorchRec's usual 15 % reserve.

    Bandwidths are the data sheets' GB/s taken as GiB/s, as TorchRec's own constants are; memory is what there is.

    Raises:
        SpaceError: its GPUs differ.
    """
    if system.uneven:
        raise SpaceError(
            f"TorchRec's planner knows equal GPUs alone, but these ranks differ: {differing_text(system)}.",
            hint="Compare without them: --set system.ranks=[].",
        )
    device, node = system.device, system.node
    return Machine(
        num_ranks=system.world_size,
        ranks_per_host=system.local_world_size,
        hbm_gib=device.hbm_bytes / BYTES_PER_GIB,
        hbm_gib_per_s=device.hbm_bytes_per_s / GIGA,
        intra_gib_per_s=node.intra_bytes_per_s / GIGA,
        inter_gib_per_s=node.inter_bytes_per_s / GIGA,
        host_gib=node.host_memory_bytes / BYTES_PER_GIB,
        host_gib_per_s=device.h2d_bytes_per_s / GIGA,
    )


def job_of(design: Design) -> Job:
    """The job that a design is, its own placement left out; caches are allowed where the tables do not fit without."""
    dims = zip(design.model.tables, design.model.table_dims, strict=True)
    tables = tuple(replace(table, embedding_dim=dim) for table, dim in dims)
    machine, training = machine_of(design.system), design.training
    element = 2 if training.table_precision is Precision.BF16 else 4
    needed = element * sum(t.num_embeddings * (t.embedding_dim or 0) for t in tables)
    fits = needed <= machine.capacity_gib * BYTES_PER_GIB * machine.num_ranks
    return Job(
        tables=tables,
        batch_per_rank=design.local_batch,
        machine=machine,
        table_precision=training.table_precision,
        table_optimizer=training.table_optimizer,
        cache_ratios=() if fits else CACHE_RATIOS,
    )
