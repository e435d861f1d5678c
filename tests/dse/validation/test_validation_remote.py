"""A folder to carry to another machine, run there by the plain interpreter, and read back."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from dse.errors import DseError
from dse.validation import unseen
from dse.validation.remote import emit, read_back
from dse.validation.unseen import (
    SHARDED_START,
    Outcome,
    Row,
    put_table,
    sharded_designs,
    sharded_table_of,
    table_of,
    unseen_designs,
    validate_unseen,
)
from perfcore.design.hardware import System, default_node, device
from perfcore.design.sharding import ShardingType
from perfcore.measure.isolate import Settings
from perfcore.measure.layout import can_run
from perfcore.measure.record import NamedDesign, Status
from perfcore.profile.profile import BUNDLED

SYSTEM = System(device("t4"), default_node("t4"), 1)


def test_a_carried_folder_measures_by_itself(tmp_path: Path) -> None:
    box = tmp_path / "box"
    sent = unseen_designs(SYSTEM)[:2]
    emit(sent, box, Settings(max_batch=64, max_rows=100, max_seconds=0.2, threads=1))
    with pytest.raises(DseError, match=r"holds no samples\.json"):
        read_back(box)
    done = subprocess.run(
        [sys.executable, "run.py", "--device", "cpu", "--budget", "0s"],
        cwd=box,
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "", "PYTHONNOUSERSITE": "1"},
    )
    assert done.returncode == 0, done.stderr
    samples, here, kernels = read_back(box)
    assert [s.name for s in samples] == [d.name for d in sent]
    assert all(s.status is Status.OK for s in samples)
    assert here["device_kind"] == "cpu"
    assert kernels is None
    text = json.dumps([p.name for p in box.rglob("*")])
    assert ".cbm" not in text
    with pytest.raises(DseError, match="is not empty"):
        emit(sent, box, Settings())
    (box / "designs.json").write_text(
        json.dumps({"designs": json.loads((box / "designs.json").read_text())["designs"][:1]})
    )
    with pytest.raises(DseError, match=sent[1].name):
        read_back(box)


def test_unseen_designs_are_no_training_loop_of_a_calibration() -> None:
    from perfcore.measure.loops import host_bound, kernel_bound

    designs = [d.design for d in unseen_designs(SYSTEM)]
    assert len(designs) == 12
    known = [d.design.model for d in [*host_bound(SYSTEM), *kernel_bound(SYSTEM, scale=1)]]
    assert not [d for d in designs if d.model in known]
    assert {d.training.global_batch for d in designs} == {256, 512, 1024, 2048, 4096}
    assert {len(d.model.tables) for d in designs} >= {2, 26}
    assert len({d.fusion.embedding for d in designs}) == 2


def test_sharded_designs_place_tables_in_every_exchanged_way() -> None:
    designs = [d.design for d in sharded_designs()]
    kinds = {t.type for d in designs for t in d.sharding.tables}
    assert kinds == {
        ShardingType.TABLE_WISE,
        ShardingType.COLUMN_WISE,
        ShardingType.ROW_WISE,
        ShardingType.DATA_PARALLEL,
    }
    assert all(d.system.world_size == 2 and can_run(d) for d in designs)
    by_rank = [r for d in designs for t in d.sharding.tables for r in t.ranks]
    assert by_rank.count(0) == by_rank.count(1)


def test_all_rounds_are_taken_together(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without measuring: every design in every round, sharded ones in every other, medians over the rounds."""
    budgets: list[float] = []
    alone: list[float] = []
    said: list[str] = []
    monkeypatch.setattr(unseen, "measured_system", lambda _: SYSTEM)
    monkeypatch.setattr(unseen, "cores", lambda: 2)
    monkeypatch.setattr(unseen, "collect", lambda *_, budget_s, **__: budgets.append(budget_s))

    def iteration(*_: object, **__: object) -> SimpleNamespace:
        alone.append(1.0)
        return SimpleNamespace(median_us=1000.0 * len(alone))

    def together(named: NamedDesign, settings: Settings) -> SimpleNamespace:
        if named.name == "sharded-3":
            return SimpleNamespace(iteration=None, detail="no gloo")
        assert (settings.max_ranks, named.design.system.world_size) == (2, 2)
        return SimpleNamespace(iteration=SimpleNamespace(median_us=5000.0))

    def fit(_: Path, out: Path, *, name: str) -> None:
        assert name == "this-cpu"
        shutil.copytree(BUNDLED / "shared", out.parent / "shared")  # whose files it names
        shutil.copytree(BUNDLED / "t4", out)

    monkeypatch.setattr(unseen, "measure_iteration", iteration)
    monkeypatch.setattr(unseen, "measure_isolated", together)
    monkeypatch.setattr(unseen, "fit_profile", fit)
    found = validate_unseen(tmp_path, budget_s=100.0, say=said.append)
    assert budgets == [20.0] * 5
    assert len(alone) == 60
    assert [r.measured_ms for r in found.rows] == [25.0 + i for i in range(12)]  # the third of five rounds
    assert [r.measured_ms for r in found.sharded] == [5.0] * 3
    assert "sharded-3 could not be measured: no gloo" in said
    assert "row_wise" in sharded_table_of(found)
    assert "None ran" in sharded_table_of(replace(found, sharded=()))


def test_a_table_replaces_the_one_before(tmp_path: Path) -> None:
    rows = (Row("a", "one", 1.0, 2.0, 3.0), Row("b", "two", 4.0, 3.0, 3.0))
    outcome = Outcome(rows, "a CPU", 10, 60.0)
    assert outcome.mape_pct == pytest.approx((50 + 100 / 3) / 2)
    assert outcome.best_pct == 0
    document = tmp_path / "doc.md"
    document.write_text("before\n<!-- unseen designs -->\nold\n<!-- end -->\nafter\n")
    put_table(document, table_of(outcome))
    put_table(document, table_of(outcome))
    text = document.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    document.write_text(f"{text}{SHARDED_START}old\n<!-- end -->\nlast\n")
    put_table(document, "new\n", start=SHARDED_START)
    assert "old" not in document.read_text()
    assert document.read_text().endswith("last\n")
    assert text.count("| one | 1.00 | 2.00 | 3 | -50.0 |") == 1
