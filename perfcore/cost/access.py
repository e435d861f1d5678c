"""Which rows of a table a batch touches: distinct rows and cache hits under Zipf accesses.

Row `i` of `E` is looked up with probability `p_i ∝ i^-skew` (uniform at 0). In `x` independent lookups the
expected number of distinct rows is `D(x) = Σ 1 - exp(-p_i x)`. A least-recently-used cache of `C` rows behaves as
if it kept each row for a characteristic time `T` with `D(T) = C` (Che, Tung and Wang 2002): a lookup misses when its
row was not seen in the last `T` lookups. Starting empty, `x` lookups miss `D(min(x, T)) + (x - T)⁺ · D'(T)` times.

A cache that outlives batches of `x` lookups holds, by the same argument, the rows of the last `T` lookups before a
batch: the batch's rows that it lacks are `D(T + x) - D(T) = D(T + x) - C`.

The sum over ranks is exact for the first ranks and a Gauss-Legendre integral over the logarithm of the rank beyond.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_EXACT_RANKS = 16
_MANY = 4096  # rows that are worth a sort
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(20)
_MAX_STEPS = 50
_TOLERANCE = 1e-7


def distinct_rows(lookups: Array, rows: Array, skew: Array) -> Array:
    """Expected number of distinct rows among independent lookups.

    Args:
        lookups: any shape that broadcasts with the others.
        rows: rows of the table; 0 gives 0.
        skew: Zipf exponent.

    Returns:
        Expected distinct rows, at most `min(lookups, rows)`.
    """
    x, e, s = (np.asarray(v, dtype=np.float64) for v in np.broadcast_arrays(lookups, rows, skew))
    out, busy = np.zeros(x.shape), (x > 0) & (e > 0)
    out[busy] = _once(_distinct_rows, x[busy], e[busy], s[busy])
    return out


def hit_rate(lookups: Array, rows: Array, skew: Array, cached_rows: Array) -> Array:
    """Share of lookups that find their row in an initially empty cache of `cached_rows` rows.

    Shapes broadcast; without lookups or rows the rate is 0.
    """
    x, e, s, c = (
        np.asarray(v, dtype=np.float64) for v in np.broadcast_arrays(lookups, rows, skew, cached_rows)
    )
    out, busy = np.zeros(x.shape), (x > 0) & (e > 0)  # a rank has no shard of most tables
    out[busy] = _once(_hit_rate, x[busy], e[busy], s[busy], c[busy])
    return out


def _hit_rate(x: Array, e: Array, s: Array, c: Array) -> Array:
    share, count = _ranks(e, s)
    horizon = np.array(x)
    evicts = _distinct(x, share, count) > c
    horizon[evicts] = _characteristic(x[evicts], c[evicts], share[evicts], count[evicts])
    horizon = np.maximum(horizon, 1.0)
    inside = np.minimum(x, horizon)
    rate_after = (count * share * np.exp(-share * horizon[..., None])).sum(axis=-1)
    misses = _distinct(inside, share, count) + np.maximum(x - horizon, 0.0) * rate_after
    return np.asarray(np.clip(1.0 - misses / x, 0.0, 1.0))


def new_rows(lookups: Array, rows: Array, skew: Array, cached_rows: Array) -> Array:
    """Expected distinct rows of a batch that a warm cache of `cached_rows` rows lacks.

    Shapes broadcast; none where the cache holds the table, all distinct rows where it holds nothing.
    """
    x, e, s, c = (
        np.asarray(v, dtype=np.float64) for v in np.broadcast_arrays(lookups, rows, skew, cached_rows)
    )
    out, busy = np.zeros(x.shape), (x > 0) & (e > 0) & (c < e)
    out[busy] = _once(_new_rows, x[busy], e[busy], s[busy], c[busy])
    return out


def _new_rows(x: Array, e: Array, s: Array, c: Array) -> Array:
    share, count = _ranks(e, s)
    horizon = _characteristic(np.full_like(c, np.inf), c, share, count)
    return np.clip(_distinct(horizon + x, share, count) - c, 0.0, np.minimum(x, e))


def _distinct_rows(x: Array, e: Array, s: Array) -> Array:
    return np.minimum(_distinct(x, *_ranks(e, s)), np.minimum(x, e))


def _once(price: Callable[..., Array], *columns: Array) -> Array:
    """`(n,)` values of `(n,)` columns, equal rows once: a table split by rows is the same on most ranks."""
    if len(columns[0]) < _MANY:
        return price(*columns)
    order = np.lexsort(columns)
    ordered = [column[order] for column in columns]
    new = np.any([column[1:] != column[:-1] for column in ordered], axis=0)
    first = np.concatenate([[True], new])
    out = np.empty(len(order))
    out[order] = price(*(column[first] for column in ordered))[np.cumsum(first) - 1]
    return out


def _ranks(rows: Array, skew: Array) -> tuple[Array, Array]:
    """Probability of a row and number of such rows, `(..., nodes)` each."""
    e = rows[..., None]
    head = np.arange(1, _EXACT_RANKS + 1, dtype=np.float64)
    head_count = np.clip(e - head + 1.0, 0.0, 1.0)
    low = np.log(_EXACT_RANKS + 0.5)
    half = np.maximum(np.log(e + 0.5) - low, 0.0) / 2.0
    tail = np.exp(low + half * (1.0 + _NODES))
    tail_count = half * _WEIGHTS * tail
    rank = np.concatenate([np.broadcast_to(head, (*rows.shape, len(head))), tail], axis=-1)
    count = np.concatenate([head_count, tail_count], axis=-1)
    weight = rank ** -skew[..., None]
    return weight / (count * weight).sum(axis=-1, keepdims=True), count


def _distinct(x: Array, share: Array, count: Array) -> Array:
    return np.asarray((count * -np.expm1(-share * x[..., None])).sum(axis=-1), dtype=np.float64)


def _characteristic(x: Array, cached: Array, share: Array, count: Array) -> Array:
    """`(...)`: lookups after which `cached` distinct rows have passed, at most `x`.

    Newton's method from below: the number of distinct rows is concave, so no step overshoots.
    """
    horizon = np.minimum(cached, x)  # as many lookups see no more rows than that
    for _ in range(_MAX_STEPS):
        seen = -np.expm1(-share * horizon[..., None])
        step = (cached - (count * seen).sum(axis=-1)) / (count * share * (1.0 - seen)).sum(axis=-1)
        horizon = np.minimum(horizon + step, x)
        if np.all(step <= _TOLERANCE * horizon):
            break
    return horizon
