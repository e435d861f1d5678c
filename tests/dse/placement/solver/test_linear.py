"""Branch and bound can be interrupted, and is left alone when it does not hear of its time limit."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from dse.placement.solver import linear

# A market-split problem, which branch and bound does not solve in any time worth waiting for.
_SCRIPT = """
import os, signal, sys, threading
import numpy as np
import highspy
import dse.placement.solver.linear as linear

rng = np.random.default_rng(0)
values = rng.integers(0, 100, (5, 50)).astype(float)
rows = linear.Rows()
for row in values:
    half = float(row.sum() // 2)
    for sign in (1.0, -1.0):
        rows.add([0] * 51, np.arange(51), np.append(sign * row, -1.0), count=1, high=sign * half)
columns = np.arange(51)
program = rows.program(
    objective=(columns == 50).astype(float), low=np.zeros(51), high=np.where(columns < 50, 1.0, 1e6), whole=columns < 50
)
if sys.argv[1] == "deaf":
    linear._PATIENCE_S = 0.1
    highspy.Highs.cancelSolve = lambda solver: None
threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    linear.solve_whole(program, time_limit_s=500.0)
except KeyboardInterrupt:
    print("interrupted")
    sys.exit(130)
"""


@pytest.mark.parametrize("solver", ["listens", "deaf"])
def test_an_interrupt_ends_branch_and_bound(solver: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, solver], capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "interrupted\n", "")


class Deaf:
    """A solver that ends when told by the test alone, or when cancelled if it listens."""

    def __init__(self, *, listens: bool) -> None:
        self.listens, self.end, self.cancelled = listens, threading.Event(), False

    def run(self) -> None:
        self.end.wait(30)

    def cancelSolve(self) -> None:  # noqa: N802
        self.cancelled = True
        if self.listens:
            self.end.set()


@pytest.mark.parametrize("listens", [True, False])
def test_a_solver_past_its_time_limit_is_stopped_or_left_alone(
    listens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "_LATE_S", 0.1)
    solver = Deaf(listens=listens)
    assert linear._run_interruptibly(solver, 0.1) is listens
    assert solver.cancelled
    assert solver.end.is_set() is listens
    solver.end.set()


def test_a_solver_that_ends_in_time_is_not_cancelled() -> None:
    solver = Deaf(listens=True)
    solver.end.set()
    assert linear._run_interruptibly(solver, 5.0)
    assert not solver.cancelled
