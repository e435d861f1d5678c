"""The YAML loader: every mistake, each with its place."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import Field

from dse.errors import ConfigError
from dse.schema import DesignFile, Section
from dse.yaml_loader import load_yaml, parse_yaml


class Inner(Section):
    width: int = Field(default=1, strict=True)
    rate: float = 1.0
    name: str = ""


class Outer(Section):
    inner: Inner = Inner()
    items: list[Inner] = []  # noqa: RUF012


def read(text: str, *overrides: str) -> Outer:
    return parse_yaml(text, Outer, source="x.yaml", overrides=overrides).value


def mistakes(text: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read(text, *overrides)
    return caught.value.message.splitlines()


def test_every_mistake_is_told_once_in_the_order_of_the_file() -> None:
    text = "inner:\n  widht: 3\n  width: wide\n  rate: .nan\nitems:\n  - {name: 7}\n  - {name: a, name: b}\nmore: 1\n"
    assert mistakes(text) == [
        "x.yaml:2:3: inner.widht: unknown key `widht`; did you mean `width`?",
        "x.yaml:3:3: inner.width: input should be a valid integer, but got 'wide'",
        "x.yaml:4:3: inner.rate: input should be a finite number, but got nan",
        "x.yaml:6:6: items.0.name: input should be a valid string, but got 7",
        "x.yaml:7:15: items.1.name: this key is already there, in line 7",
        "x.yaml:8:1: more: unknown key `more`; known keys: inner, items",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"x\.yaml:1:1: \(top level\): the file is empty"),
        ("# only a comment\n", "the file is empty"),
        ("inner: [1", r"x\.yaml:\d+:\d+: not YAML: expected ',' or ']'"),
        ("inner: !!python/object:os.system {}", r"x\.yaml:1:8: not YAML: tags .* are not supported"),
        ("a: &x {}\ninner: *x\n", r"x\.yaml:2:8: not YAML: aliases .* are not supported"),
        ("inner: {}\n---\ninner: {}\n", "but found another document"),
        ("inner: \x07", "not YAML: unacceptable character"),
        (
            "- 1\n- 2\n",
            r"x\.yaml:1:1: \(top level\): a mapping of keys to values is needed, but got a list of 2",
        ),
        ("? [a, b]\n: 1\n", "not YAML: found unhashable key"),
        (
            "inner: {width: " + "9" * 5000 + "}",
            r"x\.yaml:1:16: not YAML: a number of 5000 digits is too long",
        ),
        ("[" * 3000, r"x\.yaml:1:1: nested too deeply"),
        ("inner:\n\twidth: 1", "not YAML: found character"),
    ],
)
def test_what_is_no_yaml_is_told_with_its_place(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("4.2e9", 4.2e9),
        ("1_000", 1000.0),
        ("-2", -2.0),
        (".5", 0.5),
        ("+1.", 1.0),
        ("0x10", 16.0),
    ],
)
def test_numbers_are_read_as_people_write_them(text: str, value: float) -> None:
    assert read(f"inner: {{rate: {text}}}").inner.rate == value


@pytest.mark.parametrize("text", ["on", "no", "yes", "12:30:45", "2024-01-01", "1e", "_1", "0o8", "=", "<<"])
def test_other_words_stay_text(text: str) -> None:
    assert read(f"inner: {{name: {text}}}").inner.name == text


def test_a_file_that_is_not_utf8_names_the_byte(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes(b"inner:\n  name: caf\xe9\n")
    with pytest.raises(ConfigError, match=r"x\.yaml:2:12: not UTF-8: byte 0xe9"):
        load_yaml(path, Outer)


def test_a_byte_order_mark_is_no_mistake(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes("inner: {name: é}\n".encode("utf-8-sig"))
    assert load_yaml(path, Outer).value.inner.name == "é"


@pytest.mark.parametrize("name", ["absent.yaml", "."])
def test_a_file_that_cannot_be_opened(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be read: "):
        load_yaml(tmp_path / name, Outer)


def test_overrides_replace_add_and_reach_into_lists() -> None:
    value = read(
        "inner: {width: 1}\nitems: [{name: a}]\n", "inner.width=5", "inner.rate=1e-3", "items.0.name=b"
    )
    assert value == Outer(inner=Inner(width=5, rate=1e-3), items=[Inner(name="b")])


def test_an_override_may_make_the_section() -> None:
    assert read("items: []", "inner.name=x y").inner.name == "x y"


def test_mistakes_of_an_override_name_it() -> None:
    assert mistakes("inner: {}", "inner.width=wide", "inner.widht=2") == [
        "--set inner.width=wide:1:1: inner.width: input should be a valid integer, but got 'wide'",
        "--set inner.widht=2:1:1: inner.widht: unknown key `widht`; did you mean `width`?",
    ]


@pytest.mark.parametrize("override", ["inner.width", "=3", ".=3", "inner.width.deep=3", "items.4.name=x"])
def test_an_override_that_sets_nothing(override: str) -> None:
    with pytest.raises(ConfigError, match="--set "):
        read("inner: {width: 1}\nitems: [{}]\n", override)


@given(st.text(max_size=80) | st.text(alphabet="{}[]:,-?&*!|>'\"%@` \n\tax1.", max_size=40))
@example("!!float x")
@example("!!int ''")
@example("!!bool maybe")
@example("!!timestamp x")
@example("%YAML 9")
@example("!!binary x")
@example("!!set {a, b}")
@example("!!int 1")
@example("inner: {width: -0x}")
@settings(deadline=None, max_examples=50)
def test_no_text_gives_anything_but_a_value_or_a_config_error(text: str) -> None:
    with pytest.raises(ConfigError) as caught:  # none of these is a design
        parse_yaml(text, DesignFile, source="x.yaml")
    assert all(line.startswith("x.yaml:") for line in caught.value.message.splitlines())
