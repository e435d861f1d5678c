"""A grid of designs equals its designs one by one, and expands no axis that a kernel does not depend on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from graph_designs import EAGER, TABLES, plan, small
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from perfcore.design.design import Design
from perfcore.design.model import Interaction
from perfcore.design.sharding import ShardingType, Shards, shards_of
from perfcore.design.training import (
    Communication,
    EmbeddingFusion,
    Fusion,
    InteractionFusion,
    MlpFusion,
    Optimizer,
    OptimizerFusion,
    Precision,
)
from perfcore.graph.dims import Dims, dims_of, structure_of
from perfcore.graph.dlrm import DlrmBuilder
from perfcore.graph.kernels import (
    Bucket,
    Collective,
    EmbeddingBackward,
    EmbeddingForward,
    Kernel,
    MultiTensor,
    Total,
    dims,
)
from perfcore.graph.ops import Op, Stream, WorkloadGraph

PLANS: tuple[tuple[ShardingType, ...], ...] = (
    (ShardingType.TABLE_WISE,),
    (ShardingType.COLUMN_WISE, ShardingType.ROW_WISE),
    (ShardingType.DATA_PARALLEL, ShardingType.TABLE_WISE),
    (ShardingType.ROW_WISE, ShardingType.COLUMN_WISE, ShardingType.DATA_PARALLEL),
)
RANKS = 4
Axes = dict[str, Sequence[Any]]
AXES: Axes = {
    "global_batch": (8, 64),
    "embedding_dim": (4, 6),
    "bottom_0": (0, 9),
    "bottom_1": (5, 7),
    "top_0": (0, 3),
    "top_1": (0, 8, 2),
    "plan": PLANS,
}
NAMES = list(AXES)


def grid(world_size: int) -> Dims:
    """One dimension an axis, the rank last; ranks outside the world hold no shards."""

    def along(name: str, values: Sequence[float]) -> NDArray[np.float64]:
        shape = [1] * (len(NAMES) + 1)
        shape[NAMES.index(name)] = len(values)
        return np.array(values, dtype=np.float64).reshape(shape)

    whole = np.ones((1,) * (len(NAMES) + 1))
    return Dims(
        global_batch=along("global_batch", AXES["global_batch"]),
        world_size=whole * world_size,
        local_world_size=whole * world_size,
        num_dense_features=13,
        embedding_dim=along("embedding_dim", AXES["embedding_dim"]),
        bottom_hidden=(along("bottom_0", AXES["bottom_0"]), along("bottom_1", AXES["bottom_1"])),
        top_hidden=(along("top_0", AXES["top_0"]), along("top_1", AXES["top_1"])),
        cross_rank=whole * 2,
        shards=grid_shards(world_size),
    )


def grid_shards(world_size: int) -> Shards:
    """`(1, d, 1, 1, 1, 1, p, r, t)`."""
    fields: dict[str, NDArray[Any]] = {}
    for name in Shards.__dataclass_fields__:
        rows = []
        for dim in AXES["embedding_dim"]:
            model = small(embedding_dim=dim).model
            kinds = [plan(model, world_size, p) for p in PLANS]
            rows.append([getattr(shards_of(p, model, world_size=world_size), name) for p in kinds])
        values = np.array(rows)
        padded = np.zeros((*values.shape[:2], RANKS, values.shape[-1]), dtype=values.dtype)
        padded[:, :, :world_size] = values
        fields[name] = padded.reshape(1, len(rows), 1, 1, 1, 1, len(PLANS), RANKS, len(TABLES))
    return Shards(**fields)


def design_at(index: dict[str, int], world_size: int, fusion: Fusion, **changes: Any) -> Design:
    chosen = {name: AXES[name][i] for name, i in index.items()}
    bottom = tuple(w for w in (chosen["bottom_0"], chosen["bottom_1"]) if w)
    top = (chosen["top_0"], chosen["top_1"]) if chosen["top_1"] else ()
    return small(
        fusion,
        world_size=world_size,
        kinds=chosen["plan"],
        global_batch=chosen["global_batch"],
        embedding_dim=chosen["embedding_dim"],
        bottom_hidden=bottom,
        top_hidden=tuple(w for w in top if w),
        **changes,
    )


def at(value: Any, index: tuple[int, ...], *, trailing: int = 1) -> NDArray[np.float64]:
    """The candidate at `index` of an array with `trailing` axes (rank, table) after the candidates'."""
    array = np.asarray(value, dtype=np.float64)
    array = array.reshape((1,) * (len(index) + trailing - array.ndim) + array.shape)
    return np.asarray(array[tuple(i if n > 1 else 0 for i, n in zip(index, array.shape, strict=False))])


def dims_at(kernel: Kernel, index: tuple[int, ...]) -> dict[str, NDArray[np.float64]]:
    """A candidate's dims, rank axis first; sums are evaluated."""
    values = {}
    trailing = 2 if isinstance(kernel, (EmbeddingForward, EmbeddingBackward)) else 1
    for name, dim in dims(kernel).items():
        if isinstance(dim, (Total, Bucket)):
            values[name] = replace(dim, terms=tuple(at(t, index) for t in dim.terms)).value()
        elif not (isinstance(kernel, MultiTensor) and name == "tensors"):  # counts absent layers as well
            values[name] = at(dim, index, trailing=trailing)
    return values


