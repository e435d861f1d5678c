"""Random placement tasks with tight memory, and whether any placement of one fits, by a mixed-integer program."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import scipy.optimize
import scipy.sparse

from dse.placement.instances.estimate import estimated_instance
from dse.placement.instances.instance import Objective
from dse.placement.instances.labels import labels_of
from dse.placement.instances.limits import limited
from dse.placement.instances.limits_schema import LimitsFile
from dse.placement.solver.problem import Problem, Where
from dse.yaml_loader import parse_yaml
from perfcore.design import hardware
from perfcore.design.hardware import System
from perfcore.design.model import EmbeddingTable
from perfcore.design.training import Training
from perfcore.profile.profile import profile_for

NODE = "dgx-a100-80gb"
KINDS = (
    "[table_wise]",
    "[table_wise, column_wise]",
    "[table_wise, column_wise, data_parallel]",
    "[table_wise, column_wise, row_wise, table_row_wise, data_parallel]",
)
TIGHT = (1.02, 1.3)  # memory of all ranks over what the tables need at least


@dataclass(frozen=True)
class Task:
    """Tables to place by either objective, and what they are."""

    name: str
    rating: Problem
    critical_path: Problem


def tasks(count: int, *, seed: int = 0) -> Iterator[Task]:
    """Tasks of 10 to 200 tables on 2 to 16 ranks, priced by the project's own models."""
    rng = np.random.default_rng(seed)
    node = hardware.node(NODE)
    cost = profile_for(hardware.device(node.device), node).cost_model()
    for i in range(count):
        tables, ranks = int(rng.integers(10, 201)), int(rng.choice([2, 3, 4, 5, 6, 7, 8, 16]))
        allowed, tight = KINDS[int(rng.integers(len(KINDS)))], float(rng.uniform(*TIGHT))
        system = System(hardware.device(node.device), node, ranks)
        instance = estimated_instance(
            random_tables(rng, tables), Training(global_batch=1024 * ranks), system, cost
        )
        limits = parse_yaml(f"kinds:\n  - allow: {allowed}\n", LimitsFile, source="task")
        rating, critical_path = (
            limited(instance.problem(o), labels_of(instance, o), limits).problem
            for o in (Objective.RATING, Objective.CRITICAL_PATH)
        )
        for problem in (rating, critical_path):
            problem.capacity_bytes[:] = tight * _least_bytes(problem) / ranks
        name = f"{i}: {tables} tables on {ranks} ranks, {allowed}, memory {tight:.2f} x"
        yield Task(name, rating, critical_path)


def random_tables(rng: np.random.Generator, count: int) -> list[EmbeddingTable]:
    """Sizes as in the synthetic sets: log-normal rows and pooling, dims 16 to 256."""
    rows = np.clip(rng.lognormal(np.log(3e5), 2.2, count), 100, 4e7).astype(int)
    pooling = np.clip(rng.lognormal(np.log(5), 1.5, count), 1, 200).round(3)
    dims = rng.choice([16, 32, 64, 96, 128, 256], count)
    return [
        EmbeddingTable(f"t{i}", int(r), float(p), 0.0, int(d))
        for i, (r, p, d) in enumerate(zip(rows, pooling, dims, strict=True))
    ]


def _least_bytes(problem: Problem) -> float:
    totals = np.add.reduceat(problem.bytes, problem.first_shard[:-1])
    return float(np.minimum.reduceat(totals, problem.first_option[:-1]).sum())


def any_fits(problem: Problem, *, time_limit_s: float) -> bool | None:
    """Whether some placement fits, by HiGHS; `None` when the time was up. Shards of an option must be equal."""
    counts = problem.shard_counts
    size = problem.bytes[problem.first_shard[:-1]]
    ranks, local = problem.num_ranks, problem.ranks_per_host
    options = problem.num_options
    machine = np.arange(ranks) // local
    entries: list[tuple[int, int, float]] = []
    low: list[float] = []
    high: list[float] = []
    integer_at = options
    columns: list[tuple[int, int, int, int]] = []  # option, first variable, how many, per machine or rank
    for o in range(options):
        where = Where(int(problem.where[o]))
        if where is Where.ALL:
            continue
        places = ranks if where is Where.ANY else ranks // local
        columns.append((o, integer_at, places, int(where is Where.ANY)))
        integer_at += places
    row = 0
    for t in range(problem.num_tables):
        for o in range(problem.first_option[t], problem.first_option[t + 1]):
            entries.append((row, o, 1.0))
        low.append(1.0)
        high.append(1.0)
        row += 1
    for o, first, places, by_rank in columns:
        groups = counts[o] if by_rank else counts[o] // local
        entries += [(row, first + p, 1.0) for p in range(places)] + [(row, o, -float(groups))]
        low.append(0.0)
        high.append(0.0)
        row += 1
    for r in range(ranks):
        entries += [(row, o, size[o]) for o in range(options) if problem.where[o] == Where.ALL]
        for o, first, _, by_rank in columns:
            entries.append((row, first + (r if by_rank else int(machine[r])), size[o]))
        low.append(-np.inf)
        high.append(float(problem.capacity_bytes[r]))
        row += 1
    matrix = scipy.sparse.csr_array(
        ([e[2] for e in entries], ([e[0] for e in entries], [e[1] for e in entries])), shape=(row, integer_at)
    )
    scale = np.ones(row)
    scale[-ranks:] = 1.0 / max(float(problem.capacity_bytes.max()), 1.0)
    upper = np.concatenate([np.ones(options), np.full(integer_at - options, np.inf)])
    found = scipy.optimize.milp(
        np.zeros(integer_at),
        constraints=scipy.optimize.LinearConstraint(
            scipy.sparse.diags_array(scale) @ matrix, np.array(low) * scale, np.array(high) * scale
        ),
        integrality=np.ones(integer_at),
        bounds=scipy.optimize.Bounds(0, upper),
        options={"time_limit": time_limit_s},
    )
    return {0: True, 2: False}.get(found.status)
