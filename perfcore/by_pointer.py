"""Arrays that compiled functions get together, as one pointer.

An array is some ten arguments of every function on its way, and all of them are optimised anew at each: forty arrays took half a
minute to compile, and twice as long to search. Here arrays are a table of addresses and lengths, and functions get its address;
`state.load[e, r]` in compiled code reads the two numbers that it needs.
"""

from __future__ import annotations

import hashlib
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core.datamodel import models
from numba.core.typing.templates import AttributeTemplate
from numba.extending import NativeValue, infer_getattr, lower_getattr_generic, register_model, unbox
from numba.np.arrayobj import populate_array
from numba.np.numpy_support import from_dtype

_WORD = ir.IntType(64)


class ByPointer:
    """Base of frozen dataclasses of C-contiguous arrays and whole numbers.

    Compiled functions see their fields as attributes; the elements of arrays can be changed, even where Python's view of
    them is read-only. The object must outlive the call.

    Raises:
        TypeError: a field is neither a C-contiguous array nor a whole number.
    """

    __slots__ = ("_address", "_numba_type_", "_table")

    def __post_init__(self) -> None:
        """Note where the arrays lie."""
        words: list[int] = []
        members: list[tuple[str, Any, int]] = []
        for name, value in self.fields().items():
            if isinstance(value, int):
                members.append((name, None, 0))
                words.append(value)
            elif isinstance(value, np.ndarray) and value.flags.c_contiguous and value.flags.aligned:
                members.append((name, value.dtype, value.ndim))
                words += [value.ctypes.data, *value.shape]
            else:
                raise TypeError(
                    f"`{name}` must be a C-contiguous array or a whole number, but is a {type(value).__name__}."
                )
        table = np.array(words, dtype=np.int64)
        object.__setattr__(self, "_table", table)
        object.__setattr__(self, "_address", table.ctypes.data)
        object.__setattr__(self, "_numba_type_", _type_of(type(self).__qualname__, tuple(members)))

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        """A copy in another place, or process, has its arrays elsewhere."""
        return type(self), tuple(self.fields().values())

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Of the fields."""
        return tuple(cls.__dataclass_fields__)  # type: ignore[attr-defined]

    def fields(self) -> dict[str, Any]:
        """Values by name."""
        return {name: getattr(self, name) for name in self.names()}


class Pointed(types.Type):
    """The type of a `ByPointer` in compiled code: of each field its type, and its first word in the table."""

    def __init__(self, name: str, members: tuple[tuple[str, Any, int], ...]) -> None:
        self.members: dict[str, tuple[Any, int]] = {}
        first = 0
        for field, dtype, ndim in members:
            of = types.int64 if dtype is None else types.Array(from_dtype(dtype), ndim, "C")
            self.members[field] = of, first
            first += 1 + ndim
        digest = hashlib.sha256(repr(members).encode()).hexdigest()[:12]
        super().__init__(name=f"{name}.{digest}")


_type_of = cache(Pointed)


@register_model(Pointed)
class _PointedModel(models.PrimitiveModel):
    def __init__(self, manager: Any, of: Pointed) -> None:
        super().__init__(manager, of, _WORD.as_pointer())  # type: ignore[no-untyped-call]


@unbox(Pointed)  # type: ignore[untyped-decorator]
def _unboxed(of: Pointed, value: Any, c: Any) -> NativeValue:
    address = c.pyapi.object_getattr_string(value, "_address")
    place = c.builder.bitcast(c.pyapi.long_as_voidptr(address), _WORD.as_pointer())
    c.pyapi.decref(address)
    return NativeValue(place)


@infer_getattr
class _Fields(AttributeTemplate):
    key = Pointed

    def generic_resolve(self, of: Pointed, name: str) -> Any:  # type: ignore[override]
        return of.members[name][0] if name in of.members else None


@lower_getattr_generic(Pointed)  # type: ignore[untyped-decorator]
def _field(context: Any, builder: Any, of: Pointed, place: Any, name: str) -> Any:
    member, first = of.members[name]
    words = []
    for i in range(first, first + 1 + getattr(member, "ndim", 0)):
        word = builder.load(builder.gep(place, [ir.Constant(ir.IntType(32), i)]))
        # Nobody changes the table during a call, whatever is written to the arrays.
        word.set_metadata("invariant.load", builder.module.add_metadata([]))
        words.append(word)
    if member == types.int64:
        return words[0]
    element = context.get_data_type(member.dtype)
    array, size = context.make_array(member)(context, builder), context.get_abi_sizeof(element)
    strides = [ir.Constant(_WORD, size)]
    for length in words[:1:-1]:
        strides.insert(0, builder.mul(length, strides[0]))
    populate_array(
        array,
        data=builder.inttoptr(words[0], element.as_pointer()),
        shape=words[1:],
        strides=strides,
        itemsize=ir.Constant(_WORD, size),
        meminfo=None,
    )
    return array._getvalue()
