"""The linear program of a class with some ranks told apart: it sees how shards pack, which averages do not.

Up to eight ranks are *places* by themselves, all others together are one place more of |p| ranks. A family (a table's columns,
or its rows over one machine) has P finest pieces; `b_jp` counts the ranks of place p that hold j of them. With x the shares of
the family's ways, which lie on `least` to `most` groups of `copies` ranks, every plan obeys

    Σ_jp j b_jp = P · copies · Σ x            Σ least · copies · x <= Σ_jp b_jp <= Σ most · copies · x
    Σ_j b_jp <= |p| Σ x                       every place: a rank holds a family once
    |p| M >= |p| (base + Σ shared(x) + Σ on all ranks(x)) + Σ_j b_jp · cost(j pieces)      every place and measure M
    |p| · capacity >= likewise in bytes

The third because a measure is at least what it comes to on each rank: the rank that it is taken on has no less work. (Ranks
of another pace: times that of the fastest.) With whole numbers b this is close to the packing itself. Families that take
little are counted by pieces, at the least cost of a piece: one column a place instead of P.

Letters: w ways, f families, m column pieces, p places.
"""

from __future__ import annotations

import numpy as np

from dse.placement.design.options import REPLICATED, ROW_SPLIT, shard_kind
from dse.placement.design.program import MasterProgram
from dse.placement.solver.linear import Solved, solve_whole
from dse.placement.solver.problem import Array, Ints

SINGLE_PLACES = 8
MOST_COLUMNS = 2500  # of b; a larger program says no more than averages in the time there is


class PackedProgram(MasterProgram):
    """Assembles it."""

    def least(self, apart: int, *, below_us: float, time_limit_s: float) -> Solved | None:
        """The least T of plans that take less than `below_us`, with the `apart` dearest families piece by piece.

        `None` where there are no such families, or the program would be too large.
        """
        ranks = self._bound.options.design.system.world_size
        single = min(ranks, SINGLE_PLACES)
        places = np.array([1.0] * single + [float(ranks - single)] * (ranks > single))
        families = self.families()
        pieces = self._bound.options.ways.pieces[families]
        if not families or len(places) * (len(families) + int((pieces - 1)[:apart].sum())) > MOST_COLUMNS:
            return None
        self._build()
        self._high[0] = min(self._high[0], below_us)
        self._held: list[tuple[int, Array, Ints]] = []  # family, pieces of its columns, `(j, p)` columns
        self._wholes: list[int] = []
        for number, f in enumerate(families):
            self._family(f, places, apart=number < apart)
        self._loads(places)
        program = self._program(0, 1.0, whole=True, also=self._wholes)
        return solve_whole(program, time_limit_s=time_limit_s, heuristics=False, below=below_us)

    def families(self) -> list[int]:
        """Families that are not on all ranks, those that take most first."""
        ways = self._bound.options.ways
        chosen = ~np.isin(shard_kind(ways.flag), (ROW_SPLIT, REPLICATED))
        families = np.unique(ways.family[chosen])
        size = np.zeros(len(ways.pieces))
        for key in {key for cut in self._cuts for _, key in cut.segments}:
            size += self._costs(key)[ways.pieces - 1, np.arange(len(size))]
        return [int(f) for f in families[np.argsort(-size[families], kind="stable")]]

    def _costs(self, key: tuple[int, ...]) -> Array:
        """`(m, f)`: the least that so many pieces add to a rank."""
        each = np.sum([self._bound.program.variables[v].each for v in key], axis=0)
        return self._bound.options.ways.shards(each)

    def _family(self, f: int, places: Array, *, apart: bool) -> None:
        """Columns of a family, and what the shares of its ways say of them."""
        ways = self._bound.options.ways
        pieces, copies = int(ways.pieces[f]), float(ways.copies[f])
        mine = np.flatnonzero(ways.family == f)
        x, ones = self._ways[mine], np.ones(len(mine))
        counts = np.arange(1.0, pieces + 1) if apart else np.ones(1)
        most = np.minimum(places[None, :], pieces * copies // counts[:, None]) * (1.0 if apart else pieces)
        b = np.array([[self._column(float(high)) for high in row] for row in most], dtype=np.int64)
        self._held.append((f, counts, b))
        each = np.repeat(counts, len(places))
        self._row([*b.ravel(), *x], [*each, *(-pieces * copies * ones)], low=0.0, high=0.0)
        if not apart:
            for p, size in enumerate(places):
                self._row([*b[:, p], *x], [1.0, *(-size * pieces * ones)], high=0.0)
            return
        self._wholes += b.ravel().tolist()
        ranks = np.ones(b.size)
        self._row([*b.ravel(), *x], [*ranks, *(-copies * ways.least[mine])], low=0.0)
        self._row([*b.ravel(), *x], [*ranks, *(-copies * ways.most[mine])], high=0.0)
        for p, size in enumerate(places):
            self._row([*b[:, p], *x], [*np.ones(len(b)), *(-size * ones)], high=0.0)

    def _loads(self, places: Array) -> None:
        """What each measure, and the memory, comes to on each place."""
        bound = self._bound
        for key, (column, scale, extra) in self._parts.items():
            terms = bound.measures.terms(key)
            costs = self._costs(key) * (terms.fastest / scale)
            if costs[np.isfinite(costs)].any():
                on_all = terms.on_all * (terms.fastest / scale)
                head = [column, *extra], [1.0, *([-terms.fastest] * len(extra))]
                self._load_rows(places, head, on_all, costs, low=terms.fastest * terms.base / scale)
        held = bound.options.ways.shards(bound.costs.bytes)
        scale = max(float(np.where(np.isfinite(held), held, 0.0).max()), 1.0)
        of_all = bound.measures.on_all(bound.sums(bound.costs.bytes)[1]) / scale
        nothing: tuple[list[int], list[float]] = ([], [])
        self._load_rows(places, nothing, of_all, held / scale, low=-bound.most_bytes / scale)

    def _load_rows(
        self, places: Array, head: tuple[list[int], list[float]], on_all: Array, costs: Array, *, low: float
    ) -> None:
        """One row a place: the head less what is on all ranks and what the place holds is at least `low`."""
        everywhere = np.flatnonzero(on_all)
        for p, size in enumerate(places):
            columns, values = [*head[0], *self._ways[everywhere]], [*head[1], *(-on_all[everywhere])]
            for f, counts, b in self._held:
                own = costs[: int(self._bound.options.ways.pieces[f]), f]
                if len(counts) < len(own):  # the least of a piece
                    own = np.array([(own / np.arange(1.0, len(own) + 1)).min()])
                columns += b[:, p].tolist()
                values += (-own / size).tolist()
            self._row(columns, values, low=low)
