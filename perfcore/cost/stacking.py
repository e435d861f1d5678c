"""Many kernels as flat columns: one numpy call prices all kernels of a kind."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from perfcore.cost.model import Calibration
from perfcore.errors import DesignError
from perfcore.graph.dim_types import Bucket, Total
from perfcore.graph.kernels import dim_names, dim_values

Array = NDArray[np.float64]
Columns = tuple[Array, tuple[tuple[int, ...], ...], NDArray[np.int64]]  # `(d, s)` dims; shapes; sizes
K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class Stacked:
    """Dims of kernels of one kind, flattened and laid end to end.

    Attributes:
        columns: dim name to `(s,)` values of all kernels.
        shapes: each kernel's broadcast shape.
        sizes: `(k,)` elements of each kernel; they add up to s.
    """

    columns: dict[str, Array]
    shapes: tuple[tuple[int, ...], ...]
    sizes: NDArray[np.int64]

    def __getitem__(self, name: str) -> Array:
        """`(s,)`: one dim of all kernels."""
        return self.columns[name]

    def repeat(self, values: Sequence[Any]) -> NDArray[Any]:
        """`(s,)`: one value a kernel, repeated for each of its elements."""
        if len(set(values)) == 1:
            return np.full(int(self.sizes.sum()), values[0])
        return np.repeat(np.asarray(values), self.sizes)

    def split(self, values: Array, *, sum_tables: bool = False) -> list[Array]:
        """One array per kernel, of its shape; with `sum_tables` without its last axis, summed."""
        if self._alike:
            parts = values.reshape(len(self.shapes), *self.shapes[0])
            return list(parts.sum(axis=-1) if sum_tables else parts)
        own = self._parts(values)
        return [part.sum(axis=-1) if sum_tables and part.ndim else part for part in own]

    def over_tables(self, values: Array) -> Array:
        """`(s,)`: the sum over the tables of each element's kernel."""
        if self._alike:
            parts = [values.reshape(len(self.shapes), *self.shapes[0])]
        else:
            parts = [np.atleast_1d(part) for part in self._parts(values)]
        return np.concatenate(
            [np.broadcast_to(p.sum(axis=-1, keepdims=True), p.shape).ravel() for p in parts]
        )

    @property
    def _alike(self) -> bool:
        """Whether all kernels have one shape, so that one call treats all."""
        return len(set(self.shapes)) == 1 and self.shapes[0] != ()

    def _parts(self, values: Array) -> list[Array]:
        starts = [0, *np.cumsum(self.sizes).tolist()]
        return [values[a:b].reshape(s) for (a, b), s in zip(pairwise(starts), self.shapes, strict=True)]


def stack(kernels: Sequence[Any]) -> Stacked:
    """The dims of kernels of one kind as columns.

    Raises:
        DesignError: a dim is negative, not finite, or its shape does not broadcast.
    """
    if not kernels:
        return Stacked({}, (), np.empty(0, dtype=np.int64))
    names, rows = dim_names(type(kernels[0])), [dim_values(kernel) for kernel in kernels]
    matrix, shapes, sizes = _single(rows) or _broadcast(type(kernels[0]), rows)
    if not (matrix.min(initial=0.0) >= 0 and matrix.max(initial=0.0) < np.inf):  # NaN neither
        sound = (matrix >= 0) & (matrix < np.inf)
        column = int(np.argmin(sound.all(axis=1)))
        name, bad = names[column], matrix[column][~sound[column]][0]
        kind = type(kernels[0]).__name__
        raise DesignError(f"`{name} >= 0` must hold for a {kind} and be finite, but got {name}={bad}.")
    return Stacked(dict(zip(names, matrix, strict=True)), shapes, sizes)


@dataclass(frozen=True, slots=True)
class FormulaModel(Generic[K]):
    """A kernel model made of one formula.

    Attributes:
        price_us: kernels and their stacked dims `(s,)` to durations `(s,)`.
        basis: on what the formula's constants rest.
        error: nine in ten measurements lie within a factor `exp(error)` of the duration.
        sum_tables: the last axis of the dims is tables, summed inside a kernel.
    """

    price_us: Callable[[Sequence[K], Stacked], Array]
    basis: Calibration = Calibration.ANALYTIC
    error: float = 0.0
    sum_tables: bool = False

    def predict_us(self, kernels: Sequence[K]) -> list[Array]:
        """One array per kernel, of the broadcast shape of its dims (tables summed)."""
        if not kernels:
            return []
        stacked = stack(kernels)
        return stacked.split(self.price_us(kernels, stacked), sum_tables=self.sum_tables)

    def calibration(self, kernel: K) -> Calibration:
        """On what the formula rests; the same for every shape."""
        return self.basis

    def log_error_90(self, kernel: K) -> float:
        """Nine in ten measurements lie within a factor `exp` of it of the duration; the same for every shape."""
        return self.error


def _single(rows: Sequence[Sequence[Any]]) -> Columns | None:
    """Columns of kernels of one element each; `None` where some kernel has more."""
    try:
        plain = [[v.item() if type(v) is np.ndarray else v for v in row] for row in rows]
        matrix = np.array(plain, dtype=np.float64).T.copy()
    except (TypeError, ValueError):  # a sum, an array of more elements
        return None
    shapes = tuple((1,) * max([v.ndim if type(v) is np.ndarray else 0 for v in row]) for row in rows)
    return matrix, shapes, np.ones(len(rows), dtype=np.int64)


def _broadcast(kind: type, rows: Sequence[Sequence[Any]]) -> Columns:
    """Columns of kernels whose dims broadcast to any shape."""
    rows = [[v.value() if isinstance(v, (Total, Bucket)) else v for v in row] for row in rows]
    shapes = tuple(_shape(kind, row) for row in rows)
    sizes = np.array([math.prod(shape) for shape in shapes], dtype=np.int64)
    starts = [0, *np.cumsum(sizes).tolist()]
    matrix = np.empty((len(rows[0]), starts[-1]))
    for column, values in zip(matrix, zip(*rows, strict=True), strict=True):
        numbers = [_number(v) for v in values]
        if any(number is not None for number in numbers):
            column[:] = np.repeat(np.array(numbers, dtype=np.float64), sizes)
        for i, number in enumerate(numbers):
            if number is None:
                column[starts[i] : starts[i + 1]].reshape(shapes[i])[...] = values[i]
    return matrix, shapes, sizes


def _number(value: Any) -> Any:
    """The one number that a dim is, `None` where it is several."""
    if type(value) is np.ndarray:
        return value.item() if value.size == 1 else None
    return value


def _shape(kind: type, values: Sequence[Any]) -> tuple[int, ...]:
    shape: tuple[int, ...] = ()
    for value in values:
        own = value.shape if type(value) is np.ndarray else ()
        if own and own != shape:
            if shape:
                return _broadcast_shape(kind, values)
            shape = own
    return shape


def _broadcast_shape(kind: type, values: Sequence[Any]) -> tuple[int, ...]:
    try:
        return np.broadcast_shapes(*(np.shape(v) for v in values))
    except ValueError:
        shapes = {n: np.shape(v) for n, v in zip(dim_names(kind), values, strict=True)}
        raise DesignError(
            f"The dims of a {kind.__name__} must broadcast together, but got shapes {shapes}."
        ) from None
