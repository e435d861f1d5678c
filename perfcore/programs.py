"""Assembles programs: structures' segments, merged, with equal tables stored once."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from perfcore.bulk_program import aligned
from perfcore.errors import UnsupportedError
from perfcore.grid import Axes, axes_of, entries, expand, shrink, tabulate
from perfcore.instructions import COLUMNS, Instruction, Programs
from perfcore.maxplus import compose
from perfcore.segments import Amount, CurveLaunch, Joint, Local, Segment, Term

Array = NDArray[np.float64]
# A sum's axes, where it is stored, and whether ranks differ in it.
_StoredSum: TypeAlias = tuple[Axes, int, int]
MAX_RANKS = 64


@dataclass(eq=False)
class _Store:
    """Arrays joined end to end; equal content is stored once."""

    parts: list[NDArray[Any]] = field(default_factory=list)
    length: int = 0
    _known: dict[bytes, int] = field(default_factory=dict)

    def add(self, array: NDArray[Any]) -> int:
        """Where the array begins, in rows."""
        digest = hashlib.blake2b(array.tobytes(), digest_size=16, person=str(array.shape).encode()[:16])
        at = self._known.setdefault(digest.digest(), self.length)
        if at == self.length:
            self.parts.append(array)
            self.length += len(array)
        return at


@dataclass(eq=False)
class Assembler:
    """Collects the programs of structures one after the other.

    Attributes:
        sizes: of the grid's axes.
        num_ranks: size of the rank axis; at most 64, the bits of a dominance mask.
        max_entries: of a table that merges neighbours.
        hbm_bytes: of the ranks' GPUs on the grid, if anyone asks what is left of it.
    """

    sizes: tuple[int, ...]
    num_ranks: int
    max_entries: int
    hbm_bytes: Array | None = None
    _matrices: _Store = field(default_factory=_Store)
    _values: _Store = field(default_factory=_Store)
    _dominators: _Store = field(default_factory=_Store)
    _keys: dict[Axes, int] = field(default_factory=dict)
    _rows: list[list[int]] = field(default_factory=list)
    _caps: list[tuple[float, float]] = field(default_factory=list)
    _row_bounds: list[int] = field(default_factory=lambda: [0])
    _used: list[list[int]] = field(default_factory=list)
    _ranked: list[list[tuple[int, int]]] = field(default_factory=list)
    _stored: dict[int, tuple[Local, int, NDArray[np.uint64] | None]] = field(default_factory=dict)
    _dominance: list[tuple[NDArray[np.uint64], Axes]] = field(default_factory=list)
    _memory: list[list[tuple[int, int, int, int]]] = field(default_factory=list)
    _merged: dict[tuple[int, int], tuple[Local, Local, Local | None]] = field(default_factory=dict)
    _summed: dict[int, tuple[Sequence[Any], list[_StoredSum]]] = field(default_factory=dict)
    _slots: int = 1

    def __post_init__(self) -> None:
        """Refuse more ranks than a mask has bits."""
        if self.num_ranks > MAX_RANKS:
            raise UnsupportedError(
                f"At most {MAX_RANKS} ranks can be priced in bulk, but got {self.num_ranks}."
            )

    def add(self, segments: Sequence[Segment], memory: Sequence[Any]) -> None:
        """Append one structure's program and the grid arrays whose sum is its memory.

        Structures with the same memory had better pass the same object: its sum is then formed once.
        """
        self._used.append([])
        self._emit(self._merge(segments))
        self._emit_ranks()
        self._row_bounds.append(len(self._rows))
        if id(memory) not in self._summed:
            # The terms are kept, so that their id stays their own.
            self._summed[id(memory)] = memory, [self._stored_sum(*s) for s in self._sums(memory)]
        stored = self._summed[id(memory)][1]
        self._memory.append([(self._key(axes), offset, ranked, 0) for axes, offset, ranked in stored])
        if self.hbm_bytes is not None:
            ((there, axes),) = self._sums([self.hbm_bytes])
            self._memory[-1].append((self._key(axes), *self._stored_sum(there, axes)[1:], 1))

    def programs(self) -> Programs:
        """All programs."""
        terms = [self._strides(axes) for axes in self._keys]
        return Programs(
            rows=np.array(self._rows, dtype=np.int64).reshape(-1, len(COLUMNS)),
            caps=np.array(self._caps, dtype=np.float64).reshape(-1, 2),
            row_bounds=np.array(self._row_bounds),
            keys=_joined([sorted(set(u)) for u in self._used], 1)[:, 0],
            key_bounds=_bounds([sorted(set(u)) for u in self._used]),
            key_terms=_joined(terms, 2),
            key_term_bounds=_bounds(terms),
            rank_rows=_joined(self._ranked, 2),
            rank_bounds=_bounds(self._ranked),
            memory_rows=_joined(self._memory, 4),
            memory_bounds=_bounds(self._memory),
            matrices=_matrices(self._matrices.parts),
            values=np.concatenate([*self._values.parts, np.zeros(1)]),
            dominators=np.concatenate([*self._dominators.parts, np.zeros(1, dtype=np.uint64)]),
            slots=self._slots,
        )

    def _strides(self, axes: Axes) -> list[tuple[int, int]]:
        strides = np.cumprod([1, *(self.sizes[a] for a in axes[:0:-1])])[::-1].tolist()
        return list(zip(axes, strides, strict=True)) if axes else []

    def _key(self, axes: Axes) -> int:
        key = self._keys.setdefault(axes, len(self._keys))
        self._used[-1].append(key)
        return key

    def _merge(self, segments: Sequence[Segment]) -> list[Segment]:
        """Neighbouring matrices joined while the table of both stays small; never across a guard's ends."""
        merged: list[Segment] = []
        barrier, at = 0, 0
        while at < len(segments):
            segment = segments[at]
            at += 1
            if isinstance(segment, Amount) and segment.guarded:
                inner = self._merge(segments[at : at + segment.guarded])
                at += segment.guarded
                merged += [replace(segment, guarded=len(inner)), *inner]
                barrier = len(merged)
                continue
            last = merged[-1] if len(merged) > barrier else None
            both = (
                self._both(last, segment) if isinstance(last, Local) and isinstance(segment, Local) else None
            )
            if both:
                merged[-1] = both
            else:
                merged.append(segment)
        return merged

    def _both(self, first: Local, second: Local) -> Local | None:
        known = self._merged.get((id(first), id(second)))
        if known is None:
            known = self._merged[id(first), id(second)] = (first, second, self._composed(first, second))
        return known[2]

    def _composed(self, first: Local, second: Local) -> Local | None:
        axes = tuple(sorted({*first.axes, *second.axes}))
        ranks = max(first.matrices.shape[1], second.matrices.shape[1])
        if entries(axes, self.sizes) * ranks > self.max_entries:
            return None
        early = expand(first.matrices, first.axes, axes, self.sizes)
        late = expand(second.matrices, second.axes, axes, self.sizes)
        return Local(axes, compose(late, early))

    def _emit(self, segments: Sequence[Segment]) -> None:
        filled: dict[tuple[int, ...], int] = {}
        current: tuple[int, ...] = ()
        for segment in segments:
            if isinstance(segment, Local):
                self._emit_local(segment)
            elif isinstance(segment, Joint):
                self._emit_joint(segment)
            elif isinstance(segment, CurveLaunch):
                self._emit_curve(segment)
            elif segment.bucket:
                self._emit_bucket(segment, filled)
                current = ()
            elif segment.key != current:
                self._emit_sum(segment.terms)
                current = segment.key

    def _row(
        self, kind: Instruction, *, axes: Axes = (), caps: tuple[float, float] = (0.0, 0.0), **columns: int
    ) -> None:
        values = {"kind": int(kind), "key": self._key(axes)} | columns
        self._rows.append([values.get(name, 0) for name in COLUMNS])
        self._caps.append(caps)

    def _emit_local(self, local: Local) -> None:
        known = self._stored.get(id(local))
        if known is None:
            # The segment is kept, so that its id stays its own.
            known = self._stored[id(local)] = (local, *self._store(local))
        _, offset, masks = known
        ranks = local.matrices.shape[1]
        kind = Instruction.LOCAL if ranks == 1 else Instruction.RANKED
        self._row(kind, axes=local.axes, offset=offset, length=ranks)
        if masks is not None:
            self._dominance.append((masks, local.axes))

    def _store(self, local: Local) -> tuple[int, NDArray[np.uint64] | None]:
        """Where a segment's matrices begin, and its ranks' dominance if they differ."""
        matrices = local.matrices.astype(np.float32)
        ranks = matrices.shape[1]
        masks = _dominance(matrices.reshape(len(matrices), ranks, 16)) if ranks > 1 else None
        return self._matrices.add(matrices.reshape(-1, 16)), masks

    def _emit_joint(self, joint: Joint) -> None:
        offset, ranks = self._values.add(joint.us.reshape(-1)), joint.us.shape[1]
        caps = (joint.timing.gap_us, joint.timing.latency_us)
        self._row(
            Instruction.JOINT, axes=joint.axes, caps=caps, offset=offset, length=ranks, **_columns(joint)
        )
        if ranks > 1:
            self._dominance.append((_dominance(joint.us[:, :, None]), joint.axes))

    def _emit_ranks(self) -> None:
        """As few tables of dominance as stay small; a rank must be dominated in all that there are."""
        out: list[tuple[NDArray[np.uint64], Axes]] = []
        for masks, axes in self._dominance:
            union = tuple(sorted({*axes, *(out[-1][1] if out else ())}))
            if out and entries(union, self.sizes) <= self.max_entries:
                both = [expand(m, a, union, self.sizes) for m, a in (out[-1], (masks, axes))]
                out[-1] = (both[0] & both[1], union)
            else:
                out.append((masks, axes))
        self._ranked.append([(self._key(a), self._dominators.add(m.reshape(-1))) for m, a in out])
        self._dominance.clear()

    def _emit_curve(self, launch: CurveLaunch) -> None:
        curve, paced = launch.curve, launch.slowness.shape[1] > 1
        entry = np.concatenate([curve.us, launch.slowness], axis=1) if paced else curve.us
        self._row(
            Instruction.CURVE,
            axes=launch.axes,
            caps=(launch.timing.gap_us, launch.timing.latency_us),
            offset=self._values.add(np.ascontiguousarray(entry).reshape(-1)),
            length=entry.shape[1],
            count=curve.us.shape[1] if paced else 0,
            exponent=curve.exponent,
            points=curve.points,
            **_columns(launch),
        )
        if paced:
            self._dominance.append((_dominance(launch.slowness[:, :, None]), launch.axes))

    def _emit_bucket(self, amount: Amount, filled: dict[tuple[int, ...], int]) -> None:
        """Fill the terms up to the bucket's index, then guard what it launches."""
        bucket = amount.bucket
        assert bucket is not None
        if amount.key not in filled:
            slot = len(filled)
            self._slots = max(self._slots, slot + 1)
            self._emit_sum(amount.terms)
            self._row(Instruction.OPEN, caps=(bucket.first_cap_bytes, bucket.cap_bytes), count=slot)
        slot = list({**filled, amount.key: 0}).index(amount.key)
        for term in amount.terms[filled.get(amount.key, 0) : bucket.index + 1]:
            caps = (bucket.first_cap_bytes, bucket.cap_bytes)
            offset = self._values.add(term.values)
            self._row(Instruction.FILL, axes=term.axes, caps=caps, offset=offset, count=slot)
        filled[amount.key] = bucket.index + 1
        self._row(Instruction.GUARD, count=amount.guarded)

    def _emit_sum(self, terms: Sequence[Term]) -> None:
        self._row(Instruction.CLEAR)
        for table, axes in self._fewer([(t.values[:, None], t.axes) for t in terms]):
            self._row(Instruction.ADD, axes=axes, offset=self._values.add(table[:, 0]))

    def _sums(self, arrays: Iterable[Any]) -> list[tuple[Array, Axes]]:
        """Grid arrays as few tables `(e, r)` whose entries add up."""
        tables = []
        for array in arrays:
            axes = axes_of([array], num_axes=len(self.sizes))
            table = tabulate(np.atleast_1d(array), axes, self.sizes).astype(np.float64)
            tables.append(shrink(table, axes, self.sizes))
        return self._fewer(tables)

    def _fewer(self, tables: Iterable[tuple[Array, Axes]]) -> list[tuple[Array, Axes]]:
        """Each table is added to the first that it keeps small."""
        out: list[tuple[Array, Axes]] = []
        for table, axes in sorted(tables, key=lambda t: (len(t[1]), t[1])):
            for position, (other, own) in enumerate(out):
                union = tuple(sorted({*axes, *own}))
                if entries(union, self.sizes) <= self.max_entries:
                    total = expand(table, axes, union, self.sizes) + expand(other, own, union, self.sizes)
                    out[position] = (total, union)
                    break
            else:
                out.append((table, axes))
        return out

    def _stored_sum(self, table: Array, axes: Axes) -> _StoredSum:
        return axes, self._values.add(np.ascontiguousarray(table).reshape(-1)), int(table.shape[1] > 1)


def _dominance(values: NDArray[Any]) -> NDArray[np.uint64]:
    """`(e, r)`: which ranks are nowhere faster than each, from `(e, r, x)` values: bit b for rank b."""
    masks = np.zeros(values.shape[:2], dtype=np.uint64)
    for other in range(values.shape[1]):
        slower = (values[:, other : other + 1] >= values).all(axis=-1)
        masks |= slower.astype(np.uint64) << np.uint64(other)
    return masks


def _columns(launch: Joint | CurveLaunch) -> dict[str, int]:
    timing = launch.timing
    return {"target": timing.target, "awaited": timing.awaited, "collective": int(timing.collective)}


def _bounds(parts: Sequence[Sequence[Any]]) -> NDArray[np.int64]:
    return np.cumsum([0, *map(len, parts)])


def _joined(parts: Sequence[Sequence[Any]], width: int) -> NDArray[np.int64]:
    return np.array([x for part in parts for x in part], dtype=np.int64).reshape(-1, width)


def _matrices(parts: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
    """The matrices joined, each in a cache line of its own."""
    out = aligned(sum(map(len, parts)))
    if parts:
        np.concatenate(parts, out=out)
    return out
