"""One design in, its predicted iteration and the explanation out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perfcore.breakdown import (
    OpCost,
    PathPiece,
    bound_shares,
    critical_us_by_op,
    edge_times,
    op_costs,
    path_pieces,
)
from perfcore.cost.model import Calibration, CostModel
from perfcore.design.design import Design
from perfcore.design.hardware import System
from perfcore.errors import DesignError
from perfcore.graph.dims import dims_of, structure_of
from perfcore.graph.dlrm import DlrmBuilder
from perfcore.graph.kernels import Collective, Kernel, resolve
from perfcore.graph.ops import WorkloadGraph
from perfcore.interval import iteration_interval_us
from perfcore.memory import MemoryBreakdown, memory_at
from perfcore.profile.profile import Profile
from perfcore.profile.schema import KnownError
from perfcore.ranks import merged
from perfcore.schedule import compile_steps, schedule
from perfcore.timeline import CriticalPath, Timeline
from perfcore.units import US_PER_S

Array = NDArray[np.float64]

# A level of calibration is named for a whole iteration once this share of kernel time rests on it or worse.
CALIBRATION_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class HostTime:
    """Host time of one iteration by overhead, µs; `alone_us` is that of ops without a launch."""

    t1_us: float
    t2_us: float
    t3_us: float
    t4_us: float
    t5_us: float
    alone_us: float

    @property
    def total_us(self) -> float:
        """Host work, without waiting."""
        return self.t1_us + self.t2_us + self.t3_us + self.t4_us + self.t5_us + self.alone_us


@dataclass(frozen=True, slots=True, eq=False)
class Prediction:
    """One predicted iteration, seen from the rank on the critical path; times in µs.

    Attributes:
        iteration_time_us: steady spacing of iterations, the data loader's limit included.
        global_batch: samples per iteration.
        device_active_us: time in which at least one kernel runs.
        device_idle_us: time in which none does.
        exposed_communication_us: time in which only communication runs.
        host: host time by T1 to T5.
        bound_by: `host`, `compute`, `communication`, `copy` or `input`: what most of the critical path is.
        bound_share: share of the critical path by the same words.
        ops: costs by op, dearest first.
        critical_path: the cycle that sets the iteration time.
        path_pieces: that cycle in a few pieces.
        memory: bytes by kind and rank.
        fits: every rank fits into its GPU, and the fullest machine's tables into the host's memory.
        shortfall_bytes: what the rank with the least memory left lacks.
        host_shortfall_bytes: what the machine lacks.
        calibrated: measured where at least 90 % of the kernel time is, else extrapolated.
        calibration_share: share of kernel time by `Calibration`; `analytic` is extrapolated by a formula alone.
        fallback_ops: ops without overheads of their own, with their count.
        known_errors: held-out errors of the kernel models in use.
        profile: name of the profile.
        rank: the rank that is described.
        ranks: those of the timeline, in its order; of many ranks that do the same work, the first alone.
        timeline: every start and end.
        graph: what was scheduled.
        durations_us: of its launches, each broadcasting to `(1, r)`.
    """

    iteration_time_us: float
    global_batch: int
    device_active_us: float
    device_idle_us: float
    exposed_communication_us: float
    host: HostTime
    bound_by: str
    bound_share: dict[str, float]
    ops: tuple[OpCost, ...]
    critical_path: CriticalPath
    path_pieces: tuple[PathPiece, ...]
    memory: MemoryBreakdown
    fits: bool
    shortfall_bytes: float
    host_shortfall_bytes: float
    calibrated: Calibration
    calibration_share: dict[str, float]
    fallback_ops: dict[str, int]
    known_errors: tuple[KnownError, ...]
    profile: str
    rank: int
    ranks: tuple[int, ...]
    timeline: Timeline
    graph: WorkloadGraph
    durations_us: tuple[Array, ...]

    @property
    def samples_per_second(self) -> float:
        """Training throughput over all ranks."""
        return self.global_batch / self.iteration_time_us * US_PER_S


class Predictor:
    """Predicts designs with one profile; the profile's device is the design's."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.cost: CostModel = profile.cost_model()

    def predict(self, design: Design) -> Prediction:
        """The design's steady iteration, explained.

        Raises:
            UnsupportedError: the design asks for what cannot run (a blocking copy inside a CUDA graph).
        """
        dims, structure = dims_of([design]), structure_of(design)
        graph = DlrmBuilder(dims).graph(structure)
        kernels = [resolve(launch.kernel) for launch in graph.launches()]
        durations_us = slowed(kernels, self.cost.predict_us(kernels), design.system)
        steps, ranks = merged(compile_steps(graph, durations_us, self.profile.overheads))
        timeline = schedule(steps)
        memory = memory_at(dims, structure)
        return self._explained(design, graph, kernels, durations_us, timeline, ranks.tolist(), memory)

    def iteration_time_us(self, design: Design) -> float:
        """The iteration time alone."""
        return self.predict(design).iteration_time_us

    def interval_us(self, prediction: Prediction) -> tuple[float, float]:
        """The interval that holds nine in ten measured iteration times, as far as kernels and host are known."""
        kernels = [resolve(launch.kernel) for launch in prediction.graph.launches()]
        low, high = iteration_interval_us(
            prediction.graph,
            kernels,
            prediction.durations_us,
            self.cost,
            self.profile.overheads,
            host_log_error_90=self.profile.host_log_error_90,
        )
        rest = prediction.iteration_time_us - float(prediction.timeline.iteration_time_us[0])  # a slow loader
        return low + rest, high + rest

    def iteration_times_us(self, designs: Sequence[Design]) -> Array:
        """`(n,)` iteration times of n designs that differ in numbers and placement alone; one graph serves all.

        Raises:
            DesignError: the designs differ in structure, tables or world size.
        """
        first = designs[0]
        for design in designs:
            if _kin(design) != _kin(first):
                raise DesignError(
                    "Designs that are predicted together must agree in structure, tables, world_size and slowness."
                )
        graph = DlrmBuilder(dims_of(designs)).graph(structure_of(first))
        kernels = [resolve(launch.kernel) for launch in graph.launches()]
        durations_us = slowed(kernels, self.cost.predict_us(kernels), first.system)
        timeline = schedule(compile_steps(graph, durations_us, self.profile.overheads))
        fed_us = np.array([feed_us(d) for d in designs])
        return np.asarray(np.maximum(timeline.iteration_time_us, fed_us))

    def _explained(
        self,
        design: Design,
        graph: WorkloadGraph,
        kernels: Sequence[Kernel],
        durations_us: Sequence[Array],
        timeline: Timeline,
        ranks: Sequence[int],
        memory: MemoryBreakdown,
    ) -> Prediction:
        rank = int(timeline.critical_clock[0]) // 4
        path = timeline.critical_path()
        own = timeline.of_rank(rank)
        kernel_us = np.nan_to_num(own.end_us[0, :, 0] - own.start_us[0, :, 0])
        shares = self._calibration_shares(kernels, kernel_us)
        period_us, fed_us = float(timeline.iteration_time_us[0]), feed_us(design)
        edges = edge_times(timeline, path, kernels)
        bound = bound_shares(edges)
        critical_us = critical_us_by_op(edges, path.iterations, ops=len(timeline.steps.op_names))
        active_us = float(own.device_active_us()[0, 0])
        lacks = memory.shortfall_bytes(design.system)
        host_lacks = memory.host_shortfall_bytes(design.system.node)
        return Prediction(
            iteration_time_us=max(period_us, fed_us),
            global_batch=design.training.global_batch,
            device_active_us=active_us,
            device_idle_us=max(period_us, fed_us) - active_us,
            exposed_communication_us=float(own.exposed_communication_us()[0, 0]),
            host=HostTime(*(float(own.host_us[0, 0, kind]) for kind in range(6))),
            bound_by="input" if fed_us > period_us else max(bound, key=bound.__getitem__),
            bound_share=bound,
            ops=op_costs(graph, kernel_us, critical_us),
            critical_path=path,
            path_pieces=path_pieces(graph, edges),
            memory=memory,
            fits=not (lacks or host_lacks),
            shortfall_bytes=lacks,
            host_shortfall_bytes=host_lacks,
            calibrated=_calibrated(shares),
            calibration_share=shares,
            fallback_ops=self.profile.overheads.unknown(op.name for op in graph.ops()),
            known_errors=self.profile.known_errors,
            profile=self.profile.name,
            rank=ranks[rank],
            ranks=tuple(ranks),
            timeline=timeline,
            graph=graph,
            durations_us=tuple(durations_us),
        )

    def _calibration_shares(self, kernels: Sequence[Kernel], kernel_us: Array) -> dict[str, float]:
        numbers = {level: number for number, level in enumerate(Calibration)}
        levels = np.array([numbers[self.cost.calibration(kernel)] for kernel in kernels], dtype=np.int64)
        shares_us = kernel_us / max(float(kernel_us.sum()), 1e-12)
        shares = np.bincount(levels, shares_us, minlength=len(numbers)).tolist()
        return {level.value: share for level, share in zip(Calibration, shares, strict=True)}


