"""What designs may reach at a setting before its tables are placed, and whether that is still of interest.

A *setting* is one combination of what placements depend on (`dse.candidate.PLACEMENT_SETTINGS`). The bound of its leanest
designs (`dse.placement.design.averages`) is below their time whatever the plan, and its best network is known. A setting
where even both together are dominated by a design that is known already is not on the front, as long as no other design
of the setting has a smaller bound than its leanest ones. That is sampled by a test, not proven: so pruning is asked for.

Letters: s settings, m objectives, a axes, k candidates.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np

from dse.candidate import PLACEMENT_SETTINGS
from dse.pareto import pareto_mask
from dse.placement.solver.problem import Ints, Mask
from dse.search.protocol import Array, Codes, Evaluation
from dse.space import Axis, SearchSpace

# Evaluation of `(k, a)` codes with `(k,)` iteration times in µs, bytes of the fullest rank, and bytes that it has left.
Evaluate = Callable[[Codes, Array, Array, Array], Evaluation]
_MOST_NETWORKS = 2_000
_ENDLESS = 1e30


class Prospects:
    """The objectives of designs that are known, and what others would have to beat."""

    def __init__(self, space: SearchSpace, evaluate: Evaluate) -> None:
        """Nothing is known yet."""
        self._space, self._evaluate = space, evaluate
        self._known = np.empty((0, 0))
        self._networks = _networks(space)

    def best(self, rows: Codes, lower_us: Array) -> Array:
        """`(s, m)`: what no design of a setting goes below, from `(s, a)` codes of some design and its time's bound.

        The network is the best that the accuracy proxy knows; memory may be as little or as much as it likes.
        """
        count = len(self._networks)
        if not count:
            return np.full((len(rows), 1), -np.inf)
        codes = np.repeat(rows, count, axis=0)
        columns = [self._space.position(a.name) for a in _network_axes(self._space)]
        codes[:, columns] = np.tile(self._networks, (len(rows), 1))
        lower = np.repeat(lower_us, count)
        none, endless = np.zeros(len(codes)), np.full(len(codes), _ENDLESS)
        corners = itertools.product((lower, endless), (none, endless))
        least = np.min(
            [self._evaluate(codes, us, held, _ENDLESS - held).objectives for us, held in corners], axis=0
        )
        return np.asarray(least.reshape(len(rows), count, -1).min(axis=1))

    def learn(self, codes: Codes, times_us: Array, held_bytes: Array, left_bytes: Array) -> None:
        """Designs of the space, as `Evaluate` takes them; those that meet all limits count."""
        evaluation = self._evaluate(codes, times_us, held_bytes, left_bytes)
        found = evaluation.objectives[evaluation.feasible]
        known = np.concatenate([self._known, found]) if self._known.size else found
        self._known = known[pareto_mask(known)]

    def hopeless(self, best: Array) -> Mask:
        """`(s,)`: settings whose `(s, m)` best is worse than a known design, in no objective better."""
        if not self._known.size or not np.isfinite(best).any():
            return np.zeros(len(best), dtype=bool)
        return np.asarray(_dominated(best, self._known).any(axis=1))


def beaten_by(best: Array) -> Ints:
    """`(s,)`: by how many others each of `(s, m)` best objectives is dominated: what to place first has none."""
    return np.asarray(_dominated(best, best).sum(axis=1))


def _dominated(asked: Array, known: Array) -> Mask:
    """`(s, k)`: which of `(k, m)` known objectives dominate which of `(s, m)` others."""
    a, k = asked[:, None], known[None]
    return np.asarray(np.all(k <= a, axis=2) & np.any(k < a, axis=2))


def _network_axes(space: SearchSpace) -> list[Axis]:
    return [a for a in space.axes if a.name.startswith("model.") and a.name not in PLACEMENT_SETTINGS]


def _networks(space: SearchSpace) -> Codes:
    """`(k, axes of the network)`: every depth and name, with all widths at one end or the other.

    Proxies are monotone in widths, so that the best network is among them. Empty where there are too many.
    """
    axes = _network_axes(space)
    wide = np.array([_is_width(a) for a in axes], dtype=bool)
    others = [range(len(a.values)) for a in axes if not _is_width(a)]
    rows = []
    if math.prod(len(c) for c in others) <= _MOST_NETWORKS:
        for end, chosen in itertools.product((0, -1), itertools.product(*others)):
            row = np.array(
                [
                    int(np.argsort([float(v) for v in a.values])[end]) if w else 0
                    for a, w in zip(axes, wide, strict=True)
                ],
                dtype=np.int16,
            )
            row[~wide] = chosen
            rows.append(row)
    return np.array(rows, dtype=np.int16).reshape(len(rows), len(axes))


def _is_width(axis: Axis) -> bool:
    """Layers' widths; depths and names are no such numbers."""
    return axis.ordered and not axis.name.endswith((".depth", ".cross_layers"))
