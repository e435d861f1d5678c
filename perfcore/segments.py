"""Regions of a grid as segments: folded matrices over few axes, joint launches, and sums over all layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from perfcore.cost.model import CostModel
from perfcore.curves import Curve, price_curve
from perfcore.errors import UnsupportedError
from perfcore.graph.kernels import Bucket, Collective, Kernel, Total, dims, resolve, summed_dim, with_dims
from perfcore.graph.ops import Op, Region
from perfcore.graph.presence import bucket_of
from perfcore.grid import Axes, axes_of, entries, shrink, tabulate
from perfcore.maxplus import fold_ranks
from perfcore.overheads import OverheadTable
from perfcore.steps import Encoder, Opcode, Steps

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Local:
    """Consecutive steps within ranks: `(e, r, 4, 4)` matrices, r = 1 where all ranks are alike."""

    axes: Axes
    matrices: Array


@dataclass(frozen=True, slots=True, eq=False)
class Timing:
    """What a launch's step says beside its duration."""

    target: int
    awaited: int
    gap_us: float
    latency_us: float
    collective: bool


@dataclass(frozen=True, slots=True, eq=False)
class Joint:
    """A collective: `(e, r)` durations, -1 on a rank that takes no part, r = 1 where all are alike."""

    axes: Axes
    us: Array
    timing: Timing


@dataclass(frozen=True, slots=True, eq=False)
class Term:
    """One term of a sum: `(e,)` values."""

    axes: Axes
    values: Array


@dataclass(frozen=True, slots=True, eq=False)
class Amount:
    """A sum over layers, added up per candidate for the launches that follow.

    Attributes:
        terms: in order.
        bucket: which bucket of the terms it is, `None` for the whole sum.
        key: identity of the terms.
        guarded: so many segments after it are taken only where the bucket is not empty.
    """

    terms: tuple[Term, ...]
    bucket: Bucket | None
    key: tuple[int, ...]
    guarded: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class CurveLaunch:
    """A launch whose duration follows the last `Amount`; a row of -1 where it is absent.

    `slowness` is `(e, r)`: a factor on the curve on each rank; r = 1 where all ranks are alike.
    """

    axes: Axes
    curve: Curve
    timing: Timing
    slowness: Array


Segment: TypeAlias = "Local | Joint | Amount | CurveLaunch"


