"""Where tables are printed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

WIDE = 160  # columns


def new_console() -> Console:
    """Standard output: as wide as the terminal or `COLUMNS`, or wide enough for every table where neither is there."""
    import os

    from rich.console import Console

    console = Console()
    return console if console.is_terminal or os.environ.get("COLUMNS") else Console(width=WIDE)
