"""The space: axes, which of them matter when, and coded candidates.

A candidate is a row of small integers, one code per axis. An axis that does not matter (the width of a
layer that is not there) has code 0: so each design has one code, its canonical one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from dse.errors import SpaceError
from perfcore.design.hardware import Device, Node, System
from perfcore.design.model import EmbeddingTable
from perfcore.design.rank_groups import RankGroup, system_of

Value: TypeAlias = "bool | int | float | str"
Codes: TypeAlias = NDArray[np.int16]
MAX_COUPLED = 10**6


@dataclass(frozen=True, slots=True)
class Condition:
    """An axis matters only where another one has one of these codes.

    Attributes:
        axis: name of that other axis.
        codes: its codes for which the axis matters.
    """

    axis: str
    codes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Axis:
    """One setting that varies.

    Attributes:
        name: dotted path, e.g. `training.global_batch`; `model.top_hidden.2` is the width of layer 2 (from 1).
        values: what the codes 0, 1, ... mean; distinct, two at least.
        condition: when the axis matters; always, if `None`.
    """

    name: str
    values: tuple[Value, ...]
    condition: Condition | None = None

    @property
    def ordered(self) -> bool:
        """Numbers have neighbours; names are all equally far apart."""
        return all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in self.values)


@dataclass(frozen=True, slots=True)
class Exclusion:
    """Pairs of values that no design can have together.

    Attributes:
        axes: names of the two axes.
        allowed: for each code of the first, the allowed codes of the second.
        rule: what must hold, for the error.
    """

    axes: tuple[str, str]
    allowed: tuple[tuple[int, ...], ...]
    rule: str


@dataclass(frozen=True)
class SearchSpace:
    """Axes, fixed settings, tables and hardware.

    Attributes:
        name: of the space.
        axes: what varies.
        fixed: dotted path to value of every setting that does not vary.
        tables: embedding tables, in feature order.
        device: GPU of every design.
        node: node of every design.
        exclusions: pairs of axes some of whose values cannot go together.
        ranks: that differ from the device; in worlds without them they are left out.
    """

    name: str
    axes: tuple[Axis, ...]
    fixed: Mapping[str, Value]
    tables: tuple[EmbeddingTable, ...]
    device: Device
    node: Node
    exclusions: tuple[Exclusion, ...] = ()
    ranks: tuple[RankGroup, ...] = ()
    _index: Mapping[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Refuse axes that contradict each other, and a space without a design."""
        object.__setattr__(self, "_index", {a.name: i for i, a in enumerate(self.axes)})
        if len(self._index) != len(self.axes):
            raise SpaceError("Axis names must be unique, but one occurs twice.")
        for axis in self.axes:
            self._check(axis)
        for exclusion in self.exclusions:
            self._check_exclusion(exclusion)
        if self.size == 0:
            rules = "; ".join(e.rule for e in self.exclusions)
            raise SpaceError(f"No combination of the axes is a design: {rules}.")

    def _check(self, axis: Axis) -> None:
        if len(axis.values) < 2 or len(set(axis.values)) != len(axis.values):
            raise SpaceError(
                f"Axis {axis.name!r} needs distinct values, two at least, but got {axis.values}."
            )
        if axis.condition is not None:
            parent = self._index.get(axis.condition.axis)
            if parent is None or self.axes[parent].condition is not None:
                raise SpaceError(
                    f"Axis {axis.name!r} depends on {axis.condition.axis!r}, which is no unconditional axis."
                )

    def _check_exclusion(self, exclusion: Exclusion) -> None:
        first, second = (self.axes[self.position(name)] for name in exclusion.axes)
        for name, values, possible in (
            (first.name, first.values, [bool(codes) for codes in exclusion.allowed]),
            (
                second.name,
                second.values,
                [any(c in a for a in exclusion.allowed) for c in range(len(second.values))],
            ),
        ):
            for value, alive in zip(values, possible, strict=True):
                if not alive:
                    raise SpaceError(f"Axis {name!r}: its value {value!r} fits no design: {exclusion.rule}.")

    @property
    def unequal_memory(self) -> bool:
        """Whether some ranks have memory of their own."""
        return any(group.hbm_bytes is not None for group in self.ranks)

    def system(self, world_size: int) -> System:
        """What designs with so many ranks run on."""
        return system_of(self.device, self.node, world_size, self.ranks)

    def position(self, name: str) -> int:
        """Column of an axis.

        Raises:
            SpaceError: there is no such axis.
        """
        if name not in self._index:
            raise SpaceError(f"The space has no axis {name!r}; its axes are {', '.join(self._index)}.")
        return self._index[name]

    def __contains__(self, name: str) -> bool:
        """Whether a setting is an axis."""
        return name in self._index

    @property
    def cardinalities(self) -> NDArray[np.int64]:
        """`(a,)`: number of values of each axis."""
        return np.array([len(a.values) for a in self.axes], dtype=np.int64)

    @property
    def size(self) -> int:
        """Number of distinct designs, exactly."""
        _, counts = self._coupled()
        return sum(counts)

    def active(self, codes: Codes) -> NDArray[np.bool_]:
        """`(n, a)`: where an axis matters."""
        active = np.ones(codes.shape, dtype=np.bool_)
        for i, axis in enumerate(self.axes):
            if axis.condition is not None:
                parent = codes[:, self.position(axis.condition.axis)]
                active[:, i] = np.isin(parent, axis.condition.codes)
        return active

    def canonical(self, codes: Codes) -> Codes:
        """`(n, a)` codes with 0 for every axis that does not matter; equal designs get equal rows."""
        return np.where(self.active(codes), codes, 0).astype(np.int16)

    def allowed(self, codes: Codes) -> NDArray[np.bool_]:
        """`(n,)`: the combination is a design."""
        allowed = np.ones(len(codes), dtype=np.bool_)
        for exclusion in self.exclusions:
            allowed &= self.permits(exclusion, codes)
        return allowed

    def permits(self, exclusion: Exclusion, codes: Codes) -> NDArray[np.bool_]:
        """`(n,)`: one rule's verdict."""
        first, second = (self.position(name) for name in exclusion.axes)
        return self._table(exclusion)[codes[:, first], codes[:, second]]

    def _table(self, exclusion: Exclusion) -> NDArray[np.bool_]:
        shape = [len(self.axes[self.position(name)].values) for name in exclusion.axes]
        table = np.zeros(shape, dtype=np.bool_)
        for code, others in enumerate(exclusion.allowed):
            table[code, list(others)] = True
        return table

    def sample(self, rng: np.random.Generator, n: int) -> Codes:
        """`(n, a)`: canonical codes, uniform over the grid of allowed codes (not over distinct designs)."""
        parts = [np.empty((0, len(self.axes)), dtype=np.int16)]
        missing = n
        while missing > 0:
            drawn = max(64, 2 * missing) if self.exclusions else missing
            columns = [rng.integers(0, len(axis.values), drawn, dtype=np.int16) for axis in self.axes]
            codes = np.stack(columns, axis=1) if columns else np.empty((drawn, 0), dtype=np.int16)
            codes = codes[self.allowed(codes)][:missing]
            parts.append(codes)
            missing -= len(codes)
        return self.canonical(np.concatenate(parts))

    def neighbours(self, codes: Codes) -> Codes:
        """`(k, a)`: the distinct designs one step from any of `codes` `(n, a)`, those themselves left out.

        A step moves one axis that matters: a number to the next or the previous value, a name to any other.
        """
        codes = self.canonical(codes)
        active = self.active(codes)
        steps: list[Codes] = []
        for i, axis in enumerate(self.axes):
            count = len(axis.values)
            shifts = [-1, 1] if axis.ordered else range(1, count)
            for shift in shifts:
                moved = codes[active[:, i]].copy()
                moved[:, i] = moved[:, i] + shift if axis.ordered else (moved[:, i] + shift) % count
                steps.append(moved[(moved[:, i] >= 0) & (moved[:, i] < count)])
        near = np.concatenate(steps) if steps else codes[:0]
        near = unique(self.canonical(near[self.allowed(near)]))
        return near[~contains(near, codes)]

    def enumerate(self) -> Codes:
        """`(size, a)`: every distinct design once."""
        return np.concatenate(list(self.chunks()))

    def chunks(self) -> Iterator[Codes]:
        """Every distinct design once, in blocks `(k, a)`: one for each combination of the coupled axes."""
        coupled, counts = self._coupled()
        columns = self._coupled_columns()
        for row, count in zip(coupled, counts, strict=True):
            base = np.zeros((1, len(self.axes)), dtype=np.int16)
            base[0, columns] = row
            free = [i for i in np.flatnonzero(self.active(base)[0]) if i not in columns]
            block = np.repeat(base, count, axis=0)
            if free:
                block[:, free] = np.indices([len(self.axes[i].values) for i in free]).reshape(len(free), -1).T
            yield block

    def _coupled_columns(self) -> list[int]:
        names = {a.condition.axis for a in self.axes if a.condition is not None}
        names |= {name for e in self.exclusions for name in e.axes}
        return sorted(self.position(name) for name in names)

    def _coupled(self) -> tuple[Codes, list[int]]:
        """Allowed combinations `(c, k)` of the axes that others depend on, and the designs of each."""
        columns = self._coupled_columns()
        sizes = [len(self.axes[i].values) for i in columns]
        if math.prod(sizes) > MAX_COUPLED:
            raise SpaceError(
                f"Axes that others depend on have {math.prod(sizes)} combinations, {MAX_COUPLED} at most."
            )
        combinations = np.indices(sizes).reshape(len(columns), math.prod(sizes)).T.astype(np.int16)
        codes = np.zeros((len(combinations), len(self.axes)), dtype=np.int16)
        codes[:, columns] = combinations
        keep = self.allowed(codes) & (self.canonical(codes) == codes).all(axis=1)
        active = self.active(codes[keep])
        active[:, columns] = False
        counts = [
            math.prod(c for c, on in zip(self.cardinalities.tolist(), row, strict=True) if on)
            for row in active
        ]
        return combinations[keep], counts


def unique(codes: Codes) -> Codes:
    """Distinct rows of `(n, a)` codes, in lexicographic order."""
    return np.unique(codes, axis=0) if len(codes) else codes


def contains(codes: Codes, others: Codes) -> NDArray[np.bool_]:
    """`(n,)`: which rows of `codes` are among `others`."""
    return np.isin(_keys(codes), _keys(others))


def _keys(codes: Codes) -> NDArray[np.void]:
    packed = np.ascontiguousarray(codes, dtype=np.int16)
    return packed.view(np.dtype((np.void, packed.dtype.itemsize * packed.shape[1]))).ravel()
