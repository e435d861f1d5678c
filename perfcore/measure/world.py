"""The processes that train one design together, and their collectives: gloo on a CPU, NCCL on GPUs.

Where the device runs beside the host, a collective can be called now and waited for later; on a CPU the host does the
exchange itself, so that each is waited for at once.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

MARK = "collective: "  # of a record function around what a rank waits for


@dataclass(slots=True)
class Pending:
    """A collective that was called.

    Attributes:
        out: what it writes; to be read after `wait`.
    """

    out: Tensor
    _work: Any = None

    def wait(self) -> Tensor:
        """The result: the host waits on a CPU, the current stream on a GPU."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self.out


@dataclass(frozen=True, slots=True)
class World:
    """All ranks, seen from one of them.

    Attributes:
        rank: this process.
        size: processes.
        device: where this rank's tensors lie.
        store: small values that ranks tell one another.
    """

    rank: int
    size: int
    device: str
    store: Any

    @property
    def overlaps(self) -> bool:
        """A collective runs beside the host."""
        return self.device.startswith("cuda")

    def all_to_all(self, tensor: Tensor, send: Sequence[int], receive: Sequence[int]) -> Pending:
        """`(sum(send),)` values, cut by rank, to `(sum(receive),)` values, those of rank 0 first."""
        out = tensor.new_empty(sum(receive))
        with _marked("all_to_all"):
            work = dist.all_to_all_single(
                out, tensor.contiguous(), list(receive), list(send), async_op=self.overlaps
            )
        return Pending(out, work)

    def reduce_scatter(self, tensor: Tensor) -> Pending:
        """`(size * n, d)` partial sums of every rank to this rank's `(n, d)` of their sum."""
        with _marked("reduce_scatter"):
            if self.overlaps:
                out = tensor.new_empty(len(tensor) // self.size, *tensor.shape[1:])
                return Pending(out, _reduce_scatter_single()(out, tensor.contiguous(), async_op=True))
            return Pending(_gloo_reduce_scatter(tensor.contiguous(), self))

    def all_gather(self, tensor: Tensor) -> Pending:
        """`(n, d)` of every rank to `(size * n, d)`, rank 0's first."""
        out = tensor.new_empty(self.size * len(tensor), *tensor.shape[1:])
        with _marked("all_gather"):
            work = dist.all_gather(list(out.chunk(self.size)), tensor.contiguous(), async_op=self.overlaps)
        return Pending(out, work)

    def all_reduce(self, tensor: Tensor) -> Pending:
        """The sum over ranks, in place."""
        with _marked("all_reduce"):
            work = dist.all_reduce(tensor, async_op=self.overlaps)
        return Pending(tensor, work)

    def largest(self, values: Sequence[float]) -> list[float]:
        """Element by element, the largest over ranks."""
        tensor = torch.tensor(list(values), dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        found: list[float] = tensor.tolist()
        return found

    def barrier(self) -> None:
        """Every rank waits for all."""
        self.largest([0.0])


@contextmanager
def joined(*, rank: int, size: int, device: str, store: Path, patience_s: float) -> Iterator[World]:
    """Join the other ranks, and part at the end; after a failure the process is to end without parting.

    Args:
        rank: of this process.
        size: how many processes join.
        device: `cpu` or `cuda`; rank r takes GPU r.
        store: a file that all ranks share, made by the first of them.
        patience_s: how long a collective waits for a rank that does not come.
    """
    here, backend = device, "gloo"
    if device.startswith("cuda"):
        here, backend = f"cuda:{rank}", "nccl"
        torch.cuda.set_device(here)
    shared = dist.FileStore(str(store), size)  # type: ignore[attr-defined]
    dist.init_process_group(
        backend, store=shared, rank=rank, world_size=size, timeout=datetime.timedelta(seconds=patience_s)
    )
    yield World(rank, size, here, shared)
    dist.destroy_process_group()


def _reduce_scatter_single() -> Any:
    """The call on one tensor, by the name that this torch has for it."""
    return getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _gloo_reduce_scatter(tensor: Tensor, world: World) -> Tensor:
    """Gloo's own where this torch has it; before, an all-reduce of which each rank keeps its part."""
    parts = list(tensor.chunk(world.size))
    out = torch.empty_like(parts[0])
    try:
        dist.reduce_scatter(out, parts)
    except RuntimeError as err:
        if "support" not in str(err):
            raise
        whole = tensor.clone()
        dist.all_reduce(whole)
        return whole.chunk(world.size)[world.rank].clone()
    return out


def _marked(name: str) -> AbstractContextManager[Any]:
    """A name for the profiler; nothing where none runs, since a mark costs microseconds."""
    if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
        return torch.profiler.record_function(MARK + name)
    return nullcontext()
