"""The real DLRM on several ranks: tables placed by the design's plan, the dense part on every rank.

One step is that of `perfcore.measure.model`, with what TorchRec and `DistributedDataParallel` put between: lookups go to
the owners of the tables, pooled rows come back, and the gradients of the dense part are averaged in buckets.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from perfcore.design.design import Design
from perfcore.design.training import Communication, EmbeddingFusion, Optimizer, Precision
from perfcore.errors import UnsupportedError
from perfcore.measure.batch import Batch
from perfcore.measure.exchange import AllToAll, Exchange, ReduceScatter, await_, call
from perfcore.measure.layout import can_run, layout_of
from perfcore.measure.lookups import Bags, LookupExchange
from perfcore.measure.model import Dlrm
from perfcore.measure.optimizers import LEARNING_RATE, RowwiseAdagrad, dense_optimizer, table_optimizer
from perfcore.measure.reducer import Reducer
from perfcore.measure.shard_bags import ReplicatedBags, ShardBags
from perfcore.measure.table_batched import uses_fbgemm
from perfcore.measure.world import World

Features = dict[tuple[int, int], Tensor]  # by table and first column


class ShardedDlrm(Dlrm):
    """One rank's part of a DLRM.

    Attributes:
        pooled: shards whose pooled rows are exchanged; `None` where the rank has none.
        row_split: shards whose partial sums are added up, likewise.
        replicated: tables that every rank holds, likewise.
        reducer: averages the gradients of what every rank holds.
    """

    def __init__(self, design: Design, world: World, *, seed: int) -> None:
        device = world.device
        generator = torch.Generator(device).manual_seed(seed)  # equal on all ranks
        super().__init__(design, device=device, generator=generator, bags=())
        self.world, self.layout = world, layout_of(design)
        self.overlapped = world.overlaps and design.fusion.communication is not Communication.SERIAL
        self.batched = design.fusion.embedding is EmbeddingFusion.TABLE_BATCHED
        self.dims, self.size = design.model.table_dims, design.training.global_batch
        self.local = design.local_batch
        bf16 = design.training.table_precision is Precision.BF16
        # FBGEMM's output is fp32, and one bag of all tables stands for it.
        self.sent_dtype = torch.bfloat16 if bf16 and not self.batched else torch.float32
        self.lookups = LookupExchange(design, self.layout, world)
        self.replicated = None
        if self.layout.replicated:
            tables = self.layout.replicated
            self.replicated = ReplicatedBags(design, tables, device=device, generator=generator)
        own = torch.Generator(device).manual_seed(seed + 1 + world.rank)
        self.pooled, self.row_split = (
            ShardBags(design, shards, device=device, generator=own) if shards else None
            for shards in (self.layout.pooled_of(world.rank), self.layout.row_split_of(world.rank))
        )
        self.reducer = Reducer(list(self._in_backward_order()), world, overlapped=self.overlapped)

    def logits(self, batch: Batch) -> Tensor:
        """Before the sigmoid, `(b, 1)` of this rank's samples."""
        bags, own = self.lookups(batch.indices[0], batch.offsets[0])
        split = len(self.pooled.shards) if self.pooled else 0
        joined = [
            self._joined(self.pooled, bags[:split], whole=False) if self.layout.pooled else None,
            self._joined(self.row_split, bags[split:], whole=True) if self.layout.row_split else None,
        ]
        features: Features = {}
        if self.replicated is not None:
            parts = self.replicated(own)
            features |= {(t, 0): part for t, part in zip(self.layout.replicated, parts, strict=True)}
        all_to_all = AllToAll(self._columns(), self.local, self.world)
        reduce_scatter = ReduceScatter(self.world)
        tokens = [self._called(all_to_all, joined[0]), self._called(reduce_scatter, joined[1])]
        dense = self.bottom(batch.dense)
        if tokens[0] is not None:
            features |= self._pooled_features(self._awaited(all_to_all, tokens[0]), all_to_all)
        if tokens[1] is not None:
            features |= self._summed_features(self._awaited(reduce_scatter, tokens[1]))
        ordered = [features[at].float() for at in sorted(features)]
        out: Tensor = self.top(self.interaction(dense, ordered))
        return out

    def finish_gradients(self) -> None:
        """Wait for the buckets."""
        self.reducer.finish()

    def _called(self, exchange: Exchange, tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else call(exchange, tensor, overlapped=self.overlapped)

    def _awaited(self, exchange: Exchange, token: Tensor) -> Tensor:
        return await_(exchange, token, overlapped=self.overlapped)

    def _joined(self, module: ShardBags | None, bags: list[Bags], *, whole: bool) -> Tensor:
        """`(B, columns)` to exchange: those that the rank holds, or (`whole`) all of the tables, 0 where it has none."""
        if module is None:
            width = sum(self.dims[t] for t in self.layout.split_tables) if whole else 0
            return torch.zeros(
                self.size, width, device=self.device, dtype=self.sent_dtype, requires_grad=True
            )
        out: Tensor = module(bags).to(self.sent_dtype)
        tables = [s.table for s in module.shards]
        if not whole or tables == list(self.layout.split_tables):
            return out
        parts = dict(zip(tables, torch.split(out, [s.width for s in module.shards], 1), strict=True))
        return torch.cat(
            [
                parts[t] if t in parts else out.new_zeros(len(out), self.dims[t])
                for t in self.layout.split_tables
            ],
            1,
        )

    def _columns(self) -> list[int]:
        """Pooled columns that each rank holds."""
        return [sum(s.width for s in self.layout.pooled_of(rank)) for rank in range(self.world.size)]

    def _pooled_features(self, received: Tensor, exchange: AllToAll) -> Features:
        parts = exchange.by_owner(received)
        pieces = [(s.table, first, end - first) for s in self.layout.pooled for first, end in s.columns]
        if self.batched and len(parts) > 1:
            parts = [torch.cat(parts, 1)]
        split = _split(parts, [width for *_, width in pieces])
        return {(table, first): part for (table, first, _), part in zip(pieces, split, strict=True)}

    def _summed_features(self, received: Tensor) -> Features:
        tables = self.layout.split_tables
        parts = torch.split(received, [self.dims[t] for t in tables], 1)
        return {(t, 0): part for t, part in zip(tables, parts, strict=True)}

    def _in_backward_order(self) -> Iterator[nn.Parameter]:
        for module in (self.top, self.interaction, self.bottom):
            yield from reversed(list(module.parameters()))
        if self.replicated is not None:
            yield from reversed(list(self.replicated.parameters()))


def build_sharded(design: Design, world: World, *, seed: int = 0) -> ShardedDlrm:
    """This rank's part of the design's model; the dense part has the same weights on all ranks.

    Raises:
        UnsupportedError: another number of ranks, or a kind of placement that the real model has not.
    """
    if design.system.world_size != world.size:
        raise UnsupportedError(
            f"The design has world_size={design.system.world_size}, but {world.size} processes train it."
        )
    if not can_run(design):
        raise UnsupportedError("The design places a table in a way that is predicted, but not run.")
    return ShardedDlrm(design, world, seed=seed)


def sharded_optimizers(model: ShardedDlrm, design: Design) -> tuple[torch.optim.Optimizer, ...]:
    """The dense part's optimizer, then those of the tables that this rank holds."""
    optimizers = [
        dense_optimizer(
            [*model.bottom.parameters(), *model.interaction.parameters(), *model.top.parameters()], design
        )
    ]
    shards = [p for m in (model.pooled, model.row_split) if m is not None for p in m.parameters()]
    if shards and not uses_fbgemm(design):
        optimizers.append(table_optimizer(shards, design))
    if model.replicated is not None:
        optimizers.append(_replicated_optimizer(model.replicated, design.training.table_optimizer))
    return tuple(optimizers)


def _replicated_optimizer(bags: ReplicatedBags, optimizer: Optimizer) -> torch.optim.Optimizer:
    """The tables' optimizer where gradients are dense."""
    parameters = list(bags.parameters())
    flags: dict[str, Any] = {"lr": LEARNING_RATE, "foreach": False, "fused": False}
    match optimizer:
        case Optimizer.SGD:
            return torch.optim.SGD(parameters, **flags)
        case Optimizer.ADAGRAD:
            return torch.optim.Adagrad(parameters, **flags)
        case Optimizer.ADAM:
            return torch.optim.Adam(parameters, **flags)
        case Optimizer.ROWWISE_ADAGRAD:
            return RowwiseAdagrad(parameters, lr=LEARNING_RATE)


def _split(parts: list[Tensor], widths: list[int]) -> list[Tensor]:
    """Consecutive pieces of tensors that stand side by side; none crosses from one to the next."""
    out: list[Tensor] = []
    todo = iter(widths)
    for part in parts:
        here: list[int] = []
        while sum(here) < part.shape[1]:
            here.append(next(todo))
        out += torch.split(part, here, 1)
    return out
