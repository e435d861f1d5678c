"""What the fields of kernels hold: dims (numbers, arrays, sums of arrays), formats, and which product of a layer."""

from __future__ import annotations

from enum import StrEnum
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from perfcore.values import dataclass

Array: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Total:
    """A sum of terms, each of which broadcasts to `(..., r)`."""

    terms: tuple[Array, ...]

    def value(self) -> Array:
        """`(..., r)`: the sum."""
        return np.asarray(sum(np.asarray(t, dtype=np.float64) for t in self.terms), dtype=np.float64)


@dataclass(frozen=True, slots=True, eq=False)
class Bucket:
    """Bytes of the gradient bucket that closes at term `index`, 0 where none does.

    `DistributedDataParallel` fills buckets in the order in which gradients become ready and closes one
    when it has reached its cap (`first_cap_bytes` for the first, `cap_bytes` after) or at the last positive
    term: an absent layer or table has none.
    Buckets of one `terms` must be launched at increasing `index`, one op an index.
    """

    terms: tuple[Array, ...]
    index: int
    first_cap_bytes: float
    cap_bytes: float

    def value(self) -> Array:
        """`(..., r)`: bytes to reduce at this index."""
        if all(np.size(term) == 1 for term in self.terms):
            return np.reshape(self._of_one_design(), np.broadcast_shapes(*(np.shape(t) for t in self.terms)))
        filled: Array = np.zeros(np.broadcast_shapes(*(np.shape(t) for t in self.terms)))
        cap: Array = np.full_like(filled, self.first_cap_bytes)
        closed, last = filled, np.full(filled.shape, -1)
        for position, term in enumerate(self.terms):
            last = np.where(term > 0, position, last)
        for position, term in enumerate(self.terms[: self.index + 1]):
            filled = filled + term
            closes = (filled >= cap) | (position >= last)
            closed = np.where(closes, filled, 0.0)
            filled = np.where(closes, 0.0, filled)
            cap = np.where(closes & (closed > 0), self.cap_bytes, cap)
        return closed

    def _of_one_design(self) -> float:
        """The value where every term is one number."""
        terms = [float(np.asarray(term).item()) for term in self.terms]
        last = max((position for position, term in enumerate(terms) if term > 0), default=-1)
        filled, cap, closed = 0.0, self.first_cap_bytes, 0.0
        for position, term in enumerate(terms[: self.index + 1]):
            filled += term
            closed = filled if filled >= cap or position >= last else 0.0
            if closed > 0:
                filled, cap = 0.0, self.cap_bytes
        return closed


Dim: TypeAlias = "float | Array | Total | Bucket"


class DType(StrEnum):
    """Arithmetic of a GEMM; storage follows (`tf32` stores fp32)."""

    FP32 = "fp32"
    TF32 = "tf32"
    BF16 = "bf16"

    @property
    def bytes(self) -> int:
        """Bytes per stored element."""
        return 2 if self is DType.BF16 else 4


class GemmLayout(StrEnum):
    """Which product of a linear layer: forward `X·Wᵀ`, `dX = dY·W`, `dW = dYᵀ·X`."""

    FORWARD = "forward"
    GRAD_INPUT = "grad_input"
    GRAD_WEIGHT = "grad_weight"
