"""A space file of real settings, priced by a formula instead of a profile."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dse.candidate import column, settings_at
from dse.constraints import margins_of
from dse.objective import metrics_of, objective_values
from dse.search.protocol import Evaluation
from dse.search.replan import Replanned

SPACE = """
name: toy
model:
  num_dense_features: 13
  tables:
    - {name: a, num_embeddings: 1000, pooling_factor: 2}
    - {name: b, num_embeddings: 50}
  embedding_dim: {choices: [16, 32, 64]}
  bottom_hidden: [64]
  top_hidden: {depth: {choices: [1, 2]}, widths: {choices: [64, 128, 256]}}
training:
  global_batch: {range: {low: 512, high: 4096, factor: 2}}
fusion:
  launches: {choices: [eager, cuda_graph]}
system: {device: v100-sxm2-16gb}
objectives:
  - {metric: iteration_time_ms}
  - {metric: samples_per_second}
constraints:
  - {metric: hbm_gib, max: 4}
search: {trials: 30, batch: 10, seed: 3}
"""


@dataclass(frozen=True)
class FormulaEvaluator:
    config: object

    def evaluate(self, codes):
        def values(name):
            return column(self.config.space, codes, name).astype(float)

        batch, dim = values("training.global_batch"), values("model.embedding_dim")
        eager = column(self.config.space, codes, "fusion.launches") == "eager"
        width = values("model.top_hidden.1") + values("model.top_hidden.2") * (
            values("model.top_hidden.depth") > 1
        )
        metrics = metrics_of(
            900.0 * eager + batch**0.9 * (0.2 + width / 1000) + dim,
            batch * dim * 2**15,
            global_batch=batch,
            world_size=np.ones(len(codes)),
            circumstances=self.config.circumstances,
        )
        margins = margins_of(self.config.constraints, metrics)
        return Evaluation(objective_values(self.config.objectives, metrics), margins, metrics)


@dataclass(frozen=True)
class FormulaPricing:
    config: object
    profile: str = "formula"
    profile_hash: str = "1"

    def factory(self):
        return FormulaEvaluator(self.config)

    def design_text(self, codes, plan=None):
        return str(settings_at(self.config.space, codes))

    def gaps_pct(self, codes, time_us, plans=None):
        return np.zeros(len(codes))

    def replanned(self, codes, evaluation, *, searches):
        return Replanned(codes, evaluation, (None,) * len(codes))


def formula_pricing(config, profile):
    return FormulaPricing(config, profile or "formula")
