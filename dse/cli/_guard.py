"""How every command ends: a sentence and an exit code, never a traceback."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

import typer

from perfcore.errors import PerfcoreError

P = ParamSpec("P")
R = TypeVar("R")

BUG, WRONG_REQUEST, INTERRUPTED = 1, 2, 130


def guarded(command: Callable[P, R]) -> Callable[P, R]:
    """The command, whose failures become a message on stderr and an exit code."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except PerfcoreError as err:
            _say(f"error: {err.message}")
            if err.hint:
                _say(f"hint: {err.hint}")
            raise typer.Exit(getattr(err, "exit_code", WRONG_REQUEST)) from None
        except KeyboardInterrupt:
            _say("interrupted")
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            _close_stdout()  # its reader has gone
            raise typer.Exit(BUG) from None
        except OSError as err:
            _say(f"error: {err.filename or 'The output'} cannot be used: {err.strerror or err}.")
            if err.filename is None:
                _close_stdout()
            raise typer.Exit(WRONG_REQUEST) from None
        except Exception as err:
            if type(err).__module__.startswith(("typer", "click")):
                raise
            _say(f"This is a bug in dse: {type(err).__name__}: {err}\nThe traceback is in {_log()}.")
            raise typer.Exit(BUG) from None

    return run


def _close_stdout() -> None:
    """Keep Python from complaining at exit about what can no longer be written."""
    with contextlib.suppress(OSError, ValueError):  # there may be no such descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _say(text: str) -> None:
    typer.echo(text, err=True)


def _log() -> Path:
    descriptor, name = tempfile.mkstemp(prefix="dse-", suffix=".log")
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        traceback.print_exc(file=file)
    return Path(name)
