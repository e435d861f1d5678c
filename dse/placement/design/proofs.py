"""What a linear program proves of designs that share their steps.

Designs with the same steps and tables differ in what the steps cost that no plan changes. Every cut is `T >= a_n + f(x)`
for design n, with its own constant `a_n` and the same `f` of the plan x. The dual solution of the program of one design m
weighs the cuts by `y >= 0`, of sum 1 at most, and its other rows show for every plan that `Σ y f(x) >= lower_m - Σ y a_m`. So
for any design

    T >= Σ y T >= Σ y a_n + Σ y f(x) >= lower_m + Σ y (a_n - a_m)

and one program bounds all of them: exactly where the same rows are tight, and never above.

Letters: n designs, c cuts, S steps.
"""

from __future__ import annotations

import numpy as np

from dse.placement.design.relaxed import Cut
from dse.placement.solver.problem import Array


class Proofs:
    """The best bounds so far of n designs of one class of plans."""

    def __init__(self, constant_us: Array) -> None:
        """From the `(n, S)` durations of steps that no plan changes; nothing is proven."""
        self._constant_us = constant_us
        self._constants: list[Array] = []
        self._upper_us = np.full(len(constant_us), np.inf)
        self._of_all, self._of_interest = np.zeros((2, len(constant_us)))

    @property
    def constants_us(self) -> Array:
        """`(c, n)` constants of the cuts."""
        return np.stack(self._constants)

    def lower_of(self, number: int) -> float:
        """The bound of one design."""
        of_interest = min(float(self._of_interest[number]), float(self._upper_us[number]))
        return max(float(self._of_all[number]), of_interest)

    @property
    def upper_us(self) -> Array:
        """`(n,)`: plans of each design that are slower are of no interest; infinite while all are."""
        return self._upper_us

    def add_cut(self, cut: Cut) -> None:
        """One more cut, with the constant of the first design."""
        rows, weights = [s for _, s in cut.steps], np.array([w for w, _ in cut.steps])
        own = self._constant_us[:, rows] @ weights
        self._constants.append(cut.constant_us + own - own[0])

    def close_in(self, upper_us: float | Array) -> None:
        """From now on plans that take longer, of each of the designs, are of no interest."""
        self._upper_us = np.minimum(self._upper_us, upper_us)

    def of_all(self, number: int, lower_us: float, weights: Array | None) -> Array:
        """`(n,)` what a bound of one design says of all, with the `(c,)` weights of the cuts in it; without, of that one."""
        if weights is None:
            said = np.zeros(len(self._upper_us))
            said[number] = lower_us
            return said
        of_cuts = self.constants_us[: len(weights)]
        return np.asarray(lower_us + weights @ (of_cuts - of_cuts[:, number, None]))

    def add(self, lower_us: Array) -> None:
        """`(n,)` bounds of all plans."""
        self._of_all = np.maximum(self._of_all, lower_us)

    def add_of_interest(self, number: int, lower_us: float) -> None:
        """The bound of the plans of interest of one design."""
        self._of_interest[number] = max(float(self._of_interest[number]), lower_us)
