"""Remedies for designs whose tables fit nowhere: each one named is enough when it is applied."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from dse.config import load_design
from dse.errors import NoFeasibleCandidateError
from dse.placement.design.certify import plan_design
from dse.placement.design.shortage import design_remedies, fits, tables_problem
from dse.placement.solver.alternatives import alternatives
from dse.placement.solver.problem import Assignment, Loads, Problem, Where
from perfcore.design.design import Design
from perfcore.design.sharding import ShardingPlan, shards_of
from perfcore.graph.dims import dims_of, structure_of
from perfcore.memory import embedding_bytes
from perfcore.predictor import Predictor
from perfcore.profile.profile import priced

FILE = Path(__file__).parents[4] / "spaces" / "designs" / "criteo_8gpu.yaml"


def design(*overrides: str) -> Design:
    return load_design(
        FILE, overrides=list(overrides), place=lambda model, *_: ShardingPlan.on_one_rank(model)
    )


def greedy(problem: Problem) -> Assignment:
    """Tables one after another, the largest first, each in the way that is best then."""
    cost, held = np.zeros((problem.num_ranks, 1)), np.zeros(problem.num_ranks)
    on_host = np.zeros(len(problem.host_capacity_bytes))
    totals = np.add.reduceat(problem.bytes, problem.first_shard[:-1])
    size = np.minimum.reduceat(totals, problem.first_option[:-1])
    option, ranks = problem.first_option[:-1].copy(), [(0,)] * problem.num_tables
    nowhere = Assignment(np.full(problem.num_tables, -1), tuple(() for _ in ranks))
    for table in np.argsort(-size):
        found = alternatives(problem, nowhere, Loads(cost, held, on_host), int(table))
        best = found[0]
        option[table], ranks[table] = best.option, best.ranks
        shards = slice(problem.first_shard[best.option], problem.first_shard[best.option + 1])
        at = np.array(best.ranks)
        np.add.at(cost, at, problem.cost[shards] * problem.slowness[at, None])
        np.add.at(held, at, problem.bytes[shards])
    return Assignment(option, tuple(ranks))


def refusal_of(*overrides: str) -> tuple[str, str]:
    small, profile = priced(design(*overrides), None)
    with pytest.raises(NoFeasibleCandidateError) as refused:
        plan_design(small, predictor=Predictor(profile), remedies=lambda: [*design_remedies(small, greedy)])
    assert refused.value.exit_code == 3
    return refused.value.message, refused.value.hint or ""


def test_memory_is_that_of_the_predictor() -> None:
    mine = design()
    problem, labels = tables_problem(mine)
    whole = [o for o in range(problem.num_options) if labels.types[o] == "table_wise"]
    dims, structure = dims_of([mine]), structure_of(mine)
    assert shards_of(mine.sharding, mine.model, world_size=8).rows.shape == (8, 26)
    on_one = float(embedding_bytes(dims, structure)[0, 0])
    assert problem.bytes[problem.first_shard[whole]].sum() == pytest.approx(on_one)
    assert set(problem.where) == {Where.ANY, Where.ALL}


def test_two_gpus_are_too_few_and_every_remedy_is_enough() -> None:
    few = ("system.world_size=2", "training.table_optimizer=adagrad")
    message, hint = refusal_of(*few)
    assert re.fullmatch(r"All tables together need [\d.]+ GiB at least, but the 2 ranks have [\d.]+ GiB for them: [\d.]+ GiB are missing\.", message)  # fmt: skip
    assert "  1. 4 GPUs instead of 2 (--set system.world_size=4)." in hint
    changes = re.findall(r"\(((?:--set \S+ ?)+)\)", hint)
    assert len(changes) >= 3
    for change in changes:
        assert fits(design(*few, *change.replace("--set ", "").split()), greedy)
    saved = re.search(r"rowwise_adagrad for the tables: saves ([\d.]+) GiB", hint)
    assert saved is not None
    assert 90 < float(saved[1]) < 100  # fp32 sums of squares of 204 M rows of 128 columns
    room = re.search(r"([\d.]+) GiB for tables on each rank instead of ([\d.]+) GiB", hint)
    assert room is not None
    assert float(room[1]) > float(room[2])


def test_one_change_is_not_enough_but_two_are() -> None:
    message, hint = refusal_of(
        "system.node=dgx-1-v100-16gb", "system.world_size=4", "model.embedding_dim=512"
    )
    assert "missing" in message
    assert hint
