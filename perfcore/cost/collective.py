"""Collectives: measured tables over size inside a machine, links between machines.

Inside: times that fall while the size grows are noise, and take their mean (isotonic regression). Log time less that of a
straight line, `latency + bytes / bandwidth` through the ends, is interpolated over log bytes by cubics that overshoot
nowhere (Fritsch and Carlson 1980), and kept monotone; above the largest measured size the last bus bandwidth holds,
below the smallest the time stands still. Other world sizes scale the nearest measured one by
the bytes each rank must move; a node without a table is `latency + bytes moved / link bandwidth`.
Between machines a collective is hierarchical: a stage inside, and a stage on each GPU's own network link.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perfcore.cost.model import Calibration
from perfcore.cost.stacking import stack
from perfcore.design.hardware import Node
from perfcore.errors import ProfileError
from perfcore.graph.kernels import Collective, CollectiveKind
from perfcore.units import US_PER_S

Array = NDArray[np.float64]

STEPS = 16  # between two measured sizes
_ONE_MORE_RANK = 2.0**20  # no machine has as many


class SizeCurve:
    """Time of one collective over its size, from measured points."""

    def __init__(self, bytes_: Sequence[float], us: Sequence[float], *, bytes_factor: float) -> None:
        """Points in increasing size; `bytes_factor` is the share of the size that each rank moves."""
        sizes, times = np.asarray(bytes_, dtype=np.float64), np.asarray(us, dtype=np.float64)
        if len(sizes) < 2 or len(sizes) != len(times) or bool(np.any(np.diff(sizes) <= 0)):
            raise ProfileError(
                f"A collective needs two or more sizes, increasing, one time each, but got {list(bytes_)}."
            )
        if not bool(np.all(np.isfinite(times) & (times > 0)) and np.isfinite(sizes[-1]) and sizes[0] > 0):
            raise ProfileError("Sizes and times of a collective must be positive and finite.")
        x, y = np.log(sizes), increasing(np.log(times))
        self._x, self._y = _between(x, y)
        self.range_bytes = (float(bytes_[0]), float(bytes_[-1]))
        self._s_per_byte = float(np.exp(y[-1] - x[-1])) / US_PER_S
        self.bus_bytes_per_s = bytes_factor / self._s_per_byte

    def covers(self, bytes_: Array) -> bool:
        """Whether all sizes lie inside the measured range."""
        return bool(np.all((bytes_ >= self.range_bytes[0]) & (bytes_ <= self.range_bytes[1])))

    def us(self, bytes_: Array) -> Array:
        """`(s,)` times of `(s,)` positive sizes."""
        inside = np.interp(np.log(bytes_), self._x, self._y)
        beyond = np.maximum(bytes_ - self.range_bytes[1], 0.0) * self._s_per_byte * US_PER_S
        return np.asarray(np.exp(inside) + beyond, dtype=np.float64)


Curves = Mapping[tuple[CollectiveKind, int], SizeCurve]


@dataclass(frozen=True, slots=True)
class CollectiveModel:
    """Prices collectives on machines of one kind.

    Attributes:
        curves: by kind and number of GPUs inside one machine.
        node: links; `None` when only measured world sizes can be priced.
        own: the curves were measured on this device, not carried over.
        log_error_90_inside: nine in ten measurements lie within a factor `exp` of it, inside the curves.
        analytic_log_error_90: likewise where links or another world size price.
    """

    curves: Curves
    node: Node | None
    own: bool = True
    log_error_90_inside: float = 0.0
    analytic_log_error_90: float = 0.0

    def predict_us(self, kernels: Sequence[Collective]) -> list[Array]:
        """One array per kernel, of the broadcast shape of its dims; 0 for one rank or no bytes."""
        if not kernels:
            return []
        stacked = stack(kernels)
        kinds = stacked.repeat([str(k.kind) for k in kernels])
        us = np.zeros(len(kinds))
        bytes_, worlds, locals_ = (stacked[name] for name in ("bytes", "world_size", "local_world_size"))
        both = worlds * _ONE_MORE_RANK + locals_  # one number for a pair
        busy = (bytes_ > 0) & (worlds > 1)
        for kind in {k.kind for k in kernels}:
            of_kind = busy & (kinds == str(kind))
            for pair in np.unique(both[of_kind]).tolist():
                world, local = divmod(pair, _ONE_MORE_RANK)
                at = of_kind & (both == pair)
                us[at] = self._us(kind, bytes_[at], world=int(world), local=int(local))
        return stacked.split(us)

    def calibration(self, kernel: Collective) -> Calibration:
        """`MEASURED` for a measured world size and size range of this device's own machine."""
        if not self.curves:
            return Calibration.ANALYTIC
        values = stack([kernel])
        sizes, worlds = values["bytes"], values["world_size"]
        busy = (sizes > 0) & (worlds > 1)
        covered = self.own and not np.any(busy & (worlds > values["local_world_size"]))
        for world in set(worlds[busy].tolist()):
            curve = self.curves.get((kernel.kind, int(world)))
            covered = covered and curve is not None and curve.covers(sizes[busy & (worlds == world)])
        return Calibration.MEASURED if covered else Calibration.EXTRAPOLATED

    def log_error_90(self, kernel: Collective) -> float:
        """Nine in ten measurements lie within a factor `exp` of it of the duration."""
        measured = self.calibration(kernel) is Calibration.MEASURED
        return self.log_error_90_inside if measured else self.analytic_log_error_90

    def _us(self, kind: CollectiveKind, bytes_: Array, *, world: int, local: int) -> Array:
        local = max(1, min(local, world))
        if world <= local:
            return self._inside_us(kind, bytes_, world)
        nodes = -(-world // local)
        node = self._links(f"{world} ranks on {nodes} machines")
        match kind:
            case CollectiveKind.ALL_TO_ALL:
                near = self._inside_us(kind, bytes_ / nodes, local)
                far = bytes_ * (nodes - 1) / nodes
                rounds = 1.0
            case CollectiveKind.ALL_REDUCE:
                near = self._inside_us(kind, bytes_, local)
                far = 2.0 * bytes_ / local * (nodes - 1) / nodes
                rounds = 2.0
            case _:
                near = self._inside_us(kind, bytes_, local)
                far = bytes_ / local * (nodes - 1) / nodes
                rounds = 1.0
        steps = rounds * np.ceil(np.log2(nodes))
        far_us = steps * node.inter_latency_us + far / node.inter_bytes_per_s * US_PER_S
        return np.asarray(near + far_us, dtype=np.float64)

    def _inside_us(self, kind: CollectiveKind, bytes_: Array, world: int) -> Array:
        if world <= 1:
            return np.zeros_like(bytes_)
        measured = [n for k, n in self.curves if k is kind]
        if not measured:
            node = self._links(f"{kind.value} of {world} ranks")
            return (
                node.intra_latency_us + bytes_factor(kind, world) * bytes_ / node.intra_bytes_per_s * US_PER_S
            )
        nearest = min(measured, key=lambda n: (abs(np.log(n / world)), n))
        scale = bytes_factor(kind, world) / bytes_factor(kind, nearest)
        return self.curves[kind, nearest].us(bytes_ * scale)

    def _links(self, what: str) -> Node:
        if self.node is None:
            raise ProfileError(
                f"A node description is needed to price {what}, but none was given.",
                hint="Pass node= when loading the profile.",
            )
        return self.node


def bytes_factor(kind: CollectiveKind, world_size: int) -> float:
    """Share of the size that each rank must send: nccl-tests' bus factor."""
    rounds = 2.0 if kind is CollectiveKind.ALL_REDUCE else 1.0
    return rounds * (world_size - 1) / world_size


def increasing(values: Array) -> Array:
    """`(s,)`: the sequence nearest in squares that never falls: runs that fall are pooled to their means."""
    means: list[float] = []
    counts: list[int] = []
    for value in values.tolist():
        mean, count = value, 1
        while means and means[-1] > mean:
            mean = (mean * count + means[-1] * counts[-1]) / (count + counts[-1])
            count += counts.pop()
            means.pop()
        means.append(mean)
        counts.append(count)
    return np.repeat(means, counts)


def _between(x: Array, y: Array) -> tuple[Array, Array]:
    """Log sizes and log times at and between the measured ones, both increasing."""
    at = np.repeat(np.arange(len(x) - 1), STEPS)
    t = np.tile(np.arange(STEPS) / STEPS, len(x) - 1)
    width = np.diff(x)[at]
    dense = x[at] + t * width
    line = np.log(np.exp(y[0]) + np.exp(y[-1] - x[-1]) * np.exp(np.concatenate([x, dense])))
    rest = y - line[: len(x)]
    slopes = _slopes(x, rest)
    rise = (1 + 2 * t) * (1 - t) ** 2 * rest[at] + t * t * (3 - 2 * t) * rest[at + 1]
    cubic = rise + width * t * (1 - t) * ((1 - t) * slopes[at] - t * slopes[at + 1])
    found = np.clip(line[len(x) :] + cubic, y[at], y[at + 1])
    return np.append(dense, x[-1]), np.append(np.maximum.accumulate(found), y[-1])


def _slopes(x: Array, y: Array) -> Array:
    """Slopes at the knots with which a cubic Hermite interpolant overshoots none of them (harmonic means)."""
    width, secant = np.diff(x), np.diff(y) / np.diff(x)
    left, right = 2 * width[1:] + width[:-1], width[1:] + 2 * width[:-1]
    alike = secant[:-1] * secant[1:] > 0
    safe = [np.where(alike, s, 1.0) for s in (secant[:-1], secant[1:])]
    inner = np.where(alike, (left + right) / (left / safe[0] + right / safe[1]), 0.0)
    return np.concatenate([secant[:1], inner, secant[-1:]])