def on_ranks(value: NDArray[Any], ranks: NDArray[np.bool_]) -> list[Any]:
    """Values of those ranks of the world."""
    spread = np.broadcast_to(value, (len(ranks), *value.shape[1:])) if len(value) == 1 else value
    chosen: list[Any] = np.round(spread[: len(ranks)][ranks], 6).tolist()
    return chosen


def mask_at(mask: Any, index: tuple[int, ...], world_size: int) -> NDArray[np.bool_]:
    values = at(mask, index).astype(bool)
    return np.broadcast_to(values, (world_size,)) if len(values) == 1 else values[:world_size]


def launches_at(op: Op, index: tuple[int, ...], world_size: int) -> list[tuple[Any, ...]]:
    rows = []
    for launch in op.launches:
        ranks = mask_at(op.present, index, world_size) & mask_at(launch.present, index, world_size)
        values = dims_at(launch.kernel, index)
        empty_bucket = isinstance(launch.kernel, Collective) and not values["bytes"].any()
        if ranks.any() and not empty_bucket:
            described = {name: on_ranks(value, ranks) for name, value in values.items()}
            rows.append((type(launch.kernel).__name__, launch.stream, launch.after, launch.blocks, described))
    return rows


def summary(graph: WorkloadGraph, index: tuple[int, ...], world_size: int) -> list[tuple[Any, ...]]:
    """The ops that some rank runs, with the launches of those ranks; waits that wait for nothing new are dropped."""
    rows: list[tuple[Any, ...]] = []
    awaited: tuple[Any, ...] = ()
    for op in graph.ops():
        launches = launches_at(op, index, world_size)
        if mask_at(op.present, index, world_size).any() and bool(launches) == bool(op.launches):
            rows.append((op.name, op.continues, op.waits if op.waits != awaited else (), launches))
            calls = any(x.stream is Stream.COMMUNICATION for x in op.launches)
            awaited = () if calls else op.waits or awaited
    return rows


# An example names a whole design, and a smaller one says no more.
NO_SHRINKING = (Phase.explicit, Phase.reuse, Phase.generate)
INDICES = st.tuples(*(st.integers(0, len(values) - 1) for values in AXES.values()))
FUSIONS = st.builds(
    Fusion,
    embedding=st.sampled_from(EmbeddingFusion),
    mlp=st.sampled_from(MlpFusion),
    interaction=st.sampled_from(InteractionFusion),
    optimizer=st.sampled_from(OptimizerFusion),
    communication=st.sampled_from(Communication),
)
BUILDERS = {world_size: DlrmBuilder(grid(world_size)) for world_size in (1, RANKS)}


@settings(max_examples=50, deadline=None, phases=NO_SHRINKING)
@given(
    index=INDICES,
    world_size=st.sampled_from(sorted(BUILDERS)),
    fusion=FUSIONS,
    interaction=st.sampled_from(Interaction),
    precision=st.sampled_from(Precision),
    optimizer=st.sampled_from([Optimizer.SGD, Optimizer.ADAGRAD, Optimizer.ADAM]),
    table_optimizer=st.sampled_from(Optimizer),
    table_precision=st.sampled_from([Precision.FP32, Precision.BF16]),
)
def test_a_grid_equals_its_designs(
    index: tuple[int, ...], world_size: int, fusion: Fusion, **changes: Any
) -> None:
    named = dict(zip(NAMES, index, strict=True))
    if AXES["top_1"][named["top_1"]] == 0:  # slots are right-aligned: no layer before an absent one
        named["top_0"] = 0
    design = design_at(named, world_size, fusion, **changes)
    gridded = BUILDERS[world_size].graph(structure_of(design))
    alone = DlrmBuilder(dims_of([design])).graph(structure_of(design))
    assert gridded.num_ranks == RANKS
    assert summary(gridded, tuple(named.values()), world_size) == summary(alone, (0,), world_size)


def arrays_of(graph: WorkloadGraph) -> Iterator[NDArray[Any]]:
    for op in graph.ops():
        yield np.asarray(op.present)
        for launch in op.launches:
            yield np.asarray(launch.present)
            for dim in dims(launch.kernel).values():
                yield from dim.terms if isinstance(dim, (Total, Bucket)) else (np.asarray(dim),)


@pytest.mark.parametrize("world_size", [1, RANKS])
@pytest.mark.parametrize("optimizer", OptimizerFusion)
def test_no_array_spans_all_widths(world_size: int, optimizer: OptimizerFusion) -> None:
    design = small(replace(EAGER, optimizer=optimizer), world_size=world_size, interaction=Interaction.CAT)
    graph = BUILDERS[world_size].graph(structure_of(design))
    widths = [NAMES.index(n) - len(NAMES) - 1 for n in NAMES if n.startswith(("bottom", "top"))]
    for array in arrays_of(graph):
        spanned = [axis for axis in widths if array.ndim >= -axis and array.shape[axis] > 1]
        assert len(spanned) <= 2  # a layer and the one before it


def test_a_list_of_designs_equals_its_designs() -> None:
    designs = [
        small(global_batch=b, bottom_hidden=w, world_size=RANKS, kinds=kinds)
        for b, w, kinds in ((8, (9, 7), PLANS[1]), (16, (5,), PLANS[3]), (32, (), PLANS[0]))
    ]
    listed = DlrmBuilder(dims_of(designs)).graph(structure_of(designs[0]))
    for number, design in enumerate(designs):
        alone = DlrmBuilder(dims_of([design])).graph(structure_of(design))
        assert summary(listed, (number,), RANKS) == summary(alone, (0,), RANKS)
