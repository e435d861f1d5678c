"""Linear and mixed-integer programs by HiGHS, one thread, with bounds that do not trust its tolerances.

Letters: j columns, i rows.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from scipy.sparse import csr_matrix

from dse.placement.solver.problem import Array, Ints, Mask

# What a bound of the branch-and-bound loses to the solver's feasibility tolerances.
MIP_TOLERANCE = 1e-6
# Between two looks for a signal, and what a solver that was told to stop has for it.
_LOOK_S, _PATIENCE_S = 0.1, 5.0
_LATE_S = 0.5  # that a solver may be late by itself, and then after it was told to stop
_INTERRUPTED = 130  # exit code
_NO_HEURISTICS: dict[str, Any] = {
    "mip_heuristic_effort": 0.0,
    "mip_heuristic_run_feasibility_jump": False,
    "mip_heuristic_run_rens": False,
    "mip_heuristic_run_rins": False,
    "mip_heuristic_run_root_reduced_cost": False,
}


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """Minimise `objective @ x` over `row_low <= matrix @ x <= row_high`, `low <= x <= high`, some x whole numbers.

    Attributes:
        objective: `(j,)`.
        matrix: `(i, j)`.
        row_low: `(i,)`.
        row_high: `(i,)`.
        low: `(j,)` finite.
        high: `(j,)` finite, so that a dual solution of any quality gives a bound.
        whole: `(j,)` columns that are whole numbers.
    """

    objective: Array
    matrix: csr_matrix
    row_low: Array
    row_high: Array
    low: Array
    high: Array
    whole: Mask

    def dual_bound(self, duals: Array) -> float:
        """A lower bound of the program without whole numbers, from any `(i,)` multipliers y.

        For every feasible x: c x = y A x + (c - y A) x, and each of the two is at least its minimum over the rows'
        and the columns' own limits (Neumaier and Shcherbina 2004). Multipliers on infinite limits are dropped.
        """
        y = self._usable(duals)
        limits = np.where(y > 0, self.row_low, self.row_high)
        reduced = self.reduced_costs(duals)
        rows = float(np.sum(np.where(y == 0, 0.0, y * np.where(y == 0, 0.0, limits))))
        return rows + float(np.minimum(reduced * self.low, reduced * self.high).sum())

    def reduced_costs(self, duals: Array) -> Array:
        """`(j,)` c - y A, what `dual_bound` gains for each unit of a column."""
        reduced: Array = self.objective - self.matrix.T @ self._usable(duals)
        return reduced

    def _usable(self, duals: Array) -> Array:
        y = np.where(np.isneginf(self.row_low), np.minimum(duals, 0.0), duals)
        return np.where(np.isposinf(self.row_high), np.maximum(y, 0.0), y)


@dataclass(frozen=True, slots=True, eq=False)
class Solved:
    """What HiGHS found.

    Attributes:
        x: `(j,)`; `None` when it found no feasible point.
        bound: no feasible point is below; infinite when there is none.
        finished: the program is solved to the end.
        duals: `(i,)` multipliers of the rows that give the bound; `None` of branch and bound, and where there are none.
    """

    x: Array | None
    bound: float
    finished: bool
    duals: Array | None = None


class Rows:
    """Rows of a program, collected one block at a time."""

    def __init__(self) -> None:
        """No rows yet."""
        self._rows: list[Ints] = []
        self._columns: list[Ints] = []
        self._values: list[Array] = []
        self._low: list[Array] = []
        self._high: list[Array] = []
        self.count = 0

    def add(
        self,
        rows: Sequence[int] | Ints,
        columns: Sequence[int] | Ints,
        values: Sequence[float] | Array,
        *,
        count: int,
        low: float = -np.inf,
        high: float = np.inf,
    ) -> None:
        """A block of `count` rows with entries `values` at (`rows`, `columns`); rows count from 0 in the block."""
        self._rows.append(np.asarray(rows, dtype=np.int64) + self.count)
        self._columns.append(np.asarray(columns, dtype=np.int64))
        self._values.append(np.asarray(values, dtype=np.float64))
        self._low.append(np.full(count, low))
        self._high.append(np.full(count, high))
        self.count += count

    def program(self, *, objective: Array, low: Array, high: Array, whole: Mask) -> Program:
        """The rows with columns of these objectives and limits."""
        place = np.concatenate(self._rows), np.concatenate(self._columns)
        matrix = csr_matrix((np.concatenate(self._values), place), shape=(self.count, len(objective)))
        row_low, row_high = np.concatenate(self._low), np.concatenate(self._high)
        return Program(objective, matrix, row_low, row_high, low, high, whole)


@contextlib.contextmanager
def _without_output() -> Iterator[None]:
    """Keep HiGHS's banner, printed when it begins whatever its options, out of what a machine may read."""
    sys.stdout.flush()
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


