"""What the search needs of a space and of an evaluator, and the values that they exchange.

Axis letters: `n` candidates, `a` search axes, `m` objectives, `c` constraints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

Codes: TypeAlias = NDArray[np.int16]
Array: TypeAlias = NDArray[np.float64]


class Axis(Protocol):
    """One finite axis: a candidate's code is an index into `values`."""

    @property
    def name(self) -> str:
        """Unique in the space."""

    @property
    def values(self) -> Sequence[Any]:
        """All choices, in order."""


class Space(Protocol):
    """A product of finite axes, some of which may be conditional."""

    @property
    def axes(self) -> Sequence[Axis]:
        """The `a` axes, in the order of the codes' columns."""

    @property
    def size(self) -> int:
        """Distinct candidates."""

    def sample(self, rng: np.random.Generator, n: int) -> Codes:
        """`(n, a)` canonical, allowed candidates drawn over the whole space."""

    def canonical(self, codes: Codes) -> Codes:
        """`(n, a)`: the one representative of each candidate (inactive axes at a fixed code); idempotent."""

    def allowed(self, codes: Codes) -> NDArray[np.bool_]:
        """`(n,)`: the combination is a candidate."""


@dataclass(frozen=True, slots=True, eq=False)
class Evaluation:
    """What an evaluator says of n candidates.

    Attributes:
        objectives: `(n, m)`, all minimised; a row that is not finite is infeasible.
        margins: `(n, c)`, feasible where `<= 0`; relative to their limits, so that they can be compared.
        metrics: further numbers by name, `(n,)` each.
    """

    objectives: Array
    margins: Array
    metrics: Mapping[str, Array] = field(default_factory=dict)

    @property
    def violation(self) -> Array:
        """`(n,)`: sum of the positive margins; infinite where anything is NaN or an objective infinite."""
        total = np.clip(self.margins, 0.0, None).sum(axis=1)
        known = np.isfinite(self.objectives).all(axis=1) & np.isfinite(total)
        return np.where(known, total, np.inf)

    @property
    def feasible(self) -> NDArray[np.bool_]:
        """`(n,)`: every margin is `<= 0` and every objective finite."""
        return self.violation <= 0.0

    def take(self, rows: NDArray[Any]) -> Evaluation:
        """The evaluation of those rows (indices or a mask)."""
        metrics = {k: v[rows] for k, v in self.metrics.items()}
        return Evaluation(self.objectives[rows], self.margins[rows], metrics)


class Evaluator(Protocol):
    """Prices candidates; pure, so that a chunk may be evaluated anywhere and again; picklable."""

    def evaluate(self, codes: Codes) -> Evaluation:
        """The evaluation of `(n, a)` canonical codes."""


EvaluatorFactory: TypeAlias = Callable[[], Evaluator]

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Task(Protocol[T_co]):
    """A picklable, pure unit of work for a worker that holds the space and an evaluator."""

    def __call__(self, space: Space, evaluator: Evaluator, /) -> T_co:
        """The result, a function of the task alone."""


class Pool(Protocol):
    """Workers at work."""

    def map(self, tasks: Iterable[Task[T]]) -> Iterator[T]:
        """The tasks' results, in the tasks' order."""


class Executor(Protocol):
    """Where tasks run."""

    @property
    def width(self) -> int:
        """Tasks that run at once."""

    def start(self, space: Space, factory: EvaluatorFactory) -> AbstractContextManager[Pool]:
        """Workers that share what `factory` builds; they end with the context."""
