"""Exceptions of `perfcore`, named for what the caller does next; each carries a hint.

`DseError` of the search layer derives from `PerfcoreError`, so one `except` at the command line
turns every expected failure into a sentence.
"""

from __future__ import annotations


class PerfcoreError(Exception):
    """Base of every expected failure: a rule, the value that broke it, and what to do about it."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __reduce__(self) -> tuple[object, ...]:
        """Keep the hint when an executor carries the exception between processes."""
        return (_rebuild, (type(self), self.message, self.hint))


def _rebuild(kind: type[PerfcoreError], message: str, hint: str | None) -> PerfcoreError:
    return kind(message, hint=hint)


class DesignError(PerfcoreError, ValueError):
    """The described design cannot exist: change the design."""


class HardwareError(PerfcoreError, ValueError):
    """A device or node description is unknown or impossible: name another one, or mend the file."""


class ProfileError(PerfcoreError, ValueError):
    """A profile is missing, corrupt, or lacks what is asked of it: name or fit another one."""


class TraceError(PerfcoreError, ValueError):
    """A trace file cannot be read or understood: record it again, or pass another file."""


class UnsupportedError(PerfcoreError):
    """Permanently outside what is modelled, as against not done yet."""


class MissingPackageError(PerfcoreError, ImportError):
    """An optional package is needed here: install it as the hint says."""
