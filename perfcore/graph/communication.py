"""Collectives of hybrid parallelism, as TorchRec and `DistributedDataParallel` place them.

Tables are model parallel: lookups go to their owners (`perfcore.graph.input_exchange`), pooled embeddings come back (all-to-all for whole tables and columns, reduce-scatter for rows), gradients take the
opposite way. Partial sums of tables that one machine holds (table_row_wise, grid_shard) come back in two stages, as
TorchRec's `TwRwPooledEmbeddingDist` sends them: reduce-scatter inside the machine, then all-to-all across machines
among the ranks of equal local index. A machine's stage starts when the latest machine's does. The dense part and
replicated tables are data parallel: bucketed all-reduce.

NCCL's stream waits for the compute stream's end when a collective is called (`after`). Unless communication is `serial`, the backward exchange runs beside the bottom MLP's backward; the event that the lookups' backward
waits for is held on the copy stream's clock, which is otherwise idle, so that it does not wait for the
all-reduces that were called in between. (`pipelined` communication copies a batch on that stream meanwhile; only a copy
that takes most of an iteration holds the lookups' backward back.)
"""

from __future__ import annotations

import numpy as np

from perfcore.design.model import Interaction
from perfcore.design.training import Communication, EmbeddingFusion, Precision
from perfcore.graph import cross, staged
from perfcore.graph.calls import MODULE, all_to_all, call, collective, exchanged, wait
from perfcore.graph.embedding import output_bytes
from perfcore.graph.kernels import Array, Bucket, CollectiveKind, Concat
from perfcore.graph.ops import Launch, Leaf, Op, Stream
from perfcore.graph.parts import AWAIT_COLLECTIVES, FP32_BYTES, elementwise
from perfcore.graph.sizes import BOTTOM, TOP, Sizes

# Defaults of `torch.nn.parallel.DistributedDataParallel`: `bucket_cap_mb=25`, and a first bucket of
# `torch.distributed._DEFAULT_FIRST_BUCKET_BYTES` so that communication starts early.
FIRST_BUCKET_BYTES = 1024.0 * 1024.0
BUCKET_CAP_BYTES = 25 * 1024.0 * 1024.0

HOLD_EVENT = ((Stream.COPY, Stream.COMMUNICATION),)
AWAIT_EVENT = ((Stream.COMPUTE, Stream.COPY),)


def forward_exchange(sizes: Sizes, embedding: EmbeddingFusion, table_precision: Precision) -> tuple[Op, ...]:
    """Calls of the pooled embeddings' all-to-all and of the partial sums' reduce-scatter.

    The second stage of a machine's partial sums is called when the first is done.
    """
    size = output_bytes(embedding, table_precision)
    ops = [*staged.forward_exchange(sizes, size)]
    pooled = sizes.holds("pooled", anywhere=True)
    if pooled is not False:
        if embedding is EmbeddingFusion.PER_TABLE:
            ops += _local_concat(sizes, size, split=False)
        exchange = all_to_all(sizes, exchanged(sizes, sizes.columns_held("pooled")) * size)
        ops.append(call("All2All_Pooled_Req", exchange, present=pooled))
    row_split = sizes.holds("row_split", anywhere=True)
    if row_split is not False:
        reduce = collective(sizes, CollectiveKind.REDUCE_SCATTER, _row_split_elements(sizes) * size)
        ops.append(call("ReduceScatter_Req", reduce, present=row_split))
    return tuple(ops)


def forward_wait(sizes: Sizes, embedding: EmbeddingFusion, table_precision: Precision) -> tuple[Op, ...]:
    """The compute stream waits; what came from each rank is put side by side (views where tables are apart)."""
    size = output_bytes(embedding, table_precision)
    ops = [*staged.forward_wait(sizes, size)]
    pooled = sizes.holds("pooled", anywhere=True)
    if pooled is not False:
        launches: tuple[Launch, ...] = ()
        if embedding is EmbeddingFusion.TABLE_BATCHED:
            launches = (Launch(_gathered(sizes, size, split=False)),)
        ops.append(
            wait("All2All_Pooled_Wait", launches, present=pooled, waits=AWAIT_COLLECTIVES, phase="forward")
        )
    row_split = sizes.holds("row_split", anywhere=True)
    if row_split is not False:
        ops.append(
            wait("ReduceScatter_Wait", (), present=row_split, waits=AWAIT_COLLECTIVES, phase="forward")
        )
    return tuple(ops)


def backward_exchange(
    sizes: Sizes, embedding: EmbeddingFusion, table_precision: Precision, communication: Communication
) -> tuple[Op, ...]:
    """Gradients of the pooled embeddings set out for the owners of the tables."""
    size = output_bytes(embedding, table_precision)
    ops = [*staged.backward_exchange(sizes, size, communication)]
    row_split = sizes.holds("row_split", anywhere=True)
    if row_split is not False:
        gather = collective(sizes, CollectiveKind.ALL_GATHER, _row_split_elements(sizes) * size)
        ops.append(call("ReduceScatter_WaitBackward", gather, present=row_split, phase="backward"))
    pooled = sizes.holds("pooled", anywhere=True)
    if pooled is not False:
        exchange = all_to_all(sizes, exchanged(sizes, sizes.columns_held("pooled")) * size)
        ops.append(
            call(
                "All2All_Pooled_WaitBackward",
                exchange,
                present=pooled,
                before=(Launch(_gathered(sizes, size, split=True)),),
                waits=AWAIT_COLLECTIVES if communication is Communication.SERIAL else (),
                phase="backward",
            )
        )
    return tuple(ops)


