"""Bulk prices equal the walk's and the plain oracle's, candidate by candidate."""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfcore.bulk import BulkTables
from perfcore.cost.model import Calibration, CostModel
from perfcore.curves import at, octave_grid, price_curve
from perfcore.errors import DesignError, UnsupportedError
from perfcore.graph.kernels import (
    Bucket,
    Collective,
    CollectiveKind,
    Elementwise,
    MultiTensor,
    Total,
    dims,
    resolve,
    with_dims,
)
from perfcore.graph.ops import Launch, Op, Region, Stream, WorkloadGraph
from perfcore.grid import axes_of, expand, shrink, tabulate
from perfcore.overheads import OpOverheads, OverheadTable
from perfcore.schedule import compile_steps, schedule

sys.path.insert(0, str(Path(__file__).parent.parent))
from oracles import scalar_iteration_time

OVERHEADS = OverheadTable(
    by_op={"slow": OpOverheads(3, 20, 5, 7, 11, 4), "nothing": OpOverheads(1, 1, 1, 1, 1, 30)},
    default=OpOverheads(1, 4, 2, 3, 5, 6),
    launch_latency_us=8,
    kernel_gap_us=1,
    graph_gap_us=0.5,
    graph_launch_us=15,
    queue_depth=1024,
)
SIZES = (2, 3, 4)


class Priced:
    """A smooth toy price of any kernel that has a size."""

    def __init__(self, name, latency_us):
        self._name, self._latency_us = name, latency_us

    def predict_us(self, kernels):
        return [
            np.asarray(
                self._latency_us * (np.asarray(getattr(k, self._name)) > 0)
                + np.asarray(getattr(k, self._name)) / 50 * np.asarray(getattr(k, "world_size", 1.0))
            )
            for k in kernels
        ]

    def calibration(self, kernel):
        return Calibration.ANALYTIC


COST = CostModel(
    {
        Elementwise: Priced("elements", 2.0),
        MultiTensor: Priced("elements", 3.0),
        Collective: Priced("bytes", 5.0),
    }
)


def grid_array(rng, *, ranks=1, high=2000.0):
    """A random grid array that depends on a random part of the axes, and on the rank perhaps."""
    shape = tuple(s if rng.random() < 0.4 else 1 for s in SIZES)
    return np.round(rng.random((*shape, ranks if rng.random() < 0.5 else 1)) * high, 2) + 1.0


def random_graph(rng, ranks, captured, summed):
    streams = list(Stream)

    def mask():
        return True if rng.random() < 0.7 else grid_array(rng, ranks=ranks, high=2) > 2

    def launch():
        elements = grid_array(rng, ranks=ranks)
        kernel = Elementwise("add", elements, elements, elements)
        if rng.random() < 0.25:
            kernel = Collective(CollectiveKind.ALL_REDUCE, elements, 2.0, 2.0)
        return Launch(
            kernel,
            stream=streams[rng.integers(3)],
            after=tuple(s for s in streams if rng.random() < 0.2),
            blocks=bool(captured is None and rng.random() < 0.1),
            present=mask(),
        )

    def op():
        waits = tuple((streams[rng.integers(3)], streams[rng.integers(3)]) for _ in range(rng.integers(0, 2)))
        name = ["slow", "fast", "nothing"][rng.integers(3)]
        launches = tuple(launch() for _ in range(rng.integers(0, 3)))
        return Op(name, launches, waits=waits, present=mask())

    regions = [Region(str(k), tuple(op() for _ in range(rng.integers(1, 4)))) for k in range(3)]
    terms = tuple(grid_array(rng) * rng.integers(0, 2) for _ in range(4))
    if summed:
        buckets = []
        for k in range(4):
            bucket = Bucket(terms, k, 500.0, 900.0)
            kernel = Collective(CollectiveKind.ALL_REDUCE, bucket, grid_array(rng, high=2), 2.0)
            reduce_op = Op("reduce", (Launch(kernel, Stream.COMMUNICATION, after=(Stream.COMPUTE,)),))
            buckets.append(Region(f"bucket {k}", (op(), reduce_op)))
        total = MultiTensor("sgd", Total(tuple(t + 1 for t in terms)), 4.0, 12.0)
        launches = (
            Launch(total, present=grid_array(rng, high=2) > 2),
            launch(),
            Launch(replace(total, function="adam")),
        )
        regions += [*buckets, Region("optimizer", (Op("slow", launches),))]
    return WorkloadGraph(tuple(regions), num_ranks=ranks, captured_from=captured)


