"""Lower bounds that decide how long events may last, one limit after another.

The bound without ranks (`bound`) takes shares of options. Half of an option with a large shard then asks for half as long an event,
although no assignment has half a shard. Here limits `low_e <= M_e <= high_e` of how long events last are decided: in each
such *box*

1. the rules of `bound` hold, with `low_e <= M_e <= high_e`;
2. an option with a shard that alone takes longer than `high_e` is not taken.

Whatever an assignment's M_e, it lies in one of the two boxes that a value cuts a box into. So the least bound over boxes that
together hold all M is a bound, wherever boxes are cut and wherever that ends.

Letters: t tables, o options, s shards, e events, r ranks.
"""

from __future__ import annotations

import heapq
import time
from dataclasses import dataclass, replace
from itertools import count
from typing import NamedTuple

import numpy as np

from dse.placement.solver.bound import Options, bound_of_averages, options_of, rank_free
from dse.placement.solver.linear import Resolved
from dse.placement.solver.problem import Array, Mask, Problem

_PATIENCE, _NOTHING = 16, 1e-4  # boxes that must raise a bound by more than that share for more to be cut
_ABOVE = 1e-9  # relative: a shard that is longer than its event by less is rounding
_MARGINS = (
    0.1,
    0.05,
    0.02,
)  # of how long an event lasts: where it is cut, at first and when that cuts nothing off
_SHORTEST = 0.005  # of the bound: shorter events are cut there
_TINY = 1e-300


@dataclass(frozen=True, slots=True, eq=False)
class Boxed:
    """The relaxation in a box.

    Attributes:
        value: no assignment in the box is below; infinite when there is none.
        weights: `(o,)` share of each option; `None` when the relaxation has no point.
        events: `(e,)` how long the events last then; `None` likewise.
    """

    value: float
    weights: Array | None = None
    events: Array | None = None


class Boxes:
    """The relaxation, solved in one box after another, each time from the last solution."""

    def __init__(self, problem: Problem) -> None:
        """Of a problem that is best reduced first (`dominance.reduced`)."""
        self._problem, self.options = problem, options_of(problem)
        self._program = rank_free(problem, self.options, below=None, steps=None)
        self._solver = Resolved(self._program)
        self._widest: Boxed | None = None

    @property
    def num_events(self) -> int:
        """Events of the problem."""
        return self._problem.num_events

    def cut(self, low: Array, high: Array, boxed: Boxed) -> list[tuple[Array, Array]]:
        """The two parts of a box, cut a little above how long the event lasts whose options are most too long for it.

        Empty when none is too long, or the relaxation has no point.
        """
        if boxed.weights is None or boxed.events is None:
            return []
        for margin in _MARGINS:
            at = np.maximum(boxed.events, _SHORTEST * max(boxed.value, _TINY)) * (1.0 + margin)
            too_long = boxed.weights @ np.clip(self.options.largest - at, 0.0, at)
            too_long[~((low < at) & (at < high))] = 0.0
            event = int(np.argmax(too_long))
            if too_long[event] > _ABOVE * at[event]:
                lower, upper = high.copy(), low.copy()
                lower[event] = upper[event] = at[event]
                return [(low, lower), (upper, high)]
        return []

    def offered(self, high: Array) -> Mask:
        """`(o,)` without options whose largest shard is longer than an event may last."""
        return offered(self.options, high)

    def widest(self, *, time_limit_s: float) -> Boxed:
        """The relaxation without limits, solved once; in place of one that does not end in time, by averages alone."""
        if self._widest is None or self._widest.weights is None:
            nothing = np.zeros(self.num_events)
            found = self.within(nothing, nothing + np.inf, time_limit_s=time_limit_s)
            self._widest = replace(
                found, value=max(found.value, bound_of_averages(self._problem, self.options))
            )
        return self._widest

    def within(
        self, low: Array, high: Array, *, usable: Mask | None = None, time_limit_s: float = 60.0
    ) -> Boxed:
        """The relaxation in the box of `(e,)` limits; of `(o,)` usable options alone if given."""
        options, events = self._problem.num_options, self._problem.num_events
        usable = self.offered(high) if usable is None else usable
        if not np.logical_or.reduceat(usable, self._problem.first_option[:-1]).all():
            return Boxed(np.inf)
        lowest, highest = self._program.low.copy(), self._program.high.copy()
        highest[:options] *= usable
        longest = highest[options : options + events]
        if (low > longest * (1.0 + _ABOVE)).any():
            return Boxed(np.inf)  # all options together take less than that
        highest[options : options + events] = np.minimum(longest, high)
        lowest[options : options + events] = np.minimum(low, longest)
        value, x = self._solver.solve(lowest, highest, time_limit_s=time_limit_s)
        return Boxed(value) if x is None else Boxed(value, x[:options], x[options : options + events])


def offered(options: Options, high: Array) -> Mask:
    """`(o,)`: rule 2."""
    mask: Mask = options.usable & (options.largest <= high * (1.0 + _ABOVE)).all(axis=1)
    return mask


class _Node(NamedTuple):
    """A box, and what no assignment in it is below."""

    bound: float
    order: int
    low: Array
    high: Array
    boxed: Boxed


def boxed_bound(
    boxes: Boxes, relaxed: float, *, below: float, time_limit_s: float, most_boxes: int = 10_000
) -> float:
    """The least bound over boxes, which are cut where it is least.

    Args:
        boxes: of the problem.
        relaxed: its bound without ranks.
        below: a known objective, infinite when none is known: boxes that lie above are left out.
        time_limit_s: after which the bound so far is returned.
        most_boxes: to solve.

    Returns:
        A bound of the assignments below `below`, or that value itself.
    """
    until, order, events = time.perf_counter() + time_limit_s, count(), boxes.num_events
    widest = np.zeros(events), np.full(events, np.inf)
    heap = [_Node(relaxed, next(order), *widest, boxes.widest(time_limit_s=time_limit_s))]
    solved = 1
    while (
        heap and heap[0].bound < below and solved < most_boxes and (left := until - time.perf_counter()) > 0
    ):
        if solved > _PATIENCE and heap[0].bound <= relaxed * (1.0 + _NOTHING):
            break
        node = heapq.heappop(heap)
        parts = boxes.cut(node.low, node.high, node.boxed)
        if not parts:
            return min(node.bound, below)
        for low, high in parts:
            found = boxes.within(low, high, time_limit_s=left)
            bound = max(found.value, node.bound)
            if bound < below:
                heapq.heappush(heap, _Node(bound, next(order), low, high, found))
        solved += len(parts)
    return min(heap[0].bound if heap else below, below)
