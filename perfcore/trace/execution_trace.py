"""Reads PyTorch execution traces (schemas 1.0.1 to 1.1.1): ops in the order in which they began, without times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perfcore.errors import TraceError
from perfcore.trace.events import whole
from perfcore.trace.load import parse, read_bytes, without_garbage_collection
from perfcore.trace.records import Shapes

_NO_OPS = ("[pytorch|profiler|execution_",)


@dataclass(frozen=True, slots=True)
class Node:
    """An op.

    Attributes:
        name: as the profiler prints it.
        id: unique, growing in the order in which nodes were finished or begun.
        parent: id of the node around it.
        record_id: of the profiler's record function, 0 where the file has none.
        thread: number of the thread within the file.
        shapes: of its inputs.
        types: of its inputs.
    """

    name: str
    id: int
    parent: int
    record_id: int
    thread: int
    shapes: Shapes
    types: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ExecutionTrace:
    """Ops in order; `schema` as the file says, `pid` of the process, -1 where it does not say."""

    schema: str
    nodes: tuple[Node, ...]
    pid: int = -1


def is_execution_trace(path: Path) -> bool:
    """The file looks like one: it begins with a schema or with nodes.

    Raises:
        TraceError: the file cannot be read.
    """
    head = read_bytes(path)[:4096]
    return b'"traceEvents"' not in head and (b'"nodes"' in head or b'"schema":' in head.replace(b" ", b""))


def read_execution_trace(path: Path) -> ExecutionTrace:
    """The ops in a `.json` or `.json.gz` file.

    Raises:
        TraceError: the file is missing, truncated, not JSON, or holds no nodes.
    """
    with without_garbage_collection():
        data = parse(read_bytes(path), origin=path.name)
        if not isinstance(data, Mapping) or not isinstance(data.get("nodes"), list):
            raise TraceError(f"{path.name}: an execution trace has a list `nodes`, but there is none.")
        nodes = [_node(n) for n in data["nodes"] if isinstance(n, Mapping)]
    kept = sorted((n for n in nodes if not n.name.startswith(_NO_OPS)), key=lambda n: n.id)
    return ExecutionTrace(str(data.get("schema", "")), tuple(kept), whole(data.get("pid")))


def _node(node: Mapping[str, Any]) -> Node:
    attributes = _attributes(node)
    inputs = node.get("inputs")
    described: Mapping[str, Any] = inputs if isinstance(inputs, Mapping) else {}
    shapes = node.get("input_shapes", described.get("shapes", ()))
    types = node.get("input_types", described.get("types", ()))
    return Node(
        name=str(node.get("name", "")),
        id=whole(node.get("id")),
        parent=whole(node.get("parent", node.get("ctrl_deps"))),
        record_id=whole(node.get("rf_id", attributes.get("rf_id")), otherwise=0),
        thread=whole(node.get("tid", attributes.get("tid")), otherwise=0),
        shapes=tuple(_shape(s) for s in shapes or ()),
        types=tuple(map(str, types or ())),
    )


def _attributes(node: Mapping[str, Any]) -> dict[str, Any]:
    """Newer schemas keep what describes a node in a list of named values."""
    listed = node.get("attrs")
    if not isinstance(listed, list):
        return {}
    return {str(a.get("name")): a.get("value") for a in listed if isinstance(a, Mapping)}


def _shape(shape: Any) -> tuple[int, ...]:
    if not isinstance(shape, list) or any(not isinstance(d, int) for d in shape):
        return ()
    return tuple(shape)
