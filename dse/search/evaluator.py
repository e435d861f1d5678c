"""The real prices of a space's candidates: bulk prediction with a profile, and the accuracy proxy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dse.candidate import Place, column, design_of
from dse.config import dump_design
from dse.constraints import margins_of
from dse.objective import metrics_of, objective_values
from dse.placement.design.gap import DesignBounds
from dse.quality.protocol import QualityModel, features_of
from dse.quality.scaling_law import quality_model
from dse.search.bulk_times import BulkTimes
from dse.search.placing import SpacePlanner
from dse.search.prospects import Prospects
from dse.search.protocol import Array, Codes, Evaluation, EvaluatorFactory
from dse.search.replan import Replanned, replanned
from dse.search.table_cache import TableCache, cache_folder
from dse.study_config import StudyConfig
from perfcore.design.design import Design
from perfcore.design.sharding import ShardingPlan
from perfcore.predictor import Predictor
from perfcore.profile.profile import Profile, load_profile, profile_for


class SpaceEvaluator:
    """Objectives, margins and metrics of a study's candidates."""

    def __init__(self, config: StudyConfig, profile: Profile, *, cache: TableCache | None = None) -> None:
        """Take the tables from the cache, or build them."""
        self._config = config
        self._quality: QualityModel | None = quality_model(config.quality)
        prospects = None
        if config.search.prune:
            prospects = Prospects(config.space, partial(evaluation_of, config, self._quality))
        planner = SpacePlanner(config.space, profile, prospects=prospects)
        asked = config.objectives, config.constraints, config.quality, config.circumstances
        self.times = BulkTimes(config.space, profile, planner, cache=cache, asked=prospects and asked)

    def evaluate(self, codes: Codes) -> Evaluation:
        """The evaluation of `(n, a)` canonical codes."""
        return evaluation_of(self._config, self._quality, codes, *self.times.price(codes))


def evaluation_of(
    config: StudyConfig,
    quality: QualityModel | None,
    codes: Codes,
    time_us: Array,
    hbm_bytes: Array,
    left_bytes: Array,
) -> Evaluation:
    """The evaluation of `(n, a)` codes with what `BulkTimes.price` says of them."""
    space = config.space
    proxy = quality.predict(features_of(space, codes)) if quality else None
    metrics = metrics_of(
        time_us,
        hbm_bytes,
        global_batch=column(space, codes, "training.global_batch").astype(np.float64),
        world_size=column(space, codes, "system.world_size").astype(np.float64),
        circumstances=config.circumstances,
        left_bytes=left_bytes if space.unequal_memory else None,
        quality_loss=None if proxy is None else proxy.loss,
        quality_std=None if proxy is None else proxy.std,
    )
    return Evaluation(
        objective_values(config.objectives, metrics), margins_of(config.constraints, metrics), metrics
    )


@dataclass(frozen=True)
class SpacePricing:
    """Prices of one study with one profile.

    Attributes:
        config: the study.
        source: name or folder of the profile; `None` takes the device's own.
    """

    config: StudyConfig
    source: str | None

    @cached_property
    def _loaded(self) -> Profile:
        return _profile(self.config, self.source)

    @property
    def profile(self) -> str:
        """Name of the profile, or its folder where that was named: by it the report finds the profile again."""
        named = self.source is not None and Path(self.source).parent != Path()
        return str(self.source) if named else self._loaded.name

    @property
    def profile_hash(self) -> str:
        """Of everything that the profile says."""
        return self._loaded.hash

    @property
    def factory(self) -> EvaluatorFactory:
        """Builds the evaluator where it is needed; the profile is read there."""
        return partial(build_evaluator, self.config, self.source)

    def design_text(self, codes: NDArray[Any], plan: ShardingPlan | None = None) -> str:
        """The design file of one candidate, `(a,)` codes, with a plan of its own or that of the search."""
        return dump_design(self._design(codes, plan))

    def gaps_pct(
        self, codes: Codes, time_us: Array, plans: Sequence[ShardingPlan | None] | None = None
    ) -> Array:
        """`(k,)` by how much a better placement could at most shorten the iterations of `(k, a)` candidates.

        In percent of the bound that no placement goes below; 0 on one rank.
        """
        own = plans or (None,) * len(codes)
        designs = [self._design(row, plan) for row, plan in zip(codes, own, strict=True)]
        lower_us = self._bounds.lower_us(designs, time_us)
        return np.asarray(100.0 * (time_us / lower_us - 1.0))

    def replanned(self, codes: Codes, evaluation: Evaluation, *, searches: int) -> Replanned:
        """The front, `(k, a)` codes, with placements looked for design by design."""
        return replanned(
            self.config.space,
            codes,
            evaluation,
            place=self._place,
            predictor=Predictor(self._loaded),
            evaluate=partial(evaluation_of, self.config, quality_model(self.config.quality)),
            searches=searches,
            bounds=self._bounds,
        )

    def _design(self, codes: NDArray[Any], plan: ShardingPlan | None) -> Design:
        design = design_of(self.config.space, codes, self._place)
        return design if plan is None else replace(design, sharding=plan)

    @cached_property
    def _bounds(self) -> DesignBounds:
        return DesignBounds(Predictor(self._loaded))

    @cached_property
    def _place(self) -> Place:
        return SpacePlanner(self.config.space, self._loaded)


def pricing_of(config: StudyConfig, source: str | None) -> SpacePricing:
    """Prices of a study; the profile asked for goes before the file's, and that before the device's own.

    Raises:
        ProfileError: there is no such profile, or it is corrupt.
    """
    pricing = SpacePricing(config, source or config.profile)
    assert pricing.profile  # loads it, so that a wrong name is told before anything is written
    return pricing


def build_evaluator(config: StudyConfig, source: str | None) -> SpaceEvaluator:
    """The evaluator of a study."""
    return SpaceEvaluator(config, _profile(config, source), cache=TableCache(cache_folder()))


def _profile(config: StudyConfig, source: str | None) -> Profile:
    device, node = config.space.device, config.space.node
    return profile_for(device, node) if source is None else load_profile(source, device=device, node=node)
