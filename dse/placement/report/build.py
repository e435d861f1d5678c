"""A placement as people and machines read it: per rank, per table, per event."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dse.placement.instances.labels import Labels
from dse.placement.instances.limits import Limited
from dse.placement.solver.alternatives import Alternative, alternatives
from dse.placement.solver.problem import Array, Assignment, Loads, Problem, loads_of
from perfcore.units import BYTES_PER_GIB

EXPLAINED = 100  # tables whose alternatives are priced by default: the dearest ones
_SLOWEST = 1 - 1e-9
_NOTHING = 1e-9  # relative; less is rounding


@dataclass(frozen=True, slots=True)
class Certificate:
    """How good a plan is.

    Attributes:
        objective_ms: what was minimised; for a design the predicted iteration time.
        lower_bound_ms: no placement is below it.
        gap_pct: how far the plan may be from the best one.
        proven: the plan is optimal.
        wall_s: time of the solver.
    """

    objective_ms: float
    lower_bound_ms: float
    gap_pct: float
    proven: bool
    wall_s: float


@dataclass(frozen=True, slots=True)
class OtherWay:
    """What one table would cost in another way, the others staying where they are.

    Attributes:
        type: sharding type.
        kernel: compute kernel.
        shards: pieces.
        change_ms: of the objective; negative where the plan would gain.
        missing_gib: memory that would be missing; 0 where it fits.
    """

    type: str
    kernel: str
    shards: int
    change_ms: float
    missing_gib: float


@dataclass(frozen=True, slots=True)
class TableLine:
    """One table's placement.

    Attributes:
        name: of the table.
        type: sharding type.
        kernel: compute kernel.
        ranks: of its shards, in their order.
        events_ms: what it adds to the events of the rank that it loads most; events without a share are left out.
        rank_ms: their sum.
        all_ranks_ms: its cost on all ranks together.
        hbm_gib: its memory on all ranks together.
        bound_by: the event that it adds most to; empty where costs are not known by event.
        together: tables that it must stay with.
        others: other ways, cheapest first; those without room last. Empty for tables that were not looked at.
    """

    name: str
    type: str
    kernel: str
    ranks: tuple[int, ...]
    events_ms: Mapping[str, float]
    rank_ms: float
    all_ranks_ms: float
    hbm_gib: float
    bound_by: str
    together: tuple[str, ...]
    others: tuple[OtherWay, ...]


@dataclass(frozen=True, slots=True)
class RankLine:
    """One rank's load.

    Attributes:
        rank: which.
        machine: where it is.
        load_ms: sum of its events.
        hbm_gib: memory of its shards.
        capacity_gib: memory for tables.
        shards: how many it holds.
        slowest_in: events that end with it.
        top: the tables that load it most.
    """

    rank: int
    machine: int
    load_ms: float
    hbm_gib: float
    capacity_gib: float
    shards: int
    slowest_in: tuple[str, ...]
    top: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class PlanReport:
    """All of a plan.

    Attributes:
        title: what was planned.
        objective: what was minimised, in words.
        certificate: how good it is.
        events: names of the events, in order.
        load_ms: `(r, e)`.
        ranks: one line a rank.
        tables: one line a table, in the set's order.
        facts: more to say, in order: name to value.
    """

    title: str
    objective: str
    certificate: Certificate
    events: tuple[str, ...]
    load_ms: Array
    ranks: tuple[RankLine, ...]
    tables: tuple[TableLine, ...]
    facts: Mapping[str, str]

    @property
    def dearest(self) -> tuple[TableLine, ...]:
        """Tables by what they add to a rank, most first."""
        return tuple(sorted(self.tables, key=lambda t: -t.rank_ms))

    @property
    def used_events(self) -> tuple[int, ...]:
        """Positions of the events that take time, longest first."""
        longest = self.load_ms.max(axis=0)
        order = np.argsort(-longest, kind="stable")
        return tuple(int(e) for e in order if longest[e] > _NOTHING * max(float(longest.sum()), _NOTHING))

    @property
    def rest_ms(self) -> float:
        """What the events do not account for: of a design its dense part, the host, and latencies."""
        return max(self.certificate.objective_ms - float(self.load_ms.max(axis=0).sum()), 0.0)

    @property
    def machines(self) -> int:
        """Machines in use."""
        return self.ranks[-1].machine + 1


def report_of(
    problem: Problem,
    labels: Labels,
    limits: Limited,
    answer: Assignment,
    certificate: Certificate,
    *,
    title: str,
    objective: str,
    explained: int = EXPLAINED,
    facts: Mapping[str, str] | None = None,
) -> PlanReport:
    """The report of an answer to a problem under limits.

    Args:
        problem: before limits, in ms.
        labels: of the problem.
        limits: the problem that was solved.
        answer: to `limits.problem`.
        certificate: of the answer.
        title: what was planned.
        objective: what was minimised, in words.
        explained: for how many of the dearest tables to price other ways.
        facts: more to say.
    """
    loads = loads_of(limits.problem, answer)
    whole = limits.original(answer)
    slowness = limits.problem.slowness
    bare = [_table_line(problem, labels, whole, slowness, t) for t in range(problem.num_tables)]
    others = _others(limits, answer, loads, bare, explained)
    tables = tuple(
        _with_group(line, limits, labels, g, others.get(g, ()))
        for line, g in zip(bare, _group_of_table(limits), strict=True)
    )
    return PlanReport(
        title=title,
        objective=objective,
        certificate=certificate,
        events=labels.events,
        load_ms=loads.cost,
        ranks=_rank_lines(limits.problem, labels, loads, tables),
        tables=tables,
        facts=dict(facts or {}),
    )


def _group_of_table(limits: Limited) -> list[int]:
    pairs = sorted((t, g) for g, members in enumerate(limits.members) for t in members)
    return [g for _, g in pairs]


def _table_line(
    problem: Problem, labels: Labels, answer: Assignment, slowness: Array, table: int
) -> TableLine:
    option, ranks = int(answer.option[table]), np.asarray(answer.ranks[table], dtype=np.int64)
    shards = slice(problem.first_shard[option], problem.first_shard[option + 1])
    own, place = np.unique(ranks, return_inverse=True)
    by_rank = np.zeros((len(own), problem.num_events))
    np.add.at(by_rank, place, problem.cost[shards] * slowness[ranks, None])
    worst = by_rank[int(np.argmax(by_rank.sum(axis=1)))]
    events = {name: float(ms) for name, ms in zip(labels.events, worst, strict=True) if ms > 0}
    return TableLine(
        name=labels.tables[table],
        type=labels.types[option],
        kernel=labels.kernels[option],
        ranks=tuple(ranks.tolist()),
        events_ms=events,
        rank_ms=float(worst.sum()),
        all_ranks_ms=float(by_rank.sum()),
        hbm_gib=float(problem.bytes[shards].sum()) / BYTES_PER_GIB,
        bound_by=max(events, key=lambda name: events[name]) if events else "nothing",
        together=(),
        others=(),
    )


def _others(
    limits: Limited, answer: Assignment, loads: Loads, lines: Sequence[TableLine], explained: int
) -> dict[int, tuple[OtherWay, ...]]:
    """Other ways of the groups whose tables are dearest."""
    cost = [max(lines[t].rank_ms for t in members) for members in limits.members]
    chosen = sorted(range(len(cost)), key=lambda g: -cost[g])[:explained]
    best = loads.objective
    return {
        g: tuple(_other_way(limits, a, best) for a in alternatives(limits.problem, answer, loads, g))
        for g in chosen
    }


def _other_way(limits: Limited, found: Alternative, best: float) -> OtherWay:
    return OtherWay(
        type=limits.labels.types[found.option],
        kernel=limits.labels.kernels[found.option],
        shards=len(found.ranks),
        change_ms=found.objective - best,
        missing_gib=found.missing_bytes / BYTES_PER_GIB,
    )


def _with_group(
    line: TableLine, limits: Limited, labels: Labels, group: int, others: tuple[OtherWay, ...]
) -> TableLine:
    members = limits.members[group]
    names = tuple(labels.tables[t] for t in members if labels.tables[t] != line.name)
    kept = {name: getattr(line, name) for name in TableLine.__dataclass_fields__}
    return TableLine(**kept | {"together": names, "others": others})


def _rank_lines(
    problem: Problem, labels: Labels, loads: Loads, tables: Sequence[TableLine]
) -> tuple[RankLine, ...]:
    shards = Counter(r for table in tables for r in table.ranks)
    slowest = loads.cost >= loads.cost.max(axis=0) * _SLOWEST
    top: list[list[str]] = [[] for _ in range(problem.num_ranks)]
    for table in sorted(tables, key=lambda t: -t.rank_ms):
        for rank in set(table.ranks):
            if len(top[rank]) < 3:
                top[rank].append(table.name)
    return tuple(
        RankLine(
            rank=r,
            machine=r // problem.ranks_per_host,
            load_ms=float(loads.cost[r].sum()),
            hbm_gib=float(loads.bytes[r]) / BYTES_PER_GIB,
            capacity_gib=float(problem.capacity_bytes[r]) / BYTES_PER_GIB,
            shards=shards[r],
            slowest_in=tuple(
                name
                for e, name in enumerate(labels.events)
                if slowest[r, e] and loads.cost[:, e].max() > loads.cost[:, e].min()
            ),
            top=tuple(top[r]),
        )
        for r in range(problem.num_ranks)
    )
