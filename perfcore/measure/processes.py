"""One process for each rank of a design: a crash, a hang or a lack of memory ends that measurement and no other."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_POLL_S = 0.02
# gloo looks for the machine's address by its name, which not every machine can resolve; all ranks are here.
_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"} if Path("/sys/class/net/lo").exists() else {}


@dataclass(frozen=True, slots=True)
class Ended:
    """How the processes of one measurement ended.

    Attributes:
        answers: of the ranks that gave one, by rank; of all where nothing failed.
        timed_out: they were ended after the time limit.
        crash: why the first that crashed did, if one did.
    """

    answers: dict[int, dict[str, Any]]
    timed_out: bool = False
    crash: str = ""


def run_ranks(command: str, requests: Sequence[Mapping[str, Any]], *, time_limit_s: float) -> Ended:
    """Serve each request by `python -m perfcore.measure COMMAND` in a process of its own, all at once.

    The first that fails ends the others, which would wait for it: one that crashes, or whose answer has a `status`
    other than `ok`.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        processes = [_start(command, request, folder / str(i)) for i, request in enumerate(requests)]
        stack.callback(_end, processes)
        return _watched(processes, folder, deadline=time.monotonic() + time_limit_s)


def _start(command: str, request: Mapping[str, Any], base: Path) -> subprocess.Popen[bytes]:
    # The package's own folder, so that a copied folder needs no installation.
    path = os.pathsep.join(
        filter(None, (str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH")))
    )
    base.with_suffix(".in").write_text(json.dumps(request), encoding="utf-8")
    with (
        base.with_suffix(".in").open("rb") as given,
        base.with_suffix(".out").open("wb") as out,
        base.with_suffix(".err").open("wb") as err,
    ):
        return subprocess.Popen(
            [sys.executable, "-m", "perfcore.measure", command],
            stdin=given,
            stdout=out,
            stderr=err,
            env=_LOOPBACK | os.environ | {"PYTHONPATH": path},
        )


def _watched(processes: Sequence[subprocess.Popen[bytes]], folder: Path, *, deadline: float) -> Ended:
    answers: dict[int, dict[str, Any]] = {}
    running = dict(enumerate(processes))
    while running:
        for rank, process in list(running.items()):
            code = process.poll()
            if code is None:
                continue
            del running[rank]
            if code:
                return Ended(answers, crash=_why(code, _read(folder / f"{rank}.err")))
            answers[rank] = json.loads(_read(folder / f"{rank}.out").splitlines()[-1])
            if answers[rank].get("status", "ok") != "ok":
                return Ended(answers)
        if running and time.monotonic() > deadline:
            return Ended(answers, timed_out=True)
        time.sleep(_POLL_S if running else 0)
    return Ended(answers)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def _why(returncode: int, err: str) -> str:
    if returncode < 0:
        name = signal.Signals(-returncode).name
        return f"ended by {name}" + (" (often a lack of memory)" if name == "SIGKILL" else "")
    lines = [line for line in err.splitlines() if line.strip()]
    return lines[-1] if lines else f"ended with exit code {returncode}"
