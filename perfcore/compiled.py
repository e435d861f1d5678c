"""Functions compiled to machine code, which is kept between runs and never out of date.

Numba keeps the machine code of a function for as long as the function's own file stays the same. But it holds the functions that it calls as well,
and the constants that they name, wherever they were written. Here an entry is named for all of them, so neither an edit nor an
upgrade ever runs old code. Where no folder can be written to, functions are compiled anew in each process.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numba.core.caching import FunctionCache

F = TypeVar("F", bound=Callable[..., Any])

_PACKAGES = ("dse", "perfcore")
_MACHINERY = ("compiled.py", "by_pointer.py")  # what turns functions into machine code here
_NOT_FROM_PYTHON: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
_CONSTANTS = (bool, int, float, complex, str, bytes, type(None), np.generic, np.dtype)


def compiled(**options: Any) -> Callable[[F], F]:
    """Compile a function that Python calls, and keep its machine code; options are those of `numba.njit`."""

    def decorate(function: F) -> F:
        dispatcher = numba.njit(**options)(function)
        with contextlib.suppress(RuntimeError):  # no folder can be written to
            dispatcher._cache = _Kept(function)  # type: ignore[no-untyped-call]
        return cast(F, dispatcher)

    return decorate


def inner(**options: Any) -> Callable[[F], F]:
    """Compile a function that compiled functions alone call.

    It becomes part of their machine code. The way in from Python that it lacks takes longer to compile than most functions.
    """

    def decorate(function: F) -> F:
        return cast(F, numba.njit(**_NOT_FROM_PYTHON, **options)(function))

    return decorate


def fingerprint(function: Callable[..., Any]) -> str:
    """A digest of all that a function's machine code follows from: its code, its callees' and the constants they name."""
    parts = dict(_machinery())
    waiting: list[Any] = [function]
    while waiting:
        f = waiting.pop()
        name = f"{f.__module__}.{f.__qualname__}"
        if name not in parts:
            used = sorted(set(_names(f.__code__)) & set(f.__globals__))
            values = {n: f.__globals__[n] for n in used}
            parts[name] = _stable([_instructions(f.__code__), {n: _constant(v) for n, v in values.items()}])
            waiting += filter(None, map(_callee, values.values()))
    return _digest(_stable(parts).encode())


@cache
def _machinery() -> tuple[tuple[str, str], ...]:
    return tuple((name, _digest((Path(__file__).parent / name).read_bytes())) for name in _MACHINERY)


class _Kept(FunctionCache):
    """Numba's cache, whose entries are named for what their code follows from; no failure of the disk is an error."""

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        own = super()._index_key(sig, codegen)  # type: ignore[no-untyped-call]
        return (*own, fingerprint(self._py_func))

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        with contextlib.suppress(OSError):
            return super().load_overload(sig, target_context)  # type: ignore[no-untyped-call]
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        with contextlib.suppress(OSError):
            super().save_overload(sig, data)  # type: ignore[no-untyped-call]


def _callee(value: Any) -> Any:
    """The Python function behind a compiled one, an intrinsic, or a function of ours; else `None`."""
    if isinstance(value, FunctionType):
        return value if value.__module__.partition(".")[0] in _PACKAGES else None
    return getattr(value, "py_func", None) or getattr(value, "_defn", None)


def _constant(value: Any) -> Any:
    """What machine code may follow from in a value, other than a callee's code."""
    if isinstance(value, (*_CONSTANTS, tuple, list, dict, set, frozenset)):
        return value
    if isinstance(value, np.ndarray):
        return [value.dtype, value.shape, _digest(value.tobytes())]
    return getattr(value, "targetoptions", type(value).__qualname__)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _instructions(code: CodeType) -> list[Any]:
    constants = [_instructions(c) if isinstance(c, CodeType) else c for c in code.co_consts]
    return [code.co_code, code.co_names, code.co_varnames, code.co_freevars, constants]


def _stable(value: Any) -> str:
    """As `repr`, but the same in every process."""
    if isinstance(value, dict):
        return _stable(sorted((_stable(k), _stable(v)) for k, v in value.items()))
    if isinstance(value, set | frozenset):
        return f"{{{sorted(map(_stable, value))}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_stable, value))}]"
    return repr(value) if isinstance(value, _CONSTANTS) else type(value).__qualname__


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
