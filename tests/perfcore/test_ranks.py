from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from perfcore.design import hardware
from perfcore.design.design import Design
from perfcore.design.hardware import System
from perfcore.design.model import EmbeddingTable, Interaction, Model
from perfcore.design.sharding import ShardingPlan, ShardingType, TableSharding
from perfcore.design.training import Fusion, Training
from perfcore.graph.dlrm import graph_of
from perfcore.graph.kernels import resolve
from perfcore.predictor import Predictor
from perfcore.profile.profile import profile_for
from perfcore.ranks import merged
from perfcore.schedule import compile_steps, schedule
from perfcore.steps import Steps

NODE = hardware.node("dgx-a100-80gb")
DEVICE = hardware.device(NODE.device)
RANKS = 96


@pytest.fixture(scope="module")
def predictor() -> Predictor:
    return Predictor(profile_for(DEVICE, NODE))


def design(kind: ShardingType, ranks: int = RANKS) -> Design:
    tables = tuple(EmbeddingTable(f"t{i}", 1000 * (i + 1) + i, pooling_factor=30.0) for i in range(3))
    model = Model(13, tables, 16, (32,), (32,), Interaction.DOT)
    everyone = tuple(range(ranks))
    plan = ShardingPlan(
        tuple(
            TableSharding(t.name, kind, (i,) if kind is ShardingType.TABLE_WISE else everyone)
            for i, t in enumerate(tables)
        )
    )
    return Design(model, Training(64 * ranks), Fusion(), plan, System(DEVICE, NODE, ranks))


def steps_of(d: Design, predictor: Predictor) -> Steps:
    graph = graph_of(d)
    durations_us = predictor.cost.predict_us([resolve(launch.kernel) for launch in graph.launches()])
    return compile_steps(graph, durations_us, predictor.profile.overheads)


@pytest.mark.parametrize("kind", [ShardingType.TABLE_WISE, ShardingType.ROW_WISE, ShardingType.DATA_PARALLEL])
def test_equal_ranks_are_one_and_the_iteration_is_the_same(kind: ShardingType, predictor: Predictor) -> None:
    steps = steps_of(design(kind), predictor)
    few, ranks = merged(steps)
    assert len(ranks) == few.num_ranks < 10
    assert ranks[0] == 0
    assert schedule(few).iteration_time_us == pytest.approx(schedule(steps).iteration_time_us, rel=1e-9)
    prediction = predictor.predict(design(kind))
    assert prediction.ranks == tuple(ranks)
    assert prediction.rank in prediction.ranks
    assert np.isfinite(prediction.device_active_us)


def test_few_ranks_stay_as_they_are(predictor: Predictor) -> None:
    steps = steps_of(design(ShardingType.ROW_WISE, 8), predictor)
    few, ranks = merged(steps)
    assert few is steps
    assert ranks.tolist() == list(range(8))


def test_a_thousand_different_ranks_take_as_long_as_the_slowest(predictor: Predictor) -> None:
    steps = steps_of(design(ShardingType.ROW_WISE), predictor)
    slowest = 2 * steps.durations_us[:, :, :1]
    wide = np.repeat(slowest, 1024, axis=2) * np.linspace(0.5, 1, 1024)
    masks = np.repeat(steps.masks[:, :, :1], 1024, axis=2)
    many, ranks = merged(replace(steps, durations_us=wide, masks=masks))
    assert len(ranks) == many.num_ranks == 1024
    alone = replace(steps, durations_us=slowest, masks=masks[:, :, :1].copy())
    expected = schedule(alone).iteration_time_us
    assert schedule(many).iteration_time_us == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("ranks", [512, 4096])
def test_thousands_of_ranks_have_finite_times(ranks: int, predictor: Predictor) -> None:
    prediction = predictor.predict(design(ShardingType.ROW_WISE, ranks))
    assert np.isfinite(prediction.iteration_time_us)
    assert 0 < prediction.device_active_us <= prediction.iteration_time_us * (1 + 1e-9)


def test_rounding_does_not_grow_in_the_steady_state_of_many_ranks(predictor: Predictor) -> None:
    """Longest paths around a cycle of weight 1e-12 would double with every clock."""
    steps = steps_of(design(ShardingType.ROW_WISE, 160), predictor)
    timeline = schedule(steps)
    assert np.isfinite(timeline.start_state_us).all()
    assert np.abs(timeline.start_state_us).max() < 100 * timeline.iteration_time_us[0]