def candidate_graph(graph, code):
    """The graph of one candidate: every grid array sliced to `(1, r)`."""

    def sliced(value):
        if not isinstance(value, np.ndarray):
            return value
        return value[tuple(min(c, s - 1) for c, s in zip(code, value.shape, strict=False))][None]

    def dim(value):
        if isinstance(value, (Total, Bucket)):
            return replace(value, terms=tuple(sliced(t) for t in value.terms))
        return sliced(value)

    def launch(x):
        kernel = with_dims(x.kernel, **{k: dim(v) for k, v in dims(x.kernel).items()})
        return replace(x, kernel=kernel, present=sliced(x.present))

    def op(o):
        return replace(o, present=sliced(o.present), launches=tuple(launch(x) for x in o.launches))

    regions = tuple(replace(r, ops=tuple(op(o) for o in r.ops)) for r in graph.regions)
    return replace(graph, regions=regions)


def walked(graph, code):
    one = candidate_graph(graph, code)
    durations = [np.atleast_2d(d) for d in COST.predict_us([resolve(x.kernel) for x in one.launches()])]
    return one, durations


CODES = np.array(list(itertools.product(*map(range, SIZES))))


@settings(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 2**31),
    ranks=st.sampled_from([1, 1, 2, 4]),
    captured=st.sampled_from([None, None, 0, 2]),
    summed=st.booleans(),
    max_entries=st.sampled_from([1, 2, 12, 4096]),
)
def test_bulk_equals_walk_and_oracle(seed, ranks, captured, summed, max_entries):
    rng = np.random.default_rng(seed)
    graph = random_graph(rng, ranks, captured, summed)
    tables = BulkTables.of_graphs(
        [graph], [[]], sizes=SIZES, cost=COST, overheads=OVERHEADS, max_entries=max_entries
    )
    got = tables.evaluate(np.zeros(len(CODES), dtype=int), CODES).iteration_time_us
    expected = []
    for code in CODES:
        one, durations = walked(graph, code)
        expected.append(schedule(compile_steps(one, durations, OVERHEADS)).iteration_time_us[0])
    tolerance = 1e-3 if summed and max_entries < 12 else 1e-4
    np.testing.assert_allclose(got, expected, rtol=tolerance)
    at_random = rng.integers(len(CODES))
    one, durations = walked(graph, CODES[at_random])
    oracle = scalar_iteration_time(one, durations, OVERHEADS, warm_up=300)
    assert got[at_random] == pytest.approx(oracle, rel=tolerance)


def test_structures_share_one_call():
    rng = np.random.default_rng(5)
    graphs = [random_graph(rng, 2, None, summed) for summed in (False, True, False)]
    alone = [
        BulkTables.of_graphs([g], [[]], sizes=SIZES, cost=COST, overheads=OVERHEADS).evaluate(
            np.zeros(len(CODES), dtype=int), CODES
        )
        for g in graphs
    ]
    together = BulkTables.of_graphs(graphs, [[], [], []], sizes=SIZES, cost=COST, overheads=OVERHEADS)
    which = rng.integers(3, size=len(CODES))
    got = together.evaluate(which, CODES).iteration_time_us
    np.testing.assert_array_equal(
        got, np.stack([a.iteration_time_us for a in alone])[which, range(len(CODES))]
    )


def test_dominated_ranks_do_not_matter():
    """Eight ranks, of which two trade places and the others are faster than one of the two."""
    slow = np.array([[[[10.0, 900, 300, 20, 20, 20, 290, 30]]]])
    other = np.array([[[[10.0, 100, 700, 20, 20, 20, 300, 30]]]])
    reduce = Op("reduce", (Launch(Collective(CollectiveKind.ALL_REDUCE, 50.0, 1.0, 8.0), Stream.COMPUTE),))
    graph = WorkloadGraph(
        (
            Region("a", (Op("fast", (Launch(Elementwise("add", slow, 1.0, 1.0)),)), reduce)),
            Region("b", (Op("fast", (Launch(Elementwise("add", other, 1.0, 1.0)),)), reduce)),
        ),
        num_ranks=8,
    )
    tables = BulkTables.of_graphs([graph], [[]], sizes=(1, 1, 1), cost=COST, overheads=OVERHEADS)
    one, durations = walked(graph, (0, 0, 0))
    expected = scalar_iteration_time(one, durations, OVERHEADS, warm_up=20)
    got = tables.evaluate(np.zeros(1, dtype=int), np.zeros((1, 3), dtype=int)).iteration_time_us
    assert got == pytest.approx([expected], rel=1e-6)


