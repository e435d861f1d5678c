"""Bulk prediction: iteration time and memory of coded candidates on a grid, a million a second.

Each structure's graph is built once on the whole grid and folded into tables of max-plus matrices over the
few axes that each part depends on; a candidate is then a product of gathered matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from perfcore.bulk_kernel import evaluate, grouped
from perfcore.bulk_program import aligned, new_block
from perfcore.cost.model import CostModel
from perfcore.errors import DesignError
from perfcore.graph.dims import Dims, Structure
from perfcore.graph.kernels import Total
from perfcore.graph.ops import WorkloadGraph
from perfcore.graph.presence import captured_streams
from perfcore.instructions import Programs
from perfcore.maxplus import fold_ranks
from perfcore.overheads import OverheadTable
from perfcore.programs import Assembler
from perfcore.segments import Local, Segment, Segmenter
from perfcore.steps import Encoder

Array = NDArray[np.float64]

# Which bytes a rank holds, by kind; each broadcasts to `(..., r)` on the grid.
MemoryTerms: TypeAlias = Callable[[Dims, Structure], Mapping[str, "Array | Total"]]

MAX_ENTRIES = 4096


@dataclass(frozen=True, slots=True, eq=False)
class BulkResult:
    """Of n candidates.

    Attributes:
        iteration_time_us: `(n,)`.
        hbm_bytes: `(n,)`: of the fullest rank; 0 where no memory terms were given.
        left_bytes: `(n,)`: what that rank has left, the least of all; of no memory at all where none was given.
    """

    iteration_time_us: Array
    hbm_bytes: Array
    left_bytes: Array


class BulkTables:
    """The programs of many structures on one grid, and the tables that they gather from.

    Args:
        programs: one per structure.
        sizes: of the grid's axes.
        ranks: size of the rank axis.
    """

    def __init__(self, programs: Programs, *, sizes: tuple[int, ...], ranks: int) -> None:
        self._programs, self._sizes, self._ranks = programs, sizes, ranks
        self._structures = len(programs.row_bounds) - 1

    @classmethod
    def of_graphs(
        cls,
        graphs: Sequence[WorkloadGraph],
        memory: Sequence[Sequence[Any]],
        *,
        sizes: tuple[int, ...],
        cost: CostModel,
        overheads: OverheadTable,
        max_entries: int = MAX_ENTRIES,
    ) -> BulkTables:
        """The tables of graphs on any grid.

        Args:
            graphs: one per structure, dims on a grid of `sizes`; regions are shared where they are equal.
            memory: grid arrays whose sum is a structure's memory, per structure.
            sizes: of the grid's axes.
            cost: prices kernels.
            overheads: of the host.
            max_entries: as in `BulkPredictor`.

        Raises:
            UnsupportedError: as `BulkPredictor`.
        """
        ranks = max(g.num_ranks for g in graphs)
        segmenter = Segmenter(sizes, ranks, cost, overheads, max_entries)
        programs = _programs(graphs, memory, segmenter, Assembler(sizes, ranks, max_entries))
        return BulkTables(programs, sizes=sizes, ranks=ranks)

    @property
    def arrays(self) -> dict[str, NDArray[Any]]:
        """All that the tables consist of, for `restored`."""
        return {name: np.asarray(a) for name, a in self._programs.fields().items()} | {
            "sizes": np.array(self._sizes, dtype=np.int64),
            "ranks": np.asarray(self._ranks),
        }

    @classmethod
    def restored(cls, arrays: Mapping[str, NDArray[Any]]) -> BulkTables:
        """The tables that once gave these `arrays`."""
        fields: dict[str, Any] = {name: arrays[name] for name in Programs.names()}
        matrices = aligned(len(fields["matrices"]))
        matrices[:] = fields["matrices"]
        programs = Programs(**fields | {"matrices": matrices, "slots": int(fields["slots"])})
        return BulkTables(programs, sizes=tuple(arrays["sizes"].tolist()), ranks=int(arrays["ranks"]))

    @property
    def table_bytes(self) -> int:
        """Memory of all tables."""
        return sum(a.nbytes for a in self._programs.fields().values() if isinstance(a, np.ndarray))

    def evaluate(self, structure_index: NDArray[Any], codes: NDArray[Any]) -> BulkResult:
        """Iteration time and memory of n candidates.

        Args:
            structure_index: `(n,)`.
            codes: `(n, k)`: `codes[:, j]` indexes dimension j of the grid.

        Raises:
            DesignError: a code or structure is outside the grid.
        """
        structures, codes = np.asarray(structure_index), np.ascontiguousarray(codes)
        self._check_shape(structures, codes)
        time_us, hbm_bytes, left_bytes = (np.empty(len(codes)) for _ in range(3))
        block = new_block(
            axes=len(self._sizes),
            keys=len(self._programs.key_term_bounds) - 1,
            ranks=self._ranks,
            slots=self._programs.slots,
        )
        order, bounds = grouped(structures, self._structures)
        sizes = np.array(self._sizes, dtype=np.int64)
        deciding, out = np.ones(len(codes), dtype=np.uint64), (time_us, hbm_bytes, left_bytes)
        if not evaluate(self._programs, order, bounds, codes, sizes, deciding, block, out):
            self._refuse(codes)
        return BulkResult(*out)

    def _check_shape(self, structures: NDArray[Any], codes: NDArray[Any]) -> None:
        if codes.shape != (len(structures), len(self._sizes)):
            raise DesignError(
                f"`codes` must be (n, k) = ({len(structures)}, {len(self._sizes)}), but has {codes.shape}."
            )
        if len(codes) and not 0 <= structures.min() <= structures.max() < self._structures:
            raise DesignError(
                f"`0 <= structure < {self._structures}` must hold, but got {structures.min()} to {structures.max()}."
            )

    def _refuse(self, codes: NDArray[Any]) -> None:
        for axis, size in enumerate(self._sizes):
            low, high = int(codes[:, axis].min()), int(codes[:, axis].max())
            if low < 0 or high >= size:
                raise DesignError(f"`0 <= code < {size}` must hold on axis {axis}, but got {low} to {high}.")


class BulkPredictor(BulkTables):
    """Prices coded candidates of many structures.

    Args:
        dims: a grid `(c_1, ..., c_k, r)`.
        structures: what `structure_index` counts.
        cost: prices kernels.
        overheads: of the host.
        memory: bytes of a structure on the grid, summed per candidate.
        graph_of: the graph of a structure on the grid; the DLRM builder's when not given.
        max_entries: largest table into which neighbouring parts, or a sum over layers, are joined.
        sizes: of the grid's axes; without it those that `dims` show, which may depend on fewer.
        slowness: of the ranks on the grid: a factor on what they launch, collectives apart.
        hbm_bytes: of the ranks' GPUs on the grid.

    Raises:
        UnsupportedError: more than 64 ranks, or a sum over layers that differs among ranks and is too
            large to expand.
    """

    def __init__(
        self,
        dims: Dims,
        structures: Sequence[Structure],
        *,
        cost: CostModel,
        overheads: OverheadTable,
        memory: MemoryTerms | None = None,
        graph_of: Callable[[Structure], WorkloadGraph] | None = None,
        max_entries: int = MAX_ENTRIES,
        sizes: tuple[int, ...] | None = None,
        slowness: Array | None = None,
        hbm_bytes: Array | None = None,
    ) -> None:
        builder = graph_of or _dlrm_graphs(dims)
        built = [builder(s) for s in structures]
        priced = [{} if memory is None else memory(dims, s) for s in structures]
        flat = {id(p): _flat(p) for p in priced}
        terms = [flat[id(p)] for p in priced]
        sizes = sizes or grid_sizes(dims)
        ranks = max(g.num_ranks for g in built)
        segmenter = Segmenter(sizes, ranks, cost, overheads, max_entries, slowness)
        programs = _programs(built, terms, segmenter, Assembler(sizes, ranks, max_entries, hbm_bytes))
        super().__init__(programs, sizes=sizes, ranks=ranks)


def grid_sizes(dims: Dims) -> tuple[int, ...]:
    """Sizes of a grid's axes, ranks left out."""
    arrays = [dims.global_batch, dims.world_size, dims.local_world_size, dims.embedding_dim, dims.cross_rank]
    arrays += [*dims.bottom_hidden, *dims.top_hidden]
    shapes = [np.shape(a)[:-1] for a in arrays]
    shapes += [np.shape(getattr(dims.shards, name))[:-2] for name in type(dims.shards).__dataclass_fields__]
    return tuple(np.broadcast_shapes(*shapes))


