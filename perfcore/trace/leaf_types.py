"""Element types as traces write them."""

from __future__ import annotations

import re

from perfcore.graph.kernels import DType

ELEMENT_BYTES = {
    "float": 4, "double": 8, "int": 4, "long": 8, "long int": 8, "short": 2, "bool": 1, "unsigned char": 1,
    "signed char": 1, "c10::Half": 2, "c10::BFloat16": 2,
}  # fmt: skip
_TENSOR_CORE = re.compile(r"s1688|tf32|s16816", re.IGNORECASE)


def element_bytes(kind: str) -> int:
    """Of a type as Kineto (`float`) or as an execution trace (`Tensor(float)`) writes it; 0 where unknown."""
    return ELEMENT_BYTES.get(kind.removeprefix("Tensor(").removesuffix(")"), 0)


def dtype_of(kernel_name: str, kind: str) -> DType:
    """The arithmetic of a kernel whose operands are of this type."""
    if element_bytes(kind) == ELEMENT_BYTES["c10::Half"]:
        return DType.BF16
    return DType.TF32 if _TENSOR_CORE.search(kernel_name) else DType.FP32
