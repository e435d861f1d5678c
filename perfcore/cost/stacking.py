"""Many kernels as flat columns: one numpy call prices all kernels of a kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from perfcore.cost.model import Calibration
from perfcore.errors import DesignError
from perfcore.graph.kernels import Bucket, Total, dims

Array = NDArray[np.float64]
K = TypeVar("K")

_NAMES: dict[type, tuple[str, ...]] = {}  # numeric fields of each kernel class


@dataclass(frozen=True, slots=True)
class Stacked:
    """Dims of kernels of one kind, flattened and laid end to end.

    Attributes:
        columns: dim name to `(s,)` values of all kernels.
        shapes: each kernel's broadcast shape.
    """

    columns: dict[str, Array]
    shapes: tuple[tuple[int, ...], ...]

    def __getitem__(self, name: str) -> Array:
        """`(s,)`: one dim of all kernels."""
        return self.columns[name]

    def repeat(self, values: Sequence[Any]) -> NDArray[Any]:
        """`(s,)`: one value a kernel, repeated for each of its elements."""
        if len(set(values)) == 1:
            return np.full(sum(map(_size, self.shapes)), values[0])
        return np.repeat(np.asarray(values), [_size(s) for s in self.shapes])

    def split(self, values: Array, *, sum_tables: bool = False) -> list[Array]:
        """One array per kernel, of its shape; with `sum_tables` without its last axis, summed."""
        out, at = [], 0
        for shape in self.shapes:
            part = values[at : at + _size(shape)].reshape(shape)
            out.append(part.sum(axis=-1) if sum_tables and shape else part)
            at += _size(shape)
        return out


def stack(kernels: Sequence[Any]) -> Stacked:
    """The dims of kernels of one kind as columns.

    Raises:
        DesignError: a dim is negative, not finite, or its shape does not broadcast.
    """
    names = _names(kernels[0]) if kernels else ()
    values = [[_plain(getattr(k, n)) for n in names] for k in kernels]
    shapes = tuple(_shape(k, names, v) for k, v in zip(kernels, values, strict=True))
    single = all(_size(s) == 1 for s in set(shapes))
    columns = {n: _column([v[i] for v in values], shapes, single=single) for i, n in enumerate(names)}
    for name, column in columns.items():
        sound = np.isfinite(column) & (column >= 0)
        if not bool(np.all(sound)):
            bad = column[~sound][0]
            kind = type(kernels[0]).__name__
            raise DesignError(f"`{name} >= 0` must hold for a {kind} and be finite, but got {name}={bad}.")
    return Stacked(columns, shapes)


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


def _names(kernel: Any) -> tuple[str, ...]:
    return _NAMES.setdefault(type(kernel), tuple(dims(kernel)))


def _plain(value: Any) -> Any:
    return value.value() if isinstance(value, (Total, Bucket)) else value


def _shape(kernel: Any, names: Sequence[str], values: Sequence[Any]) -> tuple[int, ...]:
    shape: tuple[int, ...] = ()
    for value in values:
        own = value.shape if isinstance(value, np.ndarray) else ()
        if own and own != shape:
            if shape:
                return _broadcast_shape(kernel, names, values)
            shape = own
    return shape


def _broadcast_shape(kernel: Any, names: Sequence[str], values: Sequence[Any]) -> tuple[int, ...]:
    try:
        return np.broadcast_shapes(*(np.shape(v) for v in values))
    except ValueError:
        shapes = {n: np.shape(v) for n, v in zip(names, values, strict=True)}
        raise DesignError(
            f"The dims of a {type(kernel).__name__} must broadcast together, but got shapes {shapes}."
        ) from None


def _column(values: Sequence[Any], shapes: Sequence[tuple[int, ...]], *, single: bool) -> Array:
    """`(s,)`: one dim of all kernels; `single` if each kernel has one element."""
    if single:
        return np.array([v.item() if isinstance(v, np.ndarray) else v for v in values], dtype=np.float64)
    column = np.empty(sum(map(_size, shapes)))
    at = 0
    for value, shape in zip(values, shapes, strict=True):
        end = at + _size(shape)
        column[at:end].reshape(shape)[...] = value
        at = end
    return column


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for n in shape:
        size *= n
    return size