def _kin(design: Design) -> tuple[object, ...]:
    """What designs share that are predicted as one list."""
    return (
        structure_of(design),
        design.model.tables,
        design.model.num_dense_features,
        design.system.world_size,
        design.system.slowness,
    )


def slowed(kernels: Sequence[Kernel], durations_us: Sequence[Array], system: System) -> list[Array]:
    """Durations that broadcast to `(n, r)`, on ranks as slow as the system's; collectives go at the links' pace."""
    if not system.slowness:
        return list(durations_us)
    slowness = np.array(system.slowness)
    return [
        us if isinstance(kernel, Collective) else us * slowness
        for kernel, us in zip(kernels, durations_us, strict=True)
    ]


def feed_us(design: Design) -> float:
    """Time that the data loaders of all machines need for one global batch."""
    system = design.system
    machines = system.world_size / system.local_world_size
    return design.training.global_batch / (system.node.input_samples_per_s * machines) * US_PER_S


def _calibrated(shares: dict[str, float]) -> Calibration:
    """Measured where at most a tenth of the kernel time rests on anything else; the shares say on what."""
    measured = shares[Calibration.MEASURED.value] >= 1.0 - CALIBRATION_SHARE
    return Calibration.MEASURED if measured else Calibration.EXTRAPOLATED
