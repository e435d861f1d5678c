"""One call for an assignment by local search."""

from __future__ import annotations

from dse.placement.solver.anytime import Search
from dse.placement.solver.problem import Assignment, Ints, Problem


def search(
    problem: Problem,
    *,
    seed: int = 0,
    time_limit_s: float = 10.0,
    work: int = 20_000_000,
    start: Assignment | None = None,
    options: Ints | None = None,
    enough: float = 0.0,
) -> Assignment:
    """The best assignment found: least overflow of memory, then least objective.

    The search ends after `work` steps, after many steps without a gain, at the time limit, or when its objective is
    small enough. It depends on seed and work alone where the time limit cuts nothing off.

    Args:
        problem: what to solve.
        seed: of the random numbers.
        time_limit_s: looked at every few thousand steps; a few thousand are always done.
        work: steps; about two million take a second.
        start: an assignment to begin with, beside greedy ones; the answer is never worse.
        options: a `(t,)` choice of options to begin with as well, e.g. a relaxation's.
        enough: an objective that needs no improvement, e.g. a lower bound.

    Raises:
        SpaceError: the problem has no table or no rank, or a start that is no assignment of it.
    """
    going = Search(problem, seed=seed, start=start, options=options)
    going.run(work=work, time_limit_s=time_limit_s, enough=enough)
    return going.best
