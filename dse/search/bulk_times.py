"""Iteration times of a space's candidates from tables, which are built once or come from the cache."""

from __future__ import annotations

import contextlib

import numpy as np

from dse.candidate import Place
from dse.grid import Grid, grid_of
from dse.search.protocol import Array, Codes
from dse.search.table_cache import TableCache, table_key
from dse.space import SearchSpace
from perfcore.bulk import BulkPredictor, BulkTables
from perfcore.memory import MemoryOfGrid
from perfcore.profile.profile import Profile


class BulkTimes:
    """Iteration time and memory of a space's candidates, on one rank and on several."""

    def __init__(
        self,
        space: SearchSpace,
        profile: Profile,
        placed: Place,
        *,
        cache: TableCache | None = None,
        asked: object = None,
    ) -> None:
        """Take the tables from the cache, or build them: seconds for a large space.

        Args:
            space: of the candidates.
            profile: prices them.
            placed: places their tables.
            cache: keeps the tables; `None` keeps nothing.
            asked: what else the placements follow from; its `repr` tells cache entries apart.
        """
        grids = (grid_of(space, placed, distributed=distributed) for distributed in (False, True))
        self._parts = [(grid, _tables(grid, profile, cache, asked)) for grid in grids if grid is not None]

    @property
    def table_bytes(self) -> int:
        """Memory of the tables."""
        return sum(predictor.table_bytes for _, predictor in self._parts)

    def price(self, codes: Codes) -> tuple[Array, Array, Array]:
        """`(n,)` iteration time in µs, bytes of the fullest rank, and bytes that it has left, of `(n, a)` candidates."""
        time_us, hbm_bytes, left_bytes = (np.full(len(codes), np.nan) for _ in range(3))
        for grid, predictor in self._parts:
            rows = np.flatnonzero(grid.covers(codes))
            structures, grid_codes = grid.locate(codes[rows])
            priced = predictor.evaluate(structures, grid_codes)
            time_us[rows] = priced.iteration_time_us
            hbm_bytes[rows], left_bytes[rows] = priced.hbm_bytes, priced.left_bytes
        return time_us, hbm_bytes, left_bytes


def _tables(grid: Grid, profile: Profile, cache: TableCache | None, asked: object) -> BulkTables:
    key = table_key(grid.space, profile, distributed=grid.distributed, asked=asked) if cache else ""
    arrays = cache.read(key) if cache else None
    if arrays is not None:
        with contextlib.suppress(KeyError):  # an entry of that name, but of something else
            return BulkTables.restored(arrays)
    built = BulkPredictor(
        grid.dims,
        grid.structures,
        cost=profile.cost_model(),
        overheads=profile.overheads,
        memory=MemoryOfGrid(),
        sizes=tuple(len(axis.values) for axis in grid.axes),
        slowness=grid.slowness,
        hbm_bytes=grid.hbm_bytes,
    )
    if cache:
        cache.write(key, built.arrays)
    return built
