"""Every sharding type and compute kernel: where the pieces are, and bulk = predict = the oracle's traversal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import scalar_iteration_time

from perfcore.bulk import BulkPredictor
from perfcore.cost.model import Calibration
from perfcore.design.design import Design, from_dict, to_dict
from perfcore.design.hardware import System, device, node
from perfcore.design.model import EmbeddingTable, Interaction, Model
from perfcore.design.sharding import (
    ComputeKernel,
    ShardingPlan,
    ShardingType,
    TableSharding,
    shards_of,
)
from perfcore.design.training import (
    Communication,
    EmbeddingFusion,
    Fusion,
    Launches,
    Optimizer,
    OptimizerFusion,
    Training,
)
from perfcore.errors import DesignError
from perfcore.graph.dims import dims_of, structure_of
from perfcore.graph.dlrm import graph_of
from perfcore.graph.kernels import (
    CachePopulate,
    Collective,
    CollectiveKind,
    EmbeddingBackward,
    EmbeddingForward,
    resolve,
)
from perfcore.graph.ops import Stream
from perfcore.graph.sizes import Sizes
from perfcore.memory import memory_of, memory_terms
from perfcore.predictor import Predictor
from perfcore.profile.profile import profile_for

TABLES = (
    EmbeddingTable("a", 4000, 2.0),
    EmbeddingTable("b", 300, 1.0, skew=1.1),
    EmbeddingTable("c", 500_000, 3.0, skew=0.8),
)
DEVICE = device("a100-sxm4-80gb")
PAIR = replace(node("dgx-a100-80gb"), name="pair", gpus=2)
GRID, TWRW, TWCW = ShardingType.GRID_SHARD, ShardingType.TABLE_ROW_WISE, ShardingType.TABLE_COLUMN_WISE
WORLD = 4
DEFAULT = Fusion()
PLACES = {
    ShardingType.TABLE_WISE: [(0,), (3,)],
    ShardingType.COLUMN_WISE: [(0, 3), (1, 1, 2)],
    TWCW: [(2, 3), (0, 1, 1)],
    ShardingType.ROW_WISE: [(0, 1, 2, 3)],
    TWRW: [(0, 1), (2, 3)],
    GRID: [(0, 1, 2, 3), (2, 3), (0, 1, 0, 1)],
    ShardingType.DATA_PARALLEL: [(0, 1, 2, 3)],
}
CACHED = ComputeKernel.FUSED_UVM_CACHING
KERNELS = {
    ComputeKernel.FUSED: None,
    ComputeKernel.DENSE: None,
    ComputeKernel.FUSED_UVM: None,
    CACHED: 0.1,
}


@pytest.fixture(scope="module")
def predictor() -> Predictor:
    return Predictor(profile_for(DEVICE, PAIR))


def design(placed: Any, fusion: Fusion = DEFAULT, *, world: int = WORLD, **training: Any) -> Design:
    """Tables a, b, c; `placed` is type and ranks, or type, ranks, kernel and cache ratio, of each."""
    plan = ShardingPlan(tuple(TableSharding(t.name, *p) for t, p in zip(TABLES, placed, strict=True)))
    model = Model(13, TABLES, 16, (32,), (64,), Interaction.CAT)
    return Design(model, Training(256, **training), fusion, plan, System(DEVICE, PAIR, world))


@st.composite
def placements(draw: st.DrawFn, *, kernels: bool = True) -> tuple[tuple[Any, ...], ...]:
    out = []
    for _ in TABLES:
        kind = draw(st.sampled_from(list(ShardingType)))
        ranks = draw(st.sampled_from(PLACES[kind]))
        kernel = draw(st.sampled_from(list(KERNELS))) if kernels else ComputeKernel.FUSED
        if kind is ShardingType.DATA_PARALLEL:
            kernel = ComputeKernel.FUSED
        out.append((kind, ranks, kernel, KERNELS[kernel]))
    return tuple(out)


def oracle_us(predictor: Predictor, d: Design) -> float:
    graph = graph_of(d)
    durations_us = predictor.cost.predict_us([resolve(x.kernel) for x in graph.launches()])
    return float(
        scalar_iteration_time(graph, durations_us, predictor.profile.overheads, warm_up=25, period=12)
    )


# --- where the pieces are --------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(placements())
def test_the_pieces_of_a_table_are_the_table(placed: tuple[tuple[Any, ...], ...]) -> None:
    d = design(placed)
    shards = shards_of(d.sharding, d.model, world_size=WORLD, local_world_size=2)
    kinds = (shards.pooled, shards.row_split, shards.staged, shards.replicated)
    assert (sum(k.astype(int) for k in kinds) == shards.present).all()
    for t, table in enumerate(TABLES):
        copies = WORLD if placed[t][0] is ShardingType.DATA_PARALLEL else 1
        assert (shards.rows * shards.dim)[:, t].sum() == copies * table.num_embeddings * 16
    sizes = Sizes(dims_of([d]))
    assert [float(v.item()) for v in sizes.table_dims] == [16.0] * 3
    assert [float(v.item()) for v in sizes.table_poolings] == pytest.approx(
        [t.pooling_factor for t in TABLES]
    )
    assert from_dict(to_dict(d)) == d


def test_grid_pieces_lie_where_their_ranks_say() -> None:
    d = design([(GRID, (2, 3, 0, 1)), (GRID, (2, 3)), (GRID, (0, 1, 0, 1))])
    shards = shards_of(d.sharding, d.model, world_size=WORLD, local_world_size=2)
    np.testing.assert_array_equal(shards.dim, [[8, 0, 16], [8, 0, 16], [8, 16, 0], [8, 16, 0]])
    np.testing.assert_array_equal(shards.rows[:, :2], [[2000, 0], [2000, 0], [2000, 150], [2000, 150]])
    assert (shards.staged == shards.present).all()


def test_what_leaves_its_machine_is_refused() -> None:
    rest = [(ShardingType.TABLE_WISE, (0,))] * 2
    with pytest.raises(DesignError, match=r"table_column_wise, which keeps its column pieces on one machine"):
        design([(TWCW, (1, 2)), *rest])
    for ranks in ((1, 2), (0,), (1, 0)):
        with pytest.raises(
            DesignError, match=r"table_row_wise, which splits its rows among all ranks of one"
        ):
            design([(TWRW, ranks), *rest])
    for ranks in ((0, 1, 2), (1, 0), (0, 2, 1, 3)):
        with pytest.raises(DesignError, match=r"grid_shard, which names, for each column piece, all ranks"):
            design([(GRID, ranks), *rest])
    with pytest.raises(DesignError, match="has 16 columns and cannot be split into 17"):
        design([(GRID, (0, 1) * 17), *rest])


def test_kernels_that_cannot_be_are_refused() -> None:
    whole = (ShardingType.TABLE_WISE, (0,))
    for ratio in (None, 0.0, 1.5):
        with pytest.raises(DesignError, match=r"`0 < cache_ratio <= 1` must hold for fused_uvm_caching"):
            TableSharding("a", *whole, CACHED, ratio)
    with pytest.raises(
        DesignError, match="`cache_ratio` is for fused_uvm_caching alone, but the kernel is fused"
    ):
        TableSharding("a", *whole, cache_ratio=0.5)
    with pytest.raises(DesignError, match="data_parallel, which needs its rows in device memory"):
        TableSharding("a", ShardingType.DATA_PARALLEL, (0,), ComputeKernel.FUSED_UVM)
    with pytest.raises(DesignError, match="Tables in host memory need `embedding: table_batched`"):
        design([(*whole, ComputeKernel.FUSED_UVM)] + [whole] * 2, Fusion(embedding=EmbeddingFusion.PER_TABLE))


# --- prices ----------------------------------------------------------------------------------------------

FUSIONS = (
    Fusion(),
    Fusion(communication=Communication.SERIAL, optimizer=OptimizerFusion.FUSED),
    Fusion(launches=Launches.CUDA_GRAPH),
    Fusion(communication=Communication.PIPELINED),
    Fusion(launches=Launches.CUDA_GRAPH, communication=Communication.PIPELINED),
    Fusion(communication=Communication.PREFETCHED),
    Fusion(launches=Launches.CUDA_GRAPH, communication=Communication.PREFETCHED),
)


@settings(max_examples=10, deadline=None)
@given(placed=placements(), fusion=st.sampled_from(FUSIONS), optimizer=st.sampled_from(Optimizer))
def test_bulk_equals_predict_equals_the_oracle(
    placed: tuple[tuple[Any, ...], ...], fusion: Fusion, optimizer: Optimizer, predictor: Predictor
) -> None:
    d = design(placed, fusion, table_optimizer=optimizer)
    us = predictor.iteration_time_us(d)
    assert us == pytest.approx(oracle_us(predictor, d), rel=1e-9)
    bulk = BulkPredictor(
        dims_of([d]),
        [structure_of(d)],
        cost=predictor.cost,
        overheads=predictor.profile.overheads,
        memory=memory_terms,
    )
    got = bulk.evaluate(np.zeros(1, dtype=int), np.zeros((1, 1), dtype=int))
    assert got.iteration_time_us[0] == pytest.approx(us, rel=1e-4)
    assert got.hbm_bytes[0] == pytest.approx(memory_of(d).total.max(), rel=1e-9)


@settings(max_examples=5, deadline=None)
@given(placed=placements(kernels=False), mode=st.sampled_from(Communication), dense=st.booleans())
def test_per_table_embeddings_too(
    placed: tuple[tuple[Any, ...], ...], mode: Communication, dense: bool, predictor: Predictor
) -> None:
    fusion = Fusion(embedding=EmbeddingFusion.PER_TABLE, communication=mode)
    if dense:
        placed = ((*placed[0][:2], ComputeKernel.DENSE, None), *placed[1:])
    d = design(placed, fusion)
    assert predictor.iteration_time_us(d) == pytest.approx(oracle_us(predictor, d), rel=1e-9)


def test_on_one_machine_rows_are_rows(predictor: Predictor) -> None:
    ranks = (0, 1)
    times = [
        predictor.iteration_time_us(design([(kind, ranks)] * 3, world=2))
        for kind in (ShardingType.ROW_WISE, TWRW, GRID)
    ]
    assert times[0] == times[1] == times[2]
    columns = [
        predictor.iteration_time_us(design([(kind, ranks)] * 3, world=2))
        for kind in (ShardingType.COLUMN_WISE, TWCW)
    ]
    assert columns[0] == columns[1]


def collectives(d: Design) -> list[tuple[str, float, float, float]]:
    kernels = [x.kernel for x in graph_of(d).launches()]
    return [
        (k.kind.value, float(np.max(k.bytes)), float(np.max(k.world_size)), float(np.max(k.local_world_size)))  # type: ignore[arg-type]
        for k in kernels
        if isinstance(k, Collective) and k.kind is not CollectiveKind.ALL_REDUCE
    ]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from([(k, r) for k in (TWRW, GRID) for r in PLACES[k]]), min_size=3, max_size=3))
def test_two_stages_equal_a_count_by_hand(placed: list[tuple[ShardingType, tuple[int, ...]]]) -> None:
    d = design(placed)
    columns = np.zeros(2)  # of each machine
    for kind, ranks in placed:
        pieces = len(ranks) // 2 if kind is GRID else 1
        for machine in (ranks[i] // 2 for i in range(0, 2 * pieces, 2)):
            columns[machine] += 16 / pieces
    inside = 4.0 * 256 * columns.max()  # every rank has partial sums of all samples
    sent = 4.0 * 128 * columns.max()  # half of them are its own after the first stage
    received = 4.0 * 64 * columns.sum()
    across = max(sent, received)
    got = collectives(d)
    assert [c for c in got if c[2:] != (4.0, 2.0)] == [
        ("reduce_scatter", inside, 2.0, 2.0),
        ("all_to_all", across, 2.0, 1.0),
        ("all_to_all", across, 2.0, 1.0),
        ("all_gather", inside, 2.0, 2.0),
    ]
    assert [c[0] for c in got if c[2:] == (4.0, 2.0)] == ["all_to_all"] * 2  # the indices


def test_two_stages_are_faster_than_one_where_machines_are_far_apart() -> None:
    cost = Predictor(profile_for(DEVICE, replace(PAIR, inter_bytes_per_s=1e8))).cost
    one = design([(ShardingType.ROW_WISE, (0, 1, 2, 3))] * 3)
    two = design([(TWRW, (0, 1)), (TWRW, (2, 3)), (TWRW, (0, 1))])
    us = []
    for d in (one, two):
        ops = [op for op in graph_of(d).ops() if op.name.startswith(("ReduceScatter", "All2All"))]
        kernels = [x.kernel for op in ops for x in op.launches if isinstance(x.kernel, Collective)]
        us.append(sum(float(price.max()) for price in cost.predict_us(kernels)))
    assert us[1] < us[0]


def test_a_pipelined_input_exchange_hides(predictor: Predictor) -> None:
    """With costly lookups to send, what the device does not wait for is saved; two more batches take memory."""
    tables = tuple(replace(t, pooling_factor=40.0) for t in TABLES)
    times, memories = [], []
    for mode in Communication:
        d = design([(ShardingType.ROW_WISE, (0, 1, 2, 3))] * 3, Fusion(communication=mode))
        d = replace(d, model=replace(d.model, tables=tables), training=Training(65536))
        times.append(predictor.predict(d).iteration_time_us)
        memories.append(memory_of(d))
    serial, overlapped, pipelined, prefetched = times
    assert prefetched == pipelined < 0.9 * overlapped < serial
    np.testing.assert_allclose(memories[2].input, 3 * memories[1].input)
    assert (memories[3].total >= memories[2].total).all()
    received = memories[2].communication - memories[1].communication
    np.testing.assert_allclose(
        received, 65536 * 8.0 * sum(t.pooling_factor / 4 + 1 for t in tables), rtol=1e-3
    )


# --- tables on the host ----------------------------------------------------------------------------------


def hosted(kernel: ComputeKernel, ratio: float | None = None, **training: Any) -> Design:
    whole = (ShardingType.TABLE_WISE, (0,))
    return design([whole, whole, (*whole, kernel, ratio)], **training)


def test_a_larger_cache_is_faster_and_larger(predictor: Predictor) -> None:
    ratios = (0.001, 0.01, 0.1, 0.5)
    designs = [hosted(ComputeKernel.FUSED_UVM), *(hosted(CACHED, r) for r in ratios)]
    for d in designs:
        populates = [x.kernel for x in graph_of(d).launches() if isinstance(x.kernel, CachePopulate)]
        assert len(populates) == (d is not designs[0])
    weights = [memory_of(d).weights[0] for d in designs]
    in_device = memory_of(hosted(ComputeKernel.FUSED)).weights[0]
    table = 500_000 * 16 * 4.0
    assert weights == pytest.approx([in_device - table * (1 - r) for r in (0.0, *ratios)])
    kinds = (CachePopulate, EmbeddingForward, EmbeddingBackward)
    us = []
    for d in designs[1:]:
        kernels = [x.kernel for x in graph_of(d).launches() if isinstance(x.kernel, kinds)]
        us.append(sum(float(price.sum()) for price in predictor.cost.predict_us(kernels)))
    assert us == sorted(us, reverse=True)
    assert us[-1] < us[0] * 0.6


@pytest.mark.parametrize("launches", Launches)
@pytest.mark.parametrize("world", [1, WORLD])
@pytest.mark.parametrize("synchronize", [False, True])
def test_a_cache_filled_ahead_hides(
    launches: Launches, world: int, *, synchronize: bool, predictor: Predictor
) -> None:
    """Beside the compute, on one rank and on several; without a cache it is the pipeline over batches in time."""
    tables = tuple(replace(t, pooling_factor=20.0, num_embeddings=2_000_000) for t in TABLES)
    whole = (ShardingType.TABLE_WISE, (0,))
    for kernel, ratio in ((CACHED, 0.05), (ComputeKernel.FUSED_UVM, None), (ComputeKernel.FUSED, None)):
        us, filled, memories = [], [], []
        for mode in (Communication.PIPELINED, Communication.PREFETCHED):
            fusion = Fusion(launches=launches, communication=mode)
            d = design([whole, whole, (*whole, kernel, ratio)], fusion, world=world)
            training = Training(32768, synchronize=synchronize)
            model = replace(d.model, tables=tables, bottom_hidden=(1024,), top_hidden=(2048, 1024))
            d = replace(d, model=model, training=training)
            us.append(predictor.iteration_time_us(d))
            assert us[-1] == pytest.approx(oracle_us(predictor, d), rel=1e-9)
            memories.append(float(memory_of(d).total.max()))
            ops = [op for op in graph_of(d).ops() if op.name == "fbgemm::lru_cache_populate"]
            filled.append([x for op in ops for x in op.launches])
        assert memories[1] >= memories[0]
        if kernel is not CACHED:
            assert us[0] == us[1]
            continue
        assert {x.stream for x in filled[0]} == {Stream.COMPUTE}
        assert {x.stream for x in filled[1]} == {Stream.COPY}
        load_us = float(predictor.cost.predict_us([filled[0][-1].kernel])[0].max())
        assert us[0] - us[1] > 0.5 * load_us > 0


@settings(max_examples=15, deadline=None)
@given(
    placed=placements(),
    launches=st.sampled_from(Launches),
    pinned=st.booleans(),
    batch=st.sampled_from([256, 4096, 65536]),
)
def test_filled_ahead_is_never_slower(
    placed: tuple[tuple[Any, ...], ...], launches: Launches, *, pinned: bool, batch: int, predictor: Predictor
) -> None:
    def us(mode: Communication) -> float:
        d = design(placed, Fusion(launches=launches, communication=mode), pinned_input=pinned)
        return predictor.iteration_time_us(replace(d, training=replace(d.training, global_batch=batch)))

    assert us(Communication.PREFETCHED) <= us(Communication.PIPELINED) * 1.005


def test_hosted_tables_rest_on_data_sheets(predictor: Predictor) -> None:
    lookups = [x.kernel for x in graph_of(hosted(CACHED, 0.1)).launches()]
    calibrations = {predictor.cost.calibration(k) for k in lookups if isinstance(k, EmbeddingForward)}
    assert calibrations == {Calibration.ANALYTIC}


def test_host_memory_is_counted_by_machine(predictor: Predictor) -> None:
    table = 500_000 * 16 * 4.0
    for optimizer, factor in ((Optimizer.SGD, 1), (Optimizer.ADAGRAD, 2), (Optimizer.ROWWISE_ADAGRAD, 1)):
        d = hosted(CACHED, 0.25, table_optimizer=optimizer)
        memory = memory_of(d)
        np.testing.assert_allclose(memory.host, [factor * table, 0, 0, 0])
        assert (
            memory.host_shortfall_bytes(replace(PAIR, host_memory_bytes=table / 2))
            == factor * table - table / 2
        )
    rowwise = memory_of(hosted(CACHED, 0.25, table_optimizer=Optimizer.ROWWISE_ADAGRAD))
    plain = memory_of(hosted(CACHED, 0.25))
    assert (
        rowwise.optimizer_state[0] - plain.optimizer_state[0] == sum(t.num_embeddings for t in TABLES) * 4.0
    )
    split = design([(TWRW, (2, 3), ComputeKernel.FUSED_UVM)] * 3)
    short = replace(PAIR, host_memory_bytes=1.0)
    whole = sum(t.num_embeddings for t in TABLES) * 16 * 4.0
    assert memory_of(split).host_shortfall_bytes(short) == whole - 1.0
    prediction = predictor.predict(split.with_system(System(DEVICE, short, WORLD)))
    assert not prediction.fits
    assert prediction.host_shortfall_bytes == whole - 1.0
    assert prediction.shortfall_bytes == 0.0


def test_dense_tables_have_gradients_of_their_size() -> None:
    whole = (ShardingType.TABLE_WISE, (0,))
    dense, fused = (
        memory_of(design([(*whole, kernel), whole, whole]))
        for kernel in (ComputeKernel.DENSE, ComputeKernel.FUSED)
    )
    assert dense.gradients[0] - fused.gradients[0] == 4000 * 16 * 4.0