@dataclass(eq=False)
class Segmenter:
    """Turns regions into segments; kernels and regions that recur are priced and folded once.

    Attributes:
        sizes: of the grid's axes.
        num_ranks: size of the rank axis.
        max_entries: largest table into which a sum over layers is expanded.
        slowness: of the ranks on the grid: a factor on what they launch, collectives apart; `None` where all are alike.
    """

    sizes: tuple[int, ...]
    num_ranks: int
    cost: CostModel
    overheads: OverheadTable
    max_entries: int
    slowness: Array | None = None
    _prices: dict[tuple[Any, ...], Array] = field(default_factory=dict)
    _regions: dict[tuple[int, bool], tuple[Region, list[Segment]]] = field(default_factory=dict)
    _curves: dict[tuple[Any, ...], Curve] = field(default_factory=dict)
    _terms: dict[int, tuple[Any, Term]] = field(default_factory=dict)

    def price(self, regions: Iterable[Region]) -> None:
        """Price every distinct kernel of the regions in one call, so that models work in bulk."""
        kernels: dict[tuple[Any, ...], Kernel] = {}
        for region in regions:
            for op in region.ops:
                for launch in op.launches:
                    if not self._is_summed(launch.kernel):
                        kernels.setdefault(_key(launch.kernel), launch.kernel)
        missing = [key for key in kernels if key not in self._prices]
        priced = self.cost.predict_us([resolve(kernels[key]) for key in missing])
        self._prices |= {key: us * self._pace(kernels[key]) for key, us in zip(missing, priced, strict=True)}

    def _pace(self, kernel: Kernel) -> Any:
        """What a kernel's durations are multiplied by on each rank."""
        return 1.0 if self.slowness is None or isinstance(kernel, Collective) else self.slowness

    def segments(self, region: Region, *, captured: bool) -> list[Segment]:
        """The segments of one region, cached by identity."""
        known = self._regions.get((id(region), captured))
        if known is None:
            # The region is kept, so that its id stays its own.
            known = self._regions[id(region), captured] = (
                region,
                list(self._split(region.ops, captured=captured)),
            )
        return known[1]

    def fold(self, encoder: Encoder) -> Local:
        """Steps without launches or collectives as one matrix."""
        return self._local(encoder.table(), {}, encoder.masks)

    def term(self, values: Any) -> Term:
        """A term of a sum as a table.

        Raises:
            UnsupportedError: it differs among ranks.
        """
        known = self._terms.get(id(values))
        if known is None:
            if np.shape(values)[-1:] not in ((), (1,)):
                raise UnsupportedError(
                    "A sum over layers must be the same on all ranks when it is not expanded."
                )
            axes = axes_of([values], num_axes=len(self.sizes))
            table, axes = shrink(
                tabulate(values, axes, self.sizes)[:, 0].astype(np.float64), axes, self.sizes
            )
            known = self._terms[id(values)] = (values, Term(axes, table))
        return known[1]

    def _is_summed(self, kernel: Kernel) -> bool:
        """Whether a kernel's sum ranges over too many axes to be expanded."""
        name = summed_dim(kernel)
        if name is None:
            return False
        axes = axes_of(_arrays(kernel), num_axes=len(self.sizes))
        return entries(axes, self.sizes) > self.max_entries

    def _split(self, ops: Sequence[Op], *, captured: bool) -> Iterator[Segment]:
        """Runs of ops, and ops with a bucket one by one, behind a guard."""
        run: list[Op] = []
        for op in ops:
            buckets = [x.kernel for x in op.launches if bucket_of(x.kernel) and self._is_summed(x.kernel)]
            if buckets:
                yield from self._run(run, captured=captured)
                yield from self._guarded(op, buckets[0], captured=captured)
                run = []
            else:
                run.append(op)
        yield from self._run(run, captured=captured)

    def _guarded(self, op: Op, kernel: Kernel, *, captured: bool) -> Iterator[Segment]:
        if len(op.launches) > 1:
            raise UnsupportedError(f"Op {op.name!r} reduces a bucket and must launch nothing else.")
        inner = list(self._run([op], captured=captured))
        amount = next(x for x in inner if isinstance(x, Amount))
        rest = [x for x in inner if x is not amount]
        yield replace(amount, guarded=len(rest))
        yield from rest

    def _run(self, ops: Sequence[Op], *, captured: bool) -> Iterator[Segment]:
        """Ops in a row: cut at collectives and at launches whose duration follows a sum."""
        encoder = Encoder(self.overheads)
        for op in ops:
            encoder.add(self._without_buckets(op), captured=captured)
        kernels = [x.kernel for op in ops for x in op.launches]
        summed = np.array([self._is_summed(k) for k in kernels], dtype=bool)
        durations = {k: self._prices[_key(x)] for k, x in enumerate(kernels) if not summed[k]}
        table, begin = encoder.table(), 0
        launched = table["launch"] >= 0
        follows = launched & (summed[table["launch"]] if len(summed) else False)
        for cut in [*np.flatnonzero((table["opcode"] == Opcode.COLLECTIVE) | follows).tolist(), len(table)]:
            if cut > begin:
                yield self._local(table[begin:cut], durations, encoder.masks)
            if cut < len(table):
                number = int(table[cut]["launch"])
                if follows[cut]:
                    yield from self._summed(table[cut], kernels[number], encoder.masks)
                else:
                    yield self._joint(table[cut], durations[number], encoder.masks)
            begin = cut + 1

    def _without_buckets(self, op: Op) -> Op:
        """The op with summed buckets as plain numbers: whether they are empty is for the guard to say."""
        launches = tuple(
            replace(x, kernel=_plain(x.kernel)) if bucket_of(x.kernel) and self._is_summed(x.kernel) else x
            for x in op.launches
        )
        return replace(op, launches=launches)

    def _local(self, table: NDArray[Any], durations: Mapping[int, Array], masks: Sequence[Any]) -> Local:
        launches = sorted(set(table["launch"][table["launch"] >= 0].tolist()))
        used = sorted(set(table["mask"][table["mask"] >= 0].tolist()))
        arrays: list[Any] = [durations[k] for k in launches]
        arrays += [np.atleast_1d(masks[k]) for k in used]
        axes = axes_of(arrays, num_axes=len(self.sizes))
        tables = [tabulate(a, axes, self.sizes) for a in arrays]
        ranks = max((t.shape[1] for t in tables), default=1)
        shape = (entries(axes, self.sizes), ranks)
        stacked = [np.broadcast_to(t, shape) for t in tables]
        own = table.copy()
        own["launch"] = _renumber(table["launch"], launches)
        own["mask"] = _renumber(table["mask"], used)
        steps = Steps(
            table=own,
            durations_us=np.array(stacked[: len(launches)], dtype=np.float64).reshape(-1, *shape),
            masks=np.array(stacked[len(launches) :], dtype=bool).reshape(-1, *shape),
            op_names=(),
            launch_ops=(),
            communicates=np.empty(0, dtype=bool),
        )
        matrices, axes = shrink(fold_ranks(steps), axes, self.sizes)
        if matrices.shape[1] > 1 and (matrices == matrices[:, :1]).all():
            matrices = matrices[:, :1]
        return Local(axes, matrices)

    def _joint(self, step: Any, duration: Array, masks: Sequence[Any]) -> Joint:
        taken = np.atleast_1d(masks[step["mask"]] if step["mask"] >= 0 else np.ones(1, dtype=bool))
        axes = axes_of([duration, taken], num_axes=len(self.sizes))
        us, present = tabulate(duration, axes, self.sizes), tabulate(taken, axes, self.sizes)
        transfer = np.max(np.where(present, us, -1.0), axis=1, keepdims=True)
        table, axes = shrink(np.where(present, transfer, -1.0), axes, self.sizes)
        return Joint(axes, table, _timing(step))

    def _summed(self, step: Any, kernel: Kernel, masks: Sequence[Any]) -> Iterator[Segment]:
        """A launch whose duration follows a sum."""
        name = summed_dim(kernel)
        assert name is not None
        dim = getattr(kernel, name)
        terms = tuple(self.term(t) for t in dim.terms)
        yield Amount(terms, dim if isinstance(dim, Bucket) else None, tuple(id(t) for t in dim.terms))
        taken = np.atleast_1d(masks[step["mask"]] if step["mask"] >= 0 else np.ones(1, dtype=bool))
        pace = np.atleast_1d(self._pace(kernel))
        axes, curve = self._curve(kernel, name, terms, taken, pace)
        yield CurveLaunch(axes, curve, _timing(step), tabulate(pace, axes, self.sizes))

    def _curve(
        self, kernel: Kernel, name: str, terms: Sequence[Term], taken: Any, pace: Any
    ) -> tuple[Axes, Curve]:
        others = {k: v for k, v in dims(kernel).items() if k != name and isinstance(v, np.ndarray)}
        axes = axes_of([*others.values(), taken, pace], num_axes=len(self.sizes))
        columns = {k: tabulate(v, axes, self.sizes) for k, v in others.items()}
        present = tabulate(taken, axes, self.sizes)
        if any(c.shape[1] > 1 for c in (*columns.values(), present)):
            raise UnsupportedError("A launch whose duration follows a sum must be alike on all ranks.")
        positive = [float(t.values[t.values > 0].min(initial=np.inf)) for t in terms]
        high = max(sum(float(t.values.max()) for t in terms), 1.0)
        span = (min(*positive, high), high)
        flat = with_dims(kernel, **columns | {name: 1.0})
        key = (_key(flat), span, present.tobytes(), name)
        if key not in self._curves:
            curve = price_curve(flat, name, span=span, cost=self.cost)
            us = np.broadcast_to(curve.us, (len(present), curve.us.shape[1]))
            self._curves[key] = replace(curve, us=np.where(present, us, -1.0))
        return axes, self._curves[key]


