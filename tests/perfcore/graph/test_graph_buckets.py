"""Gradient buckets against a plain loop, and their order in the graph."""

from __future__ import annotations

from typing import Any

import numpy as np
from graph_designs import EAGER, small
from hypothesis import given, settings
from hypothesis import strategies as st

from perfcore.design.model import Interaction
from perfcore.design.sharding import ShardingType
from perfcore.graph.communication import BUCKET_CAP_BYTES, FIRST_BUCKET_BYTES
from perfcore.graph.dlrm import graph_of
from perfcore.graph.kernels import Bucket, Collective, CollectiveKind

MIB = 1024.0**2


def buckets(sizes: list[float], first: float, cap: float) -> dict[int, float]:
    """Bytes by the index of the gradient that closes the bucket; an absent layer has no gradient."""
    closed: dict[int, float] = {}
    filled = 0.0
    gradients = [(index, size) for index, size in enumerate(sizes) if size]
    for number, (index, size) in enumerate(gradients, start=1):
        filled += size
        if filled >= (cap if closed else first) or number == len(gradients):
            closed[index] = filled
            filled = 0.0
    return closed


SIZES = st.lists(st.sampled_from([0.0, 1.0, 3.0, 10.0, 40.0]), min_size=1, max_size=12)


@settings(max_examples=50, deadline=None)
@given(designs=st.lists(SIZES, min_size=1, max_size=4), first=st.sampled_from([1.0, 4.0]), cap=st.just(25.0))
def test_buckets_equal_a_plain_loop(designs: list[list[float]], first: float, cap: float) -> None:
    width = max(map(len, designs))
    padded = np.array([[0.0] * (width - len(d)) + d for d in designs])  # absent layers come first
    terms = tuple(padded[:, i : i + 1] for i in range(width))
    for row, sizes in enumerate(padded):
        expected = buckets(list(sizes), first, cap)
        got = {i: float(Bucket(terms, i, first, cap).value()[row, 0]) for i in range(width)}
        assert {i: size for i, size in got.items() if size} == expected


def all_reduces(**changes: Any) -> list[float]:
    """Bytes of the buckets that are not empty, in order."""
    graph = graph_of(small(EAGER, world_size=4, **changes))
    values = [
        float(launch.kernel.bytes.value().max())
        for launch in graph.launches()
        if isinstance(launch.kernel, Collective) and isinstance(launch.kernel.bytes, Bucket)
    ]
    return [v for v in values if v]


def test_a_small_model_has_one_bucket() -> None:
    widths = [(13, 9), (9, 7), (7, 6), (6 + 4 * 3 // 2, 8), (8, 5), (5, 1)]
    assert all_reduces() == [4.0 * sum(n * (k + 1) for k, n in widths)]


def test_buckets_close_at_the_caps_in_order_of_readiness() -> None:
    assert (FIRST_BUCKET_BYTES, BUCKET_CAP_BYTES) == (MIB, 25 * MIB)
    # Ready first is the top MLP's last layer: 1025 values; then 4 MiB layers.
    got = all_reduces(top_hidden=(1024,) * 9, bottom_hidden=(), interaction=Interaction.CAT)
    square = 4.0 * 1024 * 1025
    assert got[0] == 4 * 1025 + square  # the first bucket closes beyond 1 MiB
    assert got[1] == 7 * square  # the next holds seven squares: six are less than 25 MiB
    rest = 4.0 * (1024 * (6 * 4 + 1) + 6 * 14)  # the top MLP's first layer, the bottom MLP
    assert got[2:] == [rest]


def test_cross_layers_and_replicated_tables_are_reduced_too() -> None:
    plain, crossed = (sum(all_reduces(interaction=i)) for i in (Interaction.CAT, Interaction.DCN_V2))
    width, rank, layers = 6 * 4, 2, 3
    assert crossed - plain == 4.0 * layers * (2 * width * rank + width)
    replicated = sum(all_reduces(interaction=Interaction.CAT, kinds=(ShardingType.DATA_PARALLEL,)))
    assert replicated - plain == 4.0 * 6 * (50 + 40 + 60)


def test_every_rank_reduces_on_its_communication_stream() -> None:
    graph = graph_of(small(EAGER, world_size=4))
    for launch in graph.launches():
        if isinstance(launch.kernel, Collective):
            assert (launch.stream.value, [s.value for s in launch.after]) == ("communication", ["compute"])
            assert float(np.max(launch.kernel.world_size)) == 4.0  # type: ignore[arg-type]
    kinds = {x.kernel.kind for x in graph.launches() if isinstance(x.kernel, Collective)}
    assert kinds == {CollectiveKind.ALL_TO_ALL, CollectiveKind.ALL_REDUCE}
