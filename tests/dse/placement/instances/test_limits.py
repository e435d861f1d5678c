"""Limits make a smaller problem whose answers are answers of the whole."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from placement_oracle import every_assignment, every_place, random_problem

from dse.errors import ConfigError
from dse.placement.instances.labels import Labels
from dse.placement.instances.limits import limited, read_limits, unlimited
from dse.placement.instances.limits_schema import LimitsFile
from dse.placement.solver.problem import Problem, Where, loads_of
from dse.yaml_loader import Document, parse_yaml

TYPES = {
    Where.ANY: "column_wise",
    Where.ALL: "row_wise",
    Where.HOST: "table_row_wise",
    Where.WITHIN: "table_column_wise",
}


def labels_for(problem: Problem) -> Labels:
    return Labels(
        tables=tuple(f"t{t}" for t in range(problem.num_tables)),
        types=tuple(TYPES[Where(int(w))] for w in problem.where),
        kernels=("fused",) * problem.num_options,
        events=tuple(f"e{e}" for e in range(problem.num_events)),
    )


def document(text: str) -> Document[LimitsFile]:
    return parse_yaml(text, LimitsFile, source="limits.yaml")


def some_assignments(problem: Problem, most: int = 20):
    return itertools.islice(every_assignment(problem), most)


@given(seed=st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_without_limits_nothing_changes(seed: int) -> None:
    problem = random_problem(seed, most_places=200)
    same = unlimited(problem, labels_for(problem))
    for assignment in some_assignments(problem):
        back = same.original(assignment)
        assert back.option.tolist() == assignment.option.tolist()
        assert back.ranks == assignment.ranks


@given(seed=st.integers(0, 10**6), data=st.data())
@settings(max_examples=40, deadline=None)
def test_every_answer_under_limits_keeps_them_and_costs_the_same(seed: int, data: st.DataObject) -> None:
    problem = random_problem(seed, most_places=300)
    labels, ranks = labels_for(problem), problem.num_ranks
    pinned = data.draw(st.integers(0, problem.num_tables - 1))
    at = data.draw(st.lists(st.integers(0, ranks - 1), min_size=1, max_size=ranks, unique=True))
    slow = data.draw(st.sampled_from([1.0, 1.5]))
    text = f"pin: [{{table: t{pinned}, ranks: {at}}}]\nranks: [{{ranks: [0], slowness: {slow}, hbm_gib: 1e-9}}]\n"
    try:
        small = limited(problem, labels, document(text))
    except ConfigError as err:
        assert f"leave table 't{pinned}' no kind of sharding" in err.message  # noqa: PT017
        return
    assert small.problem.slowness[0] == slow
    assert small.problem.capacity_bytes[0] == pytest.approx(1e-9 * 2**30)
    for assignment in some_assignments(small.problem):
        whole = small.original(assignment)
        assert set(whole.ranks[pinned]) <= set(at)
        loads, expected = loads_of(small.problem, assignment), loads_of(problem, whole)
        factor = np.ones(ranks)
        factor[0] = slow / problem.slowness[0]
        assert loads.cost == pytest.approx(expected.cost * factor[:, None])
        assert loads.bytes == pytest.approx(expected.bytes)


@given(seed=st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_tables_that_stay_together_share_ranks_and_nothing_is_lost(seed: int) -> None:
    problem = random_problem(seed, most_places=200)
    if problem.num_tables < 2:
        return
    labels = labels_for(problem)
    try:
        small = limited(problem, labels, document("together: [[t0, t1]]"))
    except ConfigError as err:
        assert "no placement together" in err.message  # noqa: PT017
        return
    assert small.problem.num_tables == problem.num_tables - 1
    assert small.labels.tables[0] == "t0 + t1"
    for assignment in some_assignments(small.problem):
        whole = small.original(assignment)
        assert whole.ranks[0] == whole.ranks[1]
        assert whole.ranks[1] in set(every_place(problem, int(whole.option[1]), 1))
        assert labels.types[whole.option[0]] == labels.types[whole.option[1]]
        assert loads_of(problem, whole).cost == pytest.approx(loads_of(small.problem, assignment).cost)
        assert loads_of(problem, whole).bytes == pytest.approx(loads_of(small.problem, assignment).bytes)


def two_tables() -> tuple[Problem, Labels]:
    from dse.placement.instances.instance import Objective, instance_of_json

    option = [
        {"type": "table_wise", "part": "device", "sh": [[1, 0, 1, 0, 1]]},
        {"type": "row_wise", "part": "uniform", "sh": [[1, 0, 0, 0, 0.5]], "n": [2]},
        {"type": "data_parallel", "kernel": "dense", "part": "uniform", "sh": [[0, 0, 0, 1, 1]], "n": [2]},
    ]
    instance = instance_of_json(
        {"ws": 2, "lws": 2, "cap": 4, "names": ["a", "b"], "tables": [option, option]}
    )
    problem = instance.problem(Objective.RATING)
    return problem, Labels(instance.names, instance.types, instance.kernels, ("all",))


def test_kinds_and_kernels_can_be_forbidden() -> None:
    problem, labels = two_tables()
    text = "kinds: [{forbid: [row_wise]}, {tables: [b], allow: [table_wise]}, {tables: [a], forbid_kernels: [dense]}]"
    small = limited(problem, labels, document(text))
    assert small.labels.types == ("table_wise", "table_wise")


def test_a_limit_for_all_ranks_lowers_and_one_for_some_replaces() -> None:
    problem, labels = two_tables()
    small = limited(problem, labels, document("hbm_gib: 3\nranks: [{ranks: 1, hbm_gib: 9}]\nhost_gib: 2"))
    assert (small.problem.capacity_bytes / 2**30).tolist() == [3, 9]
    assert (small.problem.host_capacity_bytes / 2**30).tolist() == [2]
    larger = limited(problem, labels, document("hbm_gib: 30"))
    assert (larger.problem.capacity_bytes / 2**30).tolist() == [4, 4]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("pin: [{table: c, ranks: [0]}]", r"limits.yaml:1:15: pin.0.table: no table is called 'c'; the known ones are|no table is called 'c'"),
        ("pin: [{table: a, ranks: [2]}]", r"there are 2 ranks, 0 to 1, but got 2"),
        ("ranks: [{ranks: 0-99999}]", r"ranks.0.ranks: input should be less than 65536, but got 99999$"),
        ("ranks: [{ranks: 0-5, slowness: 2}]", r"ranks.0.ranks: there are 2 ranks"),
        ("ranks: [{ranks: 5-0}]", r"ranks.0.ranks: 1 or more must be in the list"),
        ("ranks: [{ranks: [0], slowness: 0}]", r"slowness"),
        (
            "ranks: [{ranks: 0-1, slowness: 2}, {ranks: 1, slowness: 3}]",
            r"^limits.yaml:1:37: ranks.1.ranks: each rank may be named once, but rank 1 is named already$",
        ),
        ("ranks: [{ranks: 0}]", r"ranks.0: give `slowness`, `hbm_gib`, or both$"),
        ("together: [[a, b], [a, b]]", r"together.1.0: table 'a' is in a group already"),
        ("together: [[a]]", r"together.0: 2 or more must be in the list"),
        ("kinds: [{forbid: [table_wise, row_wise, data_parallel]}]", r"kinds.0: the limits leave table 'a' no kind"),
        ("kinds: [{tables: [a]}]", r"give `allow`, `forbid` or `forbid_kernels`"),
        ("kinds: [{allow: [row_wise], forbid: [table_wise]}]", r"give `allow` or `forbid`, not both"),
        ("kinds: [{allow: [rowwise]}]", r"kinds.0.allow.0"),
        (
            "pin: [{table: a, ranks: 0}]\nkinds: [{tables: [a], allow: [row_wise]}]",
            r"pin.0: the limits leave table 'a' no kind of sharding \(a pin excludes",
        ),
        (
            "pin: [{table: a, ranks: 0}, {table: b, ranks: 1}]\ntogether: [[a, b]]",
            r"leave a and b no placement together: no rank is allowed to all",
        ),
        (
            "together: [[a, b]]\nkinds: [{tables: [a], allow: [row_wise]}, {tables: [b], allow: [table_wise]}]",
            r"no kind of sharding is left to all",
        ),
        ("hbm: 3", r"limits.yaml:1:1: hbm: "),
    ],
)  # fmt: skip
def test_mistakes_are_told_with_their_place(text: str, said: str) -> None:
    problem, labels = two_tables()
    with pytest.raises(ConfigError, match=said):
        limited(problem, labels, document(text))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_limits(tmp_path / "none.yaml")
