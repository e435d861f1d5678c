"""A run as one self-contained HTML page, readable offline."""

from __future__ import annotations

from pathlib import Path

FILE = "report.html"


def write_report(run_dir: Path) -> Path:
    """Write `report.html` into a run's folder; the same files give the same page.

    Raises:
        StorageError: the folder holds no finished run, or cannot be written.
    """
    from dse.manifest import write_atomically
    from dse.report.data import read_run
    from dse.report.page import page_of

    path = run_dir / FILE
    write_atomically(path, page_of(read_run(run_dir)))
    return path
