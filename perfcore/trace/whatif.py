"""What would change if: a traced iteration scheduled again with parts of it faster, slower, or captured.

A change is written as a target, an operator and a number:

    T1 / 2                      an overhead of every op; likewise T2 to T5, alone (ops without a launch), host (all)
    op:aten::linear* / 2        all host time of ops by name
    kernel:*gemm* / 2           kernels by name (`*` and `?` as in a shell)
    kernels * 1.1               all kernels but collectives
    collectives / 2             transfers
    latency * 0, gap * 0        launch latency, gap between queued kernels
    cuda graph                  all launches captured in one CUDA graph: host times vanish but for the waits
    batch * 2                   kernels, copies and all-to-alls at twice the batch, where shapes were recorded
    world_size = 16             transfers among so many ranks, each with its batch; other kernels as they are
    fuse:aten::add*             consecutive ops by name become one: its host time and launch are paid once
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import numpy as np

from perfcore.errors import TraceError
from perfcore.schedule import schedule
from perfcore.steps import HostKind
from perfcore.trace.joint import join, shared_collectives
from perfcore.trace.pool import kinds
from perfcore.trace.replay import Program
from perfcore.trace.resize import with_batch, with_world_size

_CHANGE = re.compile(r"^\s*(?P<target>.+?)\s*(?P<operator>[/*=])\s*(?P<number>[0-9.eE+-]+)\s*$")
_KINDS = {kind.name.lower(): kind for kind in HostKind if kind >= 0}
_TARGETS = (*_KINDS, "host", "kernels", "collectives", "latency", "gap", "batch", "world_size")
_CAPTURE = "cuda graph"
_FUSE = "fuse:"


@dataclass(frozen=True, slots=True)
class Change:
    """What is multiplied, and by how much; `factor` is 1 for changes that are no factor."""

    text: str
    target: str
    factor: float


@dataclass(frozen=True, slots=True)
class Effect:
    """A change and the steady spacing of iterations before and after it, µs."""

    change: Change
    before_us: float
    after_us: float

    @property
    def saved_share(self) -> float:
        """Share of the iteration that it saves."""
        return 1.0 - self.after_us / self.before_us if self.before_us > 0 else 0.0


def parse_change(text: str) -> Change:
    """The change that a text describes.

    Raises:
        TraceError: it describes none; the message shows the forms.
    """
    plain = text.strip()
    if plain.lower() == _CAPTURE or plain.lower().startswith(_FUSE):
        return Change(plain, plain.lower() if plain.lower() == _CAPTURE else plain, 1.0)
    found = _CHANGE.match(text)
    if found is None:
        raise _no_change(text)
    try:
        number = float(found["number"])
    except ValueError:
        raise _no_change(text) from None
    target = found["target"]
    if not target.startswith(("kernel:", "op:")):
        target = target.lower()
        if target not in _TARGETS:
            raise _no_change(text)
    if (found["operator"] == "=") != (target == "world_size"):
        raise _no_change(text)
    if number < 0 or (found["operator"] == "/" and number == 0):
        raise TraceError(f"A factor must be positive, but got {text!r}.")
    return Change(plain, target, 1.0 / number if found["operator"] == "/" else number)


def effects_of(programs: Sequence[Program], changes: Sequence[Change]) -> tuple[Effect, ...]:
    """Each change alone, in order; then, where there are several, all of them together.

    Raises:
        TraceError: a change matches nothing.
    """
    before = scheduled_us(programs)
    effects = []
    for change in changes:
        after = scheduled_us([applied(p, change) for p in programs])
        effects.append(Effect(change, before, after))
    if len(changes) > 1:
        both = list(programs)
        for change in changes:
            both = [applied(p, change) for p in both]
        together = Change(" and ".join(c.text for c in changes), "", 1.0)
        effects.append(Effect(together, before, scheduled_us(both)))
    return tuple(effects)


def scheduled_us(programs: Sequence[Program]) -> float:
    """Steady spacing of one rank's iteration, or of all ranks' together."""
    compiled = [p.steps() for p in programs]
    if len(programs) == 1:
        return float(schedule(compiled[0]).iteration_time_us[0])
    steps = [p.step for p in programs]
    common = shared_collectives(steps)
    transfers = np.min([np.array(p.durations_us)[common[:, r]] for r, p in enumerate(programs)], axis=0)
    return float(schedule(join(compiled, steps, transfers)).iteration_time_us[0])


def applied(program: Program, change: Change) -> Program:
    """The program after a change.

    Raises:
        TraceError: the change matches nothing in it.
    """
    target, factor = change.target, change.factor
    if target == _CAPTURE:
        return _captured(program)
    if target == "world_size":
        return with_world_size(program, round(factor))
    if target == "batch":
        return with_batch(program, factor)
    if target.startswith(_FUSE):
        return _fused(program, target.removeprefix(_FUSE), change)
    if target in ("latency", "gap"):
        field = f"{target}_us"
        device = replace(program.device, **{field: getattr(program.device, field) * factor})
        return replace(program, device=device)
    if target.startswith("kernel:") or target in ("kernels", "collectives"):
        return _scaled_kernels(program, change)
    return _scaled_host(program, change)


def _scaled_kernels(program: Program, change: Change) -> Program:
    pattern = change.target.removeprefix("kernel:")

    def chosen(name: str, *, collective: bool) -> bool:
        if change.target in ("kernels", "collectives"):
            return collective == (change.target == "collectives")
        return fnmatchcase(name.lower(), pattern.lower())

    hits = [chosen(x.kernel.name, collective=x.collective) for x in program.step.launched]
    if not any(hits):
        raise TraceError(
            f"{change.text!r} matches none of {len(hits)} kernels.",
            hint='Quote the pattern and use `*`, as in "kernel:*gemm* / 2".',
        )
    scaled = [
        us * (change.factor if hit else 1.0) for us, hit in zip(program.durations_us, hits, strict=True)
    ]
    return replace(program, durations_us=tuple(scaled))


def _scaled_host(program: Program, change: Change) -> Program:
    pattern = change.target.removeprefix("op:") if change.target.startswith("op:") else None
    kind = _KINDS.get(change.target)
    hits, out = 0, []
    for piece, times in zip(program.step.pieces, program.host_us, strict=True):
        if pattern is not None and not fnmatchcase(piece.op, pattern):
            out.append(tuple(times))
            continue
        hits += 1
        of_times = zip(times, kinds(len(times)), strict=True)
        out.append(tuple(us * change.factor if kind in (None, k) else us for us, k in of_times))
    if not hits:
        raise TraceError(f"{change.text!r} matches none of {len(program.step.pieces)} ops.")
    return replace(program, host_us=tuple(out))


def _captured(program: Program) -> Program:
    """Host times vanish but for the longest launch call, which launches the graph."""
    calls = [
        us
        for times in program.host_us
        for us, kind in zip(times, kinds(len(times)), strict=True)
        if kind is HostKind.T4
    ]
    out = [tuple(0.0 for _ in times) for times in program.host_us]
    out[0] = (max(calls, default=0.0), *out[0][1:])
    return replace(program, host_us=tuple(out))


def _fused(program: Program, pattern: str, change: Change) -> Program:
    """Every op of a run but the first costs the host nothing; its kernels stay as long as they were."""
    out, before, hits = [], False, 0
    for piece, times in zip(program.step.pieces, program.host_us, strict=True):
        matches = fnmatchcase(piece.op, pattern)
        out.append(tuple(0.0 for _ in times) if matches and before else tuple(times))
        hits += matches and before
        before = matches
    if not hits:
        raise TraceError(f"{change.text!r} finds no two consecutive ops of that name.")
    return replace(program, host_us=tuple(out))


def _no_change(text: str) -> TraceError:
    return TraceError(
        f"A change is a target, `/` or `*`, and a number, but got {text!r}.",
        hint=f"Targets: {', '.join(_TARGETS)}, kernel:PATTERN, op:PATTERN; or {_CAPTURE!r}, {_FUSE}PATTERN.",
    )
