"""YAML in, checked values out; every mistake of a file at once, each with its place.

The dialect is YAML 1.2's core schema: `1e-3` is a number, `on` and `no` are text. Aliases and merge
keys are refused, so that a file says what it says where it says it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

import yaml
from pydantic import BaseModel, ValidationError
from yaml.error import Mark

from dse.errors import ConfigError
from dse.validation_text import message_of

M = TypeVar("M", bound=BaseModel)
Loc: TypeAlias = "Sequence[str | int]"
MAX_DIGITS = 4000  # Python refuses to read longer integers


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with YAML 1.2's plain scalars and without aliases."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent):
            raise _not_supported("aliases (`*name`)", event.start_mark)
        if getattr(event, "tag", None) is not None:
            raise _not_supported("tags (`!name`)", event.start_mark)
        return super().compose_node(parent, index)

    def construct_number(self, node: yaml.ScalarNode) -> int | float:
        text = str(node.value).replace("_", "")
        if node.tag.endswith("float"):
            return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
        if len(text) > MAX_DIGITS:
            raise yaml.constructor.ConstructorError(
                None, None, f"a number of {len(text)} digits is too long", node.start_mark
            )
        return int(text, 0 if text[:2] in ("0x", "0o") else 10)


def _not_supported(what: str, mark: Any) -> yaml.MarkedYAMLError:
    return yaml.composer.ComposerError(None, None, f"{what} are not supported, write the value out", mark)


PLAIN_SCALARS: Sequence[tuple[str, re.Pattern[str], list[str]]] = (
    ("bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")),
    ("null", re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    ("int", re.compile(r"^(?:[-+]?[0-9][0-9_]*|0o[0-7]+|0x[0-9a-fA-F]+)$"), list("-+0123456789")),
    (
        "float",
        re.compile(
            r"^(?:[-+]?(?:\.[0-9]+|[0-9][0-9_]*(?:\.[0-9_]*)?)(?:[eE][-+]?[0-9]+)?"
            r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
        ),
        list("-+.0123456789"),
    ),
)


def add_plain_scalars(kind: Any) -> None:
    """Teach a loader or a dumper class which unquoted words are no text."""
    for tag, pattern, first in PLAIN_SCALARS:
        kind.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", pattern, first)


add_plain_scalars(_Loader)
for _tag in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_tag}", _Loader.construct_number)


@dataclass(frozen=True, slots=True)
class Document(Generic[M]):
    """A file's checked values, and the tree that knows where each of them stands."""

    source: str
    root: yaml.Node
    value: M

    def problem(self, loc: Loc, message: str) -> tuple[int, int, str]:
        """Line, column and text of a mistake found after the schema's own checks."""
        mark, keys = _locate(self.root, loc)
        return _problem(mark, ".".join(keys), message)

    def error(self, loc: Loc, message: str) -> ConfigError:
        """One mistake as an exception."""
        return problems_error([self.problem(loc, message)])


def problems_error(problems: Iterable[tuple[int, int, str]]) -> ConfigError:
    """All mistakes as one exception, in the order of the file, repeated lines dropped."""
    return ConfigError("\n".join(dict.fromkeys(text for *_, text in sorted(problems, key=lambda p: p[:2]))))


def load_yaml(path: Path, schema: type[M], *, overrides: Sequence[str] = ()) -> Document[M]:
    """Read and check a file.

    Args:
        path: the file.
        schema: what it must look like.
        overrides: `section.key=value` each, applied before the check; the value is YAML.

    Raises:
        ConfigError: the file cannot be read, or has mistakes: all of them, one a line.
    """
    return parse_yaml(read_text(path), schema, source=str(path), overrides=overrides)


def parse_yaml(text: str, schema: type[M], *, source: str, overrides: Sequence[str] = ()) -> Document[M]:
    """As `load_yaml`, from text; `source` stands where the file's name would.

    Raises:
        ConfigError: the text has mistakes: all of them, one a line.
    """
    try:
        root = _compose(text, source)
        if root is None:
            raise ConfigError(f"{source}:1:1: (top level): the file is empty")
        for override in overrides:
            _apply(root, override)
        problems = list(_duplicates(root))
        data = _construct(root)
    except yaml.MarkedYAMLError as err:
        raise ConfigError(f"{_at(err.problem_mark, source)}: {_why(err)}") from None
    except yaml.YAMLError as err:
        raise ConfigError(f"{source}:1:1: not YAML: {' '.join(str(err).split())}") from None
    except RecursionError:
        raise ConfigError(f"{source}:1:1: nested too deeply") from None
    try:
        value = schema.model_validate(data)
    except ValidationError as err:
        for e in err.errors(include_url=False):
            mark, keys = _locate(root, e["loc"])
            missing = [str(e["loc"][-1])] if e["type"] == "missing" else []
            problems.append(_problem(mark, ".".join([*keys, *missing]), message_of(e, schema)))
    if problems:
        raise problems_error(problems)
    return Document(source, root, value)


