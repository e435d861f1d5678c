"""What a terminal shows of a plan: a golden text, numbers to a tolerance; numbers are never cut."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dse.cli.plan_text import print_plan, short
from dse.placement.instances.instance import Objective, read_instance
from dse.placement.instances.labels import labels_of
from dse.placement.instances.limits import unlimited
from dse.placement.report.build import Certificate, PlanReport, report_of
from dse.placement.solver.problem import Assignment, Where, loads_of
from dse.report.words import gib, number

DATA = Path(__file__).parents[2] / "data" / "sharding_instances"
GOLDEN = Path(__file__).parent / "golden" / "plan_criteo.txt"
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


def plan() -> PlanReport:
    """Multi-hot Criteo: whole tables in turn, every fifth by rows."""
    instance = read_instance(DATA / "criteo_v2_26x8.json.gz")
    problem, labels = instance.problem(Objective.CRITICAL_PATH), labels_of(instance, Objective.CRITICAL_PATH)
    options, ranks = [], []
    for t in range(problem.num_tables):
        kind = "row_wise" if t % 5 == 4 else "table_wise"
        own = range(problem.first_option[t], problem.first_option[t + 1])
        options.append(next(o for o in own if labels.types[o] == kind))
        ranks.append(tuple(range(8)) if kind == "row_wise" else (t % 8,))
    answer = Assignment(np.array(options), tuple(ranks))
    assert {int(problem.where[o]) for o in options} == {Where.ANY, Where.ALL}
    objective = loads_of(problem, answer).objective
    certificate = Certificate(objective, objective * 0.8, 25.0, False, 1.25)
    return report_of(
        problem,
        labels,
        unlimited(problem, labels),
        answer,
        certificate,
        title="criteo",
        objective="critical path",
    )


def shown(report: PlanReport, columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:  # fmt: skip
    monkeypatch.setenv("COLUMNS", str(columns))
    print_plan(report)
    return "\n".join(line.rstrip() for line in capsys.readouterr().out.splitlines()) + "\n"


def test_the_text_is_the_golden_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text, golden = shown(plan(), 80, monkeypatch, capsys), GOLDEN.read_text(encoding="utf-8")
    assert NUMBER.sub("#", text) == NUMBER.sub("#", golden)
    values, expected = ([float(n.replace(",", "")) for n in NUMBER.findall(t)] for t in (text, golden))
    assert values == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize("columns", [64, 80, 160])
def test_numbers_are_whole_and_lines_fit(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = plan()
    long = tuple(replace(t, name=f"a_rather_long_name_of_{t.name}") for t in report.tables)
    text = shown(replace(report, tables=long), columns, monkeypatch, capsys)
    assert max(map(len, text.splitlines())) <= columns
    for rank in report.ranks:
        assert re.search(
            rf"^ {rank.rank}\s+{re.escape(number(rank.load_ms))}\s+{re.escape(gib(rank.hbm_gib))} ",
            text,
            re.M,
        )
    for line in report.dearest[:10]:
        assert f"{line.rank_ms:.3g}" in text


def test_what_a_person_reads_of_a_proven_plan(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = plan()
    proven = replace(report, certificate=replace(report.certificate, proven=True), facts={"profile": "a100"})
    text = shown(proven, 80, monkeypatch, capsys)
    assert "critical path, proven optimal" in text
    assert "profile: a100" in text


def test_abbreviations_are_torchrecs() -> None:
    assert [short(k, 4) for k in ("row_wise", "column_wise", "grid_shard", "odd")] == [
        "RW",
        "CW×4",
        "GS×4",
        "odd",
    ]
