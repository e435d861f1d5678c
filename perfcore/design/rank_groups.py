"""Ranks that differ from the device, as a person says it: groups of ranks with what is theirs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from perfcore.design.hardware import Device, Node, System


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Ranks whose GPUs are alike, and differ from the others.

    Attributes:
        ranks: at least one; no rank is in two groups.
        slowness: factor on what they launch, collectives apart.
        hbm_bytes: memory of each of their GPUs; `None` where it is the device's.
    """

    ranks: tuple[int, ...]
    slowness: float = 1.0
    hbm_bytes: float | None = None


def system_of(device: Device, node: Node, world_size: int, groups: Sequence[RankGroup]) -> System:
    """The system of so many ranks; what groups say of ranks beyond them is left out.

    Raises:
        HardwareError: whole machines do not make up the world, or a number is impossible.
    """
    slowness, hbm_bytes = [1.0] * world_size, [None] * world_size  # type: list[float], list[float | None]
    for group in groups:
        for rank in group.ranks:
            if rank < world_size:
                slowness[rank], hbm_bytes[rank] = group.slowness, group.hbm_bytes
    return System(
        device,
        node,
        world_size,
        tuple(slowness) if any(s != 1 for s in slowness) else (),
        tuple(hbm_bytes) if any(b is not None for b in hbm_bytes) else (),
    )


def groups_of(system: System) -> tuple[RankGroup, ...]:
    """The groups of a system's ranks that differ from the device, in the order of their first ranks."""
    found: dict[tuple[float, float | None], list[int]] = {}
    everyone = range(system.world_size)
    slowness = system.slowness or (1.0,) * system.world_size
    hbm_bytes = system.hbm_bytes or (None,) * system.world_size
    for rank, kind in zip(everyone, zip(slowness, hbm_bytes, strict=True), strict=True):
        if kind != (1.0, None):
            found.setdefault(kind, []).append(rank)
    return tuple(RankGroup(tuple(ranks), *kind) for kind, ranks in found.items())
