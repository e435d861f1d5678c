"""Reads a profiler's JSON, piece by piece, so that a large file's events are never all in memory as parsed JSON.

Strict first. Where a piece is no JSON, the defects that profilers are known to write are mended: `nan` and
`inf` as numbers, lone backslashes and control characters in names, trailing commas, bytes that are not UTF-8.
"""

from __future__ import annotations

import gc
import gzip
import json
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson

from perfcore.errors import TraceError

PIECE_BYTES = 1 << 20
_ATTEMPTS = 8
_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
_BETWEEN = re.compile(rb"\}\s*(,)\s*\{")
_COMPLETE = re.compile(rb'"ph"\s*:\s*"')
_NOT_A_NUMBER = re.compile(r"(:\s*)-?(?:nan|inf|infinity)(?=\s*[,}\]])", re.IGNORECASE)
_LONE_BACKSLASH = re.compile(r'\\(?![\\"/bfnrtu])|\\u(?![0-9a-fA-F]{4})')
_TRAILING_COMMA = re.compile(r",(\s*[\]}])")


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Parsed JSON has no cycles: looking for them takes most of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def read_bytes(path: Path) -> bytes:
    """The file, unpacked where it is gzip.

    Raises:
        TraceError: it cannot be read, is empty, or the gzip data is damaged.
    """
    try:
        raw = path.read_bytes()
        data = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
    except OSError as err:
        raise TraceError(f"{path.name}: cannot be read: {err.strerror or err}.") from None
    except (EOFError, zlib.error):
        raise TraceError(
            f"{path.name}: the gzip data is truncated or damaged ({len(raw):,} bytes).",
            hint="Copy or record the file again.",
        ) from None
    if not data.strip():
        raise TraceError(f"{path.name}: the file is empty.")
    return data


def parse(data: bytes, *, origin: str) -> Any:
    """JSON, with the known defects mended.

    Raises:
        TraceError: not JSON, or truncated; the message says what was found.
    """
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        return _mended(data, origin=origin)


def read_events(path: Path) -> tuple[dict[str, Any], Iterator[list[Any]]]:
    """Everything but the events of a Chrome trace, and its events in pieces.

    Raises:
        TraceError: the file is missing, truncated, not JSON, or holds no list of events. Damage is found at once,
            in the pieces' JSON as they are read.
    """
    data = read_bytes(path)
    array = _EVENTS.search(data)
    if array is None:
        whole = parse(data, origin=path.name)
        if not isinstance(whole, list):
            found = (
                f"an object with {', '.join(list(whole)[:5]) or 'nothing in it'}"
                if isinstance(whole, dict)
                else "no object"
            )
            raise TraceError(
                f"{path.name}: a Kineto trace has a list `traceEvents`, but there is none: this is {found}."
            )
        return {}, iter([whole])
    head = parse(data[: array.end()] + b"]}", origin=path.name)
    tail_at = _tail_start(data, array.end())
    tail = parse(b'{"traceEvents":[' + data[tail_at:], origin=path.name)
    if not isinstance(head, dict) or not isinstance(tail, dict):
        raise TraceError(f"{path.name}: a Kineto trace is a JSON object, but this is none.")
    last = tail.pop("traceEvents")
    head.pop("traceEvents", None)
    return head | tail, _pieces(data, array.end(), tail_at, last, origin=path.name)


def _tail_start(data: bytes, start: int) -> int:
    """Where the last piece begins: after the last separator at least a piece before the end."""
    at = max(start, len(data) - PIECE_BYTES)
    if at == start:
        return start
    for found in _BETWEEN.finditer(data, at):
        try:
            orjson.loads(b'{"traceEvents":[' + data[found.end(1) :])
        except orjson.JSONDecodeError:
            if found.start() - at > PIECE_BYTES // 64:
                break
        else:
            return found.end(1)
    return start


def _pieces(data: bytes, start: int, end: int, last: list[Any], *, origin: str) -> Iterator[list[Any]]:
    while start < end:
        piece, start = _piece(data, start, end, origin=origin)
        yield piece
    yield last


def _piece(data: bytes, start: int, end: int, *, origin: str) -> tuple[list[Any], int]:
    """Events from `start` to a separator; a separator inside a string or a list gives no JSON: try the next."""
    at = start + PIECE_BYTES
    for _ in range(_ATTEMPTS):
        found = _BETWEEN.search(data, at, end) if at < end else None
        stop = found.start(1) if found else end
        text = data[start:stop].rstrip().removesuffix(b",")
        try:
            return orjson.loads(b"[" + text + b"]"), stop + 1
        except orjson.JSONDecodeError:
            if found is None:
                break
            at = stop + 1
    events = _mended(b"[" + data[start:end].rstrip().removesuffix(b",") + b"]", origin=origin)
    return events, end


def _mended(data: bytes, *, origin: str) -> Any:
    text = data.decode("utf-8", errors="replace")
    text = _NOT_A_NUMBER.sub(r"\1null", text)
    text = _LONE_BACKSLASH.sub(r"\\\\", text)
    text = _TRAILING_COMMA.sub(r"\1", text)
    try:
        return json.loads(text, strict=False)
    except (json.JSONDecodeError, RecursionError) as err:
        raise TraceError(
            f"{origin}: not JSON, or truncated: {err}. It begins with {text[:20]!r}, ends with {text[-20:]!r} and "
            f"holds {len(_COMPLETE.findall(data))} events.",
            hint="Record it again with torch.profiler and let the process end before copying the file.",
        ) from None
