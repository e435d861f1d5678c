"""A traced iteration at another batch size, or on another number of devices: kernels times the ratio of two predictions.

Batch: dims that equal the batch, and leading dims that are multiples of it, grow with it, where a file holds shapes; host
copies, lookups and all-to-alls grow with it too. World size: the batch of a rank stays, so does what a rank sends;
host times and other kernels stay.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from perfcore.cost.model import CostModel
from perfcore.design import hardware
from perfcore.errors import TraceError
from perfcore.graph.kernels import (
    BatchNorm,
    Collective,
    CollectiveKind,
    Convolution,
    CopyKind,
    Dropout,
    EmbeddingBackward,
    EmbeddingForward,
    Kernel,
    LayerNorm,
    MeasuredKernel,
    Memcpy,
    Pooling,
    Softmax,
    with_dims,
)
from perfcore.profile.profile import profile_for
from perfcore.trace.device import device_of
from perfcore.trace.layers import stands_for
from perfcore.trace.link import Launched
from perfcore.trace.replay import Program
from perfcore.trace.shapes import kernel_of

_KINDS = {
    "allreduce": CollectiveKind.ALL_REDUCE,
    "sendrecv": CollectiveKind.ALL_TO_ALL,
    "alltoall": CollectiveKind.ALL_TO_ALL,
    "allgather": CollectiveKind.ALL_GATHER,
    "reducescatter": CollectiveKind.REDUCE_SCATTER,
}
# Dims of a layer that grow with the leading dim of its inputs.
_LEADING: dict[type, tuple[str, ...]] = {
    Convolution: ("batch",),
    BatchNorm: ("rows",),
    Pooling: ("inputs", "outputs"),
    LayerNorm: ("rows",),
    Softmax: ("rows",),
    Dropout: ("elements",),
}
_LARGEST_BYTES = 2.0**36
_HALVINGS = 60
_LINEAR, _LINEAR_INPUT = "aten::addmm", 1  # a linear layer, forward: bias, input, weight


def with_world_size(program: Program, world_size: int) -> Program:
    """Transfers as between so many ranks; on one machine as many as it holds.

    Raises:
        TraceError: the traces' device is not in the catalogue, or fewer than two ranks are asked for.
        HardwareError: the catalogue has no machine with it.
    """
    before = program.trace.world_size
    if world_size < 2 or before < 2:
        raise TraceError(
            f"`world_size >= 2` must hold before and after, but got {before} and {world_size}.",
            hint="Record with torch.distributed initialised: the file then says how many ranks there are.",
        )
    device = device_of([program.trace])
    local = _local_world_size(device.name)
    cost = profile_for(device).cost_model()

    def transfer_us(kind: CollectiveKind, size: float, ranks: int) -> float:
        return _us(cost, Collective(kind, size, float(ranks), float(min(ranks, local))))

    durations = [
        _resized(x, us, lambda k, b: transfer_us(k, b, before), lambda k, b: transfer_us(k, b, world_size))
        for x, us in zip(program.step.launched, program.durations_us, strict=True)
    ]
    return replace(program, durations_us=tuple(durations))


def with_batch(program: Program, factor: float) -> Program:
    """Kernels as at `factor` times the batch, which is the commonest leading dim of linear layers' inputs.

    Raises:
        TraceError: the trace holds no shapes, or its device is not in the catalogue.
    """
    launched = program.step.launched
    leading = Counter(
        leaf.shapes[_LINEAR_INPUT][0]
        for x in launched
        if (leaf := x.call.leaf) is not None
        and leaf.name == _LINEAR
        and len(leaf.shapes) > _LINEAR_INPUT
        and leaf.shapes[_LINEAR_INPUT]
    )
    if not leading:
        raise TraceError(
            "The trace holds no shapes of linear layers, so its batch is not known.",
            hint="Record with record_shapes=True.",
        )
    batch = leading.most_common(1)[0][0]
    cost = profile_for(device_of([program.trace])).cost_model()
    before = [launch.kernel for launch in program.step.graph.launches()]
    ratios = []
    for x, old in zip(launched, before, strict=True):
        new = _scaled(x, old, batch, factor)
        ratio = 1.0 if new is None else _us(cost, new) / max(_us(cost, old), 1e-9)
        grows = x.collective and _kind(x) is CollectiveKind.ALL_TO_ALL
        ratios.append(factor if grows else ratio)
    owners = stands_for(launched, before)
    durations = [us * ratios[owner] for us, owner in zip(program.durations_us, owners, strict=True)]
    return replace(program, durations_us=tuple(durations))


def _scaled(launched: Launched, old: Kernel, batch: int, factor: float) -> Kernel | None:
    """The kernel at another batch; `None` where it is the same or not known."""
    if isinstance(old, MeasuredKernel):
        return None
    if isinstance(old, Memcpy):
        grows = old.kind in (CopyKind.H2D_PINNED, CopyKind.H2D_PAGEABLE)
        return with_dims(old, bytes=np.asarray(old.bytes) * factor) if grows else None
    if isinstance(old, (EmbeddingForward, EmbeddingBackward)):
        return with_dims(old, batch=np.asarray(old.batch) * factor)
    leaf = launched.call.leaf
    if leaf is None:
        return None
    shapes = tuple(
        tuple(_dim(d, batch, factor, first=i == 0) for i, d in enumerate(shape)) for shape in leaf.shapes
    )
    if shapes == leaf.shapes:
        return None
    if type(old) in _LEADING:
        before, after = (next((s[0] for s in x if s), 1) for x in (leaf.shapes, shapes))
        names = _LEADING[type(old)]
        return with_dims(old, **{n: np.asarray(getattr(old, n)) * after / before for n in names})
    call = replace(launched.call, leaf=replace(leaf, shapes=shapes))
    new = kernel_of(replace(launched, call=call))
    return new if type(new) is type(old) else None


def _dim(dim: int, batch: int, factor: float, *, first: bool) -> int:
    grows = dim == batch or (first and dim > batch and dim % batch == 0)
    return round(dim * factor) if grows else dim


def _resized(
    launched: Launched,
    us: float,
    before_us: Callable[[CollectiveKind, float], float],
    after_us: Callable[[CollectiveKind, float], float],
) -> float:
    """A collective's transfer after the change: of as many bytes as take its measured time before."""
    kind = _kind(launched)
    if kind is None:
        return us
    low, high = 1.0, _LARGEST_BYTES
    for _ in range(_HALVINGS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if before_us(kind, middle) < us else (low, middle)
    return us * after_us(kind, low) / before_us(kind, low)


def _kind(launched: Launched) -> CollectiveKind | None:
    if not launched.collective:
        return None
    name = launched.kernel.name.lower()
    return next((kind for word, kind in _KINDS.items() if word in name), None)


def _us(cost: CostModel, kernel: Kernel) -> float:
    return float(np.asarray(cost.predict_us([kernel])[0]).reshape(-1)[0])


def _local_world_size(device: str) -> int:
    return int(hardware.default_node(device).gpus)
