"""Lookups go to the owners of the tables: all-to-all of lengths, then of indices.

Bags have fixed lengths, so the sizes of every exchange are known to the host, and it waits for none.

`pipelined` communication does it as TorchRec's `TrainPipelineSparseDist.progress` does. While the device works on batch
`i`, the batch `i + 2` is copied to it, and the batch `i + 1` is exchanged, on streams of their own: the lengths set out
before the forward pass, the indices after it, and they are waited for at the start of the next iteration. Both streams
are one here: a batch is put into order after its own copy, which was called an iteration before, and before the next
copy. A CUDA graph's launch stands after the next copy, so there the compute stream puts the batch into order.

`prefetched` communication fills caches ahead as `PrefetchTrainPipelineSparseDist.progress` does, one batch deeper: the batch
that is waited for at the start of an iteration is the next one's. Its rows come into the caches on the copy stream from
then on, beside this batch's compute. The lookups' backward waits for that, as FBGEMM's waits for its prefetch stream,
for rows have moved; so the next iteration's lookups find theirs. One rank exchanges nothing, and copies a batch one
iteration early.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from perfcore.design.training import Communication, IndexType
from perfcore.graph.calls import MODULE, all_to_all, call, exchanged
from perfcore.graph.kernels import Array
from perfcore.graph.mlp import Waits
from perfcore.graph.ops import Op, Stream
from perfcore.graph.parts import AWAIT_COLLECTIVES, Mask, elementwise, mask_of, tiny
from perfcore.graph.sizes import Sizes


def exchange(sizes: Sizes, communication: Communication, index_dtype: IndexType) -> tuple[Op, ...]:
    """All of it on the compute stream, before the lookups."""
    send, receive = _send(sizes, index_dtype), received(sizes, index_dtype)
    if communication is Communication.SERIAL:
        send = (*send[:-1], *(replace(op, waits=AWAIT_COLLECTIVES) for op in send[-1:]))
    return (*send, *receive)


def lengths_ahead(sizes: Sizes, index_dtype: IndexType, *, captured: bool) -> tuple[Op, ...]:
    """The next batch is put into order of owners, and its lengths set out."""
    return _send(sizes, index_dtype, stream=Stream.COMPUTE if captured else Stream.COPY)[:-1]


def indices_ahead(sizes: Sizes, index_dtype: IndexType) -> tuple[Op, ...]:
    """The next batch's indices set out; they wait for its lengths, which NCCL's stream has before them."""
    calls = _send(sizes, index_dtype)[-1:]
    return tuple(replace(op, launches=tuple(replace(x, after=()) for x in op.launches)) for op in calls)


def received(sizes: Sizes, index_dtype: IndexType) -> tuple[Op, ...]:
    """What came is waited for; bags are put into the owner's order."""
    present, tables, pooling = _held(sizes)
    if present is False:
        return ()
    size, batch = float(index_dtype.bytes), sizes.global_batch
    scan = elementwise("cumsum", batch * tables, read=size, written=size)
    return (
        _permute(batch * tables, batch * pooling, size, present=present, waits=AWAIT_COLLECTIVES),
        Op(
            "fbgemm::asynchronous_complete_cumsum",
            (tiny(), tiny(), scan),
            present=present,
            phase="forward",
            module=MODULE,
        ),
    )


def _send(sizes: Sizes, index_dtype: IndexType, *, stream: Stream = Stream.COMPUTE) -> tuple[Op, ...]:
    """A batch in the order of tables' owners on a stream, then calls of the lengths' and the indices' all-to-all."""
    present, tables, pooling = _held(sizes)
    if present is False:
        return ()
    size = float(index_dtype.bytes)
    local_bags, local_lookups = sizes.batch * sizes.num_tables, sizes.batch * sizes.total_pooling
    ordered = _permute(local_bags, local_lookups, size, present=present)
    launches = tuple(replace(x, stream=stream) for x in ordered.launches)
    calls = (
        call(
            "c10d::alltoall_base_",
            all_to_all(sizes, exchanged(sizes, values) * size, after=stream),
            present=present,
        )
        for values in (tables, pooling)
    )
    return (replace(ordered, launches=launches), *calls)


def _held(sizes: Sizes) -> tuple[Mask | bool, Array, Array]:
    """Where anything is exchanged, and `(..., r)` tables, and lookups a sample, that a rank owns."""
    shards = sizes.dims.shards
    sharded = ~shards.replicated & shards.present
    present = mask_of(np.asarray(sharded.any(axis=-1).any(axis=-1, keepdims=True)))
    return present, sharded.sum(axis=-1).astype(np.float64), (shards.pooling * sharded).sum(axis=-1)


def _permute(bags: Array, lookups: Array, size: float, *, present: Mask | bool, waits: Waits = ()) -> Op:
    """Lengths and indices in another order of tables: seven launches, as in public traces."""
    launches = (
        elementwise("permute", bags, read=size, written=size),
        tiny(),
        elementwise("cumsum", bags, read=size, written=size),
        tiny(),
        tiny(),
        elementwise("cumsum", bags, read=size, written=size),
        elementwise("permute", lookups, read=size, written=size),
    )
    name = "fbgemm::permute_2D_sparse_data"
    return Op(name, launches, waits=waits, present=present, phase="forward", module=MODULE)
