"""Spaces whose ranks differ: bulk prices, walks and a plain traversal agree, and a run ends in designs that say so."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from design_cases import every_plan, times_of
from oracles import scalar_iteration_time
from typer.testing import CliRunner

from dse.candidate import settings_at
from dse.cli import app
from dse.config import load_design
from dse.placement import plan_for
from dse.placement.design.gap import DesignBounds
from dse.placement.design.options import options_of
from dse.search.evaluator import pricing_of
from dse.study_config import load_space
from perfcore.graph.dlrm import graph_of
from perfcore.graph.kernels import Collective, resolve
from perfcore.predictor import Predictor
from perfcore.profile.profile import profile_for

SPACE = """
name: two_kinds
model:
  num_dense_features: 13
  tables:
    - {name: a, num_embeddings: 100000, pooling_factor: 8}
    - {name: b, num_embeddings: 2000000, skew: 1.05}
    - {name: c, num_embeddings: 3000000, pooling_factor: 20, skew: 1.05}
  embedding_dim: {choices: [16, 64]}
  bottom_hidden: [128]
  top_hidden: {depth: {choices: [1, 2]}, widths: {choices: [128, 512]}}
training:
  global_batch: {choices: [1024, 16384]}
  optimizer: {choices: [sgd, adam]}
fusion:
  embedding: {choices: [per_table, table_batched]}
  launches: {choices: [eager, cuda_graph]}
sharding: {policy: {choices: [auto, table_wise, row_wise]}}
system:
  node: dgx-a100-80gb
  world_size: {choices: [1, 2, 4]}
  ranks: [{ranks: 1-2, slowness: 1.7, hbm_gib: 2.4}, {ranks: 0, slowness: 0.8, hbm_gib: 2.8}]