def _run_interruptibly(solver: Any, time_limit_s: float) -> bool:
    """Solve in a thread of its own: the main thread alone hears of Ctrl-C, and HiGHS does not look at the clock everywhere.

    (Not by `startSolve`: its lock is that of all solvers, and one that does not stop would keep it.)

    Returns:
        Whether it ended; if not, the solver is left alone, and nothing may be asked of it.
    """
    until, ended = time.perf_counter() + time_limit_s + _LATE_S, threading.Event()
    solver.HandleUserInterrupt = True
    threading.Thread(target=_run, args=(solver, ended), daemon=True).start()
    try:
        while not ended.wait(_LOOK_S):
            if time.perf_counter() > until:
                return _stopped(solver, ended, _LATE_S)
    except KeyboardInterrupt:
        _stopped(solver, ended, _PATIENCE_S)
        raise
    return True


def _run(solver: Any, ended: threading.Event) -> None:
    try:
        solver.run()
    finally:
        ended.set()


def _stopped(solver: Any, ended: threading.Event, patience_s: float) -> bool:
    """Tell a solver to stop; one that does not may not outlive the interpreter, which would abort."""
    solver.cancelSolve()
    if ended.wait(patience_s):
        return True
    atexit.register(_leave, ended)
    return False


def _leave(ended: threading.Event) -> None:
    """End the process at once, unless the solver has stopped in the meantime."""
    if ended.is_set():
        return
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(_INTERRUPTED)


@dataclass(slots=True)
class _Highs:
    program: Program
    time_limit_s: float
    relaxed: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def loaded(self) -> Any:
        """The solver before its run."""
        import highspy

        with _without_output():
            solver: Any = highspy.Highs()  # type: ignore[no-untyped-call]
        settings = {"output_flag": False, "threads": 1, "time_limit": max(self.time_limit_s, 0.01)}
        for name, value in (settings | self.options).items():
            solver.setOptionValue(name, value)
        solver.passModel(self._model(highspy))
        return solver

    def run(self, start: Array | None = None) -> Any | None:
        """The solver after its run; `None` when it did not end in time."""
        import highspy

        solver = self.loaded()
        if start is not None:
            solution = highspy.HighsSolution()
            solution.col_value = list(start)
            solver.setSolution(solution)
        if not self.program.whole.any() or self.relaxed:
            solver.run()  # the simplex method looks at the clock
            return solver
        return solver if _run_interruptibly(solver, self.time_limit_s) else None

    def _model(self, highspy: Any) -> Any:
        model, program = highspy.HighsLp(), self.program
        model.num_row_, model.num_col_ = program.matrix.shape
        model.col_cost_, model.col_lower_, model.col_upper_ = program.objective, program.low, program.high
        model.row_lower_, model.row_upper_ = program.row_low, program.row_high
        model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        model.a_matrix_.start_ = program.matrix.indptr
        model.a_matrix_.index_ = program.matrix.indices
        model.a_matrix_.value_ = program.matrix.data
        if program.whole.any() and not self.relaxed:
            kinds = highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger
            model.integrality_ = [kinds[int(w)] for w in program.whole]
        return model


