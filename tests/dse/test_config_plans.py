"""Design files that name where every piece of a table is."""

from __future__ import annotations

from pathlib import Path

import pytest

from dse.config import dump_design, load_design
from dse.errors import ConfigError
from perfcore.design.design import Design
from perfcore.design.sharding import ComputeKernel, ShardingPlan, ShardingType, TableSharding

TEXT = """\
model:
  num_dense_features: 13
  tables: [{name: a, num_embeddings: 1000}, {name: b, num_embeddings: 2000}]
  embedding_dim: 16
  bottom_hidden: [64]
  top_hidden: [64]
training: {global_batch: 1024}
fusion: {embedding: table_batched, communication: pipelined}
sharding:
  plan:
    - {table: a, type: table_column_wise, ranks: [3, 3, 1], kernel: fused_uvm_caching, cache_ratio: 0.25}
    - {table: b, type: grid_shard, ranks: [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]}
system: {node: dgx-a100-80gb, world_size: 16}
"""


def never(*_: object) -> ShardingPlan:
    raise AssertionError


def load(folder: Path, text: str) -> Design:
    path = folder / "d.yaml"
    path.write_text(text, encoding="utf-8")
    return load_design(path, place=never)


def test_a_plan_with_kernels_survives_writing(tmp_path: Path) -> None:
    design = load(tmp_path, TEXT)
    assert design.sharding.tables == (
        TableSharding("a", ShardingType.TABLE_COLUMN_WISE, (3, 3, 1), ComputeKernel.FUSED_UVM_CACHING, 0.25),
        TableSharding("b", ShardingType.GRID_SHARD, tuple(range(16))),
    )
    written = dump_design(design)
    assert load(tmp_path, written) == design
    assert written.count("cache_ratio") == written.count("kernel:") == 1  # what is usual is left out


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("cache_ratio: 0.25", "cache_ratio: 2", r"sharding\.plan\.0\.cache_ratio: input should be less"),
        (", cache_ratio: 0.25", "", r"d\.yaml:11:\d+: sharding\.plan\.0: .*`0 < cache_ratio <= 1` must hold"),
        ("kernel: fused_uvm_caching", "kernel: fused", r"sharding\.plan\.0: .*for fused_uvm_caching alone"),
        (
            "kernel: fused_uvm_caching",
            "kernel: uvm",
            r"sharding\.plan\.0\.kernel: input should be 'fused', 'dense'",
        ),
        (
            "[3, 3, 1]",
            "[3, 8]",
            r"'a' is table_column_wise, which keeps its column pieces on one machine \(8 ",
        ),
        (
            "ranks: [0, 1,",
            "ranks: [1, 0,",
            r"'b' is grid_shard, which names, for each column piece, all ranks",
        ),
        ("table_batched", "per_table", r"sharding: Tables in host memory need `embedding: table_batched`"),
    ],
)
def test_mistakes_in_a_plan_are_told_with_their_place(old: str, new: str, said: str, tmp_path: Path) -> None:
    assert old in TEXT
    with pytest.raises(ConfigError, match=said):
        load(tmp_path, TEXT.replace(old, new))
