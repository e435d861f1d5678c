"""One driver a run folder."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dse.errors import StudyError
from dse.search.checkpoint import cannot_write

FILE = ".lock"


@contextmanager
def run_lock(run_dir: Path) -> Iterator[None]:
    """Hold the folder; the system lets go of it when the process ends, however it ends.

    Raises:
        StudyError: another process holds it.
        StorageError: the folder cannot be written.
    """
    try:
        file = (run_dir / FILE).open("w")
    except OSError as err:
        raise cannot_write(run_dir, err) from err
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StudyError(
                f"{run_dir} is in use by another process.",
                hint="Wait for it, or give the run another --name.",
            ) from None
        yield
