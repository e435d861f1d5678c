"""Partial sums that one machine's ranks hold (table_row_wise, grid_shard among several machines), in two stages.

Forward, as TorchRec's `TwRwPooledEmbeddingDist`: reduce-scatter inside the machine, waited for, then all-to-all across
machines among the ranks of equal local index. Gradients take the opposite way: all-to-all across, all-gather inside.
All machines' stages start together, when the latest of them can.
"""

from __future__ import annotations

import numpy as np

from perfcore.design.training import Communication
from perfcore.graph.calls import call, wait
from perfcore.graph.kernels import Collective, CollectiveKind, Concat
from perfcore.graph.mlp import Waits
from perfcore.graph.ops import Launch, Op, Stream
from perfcore.graph.parts import AWAIT_COLLECTIVES, elementwise
from perfcore.graph.sizes import Sizes


def forward_exchange(sizes: Sizes, size: float) -> list[Op]:
    """The second stage is called when the first is done; `size` bytes an element."""
    present = sizes.holds("staged", anywhere=True)
    if present is False:
        return []
    reduce = _inside(sizes, CollectiveKind.REDUCE_SCATTER, size)
    return [
        call("ReduceScatter_Req", reduce, present=present),
        wait("ReduceScatter_Wait", (), present=present, waits=AWAIT_COLLECTIVES, phase="forward"),
        call("All2All_Pooled_Req", _across(sizes, size), present=present),
    ]


def forward_wait(sizes: Sizes, size: float) -> list[Op]:
    """What came from each machine is put side by side."""
    present = sizes.holds("staged", anywhere=True)
    if present is False:
        return []
    launches = (Launch(_from_machines(sizes, size, split=False)),)
    return [wait("All2All_Pooled_Wait", launches, present=present, waits=AWAIT_COLLECTIVES, phase="forward")]


def backward_exchange(sizes: Sizes, size: float, communication: Communication) -> list[Op]:
    """Gradients set out for the machines that hold the tables."""
    present = sizes.holds("staged", anywhere=True)
    if present is False:
        return []
    return [
        call(
            "All2All_Pooled_WaitBackward",
            _across(sizes, size),
            present=present,
            before=(Launch(_from_machines(sizes, size, split=True)),),
            waits=AWAIT_COLLECTIVES if communication is Communication.SERIAL else (),
            phase="backward",
        )
    ]


def backward_wait(sizes: Sizes, size: float, waits: Waits) -> list[Op]:
    """Gradients that came across machines are scaled, then gathered inside the machine and scaled again."""
    present = sizes.holds("staged", anywhere=True)
    if present is False:
        return []
    gathered = sizes.global_batch * sizes.columns_held("staged")
    share = elementwise("div", gathered / sizes.dims.local_world_size, read=size, written=size)
    whole = elementwise("div", gathered, read=size, written=size)
    gather = _inside(sizes, CollectiveKind.ALL_GATHER, size)
    return [
        wait("All2All_Pooled_ReqBackward", (share,), present=present, waits=waits, phase="backward"),
        call("ReduceScatter_WaitBackward", gather, present=present, phase="backward"),
        wait(
            "ReduceScatter_ReqBackward",
            (whole,),
            present=present,
            waits=AWAIT_COLLECTIVES,
            phase="backward",
        ),
    ]


def _inside(sizes: Sizes, kind: CollectiveKind, size: float) -> Launch:
    """A collective of each machine's ranks over the partial sums of all samples; `(..., r)` bytes."""
    local = sizes.dims.local_world_size
    total = sizes.global_batch * sizes.columns_held("staged") * size
    return Launch(Collective(kind, total, local, local), Stream.COMMUNICATION, after=(Stream.COMPUTE,))


def _across(sizes: Sizes, size: float) -> Launch:
    """The all-to-all of ranks of equal local index, one a machine: each holds a share of every machine's samples."""
    local = sizes.dims.local_world_size
    columns = sizes.columns_held("staged")
    sent = sizes.global_batch / local * columns.max(axis=-1, keepdims=True)
    received = sizes.batch * columns.sum(axis=-1, keepdims=True) / local
    machines = np.ceil(sizes.dims.world_size / local)
    kernel = Collective(
        CollectiveKind.ALL_TO_ALL, np.maximum(sent, received) * size, machines, np.ones_like(machines)
    )
    return Launch(kernel, Stream.COMMUNICATION, after=(Stream.COMPUTE,))


def _from_machines(sizes: Sizes, size: float, *, split: bool) -> Concat:
    """What a rank's samples got from (or send to) the machines that hold staged tables, side by side."""
    columns, local = sizes.columns_held("staged"), sizes.dims.local_world_size
    machines = (columns > 0).sum(axis=-1, keepdims=True) / local
    total = sizes.batch * columns.sum(axis=-1, keepdims=True) / local
    return Concat(total * size, machines, split=split)
