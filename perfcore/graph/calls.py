"""Ops that call a collective, and ops that wait for one."""

from __future__ import annotations

from perfcore.graph.mlp import Waits
from perfcore.graph.ops import Launch, Op
from perfcore.graph.parts import Mask

MODULE = "communication"


def call(
    name: str,
    launch: Launch,
    *,
    present: Mask | bool,
    before: tuple[Launch, ...] = (),
    waits: Waits = (),
    phase: str = "forward",
) -> Op:
    """A collective is called, after what prepares its buffer."""
    return Op(name, (*before, launch), waits=waits, present=present, phase=phase, module=MODULE)


def wait(name: str, launches: tuple[Launch, ...], *, present: Mask | bool, waits: Waits, phase: str) -> Op:
    """Its result is waited for, and laid out."""
    return Op(name, launches, waits=waits, present=present, phase=phase, module=MODULE)
