"""What a person reads for a validation error: the rule, then the value."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel


def message_of(error: Mapping[str, Any], schema: type[BaseModel]) -> str:
    """The sentence for one of pydantic's errors.

    Args:
        error: an item of `ValidationError.errors()`.
        schema: the validated model, whose known keys an unknown one is compared with.
    """
    kind, value = error["type"], error.get("input")
    text = str(error["msg"]).removeprefix("Value error, ")
    if kind == "extra_forbidden":
        key = str(error["loc"][-1])
        return (
            f"unknown key `{key}`; {nearest(key, known_keys(schema, error['loc'][:-1]), kind='known keys')}"
        )
    if kind == "missing":
        return "this key is needed, but it is missing"
    if kind == "value_error":
        return text
    shown = _shown(value)
    if kind in ("model_type", "dict_type"):
        return f"a mapping of keys to values is needed, but got {shown}"
    if kind == "list_type":
        return f"a list is needed, but got {shown}"
    if kind == "too_short":
        return f"{error['ctx']['min_length']} or more must be in the list, but got {shown}"
    return f"{text[:1].lower()}{text[1:]}, but got {shown}"


def known_keys(schema: type[BaseModel], loc: tuple[str | int, ...]) -> list[str]:
    """Keys that may stand at a place; list positions and union tags in `loc` name no field and are skipped."""
    models = {schema}
    for part in loc:
        fields = [m.model_fields[str(part)] for m in models if str(part) in m.model_fields]
        if fields:
            models = {m for field in fields for m in _models_in([field.annotation, *field.metadata])}
    return sorted({key for m in models for key in m.model_fields})


def _models_in(annotations: Any) -> Iterator[type[BaseModel]]:
    for annotation in annotations:
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield annotation
        yield from _models_in(get_args(annotation))


def nearest(word: str, known: Sequence[str], *, kind: str = "known") -> str:
    """`did you mean ...?`, or the list of what is known."""
    near = difflib.get_close_matches(word, known, n=1)
    return f"did you mean `{near[0]}`?" if near else f"{kind}: " + ", ".join(known)


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if value is None:
        return "nothing"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
