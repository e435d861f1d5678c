"""Max-plus arithmetic on `(4, 4)` matrices, each one vector of 16 numbers.

A compiler does not find these by itself: loops over 4 columns stay scalar, at a third of the speed. The
vectors are LLVM's, so they fit any processor: one register with AVX-512, four with SSE or NEON.
Arrays of matrices are C-contiguous `(m, 16)` float32, row after row; no element is NaN.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

from perfcore.steps import CLOCKS

_LANES = CLOCKS * CLOCKS
_VECTOR = ir.VectorType(ir.FloatType(), _LANES)
_INDICES = ir.VectorType(ir.IntType(32), _LANES)
_ROWS = [lane // CLOCKS for lane in range(_LANES)]
_COLUMNS = [lane % CLOCKS for lane in range(_LANES)]
_NO_NAN = ("nnan", "nsz")


def _multiply(context: Any, left: Any, x: Any, right: Any, y: Any, out: Any, z: Any) -> Any:
    """`out[z]` becomes `left[x] ⊗ right[y]`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        a = builder.load(_pointer(context, builder, signature.args[0], args[0], args[1]), align=4)
        b = builder.load(_pointer(context, builder, signature.args[2], args[2], args[3]), align=4)
        terms = []
        for k in range(CLOCKS):
            column = _shuffled(builder, a, [CLOCKS * row + k for row in _ROWS])
            row = _shuffled(builder, b, [CLOCKS * k + column for column in _COLUMNS])
            terms.append(builder.fadd(column, row))
        best = _larger(builder, _larger(builder, *terms[:2]), _larger(builder, *terms[2:]))
        builder.store(best, _pointer(context, builder, signature.args[4], args[4], args[5]), align=4)
        return context.get_dummy_value()

    return types.void(left, types.intp, right, types.intp, out, types.intp), generate


def _launch(context: Any, state: Any, y: Any, weights: Any, clock: Any, us: Any) -> Any:
    """Row `clock` of `state[y]` becomes the largest of its rows, each plus its weight, plus `us`.

    `weights` is `(1, 16)`: 4 times the same number for each row.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        target = _pointer(context, builder, signature.args[0], args[0], args[1])
        zero = ir.Constant(args[1].type, 0)
        weight = builder.load(_pointer(context, builder, signature.args[2], args[2], zero), align=4)
        before = builder.load(target, align=4)
        best = builder.fadd(before, weight)
        for step in (2, 1):
            other = _shuffled(
                builder, best, [CLOCKS * (r ^ step) + c for r, c in zip(_ROWS, _COLUMNS, strict=True)]
            )
            best = _larger(builder, best, other)
        best = builder.fadd(best, _splat(builder, args[4], _VECTOR))
        row = _splat(builder, builder.trunc(args[3], ir.IntType(32)), _INDICES)
        changed = builder.icmp_signed("==", row, ir.Constant(_INDICES, _ROWS))
        builder.store(builder.select(changed, best, before), target, align=4)
        return context.get_dummy_value()

    return types.void(state, types.intp, weights, types.intp, types.float32), generate


# Called from compiled code only, without the context.
multiply: Any = intrinsic(_multiply)
launch: Any = intrinsic(_launch)


def _pointer(context: Any, builder: Any, array_type: Any, array: Any, row: Any) -> Any:
    """Where row `row` of a C-contiguous `(m, 16)` array lies."""
    data = context.make_array(array_type)(context, builder, array).data
    start = builder.gep(data, [builder.mul(row, ir.Constant(row.type, _LANES))])
    return builder.bitcast(start, _VECTOR.as_pointer())


def _shuffled(builder: Any, vector: Any, lanes: list[int]) -> Any:
    return builder.shuffle_vector(vector, ir.Constant(_VECTOR, ir.Undefined), ir.Constant(_INDICES, lanes))


def _splat(builder: Any, value: Any, vector: Any) -> Any:
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(
        first, ir.Constant(vector, ir.Undefined), ir.Constant(_INDICES, [0] * _LANES)
    )


def _larger(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b, flags=_NO_NAN), a, b)
