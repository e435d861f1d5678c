"""Events of a Chrome trace by role, as compact records."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from perfcore.trace.records import Shapes

OP_CATEGORIES = {"cpu_op", "operator"}
ANNOTATION_CATEGORIES = {"user_annotation"}
RUNTIME_CATEGORIES = {"cuda_runtime", "cuda_driver", "hip_runtime", "runtime", "driver"}
DEVICE_CATEGORIES = {"kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset"}
SYNC_CATEGORIES = {"cuda_sync"}
EVENT_CATEGORIES = {"cuda_event"}
STEP_PREFIX = "ProfilerStep#"
# Annotations that stand for work of their own; all others only group ops.
WORKING_ANNOTATIONS = ("Optimizer.", "enumerate(DataLoader)", "nccl:")
_NAMED_ANNOTATIONS = (STEP_PREFIX, *WORKING_ANNOTATIONS)
_NO_ARGUMENTS: Mapping[str, Any] = {}


class Event(NamedTuple):
    """A complete event."""

    name: str
    start_us: float
    end_us: float
    tid: str
    correlation: int  # of an op: its record function id; -1 where the file has none
    arguments: Mapping[str, Any]  # of device and synchronisation events alone
    shapes: Shapes
    types: tuple[str, ...]


class Events:
    """Events by role; old files call annotations operators, so those are told by their names."""

    def __init__(self) -> None:
        self.op: list[Event] = []
        self.annotation: list[Event] = []
        self.runtime: list[Event] = []
        self.device: list[Event] = []
        self.sync: list[Event] = []
        self.event: list[Event] = []
        self.count = 0
        self.pid = -1  # of the last op
        self._roles: dict[str, str] = {}
        self._seen: dict[str, Any] = {}

    def add(self, events: Iterable[Any]) -> None:
        """Sort a piece of the file in; what is no complete event, or has no times, is passed over."""
        for event in events:
            self.count += 1
            if not isinstance(event, Mapping) or event.get("ph") != "X":
                continue
            category, name = event.get("cat"), event.get("name")
            role = self._role(str(category), str(name))
            if role is not None:
                record = self._record(event, role)
                if record is not None:
                    getattr(self, role).append(record)

    def _role(self, category: str, name: str) -> str | None:
        role = self._roles.get(category)
        if role is None:
            role = self._roles[category] = _role_of(category.lower())
        if role == "op" and name.startswith(_NAMED_ANNOTATIONS):
            return "annotation"
        if not role or (role == "runtime" and "INVALID" in name):
            return None
        return role

    def _record(self, event: Mapping[str, Any], role: str) -> Event | None:
        try:
            start = float(event["ts"])
            end = start + float(event["dur"])
        except (KeyError, TypeError, ValueError):
            return None
        if not start <= end < math.inf:
            return None
        args = event.get("args")
        if not isinstance(args, Mapping):
            args = _NO_ARGUMENTS
        shapes, types, correlation, kept = (), (), -1, _NO_ARGUMENTS
        if role == "op":
            shapes, types = self._shapes(args)
        if role == "op":
            self.pid = whole(event.get("pid"))
        if role in ("op", "annotation"):
            correlation = whole(args.get("Record function id"))
        else:
            correlation = whole(args.get("correlation", args.get("Correlation")))
            kept = _NO_ARGUMENTS if role == "runtime" else _kept(args)
        name, tid = self._same(str(event.get("name"))), self._same(str(event.get("tid")))
        return Event(name, start, end, tid, correlation, kept, shapes, types)

    def _same(self, text: str) -> str:
        return str(self._seen.setdefault(text, text))

    def _shapes(self, args: Mapping[str, Any]) -> tuple[Any, Any]:
        """Shapes and types of the inputs, equal ones being one object."""
        dims = args.get("Input Dims", args.get("Input dims"))
        if not dims or not isinstance(dims, list):
            return (), ()
        types = args.get("Input type", ())
        types = types if isinstance(types, list) else []
        key = f"{dims}{types}"
        found = self._seen.get(key)
        if found is None:
            found = self._seen[key] = (tuple(map(_shape, dims)), tuple(map(str, types)))
        return found[0], found[1]


def whole(value: Any, *, otherwise: int = -1) -> int:
    """An integer that may be missing or no number."""
    try:
        return int(value)
    except (TypeError, ValueError):
        return otherwise


def _role_of(category: str) -> str:
    for role, categories in (
        ("op", OP_CATEGORIES),
        ("annotation", ANNOTATION_CATEGORIES),
        ("runtime", RUNTIME_CATEGORIES),
        ("device", DEVICE_CATEGORIES),
        ("sync", SYNC_CATEGORIES),
        ("event", EVENT_CATEGORIES),
    ):
        if category in categories:
            return role
    return ""


def _shape(dims: Any) -> tuple[int, ...]:
    """A tensor's shape; `()` for scalars and lists of tensors."""
    if not isinstance(dims, list) or any(not isinstance(d, int) for d in dims):
        return ()
    return tuple(dims)


_KEPT = (
    "stream",
    "bytes",
    "wait_on_stream",
    "wait_on_cuda_event_record_corr_id",
    "wait_on_cuda_event_id",
    "cuda_event_id",
    "event_id",
    "cuda_sync_kind",
    "device",
)


def _kept(args: Mapping[str, Any]) -> Mapping[str, Any]:
    return {key: args[key] for key in _KEPT if key in args}
