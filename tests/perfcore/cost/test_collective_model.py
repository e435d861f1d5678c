from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_conformance import KernelModelConformance

from perfcore.cost.collective import CollectiveModel, SizeCurve, bytes_factor, increasing
from perfcore.cost.model import Calibration
from perfcore.design.hardware import Node
from perfcore.errors import ProfileError
from perfcore.graph.kernels import Collective, CollectiveKind

NODE = Node(
    name="toy-node",
    description="Eight toys",
    device="toy-gpu",
    gpus=8,
    intra_bytes_per_s=300e9,
    intra_latency_us=10.0,
    inter_bytes_per_s=25e9,
    inter_latency_us=14.0,
    host_memory_bytes=1e12,
)
SIZES = [2.0**i for i in range(10, 29, 2)]
TIMES = [12.0 + 1.75 * s / 250e9 * 1e6 for s in SIZES]
ALL_REDUCE = SizeCurve(SIZES, TIMES, bytes_factor=1.75)
MEASURED = CollectiveModel({(CollectiveKind.ALL_REDUCE, 8): ALL_REDUCE}, NODE)


def all_reduce(bytes_, world=8.0, local=8.0) -> Collective:
    return Collective(CollectiveKind.ALL_REDUCE, bytes_, world, local)


class TestMeasured(KernelModelConformance):
    model = MEASURED
    kernel = staticmethod(lambda s: all_reduce(s * 1000))
    work_dims = ("bytes",)
    least_bytes = staticmethod(lambda s: 1.75 * s * 1000)
    bytes_per_s = NODE.intra_bytes_per_s


class TestLinksOnly(KernelModelConformance):
    model = CollectiveModel({}, NODE)
    kernel = staticmethod(lambda s: Collective(CollectiveKind.ALL_TO_ALL, s * 1000, 16.0, 8.0))
    work_dims = ("bytes",)
    least_bytes = staticmethod(lambda s: s * 1000 / 2)
    bytes_per_s = NODE.inter_bytes_per_s


def test_the_curve_goes_through_its_points():
    np.testing.assert_allclose(ALL_REDUCE.us(np.array(SIZES)), TIMES, rtol=1e-9)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(1, 1e5), min_size=2, max_size=12), st.floats(1e2, 1e10), st.floats(1.0, 4.0))
def test_a_curve_never_falls(times, size, step):
    curve = SizeCurve([4.0**i * 64 for i in range(len(times))], times, bytes_factor=1.0)
    less, more = curve.us(np.array([size, size * step]))
    assert more >= less * (1 - 1e-9)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-5, 5), min_size=1, max_size=12))
def test_falling_times_are_pooled_to_their_means(values):
    found = increasing(np.array(values))
    assert np.all(np.diff(found) >= -1e-12)
    assert found.sum() == pytest.approx(sum(values), abs=1e-9)
    # The nearest such sequence: at each place the least of means to the right of the greatest to the left.
    count = len(values)
    exact = [
        max(min(np.mean(values[i : j + 1]) for j in range(at, count)) for i in range(at + 1))
        for at in range(count)
    ]
    assert found == pytest.approx(exact, abs=1e-9)


def test_beyond_the_last_size_the_bus_bandwidth_holds():
    last, far = ALL_REDUCE.us(np.array([SIZES[-1], 3 * SIZES[-1]]))
    assert (far - last) * 1e-6 * ALL_REDUCE.bus_bytes_per_s == pytest.approx(1.75 * 2 * SIZES[-1])


def test_one_rank_needs_no_collective():
    assert MEASURED.predict_us([all_reduce(1e6, world=1.0, local=1.0)])[0] == 0


def test_other_world_sizes_scale_by_moved_bytes():
    [us] = MEASURED.predict_us([all_reduce(1e9, world=4.0, local=4.0)])
    assert us == pytest.approx(ALL_REDUCE.us(np.array([1e9 * 1.5 / 1.75]))[0])


def test_machines_add_their_network():
    inside, across = MEASURED.predict_us([all_reduce(1e8), all_reduce(1e8, world=16.0)])
    assert across - inside == pytest.approx(2 * 14.0 + 2 * 1e8 / 8 / 2 / 25e9 * 1e6)


def test_ranks_and_worlds_broadcast():
    world = np.array([[1.0], [4.0], [8.0], [16.0]])
    [us] = MEASURED.predict_us([all_reduce(np.array([1e6, 1e7]), world=world, local=np.minimum(world, 8.0))])
    assert us.shape == (4, 2)
    assert np.all(us[0] == 0)
    assert np.all(np.diff(us, axis=0) > 0)


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        (all_reduce(1e6), Calibration.MEASURED),
        (all_reduce(1e10), Calibration.EXTRAPOLATED),
        (all_reduce(1e6, world=4.0, local=4.0), Calibration.EXTRAPOLATED),
        (all_reduce(1e6, world=16.0), Calibration.EXTRAPOLATED),
        (Collective(CollectiveKind.ALL_TO_ALL, 1e6, 8.0, 8.0), Calibration.EXTRAPOLATED),
    ],
)
def test_calibration_says_what_was_measured(kernel, expected):
    assert MEASURED.calibration(kernel) is expected
    assert CollectiveModel({}, NODE).calibration(kernel) is Calibration.ANALYTIC


@pytest.mark.parametrize("kind", list(CollectiveKind))
def test_bus_factors(kind):
    assert bytes_factor(kind, 8) == (1.75 if kind is CollectiveKind.ALL_REDUCE else 0.875)


def test_without_links_only_measured_machines_are_priced():
    bare = CollectiveModel({(CollectiveKind.ALL_REDUCE, 8): ALL_REDUCE}, None)
    with pytest.raises(ProfileError, match="node description is needed to price 16 ranks on 2 machines"):
        bare.predict_us([all_reduce(1e6, world=16.0)])


@pytest.mark.parametrize(("sizes", "times"), [([1.0], [1.0]), ([2.0, 1.0], [1.0, 2.0]), ([1.0, 2.0], [1.0])])
def test_bad_points_are_refused(sizes, times):
    with pytest.raises(ProfileError, match="two or more sizes, increasing"):
        SizeCurve(sizes, times, bytes_factor=1.0)


def test_points_without_time_are_refused():
    with pytest.raises(ProfileError, match="must be positive and finite"):
        SizeCurve([1.0, 2.0], [0.0, float("nan")], bytes_factor=1.0)
