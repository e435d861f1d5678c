from __future__ import annotations

import errno
import json
import os

import numpy as np
import pytest
from synthetic_problem import ToySpace, toy_evaluator

from dse.errors import StorageError, StudyError
from dse.search import checkpoint as checkpoints
from dse.search.checkpoint import Checkpoint
from dse.search.found import Found
from dse.search.lock import run_lock
from dse.search.storage import StudyStorage, repair_journal
from dse.search.study import Effort, run_study

EFFORT = Effort(enumeration_limit=0, sample=64, batch=4, refine_rounds=1, expand=1, polish_rounds=0)


def search(storage, *, trials=4):
    return run_study(
        ToySpace(),
        toy_evaluator,
        objectives=("cost", "quality"),
        trials=trials,
        seed=2,
        effort=EFFORT,
        storage=storage,
    )


def storage(path, **options):
    return StudyStorage(path, name="toy", objectives=("cost", "quality"), **options)


def test_a_torn_last_line_is_cut_off_and_the_study_goes_on(tmp_path):
    search(storage(tmp_path))
    journal = tmp_path / "study.journal"
    whole = journal.read_bytes()
    journal.write_bytes(whole + whole.splitlines(keepends=True)[-1][:50])
    repair_journal(journal)
    assert journal.read_bytes() == whole
    journal.write_bytes(whole[:-40])
    again = search(storage(tmp_path), trials=8)
    assert len(storage(tmp_path).trials()) == 16
    np.testing.assert_array_equal(again.codes, search(None, trials=8).codes)


def test_a_corrupt_line_in_the_middle_is_named(tmp_path):
    search(storage(tmp_path))
    journal = tmp_path / "study.journal"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join([*lines[:3], b'{"op_code": 4, "stu\x00\n', *lines[4:]]))
    with pytest.raises(StorageError, match=r"study\.journal:4: the journal is corrupt"):
        storage(tmp_path)


def test_records_that_no_study_writes_are_refused(tmp_path):
    journal = tmp_path / "study.journal"
    journal.write_text(json.dumps({"op_code": 99, "worker_id": "x"}) + "\n" + json.dumps({"a": 1}) + "\n")
    with pytest.raises(StorageError, match="is not the journal of a study"):
        storage(tmp_path)


def test_a_batch_is_one_write(tmp_path, monkeypatch):
    kept = storage(tmp_path)
    synced = []
    monkeypatch.setattr(os, "fsync", lambda fd, real=os.fsync: synced.append(fd) or real(fd))
    search(kept)
    assert len(synced) == 3  # the checkpoint of the sample, the batch, its checkpoint


def test_a_full_disk_is_said_and_what_is_stored_stays(tmp_path, monkeypatch):
    search(storage(tmp_path))
    kept = storage(tmp_path)

    def full(fd):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match=r"study\.journal cannot be written: No space left") as error:
        search(kept, trials=8)
    assert "--resume" in error.value.hint
    monkeypatch.undo()
    np.testing.assert_array_equal(search(storage(tmp_path), trials=8).codes, search(None, trials=8).codes)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_checkpoint_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch, code):
    path = tmp_path / checkpoints.FILE
    old = Checkpoint(1, 2, 3, Found.nothing(axes=2, objectives=1), np.zeros((0, 2), np.int16), {"a": 1})
    checkpoints.save(old, path)

    def refuse(*_, **__):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(np, "savez", refuse)
    with pytest.raises(StorageError, match=os.strerror(code)):
        checkpoints.save(Checkpoint(2, 2, 3, old.found, old.explored), path)
    kept = checkpoints.load(path)
    assert (kept.batch, kept.trials, kept.asked, dict(kept.study_attrs)) == (1, 2, 3, {"a": 1})
    assert kept.found.nearest_violation == np.inf


def test_a_corrupt_checkpoint_is_refused(tmp_path):
    path = tmp_path / checkpoints.FILE
    path.write_bytes(b"PK\x03\x04 not a zip")
    with pytest.raises(StorageError, match="is not a checkpoint of a study, or is corrupt"):
        checkpoints.load(path)
    assert checkpoints.load(tmp_path / "none.npz") is None


@pytest.mark.parametrize(
    ("url", "match"),
    [
        ("sqlite:////nowhere/at/all/x.db", "cannot be opened"),
        ("nosuch://x", "cannot be opened"),
        ("postgresql+pg8000://me:secret@host/db", "needs a driver|cannot be opened"),
        ("/nowhere/at/all/x.journal", "cannot be written: No such file"),
    ],
)
def test_places_that_cannot_be_used(tmp_path, url, match):
    with pytest.raises((StorageError, ImportError), match=match) as error:
        storage(tmp_path, url=url)
    assert "secret" not in str(error.value)


def test_a_run_folder_has_one_driver(tmp_path):
    with (
        run_lock(tmp_path),
        pytest.raises(StudyError, match="is in use by another process"),
        run_lock(tmp_path),
    ):
        pass
    with run_lock(tmp_path):
        pass
    with pytest.raises(StorageError, match="cannot be written"), run_lock(tmp_path / "absent"):
        pass
