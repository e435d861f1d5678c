"""A placement with the proof of how good it is: the search for a plan, and the bound that no plan goes below."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from dse.placement.solver.bound import Bound, lower_bound
from dse.placement.solver.boxes import Boxes, boxed_bound
from dse.placement.solver.dominance import Reduced, reduced
from dse.placement.solver.exact import MOST_COLUMNS, size_of, solve_exactly
from dse.placement.solver.packing import most_weight, packed_bound
from dse.placement.solver.problem import Array, Assignment, Problem, loads_of

if TYPE_CHECKING:
    from dse.placement.solver.anytime import Search
    from dse.placement.solver.tails import TailSearch

# An objective within this share of its bound is the best there is: what branch and bound tells apart, with a margin.
PROVEN = 1e-5
# Shares of the time limit: for the first search of a large or a small problem, for the bound over boxes (of many ranks, and
# of others), for the bound with ranks for large tables, and for that with whole numbers.
_SEARCH, _SMALL_SEARCH, _MANY_BOX, _BOX, _PACK, _BOUND = 0.2, 0.15, 0.3, 0.03, 0.35, 0.05
_LEAST_S = 1.0  # for the first bound, whatever the time limit
# Counted columns of a problem that branch and bound may solve to the end: these, and so many more for each second.
_SMALL, _SMALL_PER_S = 400, 100
# Of the gap, what branch and bound looks through first.
_FIRST_PART = 0.25


@dataclass(frozen=True, slots=True, eq=False)
class Certified:
    """An assignment and what is known of it.

    Attributes:
        assignment: the best found; where nothing fits, the one with the least overflow.
        objective: of the assignment.
        lower_bound: no feasible assignment is below; infinite when it is proven that there is none.
        feasible: the assignment is within all memory.
        wall_s: time spent.
        option_weights: `(o,)` share of each option in the relaxation: what a plan without ranks would choose.
    """

    assignment: Assignment
    objective: float
    lower_bound: float
    feasible: bool
    wall_s: float
    option_weights: Array

    @property
    def gap_pct(self) -> float:
        """By how much the objective may at most exceed the best one, in percent of the bound."""
        if not self.feasible:
            return np.inf
        if self.objective <= self.lower_bound:
            return 0.0
        return 100.0 * (self.objective / self.lower_bound - 1.0) if self.lower_bound > 0 else np.inf

    @property
    def proven(self) -> bool:
        """The assignment is the best there is, or it is proven that none fits."""
        return self.gap_pct <= 100.0 * PROVEN if self.feasible else bool(np.isinf(self.lower_bound))


def certify(
    problem: Problem, *, time_limit_s: float = 10.0, seed: int = 0, start: Assignment | None = None
) -> Certified:
    """Place the tables and prove how far from the best the placement can be.

    What cannot matter is dropped, a linear program bounds the objective and suggests options, local search places the
    shards; then whole numbers tighten the bound, and small problems are solved to the end. Within the time limit;
    the same seed gives the same answer as long as no step is cut off by it.

    Args:
        problem: what to place.
        time_limit_s: of everything together, roughly.
        seed: of the local search.
        start: an assignment to improve on; the result is never worse than a feasible one.
    """
    began = time.perf_counter()
    run = _Run(reduced(problem), began + time_limit_s, seed, start)
    small = size_of(run.problem) <= min(_SMALL + _SMALL_PER_S * time_limit_s, MOST_COLUMNS)
    run.relax(0.0)
    run.search((_SMALL_SEARCH if small else _SEARCH) * time_limit_s)
    if not run.closed:
        run.box(min((_MANY_BOX if run.many else _BOX) * time_limit_s, run.left_s))
    if not run.closed:
        run.pack(min(_PACK * time_limit_s, run.left_s))
    if not run.closed and not run.many:
        run.relax(min(_BOUND * time_limit_s, run.left_s))
    if not run.closed and small:
        run.solve()
    elif not run.closed:
        run.search(run.left_s, last=True)
    best = run.smaller.original(run.best)
    if start is not None and _better(problem, start, best):
        best = start
    loads = loads_of(problem, best)
    weights = np.zeros(problem.num_options)
    if run.bound.weights is not None:
        weights[run.smaller.option] = run.bound.weights
    return Certified(
        assignment=best,
        objective=loads.objective,
        lower_bound=run.bound.value,
        feasible=_fits(problem, best),
        wall_s=time.perf_counter() - began,
        option_weights=weights,
    )


class _Run:
    """The state of one call: the smaller problem, the best assignment, the best bound."""

    def __init__(self, smaller: Reduced, until: float, seed: int, start: Assignment | None) -> None:
        self.smaller, self.problem, self._until, self._seed = smaller, smaller.problem, until, seed
        self._start = smaller.translated(start) if start is not None else None
        from dse.placement.solver.tails import suits

        self._suits = suits(self.problem)
        self._going: Search | None = None
        self._tails: TailSearch | None = None
        self._made: Boxes | None = None
        self.bound = Bound(0.0, None, None)
        self.best: Assignment

    @property
    def left_s(self) -> float:
        return max(self._until - time.perf_counter(), 0.0)

    @property
    def closed(self) -> bool:
        """Nothing better exists."""
        if np.isinf(self.bound.value):
            return True
        return _fits(self.problem, self.best) and self._objective <= self.bound.value * (1 + PROVEN)

    @property
    def _objective(self) -> float:
        return loads_of(self.problem, self.best).objective

    def relax(self, time_limit_s: float) -> None:
        """Bound the objective without ranks."""
        if self._suits:  # the boxes' first solution: a large program is not solved twice
            widest = self._boxes.widest(time_limit_s=max(self.left_s, _LEAST_S))
            self.bound = Bound(max(self.bound.value, widest.value), widest.weights, widest.events)
            return
        found = lower_bound(self.problem, time_limit_s=time_limit_s)
        self.bound = replace(found, value=max(self.bound.value, found.value))

    @property
    def many(self) -> bool:
        """So many options and ranks that the search prices ranks one by one."""
        return self._suits and not np.isinf(self.bound.value)

    @property
    def _boxes(self) -> Boxes:
        self._made = self._made or Boxes(self.problem)
        return self._made

    def box(self, time_limit_s: float) -> None:
        """Bound the objective by deciding how long events may last."""
        if self.bound.weights is None:
            return
        below = self._objective if _fits(self.problem, self.best) else np.inf
        value = boxed_bound(self._boxes, self.bound.value, below=below, time_limit_s=time_limit_s)
        self.bound = replace(self.bound, value=max(self.bound.value, value))

    def search(self, time_limit_s: float, *, last: bool = False) -> None:
        """Improve the best assignment by local search, which goes on where it stopped.

        Of many ranks, the usual search is asked at last, and only where nothing fits: its starts alone may take longer.
        """
        if self.many:
            self._search_tails(time_limit_s)
            if not last or _fits(self.problem, self.best):
                return
        from dse.placement.solver.anytime import Search

        if self._going is None:
            weights = self.bound.weights
            options = most_weight(self.problem, weights) if weights is not None else None
            self._going = Search(self.problem, seed=self._seed, start=self._start, options=options)
        self._going.run(time_limit_s=time_limit_s, enough=self.bound.value * (1 + PROVEN / 2))
        self.best = self._going.best

    def _search_tails(self, time_limit_s: float) -> None:
        from dse.placement.solver.tails import TailSearch

        if self._tails is None:
            self._tails = TailSearch(self.problem, self.bound, seed=self._seed, boxes=self._boxes)
        self._tails.run(time_limit_s=time_limit_s, enough=self.bound.value * (1 + PROVEN / 2))
        self.best = self._tails.best

    def pack(self, time_limit_s: float) -> None:
        """Bound the objective with ranks for the large tables, and offer the search where they are then."""
        if self.bound.weights is None:
            return
        below = self._objective if _fits(self.problem, self.best) else np.inf
        found = packed_bound(self.problem, self.bound, below=below, time_limit_s=time_limit_s)
        if found is None:
            return
        self.bound = replace(self.bound, value=max(self.bound.value, found.value))
        if found.option is not None and self._going is not None:
            self._going.offer(found.option, found.ranks)

    def solve(self) -> None:
        """Branch and bound to the end, or to the time limit.

        That nothing lies in the lower part of the gap is proven much sooner than that nothing lies in all of it.
        """
        for share in (_FIRST_PART, 1.0):
            known = self.bound.value
            fits = _fits(self.problem, self.best)
            below = known + share * (self._objective - known) if fits else np.inf
            found = solve_exactly(self.problem, below=below, bound=known, time_limit_s=self.left_s)
            if found.assignment is not None and _better(self.problem, found.assignment, self.best):
                self.best = found.assignment
            self.bound = replace(self.bound, value=found.bound)
            if self.closed or not self.left_s:
                return


def _fits(problem: Problem, assignment: Assignment) -> bool:
    return loads_of(problem, assignment).overflow_bytes(problem) <= 0.0


def _better(problem: Problem, a: Assignment, b: Assignment) -> bool:
    ours, theirs = loads_of(problem, a), loads_of(problem, b)
    over = ours.overflow_bytes(problem), theirs.overflow_bytes(problem)
    return (over[0], ours.objective) < (over[1], theirs.objective)
