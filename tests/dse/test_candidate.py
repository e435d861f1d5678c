"""Candidates: codes to designs, and the grid of the bulk path against designs one by one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dse.candidate import column, design_of, even_plan, remembered, settings_at
from dse.errors import NoFeasibleCandidateError, SpaceError
from dse.grid import Grid, grid_of
from dse.space import SearchSpace
from dse.study_config import load_space
from perfcore.design.hardware import System
from perfcore.design.model import EmbeddingTable, Model
from perfcore.design.sharding import ShardingPlan, ShardingType, Shards
from perfcore.design.training import Fusion, Training
from perfcore.graph.dims import dims_of, structure_of

TEXT = """
name: tiny
model:
  num_dense_features: 13
  tables: [{name: a, num_embeddings: 1000, pooling_factor: 3}, {name: b, num_embeddings: 7}, {name: c, num_embeddings: 99}]
  embedding_dim: {choices: [16, 32]}
  bottom_hidden: {depth: {choices: [0, 2]}, widths: {choices: [64, 32]}}
  top_hidden: [{choices: [128, 256]}, {choices: [256, 512]}]
  interaction: {choices: [dot, dcn_v2]}
  cross_layers: {choices: [1, 2]}
  cross_rank: {choices: [8, 16]}
training:
  global_batch: {choices: [1024, 2048, 1026]}
  precision: {choices: [fp32, bf16]}
  table_precision: {choices: [fp32, bf16]}
sharding: {policy: {choices: [auto, row_wise]}}
fusion: {communication: {choices: [serial, overlapped]}, interaction: {choices: [eager, fused]}}
system: {node: dgx-a100-80gb, world_size: {choices: [1, 2, 4]}}
objectives: [{metric: iteration_time_ms}]
"""


def place(model: Model, training: Training, system: System, policy: str, fusion: Fusion) -> ShardingPlan:
    """Depends on everything that a placement may depend on, and finds nothing for large tables in large batches."""
    if training.global_batch == 2048 and model.embedding_dim == 32:
        raise NoFeasibleCandidateError("too large")
    half = policy == "auto" and training.global_batch > 1024
    return even_plan(model, policy="data_parallel" if half else policy, world_size=system.world_size)


@pytest.fixture(scope="module")
def space(tmp_path_factory: pytest.TempPathFactory) -> SearchSpace:
    path = tmp_path_factory.mktemp("space") / "tiny.yaml"
    path.write_text(TEXT, encoding="utf-8")
    return load_space(path).space


@pytest.fixture(scope="module")
def grids(space: SearchSpace) -> dict[bool, Grid]:
    found = {kind: grid_of(space, place, distributed=kind) for kind in (False, True)}
    return {kind: grid for kind, grid in found.items() if grid is not None}


def at(values: np.ndarray, codes: np.ndarray, tail: int) -> np.ndarray:
    """The element of a grid array at a candidate's codes; the last `tail` axes are kept."""
    lead = values.shape[: values.ndim - tail]
    return values[tuple(0 if size == 1 else int(c) for size, c in zip(lead, codes, strict=True))]


def test_settings_become_a_design(space: SearchSpace) -> None:
    row = space.sample(np.random.default_rng(3), 1)[0]
    settings_of_row = settings_at(space, row)
    design = design_of(space, row, place)
    assert design.training.global_batch == settings_of_row["training.global_batch"]
    assert design.model.tables == space.tables
    assert design.system.world_size == settings_of_row["system.world_size"]
    assert design.fusion.communication == settings_of_row["fusion.communication"]


@given(st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=50)
def test_the_grid_holds_the_designs_dims(space: SearchSpace, grids: dict[bool, Grid], seed: int) -> None:
    codes = space.sample(np.random.default_rng(seed), 1)
    design = design_of(space, codes[0], place)
    grid = grids[design.system.world_size > 1]
    (index,), (grid_codes,) = grid.locate(codes)
    assert grid.structures[index] == structure_of(design)
    one = dims_of([design])
    for name in ("global_batch", "world_size", "local_world_size", "embedding_dim", "cross_rank"):
        assert at(getattr(grid.dims, name), grid_codes, 1) == getattr(one, name)[0, 0], name
    for name in ("bottom_hidden", "top_hidden"):
        slots = [float(at(slot, grid_codes, 1)[0]) for slot in getattr(grid.dims, name)]
        widths = [float(slot[0, 0]) for slot in getattr(one, name)]
        assert slots == [0.0] * (len(slots) - len(widths)) + widths
    ranks = design.system.world_size
    for name in Shards.__dataclass_fields__:
        found = at(getattr(grid.dims.shards, name), grid_codes, 2)
        assert (found[:ranks] == getattr(one.shards, name)[0]).all(), name
    assert (at(grid.dims.shards.rows, grid_codes, 2)[ranks:] == 0).all()