def read_text(path: Path) -> str:
    """A file's text.

    Raises:
        ConfigError: it cannot be opened, or is not UTF-8.
    """
    try:
        raw = path.read_bytes()
    except OSError as err:
        raise ConfigError(f"{path}:1:1: cannot be read: {err.strerror or err}") from None
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as err:
        before = raw[: err.start]
        line, column = before.count(b"\n") + 1, err.start - (before.rfind(b"\n") + 1) + 1
        raise ConfigError(f"{path}:{line}:{column}: not UTF-8: byte 0x{raw[err.start]:02x}") from None


def _compose(text: str, source: str) -> Any:
    loader = _Loader(text)
    loader.name = source
    try:
        return loader.get_single_node()
    finally:
        loader.dispose()


def _construct(root: yaml.Node) -> Any:
    return _Loader("").construct_document(root)


def _apply(root: yaml.Node, override: str) -> None:
    """Set one `section.key=value` in the tree, making the sections that are missing."""
    path, equals, text = override.partition("=")
    keys = [k.strip() for k in path.split(".")]
    if not equals or not all(keys):
        raise ConfigError(f"--set {override}:1:1: must read `section.key=value`")
    source = f"--set {override}"
    value = _compose(text, source) or _scalar(Mark(source, 0, 0, 0, None, 0), "", "null")
    for child in _nodes(value):
        # The place of a value given on the command line is its position there.
        shift = len(path) + 1
        m = child.start_mark
        child.start_mark = Mark(source, m.index, m.line, m.column + shift, None, 0)
    node = root
    for depth, key in enumerate(keys):
        node = _child(node, key, value if depth == len(keys) - 1 else None, source)


def _child(node: yaml.Node, key: str, value: yaml.Node | None, source: str) -> yaml.Node:
    mark = Mark(source, 0, 0, 0, None, 0)
    if isinstance(node, yaml.SequenceNode) and key.isdigit() and int(key) < len(node.value):
        if value is not None:
            node.value[int(key)] = value
        found: yaml.Node = node.value[int(key)]
        return found
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{source}:1:1: there is no place {key!r} to set")
    for position, (known, old) in enumerate(node.value):
        if known.value == key:
            if value is not None:
                node.value[position] = (_scalar(mark, key, "str"), value)
            return value if value is not None else old
    new = value if value is not None else yaml.MappingNode("tag:yaml.org,2002:map", [], mark, mark)
    node.value.append((_scalar(mark, key, "str"), new))
    return new


def _scalar(mark: Mark, text: str, tag: str) -> yaml.ScalarNode:
    return yaml.ScalarNode(f"tag:yaml.org,2002:{tag}", text, mark, mark)


def _nodes(node: yaml.Node) -> Iterator[yaml.Node]:
    yield node
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _nodes(item)
    elif isinstance(node, yaml.MappingNode):
        for key, item in node.value:
            yield key
            yield from _nodes(item)


def _duplicates(node: yaml.Node, path: tuple[str, ...] = ()) -> Iterator[tuple[int, int, str]]:
    """Keys that a mapping has twice."""
    if isinstance(node, yaml.SequenceNode):
        for position, item in enumerate(node.value):
            yield from _duplicates(item, (*path, str(position)))
    elif isinstance(node, yaml.MappingNode):
        first: dict[str, Mark] = {}
        for key, item in node.value:
            here = (*path, str(key.value))
            if isinstance(key, yaml.ScalarNode):
                if key.value in first:
                    line = first[key.value].line + 1
                    yield _problem(
                        key.start_mark, ".".join(here), f"this key is already there, in line {line}"
                    )
                first.setdefault(key.value, key.start_mark)
            yield from _duplicates(item, here)


def _locate(node: yaml.Node, loc: Loc) -> tuple[Mark, list[str]]:
    """The deepest node that `loc` names; a union's tag or an absent key names none and is skipped."""
    mark, keys = node.start_mark, []
    for part in loc:
        if isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            mark = node.start_mark
        elif isinstance(node, yaml.MappingNode):
            found = [(k, v) for k, v in node.value if k.value == str(part)]
            if not found:
                continue
            mark, node = found[-1][0].start_mark, found[-1][1]
        else:
            continue
        keys.append(str(part))
    return mark, keys


def _problem(mark: Mark, path: str, message: str) -> tuple[int, int, str]:
    return mark.line, mark.column, f"{_at(mark, mark.name)}: {path or '(top level)'}: {message}"


def _at(mark: Mark | None, source: str) -> str:
    return f"{source}:1:1" if mark is None else f"{mark.name}:{mark.line + 1}:{mark.column + 1}"


def _why(err: yaml.MarkedYAMLError) -> str:
    return f"not YAML: {err.problem or err.context or 'unreadable'}"
