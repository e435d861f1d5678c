"""Values that are made by the hundred are plain frozen dataclasses in all but speed."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle

import pytest

from perfcore.graph.kernels import DType, Gemm
from perfcore.values import dataclass


@dataclass(frozen=True, slots=True, eq=False)
class Quick:
    """Two fields, the second with a default."""

    first: int
    second: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Plain:
    """As `Quick`."""

    first: int
    second: tuple[int, ...] = ()


@pytest.mark.parametrize("kind", [Quick, Plain])
def test_fields_are_stored_and_frozen(kind) -> None:
    value = kind(1, second=(2, 3))
    assert (value.first, value.second, kind(4).second) == (1, (2, 3), ())
    assert type(value) is kind
    assert repr(value) == f"{kind.__name__}(first=1, second=(2, 3))"
    with pytest.raises(dataclasses.FrozenInstanceError, match="first"):
        value.first = 2
    with pytest.raises(AttributeError):
        object.__setattr__(value, "third", 3)


@pytest.mark.parametrize("kind", [Quick, Plain])
def test_a_missing_field_is_named(kind) -> None:
    with pytest.raises(TypeError, match=rf"{kind.__name__}.__init__\(\) missing 1 required .* 'first'"):
        kind()


def test_signature_is_that_of_a_plain_dataclass() -> None:
    quick, plain = (inspect.signature(kind).parameters.values() for kind in (Quick, Plain))
    assert [(p.name, p.default) for p in quick] == [(p.name, p.default) for p in plain]


def test_copies_pickles_and_replacements() -> None:
    value = Gemm(1.0, 2.0, 3.0, DType.FP32)
    for other in (copy.copy(value), copy.deepcopy(value), pickle.loads(pickle.dumps(value))):
        assert type(other) is Gemm
        assert dataclasses.asdict(other) == dataclasses.asdict(value)
    assert dataclasses.replace(value, m=5.0).m == 5.0
    assert value.m == 1.0
    assert value != copy.copy(value)  # compared by identity
