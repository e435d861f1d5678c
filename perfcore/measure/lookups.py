"""Lookups on their way to the owners of the tables: lengths of the bags first, then indices."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from perfcore.design.design import Design
from perfcore.measure.layout import Layout, Shard
from perfcore.measure.world import World

Bags = tuple[Tensor, Tensor]


class LookupExchange:
    """Sends each table's lookups to the ranks that hold it.

    Lookups of whole tables and of columns have lengths that every rank knows. Of split rows nobody knows how many fall
    to an owner: then the host reads the lengths before it sends the indices.

    Args:
        design: of a world of several ranks.
        layout: its shards.
        world: its ranks.
    """

    def __init__(self, design: Design, layout: Layout, world: World) -> None:
        self._world, self._layout, self._bags = world, layout, design.local_batch
        # As many lookups on every rank, as `make_batch` draws them.
        self._counts = [round(t.pooling_factor * design.local_batch) for t in design.model.tables]
        self._mine = layout.exchanged(world.rank)

    def __call__(self, indices: Tensor, lengths: Tensor) -> tuple[list[Bags], list[Bags]]:
        """The bags to look up: of the shards that this rank exchanges, and of the replicated tables.

        Args:
            indices: `(l,)` of this rank's samples, table by table.
            lengths: `(t * b,)` likewise.

        Returns:
            Indices and offsets of each shard, over the global batch; of each replicated table, over the rank's own.
        """
        parts = torch.split(indices, self._counts)
        by_table = lengths.view(len(parts), self._bags)
        own = [(parts[t], _offsets(by_table[t])) for t in self._layout.replicated]
        if not self._layout.pooled and not self._layout.row_split:
            return [], own
        split = {t: self._by_owner(t, parts[t], by_table[t]) for t in self._layout.split_tables}
        to_send = [
            [
                split[s.table][self._position(s)] if s.table in split else (parts[s.table], by_table[s.table])
                for s in self._layout.exchanged(rank)
            ]
            for rank in range(self._world.size)
        ]
        return self._exchanged(to_send, indices.dtype), own

    def _exchanged(self, to_send: Sequence[Sequence[Bags]], dtype: torch.dtype) -> list[Bags]:
        world, mine = self._world, self._mine
        bags = _joined([n for parts in to_send for _, n in parts], dtype, world.device)
        values = _joined([v for parts in to_send for v, _ in parts], dtype, world.device)
        called = world.all_to_all(
            bags, [len(parts) * self._bags for parts in to_send], [len(mine) * self._bags] * world.size
        )
        received = called.wait().view(world.size, len(mine), self._bags)
        counts = self._received_counts(received)
        sent = [sum(len(v) for v, _ in parts) for parts in to_send]
        arrived = world.all_to_all(values, sent, [sum(c) for c in counts]).wait()
        segments = torch.split(arrived, [n for source in counts for n in source])
        return [
            (torch.cat(segments[i :: len(mine)]), _offsets(received[:, i].reshape(-1)))
            for i in range(len(mine))
        ]

    def _received_counts(self, lengths: Tensor) -> list[list[int]]:
        """Lookups by source and shard, from `(ranks, shards, bags)` lengths."""
        if any(s.table in self._layout.split_tables for s in self._mine):
            counts: list[list[int]] = lengths.sum(2).tolist()
            return counts
        return [[self._counts[s.table] for s in self._mine]] * self._world.size

    def _by_owner(self, table: int, values: Tensor, lengths: Tensor) -> list[Bags]:
        """Lookups of a table by its pieces of rows, rows counted from each piece's first, and their lengths."""
        owners = self._owners(table)
        first = torch.tensor([s.rows[0] for s in owners], dtype=values.dtype, device=values.device)
        owner = torch.bucketize(values, first[1:], right=True)
        bag = torch.repeat_interleave(
            torch.arange(self._bags, device=values.device), lengths, output_size=len(values)
        )
        counts = torch.zeros(len(owners) * self._bags, dtype=lengths.dtype, device=values.device)
        counts.index_add_(0, owner * self._bags + bag, torch.ones_like(values))
        counts = counts.view(len(owners), self._bags)
        order = torch.sort(owner, stable=True).indices
        parts = torch.split((values - first[owner])[order], counts.sum(1).tolist())
        return list(zip(parts, counts, strict=True))

    def _owners(self, table: int) -> list[Shard]:
        return sorted((s for s in self._layout.row_split if s.table == table), key=lambda s: s.rows)

    def _position(self, shard: Shard) -> int:
        return self._owners(shard.table).index(shard)


def _offsets(lengths: Tensor) -> Tensor:
    """The start of each bag."""
    return torch.cumsum(lengths, 0, dtype=lengths.dtype) - lengths


def _joined(parts: Sequence[Tensor], dtype: torch.dtype, device: str) -> Tensor:
    return torch.cat(list(parts)) if parts else torch.empty(0, dtype=dtype, device=device)


def starts(sizes: Sequence[int]) -> list[int]:
    """Where each of consecutive blocks begins."""
    return [0, *accumulate(sizes)][:-1]
