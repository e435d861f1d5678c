"""The command as a process: encodings, pipes and full disks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CALL = [
    sys.executable,
    "-c",
    "from dse.cli import main; main()",
    "predict",
    "spaces/designs/dlrm_default.yaml",
]
ROOT = Path(__file__).parents[3]


def call(stdout: int, **environment: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        CALL, cwd=ROOT, env=os.environ | environment, stdout=stdout, stderr=subprocess.PIPE, check=False
    )


def test_a_terminal_that_knows_ascii_alone() -> None:
    done = call(subprocess.PIPE, LC_ALL="C", PYTHONIOENCODING="ascii", COLUMNS="40")
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"ms an iteration" in done.stdout
    assert done.stdout.isascii()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a disk that is always full")
def test_a_full_disk_under_stdout() -> None:
    with Path("/dev/full").open("wb") as full:
        done = call(full.fileno())
    assert done.returncode == 2
    assert done.stderr == b"error: The output cannot be used: No space left on device.\n"
