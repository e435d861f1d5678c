from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from perfcore.by_pointer import ByPointer
from perfcore.compiled import compiled, inner


@dataclass(frozen=True, slots=True, eq=False)
class Shelf(ByPointer):
    weight: NDArray[np.float64]
    count: NDArray[Any]
    bits: NDArray[np.uint64]
    cube: NDArray[np.float32]
    allowed: NDArray[np.bool_]
    per_row: int


@inner()
def added(shelf: Any, i: int, j: int) -> float:
    return shelf.weight[i, j] + shelf.count[j]


@compiled(_nrt=False)
def totals(shelf: Any, out: Any) -> None:
    for i in range(shelf.weight.shape[0]):
        for j in range(shelf.weight.shape[1]):
            out[0] += added(shelf, i, j) if shelf.allowed[j] else 0.0
            shelf.weight[i, j] *= 2.0
    for i in range(shelf.cube.shape[0]):
        for j in range(shelf.cube.shape[1]):
            for k in range(shelf.cube.shape[2]):
                out[1] += shelf.cube[i, j, k] * (k + 10 * j + 100 * i)
    out[2] = shelf.per_row + len(shelf.count) + shelf.cube.size
    shelf.bits[-1] |= np.uint64(1) << np.uint64(63)


def shelf_of(rng: np.random.Generator, shape: tuple[int, int, int], dtype: Any = np.int64) -> Shelf:
    i, j, k = shape
    return Shelf(
        weight=rng.random((i, j)),
        count=rng.integers(0, 9, j).astype(dtype),
        bits=np.zeros(2, dtype=np.uint64),
        cube=rng.integers(0, 9, shape).astype(np.float32),
        allowed=rng.random(j) < 0.5,
        per_row=k,
    )


@given(st.integers(0, 10**6), st.tuples(*[st.integers(0, 4)] * 3), st.sampled_from([np.int64, np.int32]))
@settings(deadline=None, max_examples=50)
def test_fields_are_read_and_written_in_place(seed: int, shape: tuple[int, int, int], dtype: Any) -> None:
    shelf, out = shelf_of(np.random.default_rng(seed), shape, dtype), np.zeros(3)
    before = shelf.weight.copy()
    totals(shelf, out)
    i, j, k = shape
    places = 100 * np.arange(i)[:, None, None] + 10 * np.arange(j)[:, None] + np.arange(k)
    assert out[0] == pytest.approx(((before + shelf.count) * shelf.allowed).sum())
    assert out[1] == (shelf.cube * places).sum()
    assert out[2] == k + j + i * j * k
    assert (shelf.weight == 2 * before).all()
    assert shelf.bits.tolist() == [0, 1 << 63]


@pytest.mark.parametrize(
    ("value", "kind"),
    [(np.ones((4, 4))[:, ::2], "ndarray"), (np.ones((4, 2)).T, "ndarray"), (0.5, "float"), ([1], "list")],
)
def test_only_contiguous_arrays_and_whole_numbers(value: Any, kind: str) -> None:
    good = shelf_of(np.random.default_rng(0), (2, 2, 2))
    fields = {name: getattr(good, name) for name in Shelf.__dataclass_fields__}
    with pytest.raises(
        TypeError, match=f"`weight` must be a C-contiguous array or a whole number, but is a {kind}"
    ):
        Shelf(**fields | {"weight": value})


def test_a_copy_has_arrays_of_its_own() -> None:
    shelf = shelf_of(np.random.default_rng(1), (2, 3, 1))
    other, out = pickle.loads(pickle.dumps(shelf)), np.zeros(3)
    before = shelf.weight.copy()
    totals(other, out)
    assert (shelf.weight == before).all()
    assert (other.weight == 2 * before).all()
    assert Shelf.names() == ("weight", "count", "bits", "cube", "allowed", "per_row")
    assert other.fields()["per_row"] == 1
