"""Tables that one table-batched launch looks up, and the cache of those in the host's memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from perfcore.graph.kernels import Array, CachePopulate, Sort
from perfcore.graph.ops import Launch, Op
from perfcore.graph.parts import Mask, elementwise, mask_of, tiny
from perfcore.graph.sizes import Sizes

MODULE = "embedding"
INT32_BYTES = 4.0


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Tables that one table-batched launch looks up; fields `(..., r, t)`, 0 where a rank holds none.

    Attributes:
        dense: the gradient is dense (replicated tables, and those of the kernel `dense`); else the update is fused.
        reduced: the gradient is all-reduced (replicated tables).
        cache_ratio: share of the rows in device memory; 1 where no table lies on the host.
        cached: `(..., r)`: where a rank holds a table with a cache; its `rows` in `cached_rows`.
        present: where a rank holds any of them.
        lookups: `(..., r)`, over all tables.
        elements: `(..., r)`: weights.
    """

    rows: Array
    pooling: Array
    dim: Array
    skew: Array
    batch: Array
    dense: bool
    reduced: bool
    cache_ratio: Array | float
    cached: Mask | bool
    cached_rows: Array
    present: Mask | bool
    lookups: Array
    elements: Array


def batched_groups(sizes: Sizes, *, distributed: bool) -> tuple[Group, ...]:
    """One launch for all tables of a single rank; one for each kind of sharding otherwise, as TorchRec groups.

    Tables of the kernel `dense` are a group apart; those on the host are not.
    """
    key = ("groups", distributed)
    if key not in sizes.memo:
        sizes.memo[key] = _batched_groups(sizes, distributed=distributed)
    groups: tuple[Group, ...] = sizes.memo[key]
    return groups


def _batched_groups(sizes: Sizes, *, distributed: bool) -> tuple[Group, ...]:
    shards = sizes.dims.shards
    everywhere = np.ones_like(shards.present)
    kinds = (everywhere,) if not distributed else (shards.pooled, shards.row_split, shards.staged)
    batch = sizes.global_batch if distributed else sizes.batch
    groups = [g for kind in kinds for g in _group(sizes, kind & ~shards.dense, batch, dense=False)]
    groups += [g for kind in kinds for g in _group(sizes, kind & shards.dense, batch, dense=True)]
    if distributed:
        groups += _group(sizes, shards.replicated, sizes.batch, dense=True, reduced=True)
    return tuple(groups)


def _group(
    sizes: Sizes, members: Mask, batch: Array, *, dense: bool, reduced: bool = False
) -> tuple[Group, ...]:
    """The group, or nothing where no design has a member."""
    shards = sizes.dims.shards
    held = members & shards.present
    present = mask_of(np.asarray(held.any(axis=-1)))
    if present is False:
        return ()
    rows, pooling, dim = shards.rows * held, shards.pooling * held, shards.dim * held
    on_host = held & shards.host
    cached = on_host & (shards.cache_ratio > 0)
    return (
        Group(
            rows=rows,
            pooling=pooling,
            dim=dim,
            skew=shards.skew,
            batch=batch[..., None],
            dense=dense,
            reduced=reduced,
            cache_ratio=np.where(on_host, shards.cache_ratio, 1.0) if on_host.any() else 1.0,
            cached=mask_of(np.asarray(cached.any(axis=-1))),
            cached_rows=rows * cached,
            present=present,
            lookups=batch * pooling.sum(axis=-1),
            elements=(rows * dim).sum(axis=-1),
        ),
    )


def prefetch(group: Group, element_bytes: float, index_bytes: float) -> list[Op]:
    """The cache in device memory gets the batch's rows, before the lookup, as FBGEMM's `prefetch` does.

    Indices of all tables become one, distinct ones are found (sort, run-length encoding), then those that are not
    cached, which are sorted by their set of the cache and loaded; at last each lookup's place is found.
    """
    if group.cached is False:
        return []
    by_table = group.batch * group.pooling * (group.cached_rows > 0)
    lookups, most = by_table.sum(axis=-1), np.minimum(by_table, group.cached_rows).sum(axis=-1)
    load = CachePopulate(
        group.batch,
        group.cached_rows,
        group.pooling,
        group.dim,
        group.skew,
        group.cache_ratio,
        element_bytes,
    )
    populate = (
        Launch(Sort(lookups, index_bytes, pairs=False)),
        elementwise("run_length_encode", lookups, read=index_bytes, written=index_bytes),
        tiny(),
        elementwise("lru_cache_find_uncached", most, read=index_bytes, written=INT32_BYTES),
        Launch(Sort(most, INT32_BYTES)),
        Launch(load),
    )
    linear = elementwise("linearize_cache_indices", lookups, read=index_bytes, written=index_bytes)
    found = elementwise("lxu_cache_lookup", lookups, read=index_bytes, written=INT32_BYTES)
    parts = (
        ("linearize_cache_indices", (linear,)),
        ("lru_cache_populate", populate),
        ("lxu_cache_lookup", (found,)),
    )
    return [
        Op(f"fbgemm::{name}", launches, present=group.cached, phase="forward", module=MODULE)
        for name, launches in parts
    ]
