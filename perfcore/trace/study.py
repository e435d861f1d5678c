"""Questions to analysed traces: what if, another device, a timeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from perfcore.trace.analysis import Analysis, RankAnalysis
from perfcore.trace.critical import PathPart, critical_path
from perfcore.trace.execution_trace import read_execution_trace
from perfcore.trace.export import timeline_events
from perfcore.trace.joint import join, joint_seeds_us
from perfcore.trace.match import match
from perfcore.trace.pool import HostPool
from perfcore.trace.records import KinetoTrace
from perfcore.trace.replay import Program
from perfcore.trace.retime import PricedStep, Retimed, price_step, retime
from perfcore.trace.whatif import Effect, effects_of, parse_change


@dataclass(frozen=True, slots=True)
class Link:
    """An execution trace matched to a Kineto trace.

    Attributes:
        execution_trace: name of the file.
        trace: name of the file.
        nodes: ops of the execution trace.
        matched: that have their op in the Kineto trace.
        how: `record function id` or `order`.
    """

    execution_trace: str
    trace: str
    nodes: int
    matched: int
    how: str

    @property
    def share(self) -> float:
        """Share of the nodes that are matched."""
        return self.matched / self.nodes if self.nodes else 0.0


def programs_of(analysis: Analysis) -> list[Program]:
    """One step of every rank with the rank's mean host times: the step of median length, the first where joint."""
    return [_program(rank, analysis, first=analysis.joint is not None) for rank in analysis.ranks]


def effects(analysis: Analysis, texts: Sequence[str]) -> tuple[Effect, ...]:
    """What each change does to all ranks together, or to the first trace where they are of different programs.

    Raises:
        TraceError: a text describes no change, or matches nothing.
    """
    changes = [parse_change(text) for text in texts]
    return effects_of(_together(analysis), changes) if changes else ()


def retimed(analysis: Analysis, device: str) -> Retimed:
    """The iteration with kernels as on another device.

    Raises:
        TraceError: the traces' own device is not in the catalogue.
        ProfileError: there is no such profile.
        HardwareError: there is no such device.
    """
    return retime(_together(analysis), device)


def priced(rank: RankAnalysis, analysis: Analysis) -> tuple[PricedStep, ...]:
    """Every kept step of a rank that has kernels, with kernel durations from shapes and the rank's mean host times.

    Raises:
        TraceError: the trace's device is not in the catalogue.
    """
    pool = HostPool(rank.steps)
    busy = [s for s in rank.steps if any(s.durations_us)]
    programs = [Program(s, pool.host_us(s), s.durations_us, analysis.device, rank.trace) for s in busy]
    return tuple(price_step(p) for p in programs)


def timeline_of(analysis: Analysis) -> dict[str, Any]:
    """Measured beside predicted, with mean host times, as a Chrome trace."""
    programs = _together(analysis)
    starts = [p.step.window.start_us + p.trace.base_us for p in programs]
    compiled = [p.steps() for p in programs]
    steps = compiled[0] if len(compiled) == 1 else join(compiled, [p.step for p in programs])
    seeds = joint_seeds_us([p.step for p in programs], starts, clocks=steps.clocks)
    return timeline_events([p.step for p in programs], steps, seeds, starts_us=starts)


def path_of(rank: RankAnalysis, analysis: Analysis) -> tuple[PathPart, ...]:
    """The critical path of the rank's step of median length, with its own host times."""
    program = _program(rank, analysis, first=False, exact=True)
    return critical_path(program.steps(), program.step.seeds_us)


def linked(traces: Sequence[KinetoTrace], paths: Sequence[Path]) -> tuple[Link, ...]:
    """Each execution trace matched to the trace of its process, else to the one that it fits best.

    Raises:
        TraceError: an execution trace cannot be read.
    """
    links = []
    for path in paths:
        nodes = read_execution_trace(path)
        own = [t for t in traces if t.pid == nodes.pid >= 0] or traces
        found = [(match(nodes, t), t) for t in own]
        best, trace = max(found, key=lambda f: f[0].matched)
        links.append(Link(path.name, trace.name, best.nodes, best.matched, best.how))
    return tuple(links)


def _together(analysis: Analysis) -> list[Program]:
    programs = programs_of(analysis)
    return programs if analysis.joint is not None else programs[:1]


def _program(rank: RankAnalysis, analysis: Analysis, *, first: bool, exact: bool = False) -> Program:
    lengths = [s.window.duration_us for s in rank.steps]
    at = 0 if first else int(np.argsort(lengths)[(len(lengths) - 1) // 2])
    step = rank.steps[at]
    host_us = step.host_us if exact else HostPool(rank.steps).host_us(step)
    return Program(step, host_us, step.durations_us, analysis.device, rank.trace)
