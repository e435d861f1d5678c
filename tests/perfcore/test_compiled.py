from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numba
import numpy as np
import pytest
from numba.core.caching import CacheImpl

from perfcore.compiled import compiled, fingerprint, inner

CALLER = """
from perfcore.compiled import compiled
from {callee} import FACTOR, shifted

@compiled()
def scaled(x):
    return FACTOR * shifted(x)
"""
CALLEE = """
from perfcore.compiled import inner

FACTOR = {factor}

@inner()
def shifted(x):
    return x + {shift}
"""


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The caller's module beside a callee's that was just written; its machine code lies in `kept`."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "kept"))
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(factor: float, shift: float) -> ModuleType:
        (tmp_path / "compiled_callee.py").write_text(CALLEE.format(factor=factor, shift=shift))
        (tmp_path / "compiled_caller.py").write_text(CALLER.format(callee="compiled_callee"))
        for name in ("compiled_callee", "compiled_caller"):
            spec = importlib.util.spec_from_file_location(name, tmp_path / f"{name}.py")
            assert spec is not None
            assert spec.loader is not None
            # Read as text: two versions of one second and size would share byte code.
            module = importlib.util.module_from_spec(spec)
            exec(
                compile((tmp_path / f"{name}.py").read_text(), str(tmp_path / f"{name}.py"), "exec"),
                vars(module),
            )
            monkeypatch.setitem(sys.modules, name, module)
        return module

    return write


def hits(module: ModuleType) -> int:
    return sum(module.scaled.stats.cache_hits.values())


def test_machine_code_is_kept(written: Any) -> None:
    assert written(2.0, 1.0).scaled(3.0) == 8.0
    again = written(2.0, 1.0)
    assert again.scaled(3.0) == 8.0
    assert hits(again) == 1


@pytest.mark.parametrize(("factor", "shift", "expected"), [(2.0, 5.0, 16.0), (7.0, 1.0, 28.0)])
def test_another_callee_or_constant_is_compiled_anew(
    written: Any, factor: float, shift: float, expected: float
) -> None:
    assert written(2.0, 1.0).scaled(3.0) == 8.0
    edited = written(factor, shift)
    assert edited.scaled(3.0) == expected
    assert hits(edited) == 0


def test_without_a_folder_functions_are_compiled_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CacheImpl, "_locator_classes", [])

    @compiled()
    def doubled(x: float) -> float:
        return 2 * x

    assert doubled(4.0) == 8.0


def test_a_full_disk_keeps_nothing_and_stops_nothing(written: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    module = written(2.0, 1.0)
    monkeypatch.setattr("numba.core.caching.IndexDataCacheFile.save", full)
    assert module.scaled(3.0) == 8.0
    monkeypatch.setattr("numba.core.caching.IndexDataCacheFile.load", full)
    assert written(2.0, 1.0).scaled(3.0) == 8.0


LIMITS = {"most": frozenset({"b", "a"})}
TABLE = np.arange(3)


def test_a_fingerprint_knows_options_sets_and_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    def reads() -> Any:
        return LIMITS, TABLE, helper

    def other() -> Any:
        return TABLE

    before = fingerprint(reads)
    assert before == fingerprint(reads)
    assert before != fingerprint(other)
    for name, value in (
        ("LIMITS", {"most": frozenset({"a"})}),
        ("TABLE", np.arange(4)),
        ("helper", inner(fastmath=True)(helper.py_func)),
    ):
        with monkeypatch.context() as m:
            m.setitem(globals(), name, value)
            assert fingerprint(reads) != before
    assert fingerprint(reads) == before


@inner()
def helper(x: float) -> float:
    return helped_by(x)


def helped_by(x: float) -> float:
    return x