def backward_wait(
    sizes: Sizes, embedding: EmbeddingFusion, table_precision: Precision, communication: Communication
) -> tuple[Op, ...]:
    """The gradients have arrived; TorchRec scales them by the world's size."""
    size = output_bytes(embedding, table_precision)
    waits = AWAIT_COLLECTIVES if communication is Communication.SERIAL else AWAIT_EVENT
    ops: list[Op] = []
    for kind, name in (("pooled", "All2All_Pooled_ReqBackward"), ("row_split", "ReduceScatter_ReqBackward")):
        present = sizes.holds(kind, anywhere=True)
        if present is not False:
            elements = sizes.global_batch * sizes.columns_held(kind)
            scale = elementwise("div", elements, read=size, written=size)
            ops.append(wait(name, (scale,), present=present, waits=waits, phase="backward"))
    ops += staged.backward_wait(sizes, size, waits)
    if embedding is EmbeddingFusion.PER_TABLE and sizes.holds("pooled", anywhere=True) is not False:
        ops += _local_concat(sizes, size, split=True)
    return tuple(ops)


def gradient_terms(
    sizes: Sizes, interaction: Interaction, cross_layers: int, table_precision: Precision
) -> tuple[Array, ...]:
    """Gradient bytes in the order in which they become ready, which is the order of the buckets.

    One term a layer: top MLP, cross layers, bottom MLP, each last layer first, then replicated tables.
    """

    def layer(module: str, slot: int) -> Array:
        needed = interaction if module == TOP and sizes.reads_module_input(module, slot) else None
        return sizes.layer(module, slot, needed).parameters * FP32_BYTES

    top = [layer(TOP, j) for j in reversed(range(sizes.num_slots(TOP)))]
    bottom = [layer(BOTTOM, j) for j in reversed(range(sizes.num_slots(BOTTOM)))]
    crossed = [cross.parameters(sizes) * FP32_BYTES] * (
        cross_layers if interaction is Interaction.DCN_V2 else 0
    )
    return (*top, *crossed, *bottom, *replicated_term(sizes, table_precision))


def replicated_term(sizes: Sizes, table_precision: Precision) -> tuple[Array, ...]:
    """Gradient bytes of replicated tables, as one term; none where there are none."""
    if sizes.holds("replicated", anywhere=True) is False:
        return ()
    shards = sizes.dims.shards
    elements = (shards.rows * shards.dim * (shards.replicated & shards.present)).sum(axis=-1)
    per_element = 2.0 if table_precision is Precision.BF16 else FP32_BYTES
    return (elements.max(axis=-1, keepdims=True) * per_element,)


def all_reduce(sizes: Sizes, terms: tuple[Array, ...], index: int) -> tuple[Op, ...]:
    """The bucket that closes at term `index`, if one does: an empty bucket is no op."""
    bucket = Bucket(terms, index, FIRST_BUCKET_BYTES, BUCKET_CAP_BYTES)
    launch = collective(sizes, CollectiveKind.ALL_REDUCE, bucket)
    return (call("c10d::allreduce_", launch, present=True, phase="backward"),)


def _row_split_elements(sizes: Sizes) -> Array:
    """`(..., 1)`: partial sums of all samples, for all tables whose rows are split."""
    shards = sizes.dims.shards
    dims = (shards.dim * (shards.row_split & shards.present)).max(axis=-2)
    return np.asarray(sizes.global_batch * dims.sum(axis=-1, keepdims=True))


def _local_concat(sizes: Sizes, size: float, *, split: bool) -> list[Op]:
    """The tables of a rank side by side before they are sent; apart again (views) on the way back."""
    shards = sizes.dims.shards
    elements = sizes.global_batch * sizes.columns_held("pooled")
    parts = (shards.pooled & shards.present).sum(axis=-1).astype(np.float64)
    present = sizes.holds("pooled")
    if split:
        return [
            Op("CatBackward0", (), (Leaf("aten.slice"),), present=present, phase="backward", module=MODULE)
        ]
    launch = Launch(Concat(elements * size, parts))
    return [Op("aten::cat", (launch,), present=present, phase="forward", module=MODULE)]


def _gathered(sizes: Sizes, size: float, *, split: bool) -> Concat:
    """What a rank's samples got from (or send to) every owner, side by side."""
    columns = sizes.columns_held("pooled")
    owners = (columns > 0).sum(axis=-1, keepdims=True).astype(np.float64)
    return Concat(sizes.batch * columns.sum(axis=-1, keepdims=True) * size, owners, split=split)