objectives: [{metric: time_per_sample_us}, {metric: hbm_left_gib}]
search: {trials: 20, batch: 10}
"""


@pytest.fixture(scope="module")
def priced(tmp_path_factory):
    path = tmp_path_factory.mktemp("space") / "two_kinds.yaml"
    path.write_text(SPACE, encoding="utf-8")
    config = load_space(path)
    pricing = pricing_of(config, None)
    codes = config.space.sample(np.random.default_rng(1), 40)
    return config, pricing, codes, pricing.factory().evaluate(codes)


def designs_of(pricing, codes, folder: Path):
    for code in codes:
        path = folder / "design.yaml"
        path.write_text(pricing.design_text(code), encoding="utf-8")
        yield load_design(path, place=plan_for)


def test_bulk_prices_are_those_of_the_exported_designs(priced, tmp_path: Path) -> None:
    config, pricing, codes, evaluation = priced
    predictor = Predictor(profile_for(config.space.device, config.space.node))
    for row, design in enumerate(designs_of(pricing, codes, tmp_path)):
        assert design.system == config.space.system(
            settings_at(config.space, codes[row])["system.world_size"]
        )
        prediction = predictor.predict(design)
        rank, left = prediction.memory.fullest(design.system)
        metrics = {name: values[row] for name, values in evaluation.metrics.items()}
        assert metrics["iteration_time_ms"] * 1e3 == pytest.approx(prediction.iteration_time_us, rel=2e-3)
        assert metrics["hbm_gib"] * 2**30 == pytest.approx(prediction.memory.total[rank], rel=1e-6)
        assert metrics["hbm_left_gib"] * 2**30 == pytest.approx(left, abs=1e3)
        assert (evaluation.margins[row, 0] <= 0) == prediction.fits
    assert 0 < (evaluation.margins[:, 0] <= 0).mean() < 1


def test_bulk_prices_are_those_of_a_plain_traversal(priced, tmp_path: Path) -> None:
    config, pricing, codes, evaluation = priced
    predictor = Predictor(profile_for(config.space.device, config.space.node))
    times_us = evaluation.metrics["iteration_time_ms"] * 1e3
    worlds = [settings_at(config.space, c)["system.world_size"] for c in codes]
    rows = [worlds.index(w) for w in (1, 2, 4)]
    for row, design in zip(rows, designs_of(pricing, codes[rows], tmp_path), strict=True):
        ranks, graph = design.system.world_size, graph_of(design)
        slowness = np.array([0.8, 1.7, 1.7, 1.0][:ranks])
        kernels = [resolve(x.kernel) for x in graph.launches()]
        durations = [
            np.broadcast_to(us, (1, ranks)) * (1.0 if isinstance(kernel, Collective) else slowness)
            for kernel, us in zip(kernels, predictor.cost.predict_us(kernels), strict=True)
        ]
        expected = scalar_iteration_time(graph, durations, predictor.profile.overheads, warm_up=24, period=12)
        assert times_us[row] == pytest.approx(expected, rel=2e-3)


def test_policies_give_slow_and_small_ranks_less(priced, tmp_path: Path) -> None:
    _, pricing, codes, _ = priced
    design = next(d for d in designs_of(pricing, codes, tmp_path) if d.system.world_size == 4)
    model, training = replace(design.model, embedding_dim=64), replace(design.training, global_batch=1024)

    def placed(system):
        found = plan_for.place(model, training, system, "table_wise")
        return {t.table: t.ranks[0] for t in found.plan.tables}, found

    on, found = placed(design.system)
    assert on["c"] == 3  # does not fit elsewhere
    assert found.feasible
    roomy = replace(design.system, hbm_bytes=())
    assert placed(roomy)[0]["c"] == 0  # the only quick one
    paces = np.array(design.system.slowness)
    alone = placed(roomy.even(4))[1].load_us.max()
    assert placed(roomy)[1].load_us.max() == pytest.approx(alone * paces.min())


def test_bounds_of_a_front_are_below_every_plan(priced, tmp_path: Path) -> None:
    config, pricing, codes, _ = priced
    predictor = Predictor(profile_for(config.space.device, config.space.node))
    two = [d for d in designs_of(pricing, codes, tmp_path) if d.system.world_size == 2][:4]
    best_us = np.array([times_of(d, every_plan(options_of(d)), predictor).min() for d in two])
    lower_us = DesignBounds(predictor).lower_us(two, 2 * best_us)
    assert (lower_us <= best_us * (1 + 1e-6)).all()
    assert (lower_us > 0.3 * best_us).all()


def test_a_run_exports_designs_with_their_ranks(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "two_kinds.yaml"
    path.write_text(SPACE, encoding="utf-8")
    fixed = ["system.world_size=4", "search.method=exact", "training.optimizer=sgd", "model.top_hidden=[128]"]
    options = [o for s in fixed for o in ("--set", s)]
    result = CliRunner().invoke(app, ["run", str(path), "--json", "--runs-dir", str(tmp_path), *options])
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert answer
    files = sorted((tmp_path / "two_kinds" / "designs").glob("*.yaml"))
    front = (tmp_path / "two_kinds" / "pareto.csv").read_text().splitlines()
    place = front[0].split(",").index
    config = load_space(path)
    predictor = Predictor(profile_for(config.space.device, config.space.node))
    assert files
    for file in files:
        design = load_design(file, place=plan_for)
        assert design.system == config.space.system(4)
        said = next(line.split(",") for line in front if file.name in line)
        prediction = predictor.predict(design)
        assert prediction.fits
        assert float(said[place("iteration_time_ms")]) * 1e3 == pytest.approx(
            prediction.iteration_time_us, rel=1e-6
        )
        left = prediction.memory.fullest(design.system)[1]
        assert float(said[place("hbm_left_gib")]) * 2**30 == pytest.approx(left, abs=1e3)
    manifest = json.loads((tmp_path / "two_kinds" / "manifest.json").read_text())
    assert [f for f in manifest["resolved"] if f.startswith("ranks ")] == [
        f"ranks 1-2: slowness 1.7, hbm_bytes {2.4 * 2**30}",
        f"ranks [0]: slowness 0.8, hbm_bytes {2.8 * 2**30}",
    ]
