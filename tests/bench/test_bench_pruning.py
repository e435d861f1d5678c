"""Placements of the terabyte space with bounds that rule settings out, beside all of them, in CPU time of one run."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import pytest

from dse.grid import grid_of
from dse.placement.policy.choose import placed
from dse.quality.scaling_law import quality_model
from dse.search.evaluator import evaluation_of
from dse.search.placing import SpacePlanner
from dse.search.prospects import Prospects
from dse.study_config import load_space
from perfcore.profile.profile import profile_for

SPACE = Path(__file__).parents[2] / "spaces" / "dlrm_terabyte.yaml"
CASES = {
    "as shipped": (),
    "least hours alone": ("objectives=[{metric: hours_per_epoch}]",),
    "8 to 32 GPUs, cost and quality": (
        "system.world_size={choices: [8, 16, 32]}",
        "objectives=[{metric: cost_per_epoch_usd}, {metric: quality_loss}]",
    ),
    "8 to 64 GPUs, time and quality": ("system.world_size={choices: [8, 16, 32, 64]}",),
}


@pytest.mark.benchmark(group="pruning", timer=time.process_time)
@pytest.mark.parametrize("name", CASES)
def test_settings_placed(benchmark, figure, request, name):
    if not request.config.getoption("benchmark_enable"):
        pytest.skip("placing a large space twice takes a minute")
    config = load_space(SPACE, overrides=CASES[name])
    space, profile = config.space, profile_for(config.space.device, config.space.node)
    evaluate = partial(evaluation_of, config, quality_model(config.quality))
    seconds, counts = [], []

    def place(prospects):
        placed.cache_clear()
        planner = SpacePlanner(space, profile, prospects=prospects)
        grid = grid_of(space, planner, distributed=True)
        begin = time.process_time()
        assert grid.dims.num_ranks > 1
        seconds.append(time.process_time() - begin)
        counts.append(planner.placed)

    place(None)
    benchmark.pedantic(place, args=(Prospects(space, evaluate),), rounds=1)
    benchmark.extra_info |= {"placed": counts, "seconds": seconds}
    figure(
        name,
        f"{counts[0]} settings in {seconds[0]:.1f} s; ruled out: {counts[0] - counts[1]}, {seconds[1]:.1f} s",
    )
