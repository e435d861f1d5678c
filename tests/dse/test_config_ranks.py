"""Ranks that differ, in design files and space files: read, written, set, and refused with place and rule."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from dse.candidate import even_plan
from dse.config import dump_design, load_design
from dse.errors import ConfigError, NoFeasibleCandidateError
from dse.ranks import differing_text
from dse.study_config import load_space, on_profile
from perfcore.design.design import Design
from perfcore.design.hardware import System
from perfcore.design.model import Model
from perfcore.design.sharding import ShardingPlan
from perfcore.design.training import Fusion, Training
from perfcore.units import BYTES_PER_GIB

DESIGN = """
model:
  num_dense_features: 13
  tables: [{name: a, num_embeddings: 1000}, {name: b, num_embeddings: 5e3}]
  embedding_dim: 16
  bottom_hidden: [64]
  top_hidden: [64]
training: {global_batch: 1024}
system:
  node: dgx-a100-80gb
  world_size: 4
  ranks:
    - {ranks: 2-3, slowness: 1.6, hbm_gib: 28}
"""
AXIS = DESIGN.replace("world_size: 4", "world_size: {choices: [1, 2, 4]}")
SPACE = f"""{AXIS}
name: two_kinds
objectives: [{{metric: time_per_sample_us}}, {{metric: hbm_left_gib}}]
"""


def evenly(model: Model, training: Training, system: System, policy: str, fusion: Fusion) -> ShardingPlan:
    return even_plan(model, policy=policy, world_size=system.world_size)


def load(folder: Path, text: str, *overrides: str) -> Design:
    path = folder / "design.yaml"
    path.write_text(text, encoding="utf-8")
    return load_design(path, overrides=overrides, place=evenly)


def space(folder: Path, text: str, *overrides: str):
    path = folder / "space.yaml"
    path.write_text(text, encoding="utf-8")
    return load_space(path, overrides=overrides)


def test_a_design_says_which_ranks_differ(tmp_path: Path) -> None:
    system = load(tmp_path, DESIGN).system
    own = system.device.hbm_bytes
    assert system.slowness == (1.0, 1.0, 1.6, 1.6)
    assert system.rank_hbm_bytes == (own, own, 28 * BYTES_PER_GIB, 28 * BYTES_PER_GIB)
    assert differing_text(system) == "2-3 (1.6 times as long, 28 GiB instead of 79.15)"


@pytest.mark.parametrize(
    ("override", "slowness", "gib"),
    [
        ("system.ranks=[]", (), ()),
        ("system.ranks=[{ranks: 1, slowness: 2}]", (1.0, 2.0, 1.0, 1.0), ()),
        ("system.ranks=[{ranks: [3, 0], hbm_gib: 40}]", (), (40, None, None, 40)),
        ("system.ranks.0.slowness=3", (1.0, 1.0, 3.0, 3.0), (None, None, 28, 28)),
        ("system.ranks=[{ranks: 0-3, slowness: 1}]", (), ()),
    ],
)
def test_ranks_are_set(tmp_path: Path, override: str, slowness: tuple, gib: tuple) -> None:
    system = load(tmp_path, DESIGN, override).system
    assert system.slowness == slowness
    assert tuple(b and b / BYTES_PER_GIB for b in system.hbm_bytes) == gib


def test_hosts_may_have_other_memory_than_their_node(tmp_path: Path) -> None:
    design = load(tmp_path, DESIGN, "system.host_gib=64")
    assert design.system.node.host_memory_bytes == 64 * BYTES_PER_GIB
    assert design.system.node.name == "dgx-a100-80gb"
    assert load(tmp_path, dump_design(design)) == design
    assert space(tmp_path, SPACE, "system.host_gib=64").space.node == design.system.node
    with pytest.raises(ConfigError, match=r"system\.host_gib: input should be greater than 0, but got 0$"):
        load(tmp_path, DESIGN, "system.host_gib=0")


@given(
    st.lists(
        st.tuples(st.sampled_from([None, 0.7, 1.6]), st.sampled_from([None, 28.0, 33.3])),
        min_size=4,
        max_size=4,
    )
)
@settings(deadline=None, max_examples=30)
def test_what_is_written_is_read_again(tmp_path_factory, kinds: list) -> None:
    entries = [
        {"ranks": rank} | {k: v for k, v in zip(("slowness", "hbm_gib"), kind, strict=True) if v}
        for rank, kind in enumerate(kinds)
        if any(kind)
    ]
    folder = tmp_path_factory.mktemp("designs")
    design = load(folder, DESIGN, f"system.ranks={entries}")
    text = dump_design(design)
    assert load(folder, text) == design
    assert ("ranks" in yaml.safe_load(text)["system"]) == bool(entries) == design.system.uneven


@pytest.mark.parametrize("load_one", [load, space])
@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ("2-4, slowness: 2}", r":13:8: system\.ranks\.0\.ranks: there are 4 ranks, 0 to 3, but got 4$"),
        (
            "3, slowness: 0}",
            r":13:18: system\.ranks\.0\.slowness: input should be greater than 0, but got 0$",
        ),
        ("3, slowness: -1}", r"system\.ranks\.0\.slowness: input should be greater than 0, but got -1$"),
        ("3, slowness: .inf}", r"system\.ranks\.0\.slowness: input should be a finite number, but got inf$"),
        ("3, hbm_gib: 0}", r":13:18: system\.ranks\.0\.hbm_gib: input should be greater than 0, but got 0$"),
        ("3}", r":13:7: system\.ranks\.0: give `slowness`, `hbm_gib`, or both$"),
        ("[3, 3], slowness: 2}", r"each rank may be named once, but rank 3 is named already$"),
        (
            "1-3, slowness: 2}\n    - {ranks: 3, hbm_gib: 9}",
            r":14:8: system\.ranks\.1\.ranks: each rank may be named once, but rank 3 is named already$",
        ),
        ("3, pace: 2}", r"system\.ranks\.0\.pace: unknown key `pace`; known keys: hbm_gib, ranks, slowness$"),
    ],
)
def test_mistakes_have_a_place_and_a_rule(tmp_path: Path, load_one, entries: str, said: str) -> None:
    text = DESIGN if load_one is load else SPACE
    text = text.replace("{ranks: 2-3, slowness: 1.6, hbm_gib: 28}", "{ranks: " + entries)
    with pytest.raises(ConfigError, match=f"(?m){said}"):
        load_one(tmp_path, text)


def test_a_world_without_the_ranks_is_refused_in_a_design(tmp_path: Path) -> None:
    said = r"design\.yaml:13:8: system\.ranks\.0\.ranks: there are 2 ranks, 0 to 1, but got 3$"
    with pytest.raises(ConfigError, match=said):
        load(tmp_path, DESIGN, "system.world_size=2")


def test_worlds_of_a_space_leave_ranks_beyond_them_out(tmp_path: Path) -> None:
    found = space(tmp_path, SPACE).space
    assert found.unequal_memory
    assert not found.system(1).uneven
    assert not found.system(2).uneven
    assert found.system(4) == load(tmp_path, DESIGN).system
    with pytest.raises(ConfigError, match="there are 2 ranks, 0 to 1, but got 3"):
        space(tmp_path, SPACE, "system.world_size={choices: [1, 2]}")
    with pytest.raises(ConfigError, match=r"system\.ranks: a list is needed, but got a mapping"):
        space(tmp_path, SPACE, "system.ranks={choices: [1]}")


def test_memory_is_constrained_rank_by_rank_where_it_differs(tmp_path: Path) -> None:
    unequal = space(tmp_path, SPACE)
    assert unequal.constraints[0].labels == ("hbm_left_gib >= 0",)
    assert not unequal.objectives[1].minimize
    slower = "system.ranks=[{ranks: 3, slowness: 2}]"
    objective = "objectives=[{metric: time_per_sample_us}]"
    alike = space(tmp_path, SPACE, slower, objective)
    assert alike.constraints[0].metric == "hbm_gib"
    assert on_profile(unequal, "v100-sxm2-16gb").constraints[0] == unequal.constraints[0]
    with pytest.raises(
        ConfigError,
        match=r"`hbm_left_gib` cannot be computed; all GPUs have the same memory, so `hbm_gib` says as much",
    ):
        space(tmp_path, SPACE, slower)


def test_a_table_for_the_largest_gpu_is_not_too_large(tmp_path: Path) -> None:
    table = "model.tables=[{name: a, num_embeddings: 2e9}]"  # 119 GiB
    text = SPACE + "sharding: {policy: table_wise}\n"
    with pytest.raises(NoFeasibleCandidateError, match=r"but the largest GPU has 79\.2"):
        space(tmp_path, text, table)
    assert space(tmp_path, text, table, "system.ranks.0.hbm_gib=141").space.unequal_memory
