"""The exact front of the small space is that of a brute-force loop over the plain traversal.

The test takes a corner of the space; `PYTHONPATH=.:tests python tests/dse/test_exact_front.py` takes all of it, in some ten minutes.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracles import scalar_iteration_time
from typer.testing import CliRunner

from dse.candidate import design_of, settings_at
from dse.cli import app
from dse.placement import plan_for
from dse.quality.protocol import features_of
from dse.quality.scaling_law import quality_model
from dse.study_config import StudyConfig, load_space
from perfcore.graph.dlrm import graph_of
from perfcore.graph.kernels import resolve
from perfcore.predictor import Predictor
from perfcore.profile.profile import profile_for

SPACE = Path("spaces/dlrm_small.yaml")
# A corner of the space: the plain traversal takes a tenth of a second a design.
CORNER = (
    "training.global_batch={choices: [512, 8192]}",
    "model.embedding_dim={choices: [16, 64]}",
    "model.top_hidden={depth: {choices: [1, 2]}, widths: {choices: [128, 512]}}",
    "fusion.interaction=fused",
    "fusion.optimizer=foreach",
    "fusion.mlp=eager",
)
TOLERANCE = 1e-3  # of the bulk path against the traversal


def oracle_objectives(config: StudyConfig, codes: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """`(n, 2)`: ns a sample by the plain traversal, and the quality proxy."""
    predictor = Predictor(profile_for(config.space.device, config.space.node))
    times_us = []
    for row in codes:
        design = design_of(config.space, row, plan_for)
        graph = graph_of(design)
        durations = predictor.cost.predict_us([resolve(x.kernel) for x in graph.launches()])
        overheads = predictor.profile.overheads
        times_us.append(scalar_iteration_time(graph, durations, overheads, warm_up=24, period=12))
        assert predictor.predict(design).fits
    batches = np.array([int(settings_at(config.space, row)["training.global_batch"]) for row in codes])
    proxy = quality_model(config.quality)
    assert proxy is not None
    loss = proxy.predict(features_of(config.space, codes)).loss
    return np.stack([np.array(times_us) / batches, loss], axis=1)


def brute_force_front(values: np.ndarray[Any, Any]) -> list[int]:
    """Rows that no other row beats, by comparing every pair."""
    return [
        i
        for i, mine in enumerate(values)
        if not any(np.all(other <= mine) and np.any(other < mine) for other in values)
    ]


def test_the_exact_front_is_that_of_brute_force(tmp_path: Path) -> None:
    check_front(tmp_path, CORNER)


def check_front(runs_dir: Path, overrides: tuple[str, ...]) -> str:
    """Run the space exactly, price every design by the plain traversal, compare the fronts."""
    options = [part for override in overrides for part in ("--set", override)]
    result = CliRunner().invoke(app, ["run", str(SPACE), "--json", "--runs-dir", str(runs_dir), *options])
    assert result.exit_code == 0, result.stderr
    summary = json.loads(result.stdout)
    config = load_space(SPACE, overrides=overrides)
    codes = config.space.enumerate()
    assert summary["method"] == "exact"
    assert summary["candidates_evaluated"] == summary["space_size"] == len(codes)
    values = oracle_objectives(config, codes)
    settings = [{k: str(v) for k, v in settings_at(config.space, row).items()} for row in codes]
    with (Path(summary["run_dir"]) / "pareto.csv").open() as file:
        found = [_index(settings, line) for line in csv.DictReader(file)]
    expected = brute_force_front(values)
    for i in expected:  # every design of the true front, or one as good, was found
        assert any(np.all(values[j] <= values[i] * (1 + TOLERANCE)) for j in found)
    for j in found:  # nothing that was found is beaten
        assert not any(np.all(values[i] < values[j] * (1 - TOLERANCE)) for i in expected)
    assert len(found) == summary["front_size"]
    # Designs that tie to the last bit (a fused and a foreach SGD inside a graph) are one point of the front.
    distinct = len({tuple(np.round(values[i], 9)) for i in expected})
    assert summary["front_size"] == pytest.approx(distinct, abs=2)
    return f"{len(codes)} designs, {distinct} distinct points on the true front, {len(found)} found"


def _index(settings: list[dict[str, str]], line: dict[str, str]) -> int:
    """The candidate that a line of `pareto.csv` names; an axis that does not matter is blank."""
    axes = {k: v for k, v in line.items() if "." in k and v}
    (index,) = [i for i, s in enumerate(settings) if all(s.get(k) == v for k, v in axes.items())]
    return index


if __name__ == "__main__":
    import sys
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        sys.stdout.write(check_front(Path(folder), ()) + "\n")