def test_memory_is_the_sum_on_the_fullest_rank():
    rng = np.random.default_rng(11)
    graph = random_graph(rng, 4, None, False)
    terms = [np.round(grid_array(rng, ranks=4, high=1e9)) for _ in range(12)]
    tables = BulkTables.of_graphs(
        [graph], [terms], sizes=SIZES, cost=COST, overheads=OVERHEADS, max_entries=6
    )
    got = tables.evaluate(np.zeros(len(CODES), dtype=int), CODES).hbm_bytes
    total = np.broadcast_to(sum(terms), (*SIZES, 4)).max(axis=-1)
    np.testing.assert_array_equal(got, total[tuple(CODES.T)])


# ---------------------------------------------------------------- curves and tables


@settings(deadline=None, max_examples=30)
@given(st.floats(1.0, 1e9), st.floats(0.3, 1.0))
def test_a_curve_is_within_a_thousandth(value, power):
    class Bent(Priced):
        def predict_us(self, kernels):
            return [4.0 + (k.bytes**power) / 1e3 + np.maximum(k.bytes - 1e6, 0) / 1e4 for k in kernels]

    cost = CostModel({Collective: Bent("bytes", 0.0)})
    kernel = Collective(CollectiveKind.ALL_REDUCE, 1.0, 2.0, 2.0)
    curve = price_curve(kernel, "bytes", span=(1.0, 1e9), cost=cost)
    expected = cost.predict_us([replace(kernel, bytes=value)])[0]
    got = at(curve.us.reshape(-1), 0, curve.exponent, curve.points, value)
    assert got == pytest.approx(float(expected), rel=1e-3)


def test_the_grid_of_octaves_ascends_and_covers():
    grid = octave_grid(-2, 3, 8)
    assert np.all(np.diff(grid) > 0)
    assert (grid[0], grid[-1]) == (0.25, 16.0)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**31))
def test_tables_keep_what_arrays_say(seed):
    rng = np.random.default_rng(seed)
    array = grid_array(rng, ranks=2)
    axes = axes_of([array], num_axes=3)
    table, kept = shrink(expand(tabulate(array, axes, SIZES), axes, (0, 1, 2), SIZES), (0, 1, 2), SIZES)
    assert set(kept) <= set(axes)
    back = expand(table, kept, (0, 1, 2), SIZES).reshape(*SIZES, -1)
    np.testing.assert_array_equal(back, np.broadcast_to(array, (*SIZES, array.shape[-1])))


# ---------------------------------------------------------------- bad input


def test_bad_codes_name_the_axis():
    graph = random_graph(np.random.default_rng(1), 1, None, False)
    tables = BulkTables.of_graphs([graph], [[]], sizes=SIZES, cost=COST, overheads=OVERHEADS)
    zero = np.zeros(1, dtype=int)
    with pytest.raises(DesignError, match=r"`0 <= code < 4` must hold on axis 2, but got 4 to 4"):
        tables.evaluate(zero, np.array([[0, 0, 4]]))
    with pytest.raises(DesignError, match=r"`0 <= structure < 1` must hold"):
        tables.evaluate(zero + 1, np.array([[0, 0, 0]]))
    with pytest.raises(DesignError, match=r"`codes` must be \(n, k\) = \(1, 3\), but has \(1, 2\)"):
        tables.evaluate(zero, np.array([[0, 0]]))


def test_too_many_ranks_are_refused():
    graph = WorkloadGraph((Region("a", (Op("fast"),)),), num_ranks=65)
    with pytest.raises(UnsupportedError, match=r"At most 64 ranks"):
        BulkTables.of_graphs([graph], [[]], sizes=(1,), cost=COST, overheads=OVERHEADS)


def test_a_large_sum_that_differs_among_ranks_is_refused():
    terms = tuple(np.ones((2, 1, 1, 2)) * k for k in range(1, 3))
    kernel = MultiTensor("sgd", Total(terms), 4.0, 12.0)
    graph = WorkloadGraph((Region("a", (Op("fast", (Launch(kernel),)),)),), num_ranks=2)
    with pytest.raises(UnsupportedError, match=r"same on all ranks"):
        BulkTables.of_graphs([graph], [[]], sizes=SIZES, cost=COST, overheads=OVERHEADS, max_entries=1)
