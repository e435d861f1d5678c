"""Gradients of what every rank holds, averaged in buckets while the backward pass runs.

As `DistributedDataParallel` does it with `gradient_as_bucket_view`: a gradient is scaled into its bucket as soon as it
is there, a bucket is all-reduced as soon as it is full, in the order of the buckets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from perfcore.measure.world import Pending, World

# DDP's own: `torch.distributed._DEFAULT_FIRST_BUCKET_BYTES` and `bucket_cap_mb=25`.
FIRST_BUCKET_BYTES = 1024 * 1024
BUCKET_CAP_BYTES = 25 * 1024 * 1024


@dataclass(slots=True)
class Bucket:
    """Consecutive gradients in one tensor.

    Attributes:
        flat: `(n,)`.
        parameters: in order.
        missing: how many of their gradients are not there yet.
        views: of `flat`, one a parameter.
    """

    flat: Tensor
    parameters: Sequence[nn.Parameter]
    missing: int
    views: Sequence[Tensor]


class Reducer:
    """Averages gradients over ranks.

    Args:
        parameters: in the order in which the backward pass reaches them.
        world: the ranks.
        overlapped: collectives run beside the backward pass until `finish`.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], world: World, *, overlapped: bool) -> None:
        self._world, self._overlapped = world, overlapped
        self._buckets = [_bucket(group) for group in bucketed(parameters)]
        self._next, self._called = 0, list[Pending]()
        for bucket in self._buckets:
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                parameter.register_post_accumulate_grad_hook(self._hook(bucket, view))  # type: ignore[no-untyped-call]

    def finish(self) -> None:
        """Wait for all buckets; the gradients are views of them."""
        assert self._next == len(self._buckets), "a parameter got no gradient"
        for pending in self._called:
            pending.wait()
        self._next, self._called = 0, []
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters)

    def _hook(self, bucket: Bucket, view: Tensor) -> Callable[[Tensor], None]:
        scale = 1.0 / self._world.size

        def ready(parameter: Tensor) -> None:
            assert parameter.grad is not None
            torch.mul(parameter.grad, scale, out=view)
            parameter.grad = view
            bucket.missing -= 1
            self._reduce_full()

        return ready

    def _reduce_full(self) -> None:
        while self._next < len(self._buckets) and not self._buckets[self._next].missing:
            pending = self._world.all_reduce(self._buckets[self._next].flat)
            if not self._overlapped:
                pending.wait()
            self._called.append(pending)
            self._next += 1


def bucketed(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Consecutive parameters of one dtype, each bucket closed by the gradient that fills it."""
    groups: list[list[nn.Parameter]] = []
    filled = cap = 0
    for parameter in parameters:
        if not groups or filled >= cap or groups[-1][0].dtype is not parameter.dtype:
            groups.append([])
            filled, cap = 0, BUCKET_CAP_BYTES if len(groups) > 1 else FIRST_BUCKET_BYTES
        groups[-1].append(parameter)
        filled += parameter.numel() * parameter.element_size()
    return groups


def _bucket(parameters: Sequence[nn.Parameter]) -> Bucket:
    flat = parameters[0].new_zeros(sum(p.numel() for p in parameters))
    parts = torch.split(flat, [p.numel() for p in parameters])
    views = [part.view_as(p) for part, p in zip(parts, parameters, strict=True)]
    return Bucket(flat, parameters, len(parameters), views)
