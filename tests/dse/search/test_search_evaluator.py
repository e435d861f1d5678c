from __future__ import annotations

import pickle
import re
from pathlib import Path

import numpy as np
import pytest

from dse.candidate import settings_at
from dse.config import load_design
from dse.placement import plan_for
from dse.search.evaluator import pricing_of
from dse.study_config import load_space
from perfcore.errors import ProfileError
from perfcore.predictor import Predictor
from perfcore.profile.profile import profile_for

SPACE = """
name: tiny
model:
  num_dense_features: 13
  tables:
    - {name: a, num_embeddings: 100000, pooling_factor: 8}
    - {name: b, num_embeddings: 5000}
    - {name: c, num_embeddings: 2000000, pooling_factor: 1, skew: 1.05}
  embedding_dim: {choices: [16, 64]}
  bottom_hidden: [128]
  top_hidden: {depth: {choices: [1, 2]}, widths: {choices: [128, 512]}}
training:
  global_batch: {choices: [1024, 4096]}
  precision: {choices: [tf32, bf16]}
fusion:
  embedding: {choices: [per_table, table_batched]}
  launches: {choices: [eager, cuda_graph]}
system:
  node: dgx-a100-80gb
  world_size: {choices: [1, 4]}
objectives: [{metric: time_per_sample_us}, {metric: quality_loss}]
quality: {model: capacity_law}
search: {trials: 20, batch: 10}
"""


@pytest.fixture(scope="module")
def priced(tmp_path_factory):
    path = tmp_path_factory.mktemp("space") / "tiny.yaml"
    path.write_text(SPACE, encoding="utf-8")
    config = load_space(path)
    pricing = pricing_of(config, None)
    evaluator = pickle.loads(pickle.dumps(pricing.factory))()
    codes = config.space.sample(np.random.default_rng(4), 12)
    return config, pricing, evaluator, codes


def test_what_is_priced_in_bulk_is_what_the_exported_design_is_predicted_to_take(priced, tmp_path):
    config, pricing, evaluator, codes = priced
    evaluation = evaluator.evaluate(codes)
    predictor = Predictor(profile_for(config.space.device, config.space.node))
    for row, code in enumerate(codes):
        path = tmp_path / "design.yaml"
        path.write_text(pricing.design_text(code), encoding="utf-8")
        design = load_design(path, place=plan_for)
        settings = settings_at(config.space, code)
        assert design.training.global_batch == settings["training.global_batch"]
        assert design.system.world_size == settings["system.world_size"]
        prediction = predictor.predict(design)
        # The bulk path folds in float32 and prices sums over layers by interpolation.
        assert evaluation.metrics["iteration_time_ms"][row] * 1e3 == pytest.approx(
            prediction.iteration_time_us, rel=2e-3
        )
        fullest = prediction.memory.total.max()
        assert evaluation.metrics["hbm_gib"][row] * 2**30 == pytest.approx(float(fullest), rel=1e-6)
        assert (evaluation.margins[row, 0] <= 0) == prediction.fits


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_space_without_an_axis_is_one_design(tmp_path, ranks):
    path = tmp_path / "fixed.yaml"
    path.write_text(re.sub(r"\{choices: \[([^],]*)[^]]*\]\}", r"\1", SPACE), encoding="utf-8")
    config = load_space(path, overrides=[f"system.world_size={ranks}", "fusion.embedding=table_batched"])
    assert config.space.axes == ()
    pricing = pricing_of(config, None)
    evaluation = pricing.factory().evaluate(np.empty((1, 0), dtype=np.int16))
    (tmp_path / "design.yaml").write_text(pricing.design_text(np.empty(0, dtype=np.int16)), encoding="utf-8")
    design = load_design(tmp_path / "design.yaml", place=plan_for)
    predicted_us = Predictor(profile_for(config.space.device, config.space.node)).iteration_time_us(design)
    assert evaluation.metrics["iteration_time_ms"][0] * 1e3 == pytest.approx(predicted_us, rel=2e-3)


def test_an_axis_on_which_nothing_depends_is_priced(tmp_path):
    path = tmp_path / "fixed.yaml"
    text = re.sub(r"\{choices: \[([^],]*)[^]]*\]\}", r"\1", SPACE)
    path.write_text(re.sub(r"(?m)^    - \{name: [ac].*\n", "", text), encoding="utf-8")
    overrides = ["system.world_size=2", "fusion.embedding={choices: [per_table, table_batched]}"]
    config = load_space(path, overrides=overrides)  # one table, placed alike however it is looked up
    evaluation = pricing_of(config, None).factory().evaluate(config.space.enumerate())
    assert len(evaluation.objectives) == 2
    assert np.isfinite(evaluation.objectives).all()


def test_many_at_once_are_priced_as_one_by_one(priced):
    _, _, evaluator, codes = priced
    together = evaluator.evaluate(codes)
    for row in range(len(codes)):
        alone = evaluator.evaluate(codes[row : row + 1])
        np.testing.assert_array_equal(alone.objectives[0], together.objectives[row])
        np.testing.assert_array_equal(alone.margins[0], together.margins[row])


def test_every_placement_has_a_certified_gap(priced):
    config, pricing, evaluator, codes = priced
    time_us = evaluator.evaluate(codes).metrics["iteration_time_ms"] * 1e3
    gaps = pricing.gaps_pct(codes, time_us)
    ranks = np.array([settings_at(config.space, code)["system.world_size"] for code in codes])
    assert (gaps >= 0).all()
    assert (gaps[ranks == 1] == 0).all()
    assert (ranks > 1).any()
    # A placement that takes longer has a larger gap: the bound does not depend on it.
    slower = pricing.gaps_pct(codes, 2 * time_us)
    assert (slower[ranks > 1] >= 99.9).all()


def test_no_candidates_have_an_evaluation_too(priced):
    _, _, evaluator, codes = priced
    assert evaluator.evaluate(codes[:0]).objectives.shape == (0, 2)


def test_an_unknown_profile_is_refused_before_anything_is_built(priced):
    with pytest.raises(ProfileError, match="nosuch"):
        pricing_of(priced[0], "nosuch")


@pytest.mark.parametrize("file", ["dlrm_small.yaml", "dlrm_terabyte.yaml"])
def test_the_shipped_spaces_load(file):
    config = load_space(Path(__file__).parents[3] / "spaces" / file)
    assert config.space.size > 1000
