"""What placements of a design must keep to beside the memory of ranks.

Letters: r ranks, h machines, g groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dse.placement.solver.problem import Array, Ints
from perfcore.design.design import Design


@dataclass(frozen=True, slots=True, eq=False)
class Conditions:
    """Host memory, slower ranks, tables that stay together.

    Attributes:
        host_capacity_bytes: `(h,)` memory of each machine for tables; infinite where none may lie there.
        slowness: `(r,)` factor on the launches of each rank, collectives apart; 1 where all devices are alike.
        groups: tables that are split alike and whose shards stay side by side; each table is in one group, and groups
            ascend by their first.
    """

    host_capacity_bytes: Array
    slowness: Array
    groups: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, design: Design) -> Conditions:
        """Those that a design sets by itself."""
        system = design.system
        machines = system.world_size // system.local_world_size
        return cls(
            np.full(machines, system.node.host_memory_bytes),
            np.array(system.slowness or np.ones(system.world_size)),
            tuple((t,) for t in range(len(design.model.tables))),
        )

    @property
    def uneven(self) -> bool:
        """Some rank is not as the device's kernels are priced."""
        return bool((self.slowness != 1.0).any())

    @property
    def paces(self) -> tuple[float, float, float]:
        """What ranks take on average (harmonic mean: work goes where it is done fastest), at best, and at worst."""
        even = len(self.slowness) / float((1 / self.slowness).sum())
        return even, float(self.slowness.min()), float(self.slowness.max())

    @property
    def group(self) -> Ints:
        """`(t,)`: the group of each table."""
        group = np.zeros(sum(map(len, self.groups)), dtype=np.int64)
        for g, members in enumerate(self.groups):
            group[list(members)] = g
        return group
