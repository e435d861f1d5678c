"""Collectives: their sizes, ops that call one, and ops that wait for one."""

from __future__ import annotations

import numpy as np

from perfcore.graph.kernels import Array, Collective, CollectiveKind, Dim
from perfcore.graph.mlp import Waits
from perfcore.graph.ops import Launch, Op, Stream
from perfcore.graph.parts import Mask
from perfcore.graph.sizes import Sizes

MODULE = "communication"


def call(
    name: str,
    launch: Launch,
    *,
    present: Mask | bool,
    before: tuple[Launch, ...] = (),
    waits: Waits = (),
    phase: str = "forward",
) -> Op:
    """A collective is called, after what prepares its buffer."""
    return Op(name, (*before, launch), waits=waits, present=present, phase=phase, module=MODULE)


def wait(name: str, launches: tuple[Launch, ...], *, present: Mask | bool, waits: Waits, phase: str) -> Op:
    """Its result is waited for, and laid out."""
    return Op(name, launches, waits=waits, present=present, phase=phase, module=MODULE)


def exchanged(sizes: Sizes, per_sample: Array) -> Array:
    """`(..., 1)`: values of an all-to-all, the maximum over ranks of what one receives or sends.

    The owner handles `per_sample` values `(..., r)` of every sample, the others all owners' of their own.
    """
    owners = sizes.global_batch * per_sample.max(axis=-1, keepdims=True)
    others = sizes.batch * per_sample.sum(axis=-1, keepdims=True)
    return np.asarray(np.maximum(owners, others))


def all_to_all(sizes: Sizes, size: Array, *, after: Stream = Stream.COMPUTE) -> Launch:
    """An all-to-all of all ranks; `(..., 1)` bytes."""
    return collective(sizes, CollectiveKind.ALL_TO_ALL, size, after=after)


def collective(sizes: Sizes, kind: CollectiveKind, size: Dim, *, after: Stream = Stream.COMPUTE) -> Launch:
    """A collective of all ranks, which waits for what `after` has been given so far."""
    kernel = Collective(kind, size, sizes.dims.world_size, sizes.dims.local_world_size)
    return Launch(kernel, Stream.COMMUNICATION, after=(after,))
