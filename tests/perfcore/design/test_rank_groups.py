"""Ranks whose GPUs differ: said in groups, held by rank, and the memory that each has."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from design_cases import DEVICE, NODE, predictor, random_design
from hypothesis import given, settings
from hypothesis import strategies as st

from perfcore.design.design import from_dict, to_dict
from perfcore.design.hardware import System
from perfcore.design.rank_groups import RankGroup, groups_of, system_of
from perfcore.errors import HardwareError
from perfcore.memory import memory_of
from perfcore.profile.profile import on_machine

KINDS = st.tuples(st.sampled_from([0.5, 1.0, 1.6]), st.sampled_from([None, 20e9, 30e9]))


@given(st.lists(KINDS, min_size=1, max_size=8))
@settings(deadline=None, max_examples=50)
def test_groups_say_all_of_every_rank(kinds: list[tuple[float, float | None]]) -> None:
    one_by_one = [RankGroup((rank,), *kind) for rank, kind in enumerate(kinds)]
    system = system_of(DEVICE, NODE, len(kinds), one_by_one)
    assert list(system.slowness or [1.0] * len(kinds)) == [s for s, _ in kinds]
    assert list(system.rank_hbm_bytes) == [DEVICE.hbm_bytes if b is None else b for _, b in kinds]
    groups = groups_of(system)
    assert system_of(DEVICE, NODE, len(kinds), groups) == system
    assert len({(g.slowness, g.hbm_bytes) for g in groups}) == len(groups)
    assert system.uneven == any(kind != (1.0, None) for kind in kinds) == bool(groups)


@given(st.lists(KINDS, min_size=1, max_size=8), st.integers(1, 8))
@settings(deadline=None, max_examples=50)
def test_a_smaller_world_has_the_first_ranks_and_a_larger_one_the_device(
    kinds: list[tuple[float, float | None]], size: int
) -> None:
    groups = [RankGroup((rank,), *kind) for rank, kind in enumerate(kinds)]
    whole = system_of(DEVICE, NODE, len(kinds), groups)
    resized, expected = whole.resized(size), system_of(DEVICE, NODE, size, groups)
    assert groups_of(resized) == groups_of(expected)
    assert resized.rank_hbm_bytes == expected.rank_hbm_bytes
    assert whole.even(size) == System(DEVICE, NODE, size)


def test_another_machine_keeps_what_is_said_of_ranks() -> None:
    system = system_of(DEVICE, NODE, 4, [RankGroup((1, 3), 2.0), RankGroup((2,), hbm_bytes=30e9)])
    larger = replace(DEVICE, hbm_bytes=100e9)
    moved = on_machine((larger, None), system)
    assert moved.slowness == (1.0, 2.0, 1.0, 2.0)
    assert moved.rank_hbm_bytes == (100e9, 100e9, 30e9, 100e9)


@pytest.mark.parametrize(
    ("hbm_bytes", "said"),
    [
        ((1e9,), "`hbm_bytes` must name every rank or none, but got 1 for world_size=2"),
        ((1e9, 0.0), "`0 < hbm_bytes < inf` must hold, but got 0.0 to 1000000000.0"),
        ((None, float("nan")), "`0 < hbm_bytes < inf` must hold"),
    ],
)
def test_impossible_memory_is_refused(hbm_bytes: tuple[float | None, ...], said: str) -> None:
    with pytest.raises(HardwareError, match=said):
        System(DEVICE, NODE, 2, (), hbm_bytes)


def test_each_rank_fits_into_its_own_gpu() -> None:
    base = random_design(np.random.default_rng(0), ranks=2, tables=2)  # all tables lie on rank 0
    held = memory_of(base).total
    assert held[0] > held[1]
    p = predictor()

    def predicted(*hbm_bytes: float | None):
        return p.predict(replace(base, system=replace(base.system, hbm_bytes=hbm_bytes)))

    assert predicted(None, float(held[1])).fits
    short = predicted(None, float(held[1]) - 1e6)
    assert not short.fits
    assert short.shortfall_bytes == pytest.approx(1e6)
    system = replace(base.system, hbm_bytes=(None, float(held[1]) - 1e6))
    assert short.memory.fullest(system) == (1, pytest.approx(-1e6))
    assert not predicted(float(held[0]) * 0.9, None).fits
    assert predicted(float(held[0]), 200e9).iteration_time_us == p.iteration_time_us(base)


def test_json_knows_ranks_that_differ() -> None:
    base = random_design(np.random.default_rng(0), ranks=3, tables=2)
    system = replace(base.system, slowness=(1.0, 2.0, 1.5), hbm_bytes=(None, None, 30e9))
    design = replace(base, system=system)
    assert from_dict(json.loads(json.dumps(to_dict(design)))) == design