class Resolved:
    """A linear program solved again and again with other limits of its columns, each time from the last solution."""

    def __init__(self, program: Program) -> None:
        """`program` without its whole numbers."""
        self._program, self._low, self._high = program, program.low.copy(), program.high.copy()
        self._solver = _Highs(program, np.inf, relaxed=True).loaded()

    def solve(self, low: Array, high: Array, *, time_limit_s: float) -> tuple[float, Array | None]:
        """The checked bound, and the point where it was reached, with `(j,)` limits; infinite where there is no point."""
        import highspy

        changed = np.flatnonzero((low != self._low) | (high != self._high)).astype(np.int32)
        if len(changed):
            self._solver.changeColsBounds(len(changed), changed, low[changed], high[changed])
        self._low, self._high = low, high
        self._solver.setOptionValue("time_limit", self._solver.getRunTime() + max(time_limit_s, 0.01))
        self._solver.run()
        status = self._solver.getModelStatus()
        if status == highspy.HighsModelStatus.kInfeasible:
            return np.inf, None
        solution = self._solver.getSolution()
        duals = np.asarray(solution.row_dual, dtype=np.float64)
        if len(duals) != len(self._program.row_low):
            return -np.inf, None
        bound = replace(self._program, low=low, high=high).dual_bound(duals)
        optimal = status == highspy.HighsModelStatus.kOptimal
        return bound, np.asarray(solution.col_value) if optimal else None


def solve_relaxed(program: Program, *, time_limit_s: float = 60.0) -> Solved:
    """The program without whole numbers; the bound is checked against the rows, not taken from the solver."""
    import highspy

    solver = _Highs(program, time_limit_s, relaxed=True).run()
    if solver is None:
        return Solved(None, -np.inf, finished=False)
    status = solver.getModelStatus()
    if status == highspy.HighsModelStatus.kInfeasible:
        return Solved(None, np.inf, finished=True)
    solution = solver.getSolution()
    duals = np.asarray(solution.row_dual, dtype=np.float64)
    finished = status == highspy.HighsModelStatus.kOptimal
    x = np.asarray(solution.col_value) if finished else None
    if len(duals) != len(program.row_low):
        return Solved(x, -np.inf, finished)
    return Solved(x, program.dual_bound(duals), finished, duals)


def solve_whole(
    program: Program,
    *,
    time_limit_s: float,
    start: Array | None = None,
    heuristics: bool = True,
    below: float = np.inf,
) -> Solved:
    """The program by branch and bound; its bound is lowered by `MIP_TOLERANCE` of its size.

    Args:
        program: what to solve.
        time_limit_s: after which the bound so far is returned.
        start: a feasible point, if one is known.
        heuristics: look for points by smaller programs; not worth it where only the bound matters.
        below: points that are not below it are of no interest; infinite where all are.
    """
    import highspy

    if not program.whole.any():
        return solve_relaxed(program, time_limit_s=time_limit_s)
    options: dict[str, Any] = {"mip_rel_gap": MIP_TOLERANCE} | ({} if heuristics else _NO_HEURISTICS)
    options |= {"objective_bound": below} if np.isfinite(below) else {}
    solver = _Highs(program, time_limit_s, options=options).run(start)
    if solver is None:
        return Solved(None, -np.inf, finished=False)
    status, info = solver.getModelStatus(), solver.getInfo()
    if status == highspy.HighsModelStatus.kInfeasible:
        return Solved(None, np.inf, finished=True)
    bound = float(info.mip_dual_bound)
    found = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    x = np.asarray(solver.getSolution().col_value) if found else None
    if not np.isfinite(bound):
        return Solved(x, -np.inf, finished=False)
    return Solved(x, bound - MIP_TOLERANCE * abs(bound), finished=status == highspy.HighsModelStatus.kOptimal)
