"""One warm prediction of a DLRM with 26 tables, or 856, and how long the command line takes to answer."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from dse.config import load_design
from perfcore.design.hardware import System
from perfcore.design.model import Model
from perfcore.design.sharding import ShardingPlan, ShardingType, TableSharding
from perfcore.design.training import Fusion, Training
from perfcore.predictor import Predictor
from perfcore.profile.profile import profile_for

SPACES = Path(__file__).parents[2] / "spaces"
CRITEO = (
    "model.tables=criteo_terabyte",
    "model.num_dense_features=13",
    "system.device=a100-sxm4-80gb",
    "sharding.policy=table_wise",
)
SYNTHETIC = (
    "model.tables=synthetic_856",
    "model.interaction=cat",
    "training.global_batch=1048576",
    "system.device=a100-sxm4-80gb",
    "system.world_size=1024",
    "sharding.policy=table_wise",
)
DESIGNS = {
    "table-batched, 1 GPU": (*CRITEO, "fusion.embedding=table_batched", "system.world_size=1"),
    "per table, 1 GPU": (*CRITEO, "fusion.embedding=per_table", "system.world_size=1"),
    "table-batched, 8 GPUs": (*CRITEO, "fusion.embedding=table_batched", "system.world_size=8"),
    "table-batched, 856 tables, 1,024 GPUs": (*SYNTHETIC, "fusion.embedding=table_batched"),
    "per table, 856 tables, 1,024 GPUs": (*SYNTHETIC, "fusion.embedding=per_table"),
}


def in_turn(model: Model, training: Training, system: System, policy: str, fusion: Fusion) -> ShardingPlan:
    """Each table on the next rank."""
    placed = enumerate(model.tables)
    return ShardingPlan(
        tuple(TableSharding(t.name, ShardingType.TABLE_WISE, (i % system.world_size,)) for i, t in placed)
    )


@pytest.mark.benchmark(group="predict", timer=time.process_time)
@pytest.mark.parametrize("name", DESIGNS)
def test_one_prediction(benchmark, figure, name):
    design = load_design(
        SPACES / "designs" / "dlrm_default.yaml",
        overrides=["training.program=pytorch", *DESIGNS[name]],
        place=in_turn,
    )
    assert len(design.model.tables) == (856 if "856" in name else 26)
    predictor = Predictor(profile_for(design.system.device, design.system.node))
    predictor.predict(replace(design, training=replace(design.training, read_loss=True)))  # compiles, loads
    prediction = benchmark(predictor.predict, design)
    assert prediction.iteration_time_us > 0
    if benchmark.stats:
        figure(f"predict, {name}", f"{benchmark.stats.stats.median * 1e3:.1f} ms")


@pytest.mark.benchmark(group="command line")
def test_help(benchmark, figure):
    def ask():
        return subprocess.run(
            [sys.executable, "-c", "from dse.cli import main; main()", "--help"],
            capture_output=True,
            check=False,
        )

    answer = benchmark.pedantic(ask, rounds=5 if benchmark.enabled else 1)
    assert b"predict" in answer.stdout
    if benchmark.stats:
        figure("dse --help (wall time)", f"{benchmark.stats.stats.min:.2f} s")
