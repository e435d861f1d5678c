"""Refuse problems and assignments that make no sense."""

from __future__ import annotations

import numpy as np

from dse.errors import SpaceError
from dse.placement.solver.problem import Assignment, Problem, Where


def check_problem(problem: Problem) -> None:
    """Return when every table has an option and a rank to go to, and all numbers are usable.

    Raises:
        SpaceError: they are not; says which.
    """
    if problem.num_tables < 1 or problem.num_ranks < 1:
        raise SpaceError(
            f"A placement needs at least one table and one rank, but got {problem.num_tables} tables and "
            f"{problem.num_ranks} ranks."
        )
    if (np.diff(problem.first_option) < 1).any() or (problem.shard_counts < 1).any():
        raise SpaceError("Every table needs an option, and every option a shard, but one has none.")
    for name in ("cost", "bytes", "host_bytes"):
        values = getattr(problem, name)
        if not (np.isfinite(values).all() and (values >= 0).all()):
            raise SpaceError(f"`{name}` must be finite and >= 0, but it is not everywhere.")
    if not (np.isfinite(problem.slowness).all() and (problem.slowness > 0).all()):
        raise SpaceError("`slowness` must be finite and > 0, but it is not everywhere.")
    if problem.allowed is not None:
        fixed = np.isin(problem.where, (Where.ALL, Where.HOST))
        lost = ~np.logical_or.reduceat(fixed, problem.first_option[:-1]) & ~problem.allowed.any(axis=1)
        if lost.any():
            raise SpaceError(f"A table needs a rank, but table {int(np.argmax(lost))} may take no rank.")


def check_assignment(problem: Problem, assignment: Assignment) -> None:
    """Return when the assignment is one of the problem, within memory or not.

    Raises:
        SpaceError: it is not; says which table is wrong.
    """
    if len(assignment.option) != problem.num_tables or len(assignment.ranks) != problem.num_tables:
        raise SpaceError(
            f"An assignment must place all {problem.num_tables} tables, but it places {len(assignment.option)}."
        )
    for table, (option, ranks) in enumerate(zip(assignment.option, assignment.ranks, strict=True)):
        if not problem.first_option[table] <= option < problem.first_option[table + 1]:
            raise SpaceError(f"Each table takes an option of its own, but table {table} has option {option}.")
        if not _fits(problem, table, int(option), np.array(ranks)):
            raise SpaceError(
                f"Shards must be where their option allows, but table {table} with option {option} is on ranks "
                f"{ranks}."
            )


def _fits(
    problem: Problem, table: int, option: int, ranks: np.ndarray[tuple[int, ...], np.dtype[np.int64]]
) -> bool:
    local = problem.ranks_per_host
    if len(ranks) != problem.shard_counts[option] or ranks.min() < 0 or ranks.max() >= problem.num_ranks:
        return False
    match Where(int(problem.where[option])):
        case Where.ALL:
            return bool((ranks == np.arange(problem.num_ranks)).all())
        case Where.HOST:
            groups = ranks.reshape(-1, local)
            return bool((groups == groups[:, :1] // local * local + np.arange(local)).all())
        case Where.WITHIN if len(set((ranks // local).tolist())) > 1:
            return False
    return problem.allowed is None or bool(problem.allowed[table, ranks].all())
