"""The report of a plan: what it says is what the assignment means; page, JSON and CSV agree."""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dse.errors import StorageError
from dse.placement.instances.instance import Objective, read_instance
from dse.placement.instances.labels import labels_of
from dse.placement.instances.limits import limited, unlimited
from dse.placement.instances.limits_schema import LimitsFile
from dse.placement.report.build import Certificate, PlanReport, report_of
from dse.placement.report.files import ranks_csv, report_json, tables_csv
from dse.placement.solver.problem import Assignment, Problem, Where, loads_of
from dse.report.placement import page_of, write_plan
from dse.yaml_loader import parse_yaml

DATA = Path(__file__).parents[2] / "data" / "sharding_instances"


def spread(problem: Problem) -> Assignment:
    """Every table whole, on the ranks in turn; every fifth by rows."""
    options, ranks = [], []
    for t in range(problem.num_tables):
        own = range(problem.first_option[t], problem.first_option[t + 1])
        where = Where.ALL if t % 5 == 4 else Where.ANY
        option = next((o for o in own if problem.where[o] == where), own[0])
        options.append(option)
        count = int(problem.shard_counts[option])
        ranks.append(
            tuple(range(count))
            if where == Where.ALL
            else tuple((t + i) % problem.num_ranks for i in range(count))
        )
    return Assignment(np.array(options), tuple(ranks))


def report(name: str = "criteo_v2_26x8", *, limits: str | None = None, proven: bool = False) -> tuple[PlanReport, Problem, Assignment]:  # fmt: skip
    instance = read_instance(DATA / f"{name}.json.gz")
    problem, labels = (
        instance.problem(Objective.CRITICAL_PATH),
        labels_of(instance, Objective.CRITICAL_PATH),
    )
    under = unlimited(problem, labels)
    if limits is not None:
        under = limited(problem, labels, parse_yaml(limits, LimitsFile, source="limits.yaml"))
    answer = spread(under.problem)
    objective = loads_of(under.problem, answer).objective
    certificate = Certificate(objective, objective / 1.25, 0.0 if proven else 25.0, proven, 0.5)
    made = report_of(
        problem, labels, under, answer, certificate, title="<b>criteo</b>", objective="critical path",
        facts={"note": "a & b"}, explained=5,
    )  # fmt: skip
    return made, problem, under.original(answer)


def test_ranks_and_tables_add_up_to_the_loads() -> None:
    made, problem, answer = report()
    loads = loads_of(problem, answer)
    assert made.load_ms == pytest.approx(loads.cost)
    assert sum(r.hbm_gib for r in made.ranks) == pytest.approx(loads.bytes.sum() / 2**30)
    assert sum(t.hbm_gib for t in made.tables) == pytest.approx(loads.bytes.sum() / 2**30)
    assert sum(t.all_ranks_ms for t in made.tables) == pytest.approx(loads.cost.sum())
    assert sum(r.load_ms for r in made.ranks) == pytest.approx(loads.cost.sum())
    assert sum(r.shards for r in made.ranks) == sum(len(t.ranks) for t in made.tables)
    for table in made.tables:
        assert sum(table.events_ms.values()) == pytest.approx(table.rank_ms)
        assert table.events_ms[table.bound_by] == max(table.events_ms.values())


def test_a_rank_is_slowest_in_the_events_that_end_with_it() -> None:
    made, _, _ = report()
    for line in made.ranks:
        for name in line.slowest_in:
            column = made.load_ms[:, made.events.index(name)]
            assert column[line.rank] == column.max() > column.min()


def test_other_ways_are_priced_for_the_dearest_tables_alone() -> None:
    made, problem, _ = report()
    explained = [t.name for t in made.tables if t.others]
    assert set(explained) == {t.name for t in made.dearest[:5]}
    options = np.diff(problem.first_option)
    for position, table in enumerate(made.tables):
        if table.others:
            assert len(table.others) == options[position] - 1
            lacking = [o.missing_gib > 0 for o in table.others]
            assert lacking == sorted(lacking)


def test_tables_that_stay_together_are_told_apart_again() -> None:
    text = "together: [[table_1, table_2]]\nranks: [{ranks: 1, slowness: 2}]"
    made, problem, answer = report(limits=text)
    assert len(made.tables) == 26
    assert made.tables[1].together == ("table_2",)
    assert made.tables[2].together == ("table_1",)
    assert made.tables[1].ranks == made.tables[2].ranks
    slowness = np.ones(8)
    slowness[1] = 2
    assert made.load_ms == pytest.approx(loads_of(problem, answer).cost * slowness[:, None])
    assert sum(t.all_ranks_ms for t in made.tables) == pytest.approx(made.load_ms.sum())


def test_json_has_what_is_promised() -> None:
    made, _, _ = report()
    answer = json.loads(json.dumps(report_json(made)))
    assert set(answer) >= {
        "objective_ms", "lower_bound_ms", "certified_gap_pct", "proven", "wall_s", "ranks", "tables", "events",
    }  # fmt: skip
    assert sum(e["slowest_ms"] for e in answer["events"]) == pytest.approx(answer["objective_ms"])
    assert [r["rank"] for r in answer["ranks"]] == list(range(8))
    assert all(sum(r["events_ms"].values()) == pytest.approx(r["load_ms"]) for r in answer["ranks"])
    assert {len(t["ranks"]) for t in answer["tables"] if t["type"] == "row_wise"} <= {8}
    assert any(t["alternatives"] for t in answer["tables"])
    design = report_json(replace(made, objective="iteration time"))
    assert "iteration_time_ms" in design
    assert "objective_ms" not in design


def test_csv_has_a_line_each() -> None:
    made, _, _ = report()
    tables = list(csv.DictReader(io.StringIO(tables_csv(made))))
    ranks = list(csv.DictReader(io.StringIO(ranks_csv(made))))
    assert [t["table"] for t in tables] == [t.name for t in made.tables]
    assert tables[0]["ranks"].split() == [str(r) for r in made.tables[0].ranks]
    assert len(ranks) == 8
    assert float(ranks[3]["load_ms"]) == pytest.approx(made.ranks[3].load_ms, rel=1e-5)
    assert set(made.events) <= set(ranks[0])


def test_the_page_is_self_contained_and_escaped() -> None:
    made, _, _ = report()
    page = page_of(made)
    assert page == page_of(made)
    assert "<b>criteo</b>" not in page.replace("&lt;b&gt;criteo&lt;/b&gt;", "")
    assert "a &amp; b" in page
    without_library = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    assert not re.findall(r'(?:src|href)="(?:https?:)?//', without_library)
    for words in (
        "What each rank does",
        "at most 25 %",
        "Tables: where they are, and why",
        "lacks",
        "data_parallel",
    ):
        assert words in page, words
    assert "proven optimal" in page_of(report(proven=True)[0])


def test_a_folder_of_files(tmp_path: Path) -> None:
    made, _, _ = report()
    write_plan(made, tmp_path / "deep" / "plan")
    names = sorted(p.name for p in (tmp_path / "deep" / "plan").iterdir())
    assert names == ["plan.json", "ranks.csv", "report.html", "tables.csv"]
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="file cannot be a folder"):
        write_plan(made, tmp_path / "file")