def _plain(kernel: Kernel) -> Kernel:
    name = summed_dim(kernel)
    return kernel if name is None else with_dims(kernel, **{name: 1.0})


def _timing(step: Any) -> Timing:
    return Timing(
        target=int(step["target"]),
        awaited=int(step["awaited"]),
        gap_us=float(step["gap_us"]),
        latency_us=float(step["latency_us"]),
        collective=int(step["opcode"]) == Opcode.COLLECTIVE,
    )


def _renumber(column: NDArray[Any], used: Sequence[int]) -> NDArray[Any]:
    """Positions in `used`; -1 stays."""
    return np.where(column >= 0, np.searchsorted(used, column) if used else 0, -1)


def _arrays(kernel: Kernel) -> Iterator[Any]:
    """All arrays in a kernel's dims, terms of sums among them."""
    for dim in dims(kernel).values():
        yield from dim.terms if isinstance(dim, (Total, Bucket)) else (dim,)


def _key(kernel: Kernel) -> tuple[Any, ...]:
    """Equal for kernels that cost the same: the kind and the content of its fields."""
    values = (getattr(kernel, name) for name in kernel.__dataclass_fields__)
    return (type(kernel), *(_content(v) for v in values))


def _content(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return (value.shape, value.tobytes())
    if isinstance(value, Total):
        return tuple(_content(t) for t in value.terms)
    if isinstance(value, Bucket):
        terms = tuple(_content(t) for t in value.terms)
        return (terms, value.index, value.first_cap_bytes, value.cap_bytes)
    return value
