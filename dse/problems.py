"""Mistakes that only show once values meet: gathered, each with its place in the file."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from dse.errors import ConfigError
from dse.yaml_loader import Document, problems_error
from perfcore.errors import PerfcoreError


class Problems:
    """Collects the failures of several steps, so that all of them are told at once."""

    def __init__(self, document: Document[Any]) -> None:
        self._document = document
        self._found: list[tuple[int, int, str]] = []

    def add(self, loc: tuple[str | int, ...], message: str) -> None:
        """Note one mistake at a place."""
        self._found.append(self._document.problem(loc, message))

    def __len__(self) -> int:
        """Number of mistakes noted so far."""
        return len(self._found)

    def at(self, *loc: str | int) -> _Noting:
        """Note what the block raises, as a mistake at that place, and go on after the block."""
        return _Noting(self, loc)

    def check(self) -> None:
        """Raise what was noted.

        Raises:
            ConfigError: something was.
        """
        if self._found:
            raise problems_error(self._found)


class _Noting:
    """A block whose expected failures are noted and swallowed."""

    def __init__(self, problems: Problems, loc: tuple[str | int, ...]) -> None:
        self._problems, self._loc = problems, loc

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(
        self, kind: type[BaseException] | None, err: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        """Swallow a failure that a person can mend."""
        if not isinstance(err, PerfcoreError):
            return False
        lines = err.message.splitlines() if isinstance(err, ConfigError) else [err.message]
        hint = [] if err.hint is None else [err.hint]
        for line in [*lines[:-1], " ".join([lines[-1], *hint])]:
            self._problems.add(self._loc, line)
        return True
