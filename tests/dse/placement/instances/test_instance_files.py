"""Instances to files and back; equal shards are stored once."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dse.errors import SpaceError
from dse.placement.instances.instance import (
    Instance,
    Objective,
    instance_of_json,
    json_of_instance,
    read_instance,
    write_instance,
)

DATA = Path(__file__).parents[3] / "data" / "sharding_instances"


def same(a: Instance, b: Instance) -> bool:
    arrays = ("where", "first_option", "first_shard", "cost_ms", "bytes")
    return (
        all(np.array_equal(getattr(a, n), getattr(b, n)) for n in arrays)
        and (a.types, a.kernels, a.names) == (b.types, b.kernels, b.names)
        and (a.num_ranks, a.ranks_per_host, a.capacity_bytes) == (b.num_ranks, b.ranks_per_host, b.capacity_bytes)
    )  # fmt: skip


@pytest.mark.parametrize("name", ["criteo_v2_cw_26x8", "synth_100x16_cw"])
@pytest.mark.parametrize("ending", [".json", ".json.gz"])
def test_a_round_trip_changes_nothing(name: str, ending: str, tmp_path: Path) -> None:
    before = read_instance(DATA / f"{name}.json.gz")
    write_instance(before, tmp_path / f"x{ending}")
    assert same(before, read_instance(tmp_path / f"x{ending}"))


def test_the_plain_form_without_counts_is_the_same_instance(tmp_path: Path) -> None:
    short = json.loads(gzip.decompress((DATA / "criteo_v2_26x8.json.gz").read_bytes()))
    plain = json.loads(json.dumps(short))
    for option in (o for table in plain["tables"] for o in table):
        counts = option.pop("n", [1] * len(option["sh"]))
        option["sh"] = [shard for shard, n in zip(option["sh"], counts, strict=True) for _ in range(n)]
    assert same(instance_of_json(short), instance_of_json(plain))
    assert len(json.dumps(plain)) > 2 * len(json.dumps(short))


def tiny(**option: Any) -> dict[str, Any]:
    shard = {"type": "row_wise", "part": "uniform", "sh": [[1, 0, 1, 0, 1]], "n": [2]}
    return {"ws": 2, "lws": 2, "cap": 4, "tables": [[shard | option]]}


def test_runs_end_where_options_end() -> None:
    data = tiny()
    data["tables"][0] *= 2
    back = json_of_instance(instance_of_json(data))
    assert [o["n"] for o in back["tables"][0]] == [[2], [2]]


@pytest.mark.parametrize("counts", [[0], [2, 1], [1.0], [True], "2", [-1], [10**9]])
def test_impossible_counts(counts: Any) -> None:
    with pytest.raises(
        SpaceError, match="`n` must have a count from 1 to 65536 for each of the 1 entries of `sh`"
    ):
        instance_of_json(tiny(n=counts))


def test_a_count_that_does_not_fill_the_ranks() -> None:
    with pytest.raises(SpaceError, match="uniform option needs 2 shards, one a rank, but table 'table_0'"):
        instance_of_json(tiny(n=[3]))


def test_events_are_named_in_the_order_of_the_costs() -> None:
    instance = read_instance(DATA / "criteo_v2_26x8.json.gz")
    names = instance.events(Objective.CRITICAL_PATH)
    problem = instance.problem(Objective.CRITICAL_PATH)
    assert len(names) == problem.num_events
    assert names[:2] == ("forward compute", "backward compute")
    assert problem.cost[:, 0] == pytest.approx(instance.cost_ms[:, 0])
    at = names.index("backward communication, table_wise")
    of = np.repeat(np.array(instance.types) == "table_wise", np.diff(instance.first_shard))
    assert problem.cost[of, at] == pytest.approx(instance.cost_ms[of, 3])
    assert not problem.cost[~of, at].any()
    assert instance.events(Objective.RATING) == ("all",)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"names": 5}, "`names` must be a list of one name a table, but got 5"),
        ({"names": ["a", "b"]}, "but there are 2 for 1 tables"),
        ({"names": ["a", "a"], "tables": tiny()["tables"] * 2}, "'a' is there twice"),
        ({"ws": 10**9}, "`ws` must be at most 65536, but got 1000000000"),
        ({"ws": True, "lws": True}, "positive multiple of `lws`"),
        ({"cap": 10**400}, "`cap` must be a number of GiB"),
        ({"cap": True}, "`cap` must be a number of GiB"),
        ({"hcap": None}, "`hcap` must be a number of GiB >= 0"),
        ({"hcap": float("nan")}, "`hcap` must be a number of GiB >= 0"),
    ],
)
def test_impossible_heads(change: dict[str, Any], said: str) -> None:
    with pytest.raises(SpaceError, match=re.escape(said)):
        instance_of_json(tiny() | change)


def broken_files() -> dict[str, bytes]:
    packed = gzip.compress(json.dumps(tiny()).encode())
    middle = len(packed) // 2
    return {
        "cut": packed[:middle],
        "flipped": packed[:middle] + bytes([packed[middle] ^ 255]) + packed[middle + 1 :],
        "block": packed[:10] + b"\xff" + packed[11:],
        "tail": packed + b"more",
        "deep": b"[" * 10**6,
        "bytes": b"\xff\xfe\x00",
        "empty": b"",
        "text": gzip.compress(b"no JSON"),
    }


@pytest.mark.parametrize("kind", list(broken_files()))
def test_broken_files(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "x.json.gz"
    file.write_bytes(broken_files()[kind])
    with pytest.raises(SpaceError, match=r"x\.json\.gz is no instance: "):
        read_instance(file)