def _dlrm_graphs(dims: Dims) -> Callable[[Structure], WorkloadGraph]:
    from perfcore.graph.dlrm import DlrmBuilder

    return DlrmBuilder(dims).graph


def _programs(
    graphs: Sequence[WorkloadGraph],
    memory: Sequence[Sequence[Any]],
    segmenter: Segmenter,
    assembler: Assembler,
) -> Programs:
    """Programs of all graphs."""
    segmenter.price({id(r): r for g in graphs for r in g.regions}.values())
    for graph, terms in zip(graphs, memory, strict=True):
        assembler.add(_segments(graph, segmenter), terms)
    return assembler.programs()


def _flat(terms: Mapping[str, Array | Total]) -> list[Array]:
    out: list[Array] = []
    for term in terms.values():
        out += term.terms if isinstance(term, Total) else (term,)
    return out


def _segments(graph: WorkloadGraph, segmenter: Segmenter) -> list[Segment]:
    out: list[Segment] = []
    for number, region in enumerate(graph.regions):
        if number == graph.captured_from:
            out.append(_graph_end(graph, segmenter, opens=True))
        captured = graph.captured_from is not None and number >= graph.captured_from
        out += segmenter.segments(region, captured=captured)
    if graph.captured_from is not None:
        out.append(_graph_end(graph, segmenter, opens=False))
    return out


def _graph_end(graph: WorkloadGraph, segmenter: Segmenter, *, opens: bool) -> Local:
    """What a CUDA graph's launch does before, and after, its kernels."""
    encoder = Encoder(segmenter.overheads)
    (encoder.open_graph if opens else encoder.close_graph)(captured_streams(graph))
    return Local((), fold_ranks(encoder.steps([], num_ranks=1)))
