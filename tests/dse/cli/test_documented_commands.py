"""Every command line in the documents is one that there is."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import typer.main

from dse.cli import app

DOCUMENTS = [Path("README.md"), *sorted(Path("docs").glob("*.md")), *sorted(Path("spaces").glob("*.md"))]
_CALL = re.compile(r"\bdse ([a-z]+)\b([^`|\n]*)")
_BRACKETS = re.compile(r"\((--[^)]*)")
_OPTION = re.compile(r"(?<![\w-])(--?[a-z][a-z-]*)")


def calls(text: str) -> list[tuple[str, list[str]]]:
    """Commands and their options; what follows a gap or ` # ` is a remark, of which options in brackets count."""
    found = []
    for command, rest in _CALL.findall(text):
        call, *remark = re.split(r"\s{2,}| # ", rest, maxsplit=1)
        found.append((command, _OPTION.findall(" ".join([call, *_BRACKETS.findall("".join(remark))]))))
    return found


def options() -> dict[str, set[str]]:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    return {
        name: {"--help", "-h"} | {o for p in command.params for o in p.opts}
        for name, command in commands.items()
    }


def test_calls_are_found() -> None:
    assert calls("`dse plan X --json -o y # --no` and dse run S -n 3   for --no (--seed, --set x)") == [
        ("plan", ["--json", "-o"]),
        ("run", ["-n", "--seed", "--set"]),
    ]


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_commands_and_options_exist(document: Path) -> None:
    known = options()
    for command, given in calls(document.read_text(encoding="utf-8")):
        assert command in known, f"dse {command}"
        assert set(given) <= known[command], f"dse {command}: {set(given) - known[command]}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_modules_targets_and_files_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    for module in re.findall(r"python3? -m ([\w.]+)", text):
        assert importlib.util.find_spec(module) is not None, module
    for script in re.findall(r"python (studies/\S+\.py)", text):
        assert Path(script).is_file(), script
    targets = set(re.findall(r"^([a-z-]+):", Path("Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for target in re.findall(r"`make ([a-z-]+)`|^make ([a-z-]+)", text, re.MULTILINE):
        assert set(target) - {""} <= targets, target
    for path in re.findall(r"`((?:spaces|docs|studies|tests|dse|perfcore)/[\w./-]+\.\w+)`", text):
        assert Path(path).exists(), path
