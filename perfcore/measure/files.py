"""Writes what was measured so that it is there whole or as it was before."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

from perfcore.errors import ProfileError


def write_whole(path: Path, text: str) -> None:
    """Replace a file at once: an interruption, or a full disk, leaves the old one.

    Raises:
        ProfileError: it cannot be written.
    """
    new = path.with_name(f"{path.name}.new")
    try:
        new.write_text(text, encoding="utf-8")
        os.replace(new, path)  # noqa: PTH105
    except OSError as err:
        with contextlib.suppress(OSError):
            new.unlink()
        raise cannot_write(path, err) from None


def append_line(path: Path, line: str) -> None:
    """Add a line to a file.

    Raises:
        ProfileError: it cannot be written.
    """
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    except OSError as err:
        raise cannot_write(path, err) from None


def cannot_write(path: Path, err: OSError) -> ProfileError:
    """Why, and that nothing of what was measured before is lost."""
    what = "the disk is full" if err.errno in (errno.ENOSPC, errno.EDQUOT) else str(err.strerror)
    return ProfileError(
        f"{path}: cannot be written: {what}.",
        hint="What was measured before is kept; make room, and run the same command again to go on.",
    )
