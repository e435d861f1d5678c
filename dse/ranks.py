"""Ranks that differ, as files say it: checked, turned into values, and written again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dse.problems import Problems
from dse.schema import RankEntry
from perfcore.design.hardware import System
from perfcore.design.rank_groups import RankGroup, groups_of
from perfcore.units import BYTES_PER_GIB


def check_ranks(entries: Sequence[RankEntry], num_ranks: int, problems: Problems, *loc: str | int) -> None:
    """Note every entry that names a rank which is not there, or which an entry has named already.

    Args:
        entries: of a file.
        num_ranks: how many there are.
        problems: takes the notes.
        loc: where the list of entries stands.
    """
    seen: set[int] = set()
    for position, entry in enumerate(entries):
        at = (*loc, position, "ranks")
        check_there(entry.ranks, num_ranks, problems, *at)
        again = [r for i, r in enumerate(entry.ranks) if r in seen or r in entry.ranks[:i]]
        if again:
            problems.add(at, f"each rank may be named once, but rank {again[0]} is named already")
        seen |= set(entry.ranks)


def check_there(ranks: Sequence[int], num_ranks: int, problems: Problems, *loc: str | int) -> None:
    """Note ranks beyond those that there are."""
    if max(ranks) < num_ranks:
        return
    there = f"there are {num_ranks} ranks, 0 to {num_ranks - 1}" if num_ranks > 1 else "there is rank 0 alone"
    problems.add(loc, f"{there}, but got {max(ranks)}")


def groups_in(entries: Sequence[RankEntry]) -> tuple[RankGroup, ...]:
    """Checked entries as values."""
    return tuple(
        RankGroup(
            tuple(e.ranks),
            1.0 if e.slowness is None else e.slowness,
            None if e.hbm_gib is None else e.hbm_gib * BYTES_PER_GIB,
        )
        for e in entries
    )


def entries_of(system: System) -> list[dict[str, Any]]:
    """What a file says of a system's ranks that differ."""
    return [_entry(group) for group in groups_of(system)]


def _entry(group: RankGroup) -> dict[str, Any]:
    entry: dict[str, Any] = {"ranks": ranks_text(group.ranks)}
    if group.slowness != 1:
        entry["slowness"] = group.slowness
    if group.hbm_bytes is not None:
        entry["hbm_gib"] = group.hbm_bytes / BYTES_PER_GIB
    return entry


def differing_text(system: System) -> str:
    """A system's ranks that differ, as people read them; empty where none does."""
    return "; ".join(_group_text(group, system) for group in groups_of(system))


def _group_text(group: RankGroup, system: System) -> str:
    ranks = ranks_text(group.ranks)
    named = ranks if isinstance(ranks, str) else ", ".join(map(str, ranks))
    said = [f"{group.slowness:g} times as long"] if group.slowness != 1 else []
    if group.hbm_bytes is not None:
        own = system.device.hbm_bytes / BYTES_PER_GIB
        said.append(f"{group.hbm_bytes / BYTES_PER_GIB:.4g} GiB instead of {own:.4g}")
    return f"{named} ({', '.join(said)})"


def ranks_text(ranks: Sequence[int]) -> str | list[int]:
    """`8-15` where ranks follow one another, else a list."""
    first, last = ranks[0], ranks[-1]
    together = len(ranks) > 1 and list(ranks) == list(range(first, last + 1))
    return f"{first}-{last}" if together else list(ranks)
