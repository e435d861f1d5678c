"""Exceptions of the search layer; each knows the exit code that the command line ends with."""

from __future__ import annotations

from typing import ClassVar

from perfcore.errors import PerfcoreError


class DseError(PerfcoreError):
    """Base of the expected failures of the search layer."""

    exit_code: ClassVar[int] = 2


class ConfigError(DseError, ValueError):
    """A file cannot be used: one `file:line:col: path: message` line for each mistake in it."""


class SpaceError(DseError, ValueError):
    """A space holds no design, or a code lies outside it: change the axis that the message names."""


class NoFeasibleCandidateError(DseError):
    """No design meets the limits: relax what the hint names."""

    exit_code = 3


class StudyError(DseError):
    """A study cannot start or go on as asked: change what the message names."""


class StorageError(DseError):
    """A study's files cannot be read or written: mend the place, or name another one."""


class ValidationToleranceError(DseError):
    """Measured and predicted differ by more than was allowed."""

    exit_code = 4


class StudyInterruptedError(DseError):
    """A person stopped the study; everything told so far is stored, and the hint says how to go on."""

    exit_code = 130
