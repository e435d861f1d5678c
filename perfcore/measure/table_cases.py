"""Lookups, their gradients and row updates, of one table and of many; copies to, from and on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from perfcore.design.training import Optimizer
from perfcore.graph import kernels as k
from perfcore.measure.kernel_cases import Build, Call, Case, Limits, powers
from perfcore.measure.optimizers import rows_optimizer
from perfcore.measure.source import Source
from perfcore.measure.table_batched import FusedTables, has_fbgemm

BAG: dict[str, Any] = {"scale_grad_by_freq": False, "mode": 0, "sparse": True}
SKEWS = (0.0, 1.0)


@dataclass(frozen=True, slots=True)
class Tables:
    """Equal tables that are looked up in one launch."""

    count: int
    batch: int
    rows: int
    pooling: int
    dim: int
    skew: float

    @property
    def dims(self) -> dict[str, Any]:
        """Of the embedding kernels."""
        rows = float(self.rows) if self.count == 1 else np.full((1, self.count), float(self.rows))
        dims = {"batch": self.batch, "pooling": self.pooling, "dim": self.dim, "skew": self.skew}
        return dims | {"rows": rows, "element_bytes": 4.0, "batched": self.count > 1}

    def lookups(self, s: Source) -> tuple[Tensor, Tensor]:
        """Indices into all tables laid end to end, sample by sample, and the bags' starts."""
        per_table = self.batch * self.pooling
        drawn = [s.lookups(self.rows, per_table, self.skew) + t * self.rows for t in range(self.count)]
        indices = torch.stack([d.view(self.batch, self.pooling) for d in drawn], 1).reshape(-1)
        return indices, torch.arange(0, per_table * self.count, self.pooling, device=s.device)


def table_cases(limits: Limits) -> Iterator[Case]:
    """One table in each launch, then many."""
    for shape in _shapes(limits, counts=(1,)):
        yield Case(k.EmbeddingForward(**shape.dims), _forward(shape))
        yield Case(k.EmbeddingBackward(**shape.dims), _backward(shape))
        update = k.SparseUpdate(shape.batch * shape.pooling, shape.rows, shape.dim, shape.skew, 4.0)
        yield Case(update, _update(shape))
    for shape in _shapes(limits, counts=(4, 26)):
        yield Case(k.EmbeddingForward(**shape.dims), _forward(shape))
        for optimizer in Optimizer:
            kernel = k.EmbeddingBackward(**shape.dims, optimizer=optimizer.value)
            # FBGEMM's runs in autograd, and an optimizer of sparse rows waits to count them.
            yield Case(kernel, _fused_update(shape, optimizer), captured=False)


def copy_cases(limits: Limits, *, on_cuda: bool) -> Iterator[Case]:
    """Copies on the device, and between it and the host where they are two."""
    for size in powers(1024, int(limits.bytes // 4), 8):
        yield Case(k.Memcpy(float(size), k.CopyKind.D2D), _copy(size, to_host=None, pinned=False))
        if on_cuda:
            for kind, to_host, pinned in (
                (k.CopyKind.H2D_PINNED, False, True),
                (k.CopyKind.H2D_PAGEABLE, False, False),
                (k.CopyKind.D2H, True, True),
            ):
                copy = _copy(size, to_host=to_host, pinned=pinned)
                yield Case(k.Memcpy(float(size), kind), copy, captured=pinned)


def _shapes(limits: Limits, *, counts: tuple[int, ...]) -> Iterator[Tables]:
    rows = powers(100, int(limits.table_bytes // 256), 20)
    for count, height, dim, batch, pooling, skew in product(
        counts, rows, (8, 16, 64), powers(16, limits.batch), (1, 10, 50), SKEWS
    ):
        if count * height * dim * 4.0 > limits.table_bytes or count * batch * pooling > limits.lookups:
            continue
        yield Tables(count, batch, height, pooling, dim, skew)


def _forward(t: Tables) -> Build:
    def build(s: Source) -> Call:
        if t.count > 1 and has_fbgemm():
            bags, indices, offsets = _fbgemm(t, s, Optimizer.SGD)
            return lambda: bags(indices, offsets)
        weight = s.table(t.count * t.rows, t.dim)
        indices, offsets = t.lookups(s)
        return lambda: torch.ops.aten._embedding_bag(weight, indices, offsets, **BAG)

    return build


def _gradient(t: Tables, s: Source) -> tuple[Tensor, Callable[[], Tensor]]:
    """The table, and the call that gives its sparse gradient."""
    rows = t.count * t.rows
    weight = s.table(rows, t.dim)
    indices, offsets = t.lookups(s)
    grad = s.randn(t.batch * t.count, t.dim)
    saved = torch.ops.aten._embedding_bag(weight, indices, offsets, **BAG)[1:]

    def backward() -> Tensor:
        out: Tensor = torch.ops.aten._embedding_bag_backward(
            grad, indices, offsets, *saved, rows, **BAG, per_sample_weights=None
        )
        return out

    return weight, backward


def _backward(t: Tables) -> Build:
    return lambda s: _gradient(t, s)[1]


def _update(t: Tables) -> Build:
    def build(s: Source) -> Call:
        weight, backward = _gradient(t, s)
        gradient = backward()
        return lambda: weight.add_(gradient, alpha=-1e-6)

    return build


def _fused_update(t: Tables, optimizer: Optimizer) -> Build:
    """FBGEMM's fused backward; without it, the gradient and then the optimizer's step."""

    def build(s: Source) -> Call:
        if has_fbgemm():
            bags, indices, offsets = _fbgemm(t, s, optimizer)
            out = bags(indices, offsets)
            grad = torch.ones_like(out)
            return lambda: out.backward(grad, retain_graph=True)
        weight, backward = _gradient(t, s)
        s.holds(_state_bytes(t, optimizer))
        parameter = torch.nn.Parameter(weight)
        stepper = rows_optimizer([parameter], optimizer)

        def update() -> None:
            parameter.grad = backward()
            stepper.step()

        return update

    return build


def _state_bytes(t: Tables, optimizer: Optimizer) -> float:
    """What an optimizer keeps of tables: it grows with their rows, however few of them are looked up."""
    values = {
        Optimizer.SGD: 0,
        Optimizer.ROWWISE_ADAGRAD: 1,
        Optimizer.ADAGRAD: t.dim,
        Optimizer.ADAM: 2 * t.dim,
    }
    return 4.0 * t.count * t.rows * values[optimizer]


def _fbgemm(t: Tables, s: Source, optimizer: Optimizer) -> tuple[FusedTables, Tensor, Tensor]:
    generator = torch.Generator(s.device).manual_seed(0)
    s.holds(4.0 * t.count * t.rows * t.dim + _state_bytes(t, optimizer))
    bags = FusedTables([(t.rows, t.dim)] * t.count, optimizer=optimizer, device=s.device, generator=generator)
    per_table = t.batch * t.pooling
    indices = torch.cat([s.lookups(t.rows, per_table, t.skew) for _ in range(t.count)])
    offsets = torch.arange(0, per_table * t.count + 1, t.pooling, device=s.device)
    return bags, indices, offsets


def _copy(size: int, *, to_host: bool | None, pinned: bool) -> Build:
    def build(s: Source) -> Call:
        here, there = s.randn(size // 4), s.empty(size // 4)
        if to_host is None:
            return lambda: there.copy_(here)
        host = torch.empty(size // 4, pin_memory=pinned)
        if to_host:
            return lambda: host.copy_(here, non_blocking=pinned)
        return lambda: there.copy_(host, non_blocking=pinned)

    return build