def test_every_structure_is_some_designs(space: SearchSpace, grids: dict[bool, Grid]) -> None:
    codes = space.enumerate()
    for grid in grids.values():
        own = codes[grid.covers(codes)]
        index, _ = grid.locate(own)
        assert set(index.tolist()) == set(range(len(grid.structures)))


def test_a_field_has_size_one_where_it_depends_on_nothing(grids: dict[bool, Grid]) -> None:
    names = [a.name for a in grids[True].axes]
    shape = dict(zip(names, grids[True].dims.shards.rows.shape, strict=False))
    assert (shape["system.world_size"], shape["sharding.policy"]) == (2, 2)
    assert (shape["model.cross_rank"], shape["training.table_precision"]) == (1, 1)
    assert grids[False].dims.shards.rows.shape[-2:] == (1, 3)


def test_candidates_of_the_other_kind_are_refused(space: SearchSpace, grids: dict[bool, Grid]) -> None:
    codes = space.enumerate()
    with pytest.raises(SpaceError, match="This grid holds designs with one rank"):
        grids[False].locate(codes[grids[True].covers(codes)])


def test_the_solver_is_asked_once_for_each_problem(space: SearchSpace) -> None:
    asked = []

    def counting(
        model: Model, training: Training, system: System, policy: str, fusion: Fusion
    ) -> ShardingPlan:
        asked.append(
            (training.global_batch, training.table_precision, model.embedding_dim, system.world_size, policy)
        )
        return place(model, training, system, policy, fusion)

    cached = remembered(counting)
    grid = grid_of(space, cached, distributed=True)
    assert grid is not None
    assert not asked  # no placement before the dims are needed
    assert grid.dims is grid.dims
    for row in space.sample(np.random.default_rng(0), 50):
        design_of(space, row, cached)
    assert len(asked) == len(set(asked)) == (2 * 2 + 1) * 2 * 2 * 2  # 1026 does not divide by 4


def test_a_space_on_one_rank_has_no_distributed_grid() -> None:
    small = load_space(Path("spaces/dlrm_small.yaml")).space
    assert grid_of(small, place, distributed=True) is None
    grid = grid_of(small, place, distributed=False)
    assert grid is not None
    codes = small.enumerate()
    index, grid_codes = grid.locate(codes)
    assert len({(i, *map(int, row)) for i, row in zip(index, grid_codes, strict=True)}) == len(codes)


def test_a_column_is_every_candidates_value(space: SearchSpace) -> None:
    codes = space.sample(np.random.default_rng(1), 20)
    for name in ("training.global_batch", "model.num_dense_features", "sharding.policy", "model.interaction"):
        assert column(space, codes, name).tolist() == [settings_at(space, row)[name] for row in codes]


@pytest.mark.parametrize(
    ("policy", "kinds"),
    [
        ("auto", {ShardingType.TABLE_WISE}),
        ("row_wise", {ShardingType.ROW_WISE}),
        ("data_parallel", {ShardingType.DATA_PARALLEL}),
        ("column_wise", {ShardingType.COLUMN_WISE}),
    ],
)
def test_the_even_plan_keeps_to_its_policy(policy: str, kinds: set[ShardingType]) -> None:
    tables = tuple(EmbeddingTable(f"t{i}", 10 * (i + 1)) for i in range(6))
    model = Model(13, tables, 8, (16,), (16,))
    plan = even_plan(model, policy=policy, world_size=3)
    assert {t.type for t in plan.tables} == kinds
    if (
        policy == "auto"
    ):  # largest first, each to the emptiest: 60 | 50, 10 | 40, 30 and 20 to the emptiest then
        loads = [
            sum(t.num_embeddings for t, p in zip(tables, plan.tables, strict=True) if p.ranks == (r,))
            for r in range(3)
        ]
        assert sorted(loads) == [70, 70, 70]


def test_the_even_plan_splits_rows_on_one_machine_each() -> None:
    tables = tuple(EmbeddingTable(f"t{i}", 10 * (i + 1)) for i in range(4))
    model = Model(13, tables, 8, (16,), (16,))
    plan = even_plan(model, policy="table_row_wise", world_size=4, local_world_size=2)
    assert {t.type for t in plan.tables} == {ShardingType.TABLE_ROW_WISE}
    assert [t.ranks for t in plan.tables] == [(0, 1), (2, 3), (2, 3), (0, 1)]  # largest first, to the emptier
