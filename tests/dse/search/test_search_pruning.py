"""Settings that bounds rule out: the front is the same, and fewer placements are solved."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dse.candidate import PLACEMENT_SETTINGS, design_of, even_plan, place_ahead, request_of, settings_at
from dse.errors import ConfigError
from dse.pareto import pareto_mask
from dse.placement.design.averages import lower_bounds_us
from dse.quality.protocol import QualityFeatures
from dse.quality.scaling_law import CapacityLaw, quality_model
from dse.search.bulk_times import BulkTimes
from dse.search.evaluator import SpaceEvaluator, evaluation_of
from dse.search.incumbents import many_networks
from dse.search.placing import SpacePlanner
from dse.search.prospects import Prospects, beaten_by
from dse.search.subspace import held_at, in_whole
from dse.study_config import StudyConfig, load_space
from perfcore.predictor import Predictor
from perfcore.profile.profile import Profile, profile_for

SPACE = """
name: twelve_tables
model:
  num_dense_features: 13
  tables: tables.csv
  embedding_dim: {choices: [16, 64]}
  bottom_hidden: {depth: 1, widths: {choices: [64, 512]}}
  top_hidden: {depth: {choices: [1, 2]}, widths: {choices: [64, 1024]}}
training:
  global_batch: {range: {low: 4096, high: 65536, factor: 4}}
  precision: {choices: [fp32, bf16]}
fusion:
  embedding: {choices: [per_table, table_batched]}
  launches: {choices: [eager, cuda_graph]}
