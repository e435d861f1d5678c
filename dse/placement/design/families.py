"""The families of ways (`dse.placement.design.ways`) of many settings, and what the cheapest pieces of each cost.

Letters: n batches, g settings of anything else, q probes of all g, f families of all g, m column pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dse.placement.design.options import Options
from dse.placement.solver.problem import Array, Ints


@dataclass(frozen=True, slots=True, eq=False)
class Families:
    """The families (`dse.placement.design.ways`) of all settings, one setting after the other.

    Attributes:
        setting: `(f,)` positions.
        flag: `(f,)` positions in `FLAGS`.
        copies: `(f,)` ranks that hold the same columns.
        ranks: `(f,)` of the setting.
        pieces: `(f,)` finest pieces.
        probe: `(f, m, 2)` of shards of 1, 2, ... pieces.
        first: `(g * tables,)` where the families of each setting's tables start.
        tables: of each setting.
        probes: `(q,)` settings of the probes.
        probe_flag: `(q,)` positions in `FLAGS`.
    """

    setting: Ints
    flag: Ints
    copies: Ints
    ranks: Ints
    pieces: Ints
    probe: Ints
    first: Ints
    tables: int
    probes: Ints
    probe_flag: Ints

    @classmethod
    def of(cls, groups: Sequence[Options]) -> Families:
        """From the options of each setting."""
        tables = len(groups[0].design.model.tables)
        widest = max(g.ways.probe.shape[1] for g in groups)
        parts: dict[str, list[Any]] = {name: [] for name in ("table", "flag", "copies", "pieces", "probe")}
        start = 0
        for number, group in enumerate(groups):
            ways = group.ways
            one = np.unique(ways.family, return_index=True)[1]
            parts["table"].append(number * tables + ways.table[one])
            parts["flag"].append(ways.flag[one])
            parts["copies"].append(ways.copies)
            parts["pieces"].append(ways.pieces)
            more = ((0, 0), (0, widest - ways.probe.shape[1]), (0, 0))
            parts["probe"].append(start + np.pad(ways.probe, more, mode="edge"))
            start += len(group.probes)
        joined = {name: np.concatenate(values) for name, values in parts.items()}
        setting = joined["table"] // tables
        ranks = np.array([g.design.system.world_size for g in groups])
        return cls(
            setting,
            joined["flag"],
            joined["copies"],
            ranks[setting],
            joined["pieces"],
            joined["probe"],
            np.searchsorted(joined["table"], np.arange(len(groups) * tables)).astype(np.int64),
            tables,
            np.repeat(np.arange(len(groups)), [len(g.probes) for g in groups]),
            np.concatenate([g.probe_flag for g in groups]),
        )

    @property
    def whole(self) -> Ints:
        """`(f,)` probes of all pieces as one shard."""
        return np.asarray(self.probe[np.arange(len(self.pieces)), self.pieces - 1, 0])

    def average(self, each: Array, everywhere: Array, probe: Ints) -> Array:
        """What shards add to every rank on average, from `(n, q)` of probes, at probes `(f, ...)`."""
        more = (None,) * (probe.ndim - 1)
        return np.asarray(each[:, probe] * (self.copies / self.ranks)[:, *more] + everywhere[:, probe])

    def cheapest(self, each: Array, everywhere: Array) -> Array:
        """`(n, f)`: the least that pieces which make up a family cost together, likewise."""
        shards = self.average(each, everywhere, self.probe).min(axis=-1)
        least = shards[..., 0].copy()
        split = np.flatnonzero(self.pieces > 1)
        sums = shards[:, split].copy()
        for k in range(1, sums.shape[-1]):
            for j in range((k + 1) // 2):
                sums[..., k] = np.minimum(sums[..., k], sums[..., j] + sums[..., k - 1 - j])
        least[:, split] = sums[:, np.arange(len(split)), self.pieces[split] - 1]
        return np.asarray(least)
