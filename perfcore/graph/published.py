"""Regions as published programs run them: rewrites of what a loop on PyTorch 2 does."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable

from perfcore.design.training import Program
from perfcore.graph import nvidia, script
from perfcore.graph.dims import Structure
from perfcore.graph.ops import Region
from perfcore.graph.sizes import Sizes

_REWRITES: dict[Program, Callable[[Sizes, Structure, Region], tuple[Region, ...]]] = {
    Program.DLRM_SCRIPT: script.rewritten,
    Program.NVIDIA_EXAMPLE: nvidia.rewritten,
}


class Published:
    """Rewrites each region once for each setting that a rewrite reads, so that structures share the result."""

    def __init__(self, sizes: Sizes) -> None:
        self._sizes = sizes
        self._known: dict[tuple[Hashable, ...], tuple[Region, ...]] = {}

    def regions(self, structure: Structure, regions: Iterable[Region]) -> tuple[Region, ...]:
        """The iteration's regions in the structure's program."""
        rewrite = _REWRITES.get(structure.program)
        if rewrite is None:
            return tuple(regions)
        settings = (
            structure.program,
            structure.pinned_input,
            structure.precision,
            structure.index_dtype,
            structure.fusion,
        )
        out: list[Region] = []
        for region in regions:
            key = (region, *settings)
            if key not in self._known:
                self._known[key] = rewrite(self._sizes, structure, region)
            out += self._known[key]
        return tuple(out)


def after_graph(structure: Structure, regions: Iterable[Region]) -> list[Region]:
    """Regions that are launched eagerly after a CUDA graph."""
    if structure.program is not Program.NVIDIA_EXAMPLE:
        return []
    return [region for region in regions if nvidia.eager_after_graph(region)]
