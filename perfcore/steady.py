"""The steady state of many ranks, by policy iteration on walks: no matrix over all clocks is built.

After enough iterations every clock `i` stands at `value_i + rate_i · k`, and a step takes the larger of such germs:
the larger rate, then the larger value. A *policy* names for each clock at the iteration's end the clock at its start
that decides it; it has cycles, whose means are rates, and values follow along its paths. Walking the germs through the
steps gives the best choice for every clock at once; where one beats the policy's, the policy takes it, rates first
(Cochet-Terrasson, Cohen, Gaubert, McGettrick and Quadrat, *Numerical computation of spectral elements in max-plus
algebra*, 1998). Each round improves the germs and there are finitely many policies; a few rounds suffice. The
fixed point is the steady state itself, and its largest rate the iteration time: exact, as `maxplus.eigenvalue`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfcore.compiled import compiled, inner
from perfcore.steps import Opcode, Steps

Array = NDArray[np.float64]

_HOST, _COLLECTIVE = int(Opcode.HOST), int(Opcode.COLLECTIVE)
# Rates and values that differ by less are rounding.
RELATIVE_EPSILON = 1e-11
MAX_ROUNDS = 10_000


def steady_states(steps: Steps) -> tuple[Array, NDArray[np.int64], Array]:
    """The steady iteration of every candidate.

    Args:
        steps: n candidates, c clocks on each of r ranks.

    Returns:
        `(n,)` µs between iterations, `(n,)` a clock on the critical cycle, and `(n, c * r)` clocks at an
        iteration's start. Clocks with a rate of their own are early enough to delay nothing.
    """
    n, size = steps.num_candidates, steps.clocks * steps.num_ranks
    time_us, roots, states = np.empty(n), np.empty(n, dtype=np.int64), np.empty((n, size))
    for candidate in range(n):
        rates, values, root = _policy_iteration(
            steps.table, steps.durations_us, steps.masks, candidate, steps.clocks
        )
        time_us[candidate], roots[candidate] = rates.max(), root
        states[candidate] = _start(steps, candidate, rates, values)
    return time_us, roots, states


def _start(steps: Steps, candidate: int, rates: Array, values: Array) -> Array:
    """`(c * r,)`: clocks so many iterations on that none that is slower delays another."""
    slower = rates - rates.max()
    scale = max(1.0, float(np.abs(values).max()), float(rates.max()))
    iterations, ended = 0, np.empty_like(values)
    for power in range(48):
        state = values + iterations * slower
        _walk(
            steps.table,
            steps.durations_us,
            steps.masks,
            candidate,
            np.zeros_like(rates),
            state,
            np.zeros_like(rates),
            ended,
            np.empty(len(rates), dtype=np.int64),
        )
        if np.abs(ended - state - rates).max() <= 1e-9 * (scale + iterations * float(np.abs(slower).max())):
            return np.asarray(state)
        iterations = 2**power
    return np.asarray(state)


@compiled()
def _policy_iteration(
    table: Any, durations: Array, masks: Any, candidate: int, clocks: int
) -> tuple[Array, Array, int]:
    """Rates, values, and a clock on a cycle of the largest rate."""
    size = clocks * durations.shape[2]
    rates, values = np.zeros(size), np.zeros(size)
    ended_rates, ended = np.empty(size), np.empty(size)
    policy, chosen = np.empty(size, dtype=np.int64), np.empty(size, dtype=np.int64)
    _walk(table, durations, masks, candidate, rates, values, ended_rates, ended, policy)
    weights = ended - values[policy]
    root = 0
    for _ in range(MAX_ROUNDS):
        root = _evaluate(policy, weights, rates, values)
        _walk(table, durations, masks, candidate, rates, values, ended_rates, ended, chosen)
        if not _improve(policy, weights, rates, values, ended_rates, ended, chosen):
            break
    return rates, values, root


@inner()
def _improve(
    policy: Any, weights: Array, rates: Array, values: Array, ended_rates: Array, ended: Array, chosen: Any
) -> bool:
    """Take choices of a larger rate; where there is none, those of a larger value."""
    epsilon = RELATIVE_EPSILON * max(1.0, rates.max())
    faster = False
    for i in range(len(policy)):
        if ended_rates[i] > rates[i] + epsilon:
            policy[i], weights[i], faster = chosen[i], ended[i] - values[chosen[i]], True
    if faster:
        return True
    changed, spread = False, 0.0
    for i in range(len(policy)):
        spread = max(spread, abs(values[i]))
    for i in range(len(policy)):
        later = ended[i] > values[i] + rates[i] + epsilon + RELATIVE_EPSILON * spread
        if later and ended_rates[i] >= rates[i] - epsilon:
            policy[i], weights[i], changed = chosen[i], ended[i] - values[chosen[i]], True
    return changed


@inner()
def _evaluate(policy: Any, weights: Array, rates: Array, values: Array) -> int:
    """Rates and values of a policy, in place; a clock on its fastest cycle (a cycle's first keeps its value)."""
    size = len(policy)
    seen, path = np.zeros(size, dtype=np.int64), np.empty(size, dtype=np.int64)
    settled = np.zeros(size, dtype=np.bool_)
    best, root = -np.inf, 0
    for start in range(size):
        at, length = start, 0
        while not settled[at] and seen[at] != start + 1:
            seen[at], path[length] = start + 1, at
            at, length = policy[at], length + 1
        if not settled[at]:  # a new cycle, through `at`
            total, count, node = 0.0, 0, at
            while count == 0 or node != at:
                total, count, node = total + weights[node], count + 1, policy[node]
            rate = total / count
            for other in range(size):  # equal but for rounding
                if settled[other] and abs(rates[other] - rate) <= RELATIVE_EPSILON * max(1.0, rate):
                    rate = rates[other]
                    break
            rates[at], settled[at] = rate, True
            if rate > best:
                best, root = rate, at
        for back in range(length - 1, -1, -1):
            node = path[back]
            if not settled[node]:
                rates[node] = rates[policy[node]]
                values[node] = weights[node] - rates[node] + values[policy[node]]
                settled[node] = True
    return root


@compiled()
def _walk(
    table: Any,
    durations: Array,
    masks: Any,
    candidate: int,
    rates: Array,
    values: Array,
    ended_rates: Array,
    ended: Array,
    origins: Any,
) -> None:
    """One iteration of germs: rates and values at the end, and the clock at the start that decided each."""
    ranks = durations.shape[2]
    clocks = len(rates) // ranks
    for i in range(len(rates)):
        ended_rates[i], ended[i], origins[i] = rates[i], values[i], i
    epsilon = RELATIVE_EPSILON * max(1.0, rates.max())
    for s in range(len(table)):
        step = table[s]
        last_rate, last, last_origin, transfer = -np.inf, -np.inf, -1, 0.0
        for r in range(ranks):
            if step.mask >= 0 and not masks[step.mask, candidate, r]:
                continue
            base = clocks * r
            at = base + step.target
            if step.opcode == _HOST:
                ended[at] += step.us
                continue
            rate, value, origin = ended_rates[at], ended[at], origins[at]
            if step.launch >= 0:
                value += step.gap_us
            for clock in range(clocks):
                if step.awaited >> clock & 1:
                    other = base + clock
                    if _later(ended_rates[other], ended[other], rate, value, epsilon):
                        rate, value, origin = ended_rates[other], ended[other], origins[other]
            if step.launch < 0:
                ended_rates[at], ended[at], origins[at] = rate, value, origin
                continue
            if _later(ended_rates[base], ended[base] + step.latency_us, rate, value, epsilon):
                rate, value, origin = ended_rates[base], ended[base] + step.latency_us, origins[base]
            us = durations[step.launch, candidate, r]
            ended_rates[at], ended[at], origins[at] = rate, value + us, origin
            if step.opcode == _COLLECTIVE:
                transfer = max(transfer, us)
                if _later(rate, value, last_rate, last, epsilon):
                    last_rate, last, last_origin = rate, value, origin
        if last_origin >= 0:
            for r in range(ranks):
                if step.mask < 0 or masks[step.mask, candidate, r]:
                    at = clocks * r + step.target
                    ended_rates[at], ended[at], origins[at] = last_rate, last + transfer, last_origin


@inner()
def _later(rate: float, value: float, other_rate: float, other: float, epsilon: float) -> bool:
    """Whether a germ is the larger one: by rate, then by value."""
    if other_rate == -np.inf or rate > other_rate + epsilon:
        return True
    return rate >= other_rate - epsilon and value > other
