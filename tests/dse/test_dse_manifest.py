from __future__ import annotations

import errno
import os
from dataclasses import replace

import pytest

from dse.errors import StorageError, StudyError
from dse.manifest import (
    Manifest,
    check_same,
    host,
    read_manifest,
    text_hash,
    versions,
    write_atomically,
    write_manifest,
)

LINES = ["axis a: [1, 2]", "fixed b: 3"]
MANIFEST = Manifest(
    name="x",
    space_hash=text_hash("\n".join(LINES)),
    space="a: 1\n",
    overrides=["b=3"],
    resolved=LINES,
    profile="v100",
    profile_hash="12",
    seed=1,
    sampler="nsga2",
    effort={"batch": 50},
    command=["dse", "run"],
    started="2026-01-01T00:00:00+00:00",
    versions=versions(),
    host=host(),
)


def test_a_manifest_is_read_back(tmp_path):
    done = MANIFEST.finished(wall_s=1.5, method="exact", counts={"front_size": 3})
    write_manifest(done, tmp_path)
    assert read_manifest(tmp_path) == done
    assert done.finished(wall_s=2.0, method="exact", counts={}).wall_s == 3.5


def test_the_same_is_the_same():
    check_same(MANIFEST, replace(MANIFEST, started="later", command=["else"], versions={}))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"seed": 2}, "seed: 1 then, 2 now"),
        ({"profile_hash": "13"}, "profile_hash: '12' then, '13' now"),
        ({"effort": {"batch": 10}}, r"effort: \{'batch': 50\} then, \{'batch': 10\} now"),
        (
            {"resolved": ["axis a: [1]", LINES[1]], "space_hash": "-"},
            r"space: -axis a: \[1, 2\]\n  space: \+axis a: \[1\]",
        ),
    ],
)
def test_what_changed_is_shown(change, text):
    with pytest.raises(StudyError, match=text):
        check_same(MANIFEST, replace(MANIFEST, **change))


@pytest.mark.parametrize("content", ["", "{", '{"name": 1}', "[1]"])
def test_a_corrupt_manifest_is_refused(tmp_path, content):
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(StorageError, match=r"manifest\.json is not the manifest of a run, or is corrupt"):
        read_manifest(tmp_path)


def test_a_folder_without_a_manifest_holds_no_run(tmp_path):
    with pytest.raises(StorageError, match="holds no run"):
        read_manifest(tmp_path)


def test_a_refused_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    write_atomically(path, "old")

    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("pathlib.Path.write_text", full)
    with pytest.raises(StorageError, match=r"a\.txt cannot be written: No space left on device"):
        write_atomically(path, "new")
    assert path.read_text() == "old"


def test_nothing_names_the_machine_or_its_user():
    assert set(host()) == {"system", "machine", "cores"}


def test_a_full_disk_leaves_the_old_file_and_no_draft(tmp_path, monkeypatch):
    path = tmp_path / "pareto.csv"
    path.write_text("old")

    def full(self, text, **_):
        self.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("pathlib.Path.write_text", full)
    with pytest.raises(StorageError, match=r"pareto\.csv cannot be written: No space left"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
