from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from dse.candidate import column, design_of, settings_at
from dse.config import load_design
from dse.pareto import pareto_mask
from dse.placement import plan_for
from dse.placement.design.brief import brief_plans
from dse.placement.design.gap import DesignBounds
from dse.placement.policy.choose import by_policies, iteration_times_us
from dse.quality.scaling_law import quality_model
from dse.search.evaluator import build_evaluator, evaluation_of, pricing_of
from dse.search.placing import SpacePlanner
from dse.search.protocol import Evaluation
from dse.search.replan import replanned
from dse.space import SearchSpace
from dse.study_config import StudyConfig, load_space
from perfcore.design.sharding import ShardingType
from perfcore.memory import memory_of
from perfcore.predictor import Predictor
from perfcore.profile.profile import profile_for

SPACE = """
name: eight_tables
model:
  num_dense_features: 13
  tables:
    - {name: a, num_embeddings: 100000, pooling_factor: 8}
    - {name: b, num_embeddings: 5000, pooling_factor: 20}
    - {name: c, num_embeddings: 2000000, skew: 1.05}
    - {name: d, num_embeddings: 300, pooling_factor: 3}
    - {name: e, num_embeddings: 700000, pooling_factor: 5}
    - {name: f, num_embeddings: 40000, pooling_factor: 2}
    - {name: g, num_embeddings: 90000, pooling_factor: 12}
    - {name: h, num_embeddings: 20}
  embedding_dim: {choices: [16, 64]}
  bottom_hidden: [64]
  top_hidden: {depth: {choices: [1, 2]}, widths: {choices: [64, 512]}}
training:
  global_batch: {choices: [1022, 4096, 65536]}
fusion:
  embedding: table_batched
  launches: {choices: [eager, cuda_graph]}
sharding:
  policy: {choices: [auto, table_wise]}
system:
  node: dgx-a100-80gb
  world_size: {choices: [1, 4]}
objectives: [{metric: time_per_sample_us}, {metric: quality_loss}]
quality: {model: capacity_law}
search: {trials: 20, batch: 10}
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> StudyConfig:
    path = tmp_path_factory.mktemp("space") / "eight_tables.yaml"
    path.write_text(SPACE, encoding="utf-8")
    return load_space(path)


@pytest.fixture(scope="module")
def space(config: StudyConfig) -> SearchSpace:
    return config.space


@pytest.fixture(scope="module")
def predictor(space: SearchSpace) -> Predictor:
    return Predictor(profile_for(space.device, space.node))


@pytest.fixture(scope="module")
def front(config: StudyConfig) -> tuple[np.ndarray, Evaluation]:
    codes = config.space.enumerate()
    evaluation = build_evaluator(config, None).evaluate(codes)
    kept = np.flatnonzero(pareto_mask(evaluation.objectives))
    return codes[kept], evaluation.take(kept)


@pytest.fixture(scope="module")
def better(config: StudyConfig, front: tuple[np.ndarray, Evaluation]):
    return pricing_of(config, None).replanned(*front, searches=4)


def test_a_planner_gives_the_same_plans_together_and_one_by_one(space: SearchSpace, predictor) -> None:
    rows = space.enumerate()[::7]
    one_by_one, together = (SpacePlanner(space, predictor.profile) for _ in range(2))
    from dse.candidate import request_of

    asked = [request_of(space, settings_at(space, row)) for row in rows]
    asked = [r for r in asked if r[2].world_size > 1]
    together.ahead(asked)
    assert [one_by_one(*r) for r in asked] == [together(*r) for r in asked]


def test_auto_is_no_slower_than_a_policy_where_little_hides_the_tables(space: SearchSpace, predictor) -> None:
    planner = SpacePlanner(space, predictor.profile)
    settings = {"system.world_size": 4, "training.global_batch": 65536, "sharding.policy": "auto"}
    row = np.zeros(len(space.axes), dtype=np.int16)
    for name, value in settings.items():
        axis = space.axes[space.position(name)]
        row[space.position(name)] = axis.values.index(value)
    row[space.position("fusion.launches")] = space.axes[space.position("fusion.launches")].values.index(
        "cuda_graph"
    )
    design = design_of(space, space.canonical(row[None])[0], planner)
    plain = [p.plan for p in by_policies(design.model, design.training, design.system)]
    designs = [design, *(replace(design, sharding=p) for p in plain)]
    times_us = iteration_times_us(designs, predictor=predictor)
    assert times_us[0] <= 1.002 * times_us.min()


def test_designs_of_any_kinds_are_priced_as_one_by_one(space: SearchSpace, predictor) -> None:
    designs = [design_of(space, row, plan_for) for row in space.enumerate()[::11]]
    alone = [predictor.iteration_time_us(d) for d in designs]
    assert iteration_times_us(designs, predictor=predictor).tolist() == pytest.approx(alone, rel=1e-12)


def test_a_replanned_front_is_predicted_to_take_what_it_says(
    config, predictor, better, tmp_path: Path
) -> None:
    pricing = pricing_of(config, None)
    times_ms = better.evaluation.metrics["iteration_time_ms"]
    assert len(better.plans) == len(better.codes) == len(times_ms) > 2
    for i, (row, plan) in enumerate(zip(better.codes, better.plans, strict=True)):
        path = tmp_path / "design.yaml"
        path.write_text(pricing.design_text(row, plan), encoding="utf-8")
        design = load_design(path, place=plan_for)
        assert times_ms[i] * 1e3 == pytest.approx(predictor.iteration_time_us(design), rel=1e-12)
        assert memory_of(design).shortfall_bytes(design.system) == 0


def test_no_design_gets_slower_and_some_get_faster(config, front, better) -> None:
    before = {c.tobytes(): t for c, t in zip(front[0], front[1].metrics["iteration_time_ms"], strict=True)}
    for row, time_ms in zip(better.codes, better.evaluation.metrics["iteration_time_ms"], strict=True):
        if row.tobytes() in before:
            assert time_ms <= before[row.tobytes()] * 1.002  # tables of bulk prediction are rounded
    assert better.improved > 0
    assert 0 < better.searches <= 6  # half as many again, where gaps are wide
    assert pareto_mask(better.evaluation.objectives).all()


def test_the_new_front_covers_the_old_one(front, better) -> None:
    old, new = front[1].objectives, better.evaluation.objectives
    covered = (new[None] <= old[:, None] * 1.002 + 1e-12).all(axis=2).any(axis=1)
    assert covered.all()


def test_the_same_front_gives_the_same_plans(config, front, better) -> None:
    again = pricing_of(config, None).replanned(*front, searches=4)
    assert again.plans == better.plans
    np.testing.assert_array_equal(again.evaluation.objectives, better.evaluation.objectives)


def test_a_fixed_policy_is_kept(config, space: SearchSpace, predictor) -> None:
    codes = space.enumerate()
    fixed = codes[
        (column(space, codes, "sharding.policy") == "table_wise")
        & (column(space, codes, "system.world_size") > 1)
    ]
    without = pricing_of(load_space_without_auto(config), None)
    assert without.config.space.size < space.size
    rows = without.config.space.enumerate()[-5:]
    evaluation = build_evaluator(without.config, None).evaluate(rows)
    same = without.replanned(rows, evaluation, searches=4)
    assert same.evaluation is evaluation
    assert set(same.plans) == {None}
    # Where `auto` is there too, the twin under `auto` may take the member's place.
    evaluation = build_evaluator(config, None).evaluate(fixed)
    mixed = pricing_of(config, None).replanned(fixed, evaluation, searches=2)
    for row, plan in zip(mixed.codes, mixed.plans, strict=True):
        if settings_at(space, row)["sharding.policy"] == "table_wise":
            assert {t.type for t in plan.tables} == {ShardingType.TABLE_WISE}


def load_space_without_auto(config: StudyConfig) -> StudyConfig:
    space = config.space
    axes = tuple(a for a in space.axes if a.name != "sharding.policy")
    return replace(
        config, space=replace(space, axes=axes, fixed=dict(space.fixed) | {"sharding.policy": "table_wise"})
    )


class Gaps(DesignBounds):
    """Says of all designs that their plans may be so much slower than the best."""

    def __init__(self, gap: float) -> None:
        self.gap, self.asked = gap, 0

    def lower_us(self, designs, times_us):
        self.asked += len(designs)
        return times_us / (1 + self.gap)


@pytest.mark.parametrize(("gap", "searches"), [(0.5, 3), (0.001, 2), (np.nan, 2)])
def test_designs_with_wide_gaps_are_searched_once_more(
    config, front, predictor, gap: float, searches: int
) -> None:
    def with_bounds(bounds: DesignBounds | None):
        return replanned(
            config.space,
            *front,
            place=SpacePlanner(config.space, predictor.profile),
            predictor=predictor,
            evaluate=partial(evaluation_of, config, quality_model(config.quality)),
            searches=2,
            bounds=bounds,
        )

    gaps, without = Gaps(gap), with_bounds(None)
    found = with_bounds(gaps)
    assert (without.searches, found.searches) == (2, searches)
    assert gaps.asked >= len(front[0])
    covered = (found.evaluation.objectives[None] <= without.evaluation.objectives[:, None]).all(axis=2)
    assert covered.any(axis=1).all()


def test_nothing_is_searched_when_not_asked_for(config, front, predictor) -> None:
    def never(*_: object) -> Evaluation:
        raise AssertionError("nothing is priced")

    same = replanned(
        config.space,
        *front,
        place=SpacePlanner(config.space, predictor.profile),
        predictor=predictor,
        evaluate=never,
        searches=0,
    )
    assert same.codes is front[0]
    assert same.searches == same.improved == 0


def test_more_rounds_find_no_slower_plan(space: SearchSpace, predictor) -> None:
    rows = space.enumerate()
    rows = rows[
        (column(space, rows, "system.world_size") == 4)
        & (column(space, rows, "training.global_batch") == 65536)
    ]
    design = design_of(space, rows[0], plan_for)
    short, long = (
        [
            predictor.iteration_time_us(replace(design, sharding=p))
            for p in brief_plans(design, predictor=predictor, work=2_000, rounds=n)
        ]
        for n in (1, 2)
    )
    assert min(long) <= min(short) * (1 + 1e-9)
    assert short == sorted(short)
    assert long == sorted(long)
