"""Tables from the cache price alike, and nothing about the cache is ever an error."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dse.placement import plan_for
from dse.search import bulk_times
from dse.search.bulk_times import BulkTimes
from dse.search.table_cache import TableCache, cache_folder, table_key
from dse.study_config import load_space
from perfcore.profile.profile import profile_for

SPACE = """
name: tiny
model:
  num_dense_features: 13
  tables: [{name: a, num_embeddings: 100000}, {name: b, num_embeddings: 5000, pooling_factor: 8}]
  embedding_dim: {choices: [16, 64]}
  bottom_hidden: [128]
  top_hidden: [256]
training:
  global_batch: {choices: [1024, 4096]}
system:
  node: dgx-a100-80gb
  world_size: {choices: [1, 2]}
objectives: [{metric: time_per_sample_us}]
"""


@pytest.fixture(scope="module")
def space(tmp_path_factory):
    path = tmp_path_factory.mktemp("space") / "tiny.yaml"
    path.write_text(SPACE, encoding="utf-8")
    return load_space(path).space


@pytest.fixture(scope="module")
def profile(space):
    return profile_for(space.device, space.node)


@pytest.fixture
def builds(monkeypatch):
    """How often tables were built."""
    counted = []

    class Counted(bulk_times.BulkPredictor):
        def __init__(self, *args, **named):
            counted.append(1)
            super().__init__(*args, **named)

    monkeypatch.setattr(bulk_times, "BulkPredictor", Counted)
    return counted


def prices(space, profile, cache):
    codes = np.array(list(np.ndindex(*(len(a.values) for a in space.axes))), dtype=np.int16)
    return np.stack(BulkTimes(space, profile, plan_for, cache=cache).price(codes))


def test_warm_equals_cold_without_a_build(space, profile, builds, tmp_path):
    cache = TableCache(tmp_path / "new" / "tables", smallest_bytes=0)
    expected = prices(space, profile, None)
    np.testing.assert_array_equal(prices(space, profile, cache), expected)
    assert len(builds) == 4  # one rank, and several
    np.testing.assert_array_equal(prices(space, profile, cache), expected)
    assert len(builds) == 4
    assert sorted(p.suffix for p in cache.folder.iterdir()) == [".npz", ".npz"]


def test_another_profile_or_space_is_another_entry(space, profile, builds, tmp_path):
    cache = TableCache(tmp_path, smallest_bytes=0)
    prices(space, profile, cache)
    prices(space, replace(profile, hash="changed"), cache)
    assert len(builds) == 4
    fixed = {**space.fixed, "training.optimizer": "adagrad"}
    prices(replace(space, fixed=fixed), profile, cache)
    assert len(builds) == 6


def test_changed_sources_are_another_entry(space, profile, monkeypatch):
    before = table_key(space, profile, distributed=True)
    assert before == table_key(space, profile, distributed=True)
    assert before != table_key(space, profile, distributed=False)
    monkeypatch.setattr("dse.search.table_cache._sources", lambda: "changed")
    assert before != table_key(space, profile, distributed=True)


def test_tables_of_several_ranks_follow_from_what_was_asked(space, profile):
    plain, asked = (table_key(space, profile, distributed=True, asked=a) for a in (None, "hours"))
    assert plain != asked
    alone = {table_key(space, profile, distributed=False, asked=a) for a in (None, "hours")}
    assert len(alone) == 1


@pytest.mark.parametrize("damage", ["empty", "cut", "flipped", "other arrays", "folder"])
def test_a_damaged_entry_is_built_again(space, profile, builds, tmp_path, damage):
    cache = TableCache(tmp_path, smallest_bytes=0)
    expected = prices(space, profile, cache)
    for path in tmp_path.glob("*.npz"):
        content = bytearray(path.read_bytes())
        if damage == "other arrays":
            np.savez(path, rows=np.zeros(3))
            continue
        if damage == "folder":
            path.unlink()
            path.mkdir()
            continue
        if damage == "flipped":
            content[len(content) // 2] ^= 255
        path.write_bytes(content[: {"empty": 0, "cut": len(content) // 2}.get(damage)])
    np.testing.assert_array_equal(prices(space, profile, cache), expected)
    assert len(builds) == 4


def test_a_folder_that_cannot_be_written_is_no_error(space, profile, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    cache = TableCache(tmp_path / "file" / "tables", smallest_bytes=0)
    np.testing.assert_array_equal(prices(space, profile, cache), prices(space, profile, None))


def test_small_tables_are_not_kept_and_old_ones_make_room(tmp_path):
    cache = TableCache(tmp_path, smallest_bytes=1000, most_bytes=20_000)
    cache.write("small", {"a": np.zeros(10)})
    cache.write("huge", {"a": np.zeros(10_000)})
    assert not list(tmp_path.iterdir())
    for age, key in enumerate(("first", "second")):
        cache.write(key, {"a": np.zeros(1000)})
        os.utime(tmp_path / f"{key}.npz", (age, age))
    assert cache.read("first") is not None  # used last now
    cache.write("third", {"a": np.zeros(1000)})
    assert sorted(p.stem for p in tmp_path.iterdir()) == ["first", "third"]


def test_the_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "dlrm-dse" / "tables"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_folder() == Path.home() / ".cache" / "dlrm-dse" / "tables"