sharding: {policy: {choices: [auto, row_wise]}}
system: {node: dgx-a100-80gb, world_size: {choices: [1, 2, 4, 8]}}
objectives: OBJECTIVES
quality: {model: capacity_law}
dataset: {samples: 1000000000}
search: {method: exact}
"""
TABLES = "num_embeddings,pooling_factor\n" + "".join(
    f"{rows},{pooling}\n"
    for rows, pooling in zip(
        [4_000_000, 1_500_000, 900_000, 50_000, 20_000, 7_000, 3_000, 900, 400, 90, 40, 9],
        [20, 1, 40, 1, 10, 1, 1, 5, 1, 1, 1, 1],
        strict=True,
    )
)
OBJECTIVES = {
    "time and quality": "[{metric: time_per_sample_ns}, {metric: quality_loss}]",
    "cost and quality": "[{metric: cost_per_epoch_usd}, {metric: quality_loss}]",
    "time": "[{metric: hours_per_epoch}]",
    "GPUs and time": "[{metric: world_size}, {metric: samples_per_second}]",
}


def config_of(folder: Path, objectives: str, *overrides: str) -> StudyConfig:
    (folder / "tables.csv").write_text(TABLES, encoding="utf-8")
    (folder / "space.yaml").write_text(SPACE.replace("OBJECTIVES", objectives), encoding="utf-8")
    return load_space(folder / "space.yaml", overrides=overrides)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> StudyConfig:
    return config_of(tmp_path_factory.mktemp("space"), OBJECTIVES["time and quality"])


@pytest.fixture(scope="module")
def profile(config: StudyConfig) -> Profile:
    return profile_for(config.space.device, config.space.node)


@pytest.fixture(scope="module")
def unpruned(config: StudyConfig, profile: Profile) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
    """All candidates and their times and memory, every setting placed."""
    codes = config.space.enumerate()
    return codes, BulkTimes(config.space, profile, SpacePlanner(config.space, profile)).price(codes)


def planner_of(config: StudyConfig, profile: Profile) -> SpacePlanner:
    evaluate = partial(evaluation_of, config, quality_model(config.quality))
    return SpacePlanner(config.space, profile, prospects=Prospects(config.space, evaluate))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_front_is_the_same_with_fewer_placements(
    name: str, tmp_path: Path, profile: Profile, unpruned: tuple[np.ndarray, tuple[np.ndarray, ...]]
) -> None:
    config = config_of(tmp_path, OBJECTIVES[name])
    codes, priced = unpruned
    planner = planner_of(config, profile)
    evaluate = partial(evaluation_of, config, quality_model(config.quality), codes)
    whole = evaluate(*priced)
    pruned = evaluate(*BulkTimes(config.space, profile, planner).price(codes))
    settings_placed = {tuple(row) for row in codes[:, _placement_axes(config)].tolist()}
    assert planner.placed < 0.8 * sum(_world(config, row) > 1 for row in settings_placed)
    for evaluation in (whole, pruned):
        assert evaluation.feasible.any()
    fronts = [_front(codes, e) for e in (whole, pruned)]
    assert fronts[0] == fronts[1]


def _placement_axes(config: StudyConfig) -> list[int]:
    return [i for i, a in enumerate(config.space.axes) if a.name in PLACEMENT_SETTINGS]


def _world(config: StudyConfig, chosen: tuple[int, ...]) -> int:
    names = [config.space.axes[i].name for i in _placement_axes(config)]
    axis = config.space.axes[config.space.position("system.world_size")]
    return int(axis.values[chosen[names.index("system.world_size")]])


def _front(codes: np.ndarray, evaluation) -> set[tuple[float, ...]]:
    objectives = evaluation.objectives[evaluation.feasible]
    return {tuple(np.round(o, 12)) for o in objectives[pareto_mask(objectives)]}


def test_nothing_is_ruled_out_where_nothing_is_feasible(tmp_path: Path, profile: Profile) -> None:
    config = config_of(
        tmp_path, OBJECTIVES["time"], "constraints=[{metric: iteration_time_ms, max: 0.000001}]"
    )
    planner = planner_of(config, profile)
    asked = _requests(config)
    planner.ahead(asked)
    assert planner.placed == len({(r[:4], r[4] if r[3] == "auto" else None) for r in asked})


def _requests(config: StudyConfig) -> list:
    space = config.space
    codes = space.enumerate()
    columns = [i for i, a in enumerate(space.axes) if a.name in PLACEMENT_SETTINGS]
    first = np.unique(codes[:, columns], axis=0, return_index=True)[1]
    asked = [request_of(space, settings_at(space, row)) for row in codes[first]]
    return [r for r in asked if r[2].world_size > 1]


def test_plans_are_those_of_a_planner_that_rules_nothing_out(config: StudyConfig, profile: Profile) -> None:
    ours, all_ = planner_of(config, profile), SpacePlanner(config.space, profile)
    asked = _requests(config)
    place_ahead(ours, asked)
    place_ahead(all_, asked)
    assert ours.placed < all_.placed
    assert sum(ours(*r) == all_(*r) for r in asked) >= ours.placed


def test_the_leanest_designs_have_the_least_bounds(config: StudyConfig, profile: Profile) -> None:
    """What pruning rests on, sampled: no other design of a setting is bounded lower."""
    space, planner = config.space, planner_of(config, profile)
    codes = space.sample(np.random.default_rng(3), 60)
    rows = [row for row in codes if int(settings_at(space, row)["system.world_size"]) > 1]
    requests = [request_of(space, settings_at(space, row)) for row in rows]
    designs = [design_of(space, row, _evenly) for row in rows]
    own = lower_bounds_us(designs, predictor=Predictor(profile))
    lean = planner._lower_us([(*r[:3], "auto", r[4]) for r in requests])
    assert len(own) > 30
    assert (own >= lean * (1 - 0.002)).all()


def _evenly(model, training, system, policy, fusion):
    return even_plan(model, policy="table_wise", world_size=system.world_size)


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.integers(8, 4096), min_size=3, max_size=3),
    st.integers(0, 2),
    st.integers(1, 512),
    st.sampled_from(["dot", "cat", "dcn_v2"]),
)
def test_proxies_are_monotone_in_widths(widths: list[int], which: int, more: int, interaction: str) -> None:
    """So that the best network of a setting has all widths at one end."""
    wider = [w + more * (i == which) for i, w in enumerate(widths)]

    def loss(chosen: list[int]) -> float:
        features = QualityFeatures(
            13,
            26,
            np.array([64.0]),
            np.array([chosen[:1]], dtype=float),
            np.array([chosen[1:]], dtype=float),
            np.array([interaction]),
            np.array([3.0]),
            np.array([512.0]),
            np.array([8192.0]),
        )
        return float(CapacityLaw().predict(features).loss[0])

    assert loss(wider) <= loss(widths)


def test_what_is_dominated() -> None:
    best = np.array([[1.0, 5.0], [2.0, 4.0], [2.0, 5.0], [3.0, 6.0]])
    np.testing.assert_array_equal(beaten_by(best), [0, 0, 2, 3])


def test_prospects_know_only_what_meets_the_limits(config: StudyConfig) -> None:
    evaluate = partial(evaluation_of, config, quality_model(config.quality))
    prospects = Prospects(config.space, evaluate)
    rows = config.space.enumerate()[:1]
    best = prospects.best(rows, np.array([1000.0]))
    assert not prospects.hopeless(best).any()
    too_much = np.array([1e15])
    prospects.learn(rows, np.array([1.0]), too_much, -too_much)
    assert not prospects.hopeless(best).any()
    widest = rows.copy()
    for name in (
        "model.bottom_hidden.1",
        "model.top_hidden.depth",
        "model.top_hidden.1",
        "model.top_hidden.2",
    ):
        widest[:, config.space.position(name)] = 1
    prospects.learn(widest, np.array([999.0]), np.array([1e9]), np.array([1e9]))
    assert prospects.hopeless(best).all()
    assert not prospects.hopeless(prospects.best(rows, np.array([998.0]))).any()


def test_networks_of_a_part_are_candidates_of_the_whole(config: StudyConfig, profile: Profile) -> None:
    space = config.space
    planner = SpacePlanner(space, profile)
    row = next(r for r in space.enumerate() if settings_at(space, r)["system.world_size"] == 4)
    model, training, *rest = request_of(space, settings_at(space, row))
    plans = {(model.embedding_dim, training.global_batch): planner(model, training, *rest)}
    codes, times_us, held, left = many_networks(space, profile, row, plans)
    assert len(codes) == len(np.unique(codes, axis=0)) == 12
    np.testing.assert_array_equal(space.canonical(codes), codes)
    assert space.allowed(codes).all()
    designs = [design_of(space, c, planner) for c in codes]
    whole = np.array([Predictor(profile).iteration_time_us(d) for d in designs])
    np.testing.assert_allclose(times_us, whole, rtol=5e-3)
    assert (held > 0).all()
    assert left.shape == held.shape


def test_a_part_holds_axes_and_frees_those_that_depended_on_them(config: StudyConfig) -> None:
    space = config.space
    row = next(r for r in space.enumerate() if settings_at(space, r)["model.top_hidden.depth"] == 1)
    names = frozenset({"model.top_hidden.depth", "system.world_size"})
    part = held_at(space, row, names)
    assert not names & {a.name for a in part.axes}
    assert "model.top_hidden.2" not in part  # there is no such layer
    codes = in_whole(space, part, part.enumerate(), row)
    assert {settings_at(space, c)["model.top_hidden.depth"] for c in codes} == {1}


def test_a_space_file_asks_for_pruning(tmp_path: Path, profile: Profile) -> None:
    plain, config = (config_of(tmp_path, OBJECTIVES["time"], f"search.prune={p}") for p in ("false", "true"))
    assert not plain.search.prune
    codes = config.space.enumerate()
    best = [SpaceEvaluator(c, profile).evaluate(codes).objectives.min() for c in (plain, config)]
    assert best[0] == best[1]
    with pytest.raises(ConfigError, match="prune"):
        config_of(tmp_path, OBJECTIVES["time"], "search.prune=3")
