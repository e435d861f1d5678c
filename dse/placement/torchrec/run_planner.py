"""TorchRec's own planner, run on a job. Importing this module imports TorchRec."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner, SortBy
from torchrec.distributed.planner.planners import EmbeddingShardingPlanner
from torchrec.distributed.planner.proposers import (
    DynamicProgrammingProposer,
    GreedyProposer,
    GridSearchProposer,
    UniformProposer,
)
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import PlannerError

from dse.placement.torchrec import objects
from dse.placement.torchrec.assigned import Choice
from dse.placement.torchrec.comparison import DEFAULT
from dse.placement.torchrec.job import Job
from dse.placement.torchrec.packages import quiet

# Its dynamic programme cannot be stopped: it is left out where its tables would hold more entries than this.
_MAX_STATES, _BINS = 2_000_000, 100
_SHARES = (0.4, 0.5)  # of the time that is left, for the first two settings


@dataclass(frozen=True, slots=True)
class Found:
    """The best plans of one setting of TorchRec's planner, choices in the order of the job's tables.

    Attributes:
        setting: what differs from TorchRec's defaults.
        rating: its answer: the best plan by its own rating; `None` where it found none.
        critical_path: of all plans that it tried, the best by the critical path that it prints and does not minimise.
        wall_s: time it took alone, estimates included (settings share them).
        plans_tried: plans that it rated.
        timed_out: the time limit ended it.
    """

    setting: str
    rating: tuple[Choice, ...] | None
    critical_path: tuple[Choice, ...] | None
    wall_s: float
    plans_tried: int
    timed_out: bool


@dataclass(frozen=True, slots=True)
class _Setting:
    name: str
    column_width: int | None = None
    by_time: bool = False
    proposers: str = "uniform first"
    cache_ratio: float | None = None


class _Watch:
    """TorchRec's performance model (the largest sum of a rank), that also remembers the best critical path."""

    def __init__(self, num_ranks: int, tables: int) -> None:
        self._num_ranks, self._tables = num_ranks, tables
        self._rating_ms = self._critical_ms = float("inf")
        self.rating: tuple[Choice, ...] | None = None
        self.critical_path: tuple[Choice, ...] | None = None
        self.plans = 0

    def rate(self, plan: Sequence[Any]) -> float:
        """The plan's rating, ms."""
        self.plans += 1
        rating_ms, critical_ms = _rated(plan, self._num_ranks)
        if rating_ms < self._rating_ms:
            self._rating_ms, self.rating = rating_ms, self._choices(plan)
        if critical_ms < self._critical_ms:
            self._critical_ms, self.critical_path = critical_ms, self._choices(plan)
        return rating_ms

    def _choices(self, plan: Sequence[Any]) -> tuple[Choice, ...]:
        of_name = {o.name: o for o in plan}
        options = [of_name[objects.name_of(t)] for t in range(self._tables)]
        return tuple(
            Choice(o.sharding_type, objects.kernel_of(o), tuple(int(s.rank) for s in o.shards))
            for o in options
        )


def plans_of(job: Job, *, column_widths: Sequence[int | None], time_limit_s: float) -> Iterator[Found]:
    """TorchRec's planner with its defaults, and with all else that it offers, until the time is used.

    Its proposers with the quickest first may use two fifths of the time, its defaults half of the rest, and each
    later setting its share of what is left. TorchRec looks at the time between plans only.
    """
    end = time.monotonic() + time_limit_s
    settings = _settings(job, column_widths)

    @cache
    def space(column_width: int | None, cache_ratio: float | None) -> objects.Space:
        return objects.space_of(job, column_width, cache_ratio)

    for i, setting in enumerate(settings):
        left = end - time.monotonic()
        if i >= len(_SHARES) and left <= 0:
            return
        share = _SHARES[i] if i < len(_SHARES) else 1 / (len(settings) - i)
        with quiet():
            options = space(setting.column_width, setting.cache_ratio)
            found = _run(job, setting, options, max(left * share, 1e-3))
        yield found


def _settings(job: Job, column_widths: Sequence[int | None]) -> list[_Setting]:
    states = len(job.tables) * job.machine.num_ranks * _BINS
    narrow = [w for w in dict.fromkeys(column_widths) if w is not None]
    dynamic = [_Setting("dynamic programming", proposers="dynamic")] if states <= _MAX_STATES else []
    settings = [
        _Setting("uniform first"),
        _Setting(DEFAULT, proposers="default"),
        *(_Setting(f"columns down to {w}", w) for w in narrow),
        _Setting("largest time first", by_time=True),
        *(_Setting(f"columns down to {w}, largest time first", w, by_time=True) for w in narrow),
        *dynamic,
        *(
            _Setting(f"columns down to {w}, {s.name}", w, proposers=s.proposers)
            for w in narrow
            for s in dynamic
        ),
    ]
    first, *others = job.cache_ratios or (None,)
    more = [replace(s, name=f"{s.name}, caches of {r:g}", cache_ratio=r) for r in others for s in settings]
    return [*(replace(s, cache_ratio=first) for s in settings), *more]


def _run(job: Job, setting: _Setting, space: objects.Space, time_limit_s: float) -> Found:
    watch = _Watch(job.machine.num_ranks, len(job.tables))
    planner = EmbeddingShardingPlanner(
        topology=space.topology,
        batch_size=job.batch_per_rank,
        enumerator=space,
        storage_reservation=FixedPercentageStorageReservation(job.machine.reserved_share),
        proposer=_proposers(setting),
        partitioner=GreedyPerfPartitioner(SortBy.PERF if setting.by_time else SortBy.STORAGE),
        performance_model=watch,
        constraints=space.constraints,
        stats=[],
        timeout_seconds=time_limit_s,
    )
    start = time.monotonic()
    with suppress(PlannerError):  # it found no plan, which `rating` tells
        planner.plan(space.collection, objects.sharders())
    spent_s = time.monotonic() - start
    wall_s, timed_out = spent_s + space.wall_s, spent_s > time_limit_s
    return Found(setting.name, watch.rating, watch.critical_path, wall_s, watch.plans, timed_out)


def _proposers(setting: _Setting) -> list[Any] | None:
    """TorchRec's own four in its order (`None`); in the order of their length; or its dynamic programme."""
    match setting.proposers:
        case "default":
            return None
        case "dynamic":
            return [DynamicProgrammingProposer(_BINS)]
    return [UniformProposer(), GridSearchProposer(), GreedyProposer(), GreedyProposer(use_depth=False)]


def _rated(plan: Sequence[Any], num_ranks: int) -> tuple[float, float]:
    """The largest sum of a rank, and the sum over compute and each type's exchanges of their largest, ms."""
    total = [0.0] * num_ranks
    events: dict[str, list[float]] = defaultdict(lambda: [0.0] * num_ranks)
    for option in plan:
        kind = option.sharding_type
        sums = (events["compute"], events["back"], events["out " + kind], events["in " + kind])
        for shard in option.shards:
            perf, rank = shard.perf, shard.rank
            total[rank] += perf.total
            for event, ms in zip(
                sums,
                (perf.fwd_compute + perf.prefetch_compute, perf.bwd_compute, perf.fwd_comms, perf.bwd_comms),
                strict=True,
            ):
                event[rank] += ms
    return max(total), sum(max(event) for event in events.values())
