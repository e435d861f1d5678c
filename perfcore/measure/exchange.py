"""Pooled rows on their way back to the samples, and their gradients the opposite way.

Each exchange is two nodes of autograd, call and wait, so that other work can stand between them: forward the bottom
MLP, backward its gradient. What the call sent lies in the exchange object; a token carries the order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from perfcore.measure.world import Pending, World


class Exchange(Protocol):
    """One collective and the one that takes gradients back."""

    pending: Pending

    def forth(self, tensor: Tensor) -> Pending:
        """Call it."""
        ...

    def back(self, grad: Tensor) -> Pending:
        """Call the opposite one."""
        ...

    def gradient(self, received: Tensor) -> Tensor:
        """What the lookups' gradient is, from what came back: of a mean over all ranks' samples."""
        ...


class AllToAll:
    """Whole pooled rows: `(B, columns held)` to this rank's samples, `(b * columns of all,)`, by owner."""

    def __init__(self, columns: Sequence[int], batch: int, world: World) -> None:
        self._world = world
        self._held, self._all = columns[world.rank], list(columns)
        self._samples = batch * world.size
        self._send = [batch * self._held] * world.size
        self._receive = [batch * n for n in columns]
        self.pending: Pending

    def forth(self, tensor: Tensor) -> Pending:
        """Each rank gets the rows of its samples."""
        return self._world.all_to_all(tensor.reshape(-1), self._send, self._receive)

    def back(self, grad: Tensor) -> Pending:
        """Gradients to the owners."""
        return self._world.all_to_all(grad, self._receive, self._send)

    def gradient(self, received: Tensor) -> Tensor:
        """`(B, columns held)`."""
        return received.view(self._samples, self._held).div_(self._world.size)

    def by_owner(self, received: Tensor) -> list[Tensor]:
        """`(b, columns)` of each owner, views."""
        parts = torch.split(received, self._receive)
        return [part.view(-1, n) for part, n in zip(parts, self._all, strict=True) if n]


class ReduceScatter:
    """Partial sums of split rows: `(B, d)` on each rank, added up, to this rank's `(b, d)`."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.pending: Pending

    def forth(self, tensor: Tensor) -> Pending:
        """Sums of this rank's samples."""
        return self._world.reduce_scatter(tensor)

    def back(self, grad: Tensor) -> Pending:
        """Gradients of all samples to every owner."""
        return self._world.all_gather(grad)

    def gradient(self, received: Tensor) -> Tensor:
        """`(B, d)`."""
        return received.div_(self._world.size)


def call(exchange: Exchange, tensor: Tensor, *, overlapped: bool) -> Tensor:
    """Call the collective; the token goes to `await_`."""
    token: Tensor = _Call.apply(exchange, tensor, overlapped)  # type: ignore[no-untyped-call]
    return token


def await_(exchange: Exchange, token: Tensor, *, overlapped: bool) -> Tensor:
    """Wait for what was called, and its result."""
    out: Tensor = _Await.apply(exchange, token, overlapped)  # type: ignore[no-untyped-call]
    return out


class _Call(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: Exchange, tensor: Tensor, overlapped: bool) -> Tensor:  # noqa: FBT001
        ctx.exchange = exchange
        exchange.pending = exchange.forth(tensor)
        if not overlapped:
            exchange.pending.wait()
        return tensor.new_empty(1, dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[None, Tensor, None]:
        exchange = ctx.exchange
        return None, exchange.gradient(exchange.pending.wait()), None


class _Await(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: Exchange, token: Tensor, overlapped: bool) -> Tensor:  # noqa: FBT001
        ctx.exchange, ctx.overlapped = exchange, overlapped
        ctx.save_for_backward(token)
        return exchange.pending.wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None]:
        ctx.exchange.pending = ctx.exchange.back(grads[0].contiguous())
        if not ctx.overlapped:
            ctx.exchange.pending.wait()
        (token,) = ctx.saved_tensors
        return None, torch.zeros_like(token), None
