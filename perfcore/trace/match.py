"""Ops of an execution trace and of a Kineto trace that are the same: by record function id, else by order.

By order: a thread's ops begin in the same order in both, but for neighbours with equal times. A Kineto trace may hold
many iterations of which the execution trace is one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from perfcore.trace.execution_trace import ExecutionTrace, Node
from perfcore.trace.records import KinetoTrace, NestedOp

# How far neighbours may be swapped, and how many ops one file may have that the other lacks.
_WINDOW = 24
_FIRST_NAMES = 4
_STARTS = 200


@dataclass(frozen=True, slots=True, eq=False)
class Match:
    """Which op is which.

    Attributes:
        pairs: node and its op.
        nodes: of the execution trace.
        how: `record function id` or `order`.
    """

    pairs: tuple[tuple[Node, NestedOp], ...]
    nodes: int
    how: str

    @property
    def matched(self) -> int:
        """Nodes that have an op."""
        return len(self.pairs)


def match(execution_trace: ExecutionTrace, trace: KinetoTrace) -> Match:
    """The better of both ways."""
    by_id = _by_id(execution_trace.nodes, trace)
    if by_id.matched == by_id.nodes:
        return by_id
    by_order = _by_order(execution_trace.nodes, trace)
    return by_id if by_id.matched >= by_order.matched else by_order


def _by_id(nodes: Sequence[Node], trace: KinetoTrace) -> Match:
    ops = {op.correlation: op for thread in trace.nested for op in thread if op.correlation > 0}
    found = [(n, ops[n.record_id]) for n in nodes if n.record_id in ops and ops[n.record_id].name == n.name]
    return Match(tuple(found), len(nodes), "record function id")


def _by_order(nodes: Sequence[Node], trace: KinetoTrace) -> Match:
    """Each thread with the thread and the place that it fits best, largest first."""
    threads: dict[int, list[Node]] = defaultdict(list)
    for node in nodes:
        threads[node.thread].append(node)
    left = dict(enumerate(trace.nested))
    pairs: list[tuple[Node, NestedOp]] = []
    for own in sorted(threads.values(), key=len, reverse=True):
        best: list[tuple[Node, NestedOp]] = []
        at = -1
        for number, ops in left.items():
            found = _best_place(own, ops)
            if len(found) > len(best):
                best, at = found, number
        pairs += best
        left.pop(at, None)
    return Match(tuple(pairs), len(nodes), "order")


def _best_place(nodes: Sequence[Node], ops: Sequence[NestedOp]) -> list[tuple[Node, NestedOp]]:
    best: list[tuple[Node, NestedOp]] = []
    for start in _places(nodes, ops):
        found = _aligned(nodes, ops, start)
        if len(found) > len(best):
            best = found
        if len(best) == len(nodes):
            break
    return best


def _places(nodes: Sequence[Node], ops: Sequence[NestedOp]) -> list[int]:
    """Where the first names of the nodes stand among the ops."""
    names = [n.name for n in nodes[:_FIRST_NAMES]]
    starts = [i for i in range(len(ops)) if [op.name for op in ops[i : i + len(names)]] == names]
    return ([0, *starts] if 0 not in starts else starts)[:_STARTS]


def _aligned(nodes: Sequence[Node], ops: Sequence[NestedOp], start: int) -> list[tuple[Node, NestedOp]]:
    used: set[int] = set()
    found: list[tuple[Node, NestedOp]] = []
    at = start
    for node in nodes:
        stop = min(at + _WINDOW, len(ops))
        place = next((i for i in range(at, stop) if i not in used and ops[i].name == node.name), None)
        if place is None:
            continue
        used.add(place)
        found.append((node, ops[place]))
        at = max(at, place - _WINDOW // 2)
        while at in used:
            at += 1
    return found
