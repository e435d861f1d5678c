"""Lookups of a rank's shards: a bag each, or all in one, as the design's fusion says."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from perfcore.design.design import Design
from perfcore.design.training import EmbeddingFusion, Precision
from perfcore.measure.layout import Shard
from perfcore.measure.lookups import Bags, starts
from perfcore.measure.table_batched import FusedTables, uses_fbgemm


class ShardBags(nn.Module):
    """The shards of a rank that are exchanged alike.

    Attributes:
        shards: in order.
        bags: the modules that hold them.
    """

    def __init__(
        self, design: Design, shards: Sequence[Shard], *, device: str, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.shards = tuple(shards)
        if uses_fbgemm(design):
            shapes = [(s.height, s.width) for s in shards]
            optimizer = design.training.table_optimizer
            self.bags = nn.ModuleList(
                [FusedTables(shapes, optimizer=optimizer, device=device, generator=generator)]
            )
            self._groups = [list(range(len(shards)))]
        else:
            batched = design.fusion.embedding is EmbeddingFusion.TABLE_BATCHED
            self._groups = _by_width([s.width for s in shards], batched=batched)
            weights = [
                _weight(design, s.table, (s.height, s.width), device=device, generator=generator)
                for s in shards
            ]
            self.bags = nn.ModuleList(_bag([weights[i] for i in g], sparse=True) for g in self._groups)

    def forward(self, bags: Sequence[Bags]) -> Tensor:
        """Indices and offsets of each shard to `(B, columns held)`, shard by shard."""
        if isinstance(self.bags[0], FusedTables):
            out: Tensor = self.bags[0](*_end_to_end(bags, ends=True))
            return out
        return _side_by_side(looked_up(self.bags, self._groups, self.shards, bags))


class ReplicatedBags(nn.Module):
    """Tables that every rank holds; their gradients are dense."""

    def __init__(
        self, design: Design, tables: Sequence[int], *, device: str, generator: torch.Generator
    ) -> None:
        super().__init__()
        model = design.model
        self.shards = tuple(
            Shard(t, 0, (0, model.tables[t].num_embeddings), ((0, model.table_dims[t]),)) for t in tables
        )
        batched = design.fusion.embedding is EmbeddingFusion.TABLE_BATCHED
        self._groups = _by_width([s.width for s in self.shards], batched=batched)
        weights = [
            _weight(design, s.table, (s.height, s.width), device=device, generator=generator)
            for s in self.shards
        ]
        self.bags = nn.ModuleList(_bag([weights[i] for i in g], sparse=False) for g in self._groups)

    def forward(self, bags: Sequence[Bags]) -> list[Tensor]:
        """Indices and offsets of each table to `(b, d)` of each."""
        return looked_up(self.bags, self._groups, self.shards, bags)


def looked_up(
    modules: nn.ModuleList, groups: Sequence[Sequence[int]], shards: Sequence[Shard], bags: Sequence[Bags]
) -> list[Tensor]:
    """`(B, width)` of each shard; those of one group come from one lookup."""
    out: dict[int, Tensor] = {}
    for module, group in zip(modules, groups, strict=True):
        if len(group) == 1:
            out[group[0]] = module(*bags[group[0]])
            continue
        bases = starts([shards[i].height for i in group])
        moved = [(bags[i][0] + base, bags[i][1]) for i, base in zip(group, bases, strict=True)]
        pooled = module(*_end_to_end(moved, ends=False)).view(len(group), -1, shards[group[0]].width)
        out |= dict(zip(group, pooled.unbind(), strict=True))
    return [out[i] for i in range(len(shards))]


def _end_to_end(bags: Sequence[Bags], *, ends: bool) -> tuple[Tensor, Tensor]:
    """All bags as those of one table; `ends` adds the end of the last."""
    at = starts([len(indices) for indices, _ in bags])
    offsets = [o + start for (_, o), start in zip(bags, at, strict=True)]
    indices = torch.cat([i for i, _ in bags])
    if ends:
        offsets.append(offsets[0].new_full((1,), len(indices)))
    return indices, torch.cat(offsets)


def _by_width(widths: Sequence[int], *, batched: bool) -> list[list[int]]:
    """Positions looked up together: those of one width where tables are batched, else one by one."""
    if not batched:
        return [[i] for i in range(len(widths))]
    return [[i for i, w in enumerate(widths) if w == width] for width in dict.fromkeys(widths)]


def _bag(weights: Sequence[Tensor], *, sparse: bool) -> nn.EmbeddingBag:
    weight = weights[0] if len(weights) == 1 else torch.cat(list(weights))
    return nn.EmbeddingBag.from_pretrained(weight, freeze=False, mode="sum", sparse=sparse)


def _weight(
    design: Design, table: int, shape: tuple[int, int], *, device: str, generator: torch.Generator
) -> Tensor:
    """Uniform within `rows ** -0.5` of 0, rows of the whole table, as DLRM initialises it."""
    dtype = torch.bfloat16 if design.training.table_precision is Precision.BF16 else torch.float32
    bound = design.model.tables[table].num_embeddings ** -0.5
    return torch.empty(shape, device=device, dtype=dtype).uniform_(-bound, bound, generator=generator)


def _side_by_side(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), 1)
