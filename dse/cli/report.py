"""`dse report`: the page, the table and the designs of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(run: Annotated[Path, typer.Argument(help="A run folder, e.g. runs/dlrm_small.")]) -> None:
    """Write RUN/report.html, which opens offline."""
    from dse.manifest import read_manifest
    from dse.report import write_report

    read_manifest(run)
    write_report(run)
    typer.echo(str(run / "report.html"))
