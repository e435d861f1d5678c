"""How much of an objective's variation each axis explains by itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dse.report.data import RunFiles

if TYPE_CHECKING:
    import pandas as pd

Array: TypeAlias = NDArray[np.float64]

MIN_ROWS = 30


@dataclass(frozen=True, slots=True)
class Importance:
    """Shares of variance.

    Attributes:
        axes: most important first.
        shares: for each metric, one share per axis.
        rows: for each metric, how many candidates the shares rest on.
        uniform: the candidates are a uniform sample of the space.
    """

    axes: tuple[str, ...]
    shares: dict[str, tuple[float, ...]]
    rows: dict[str, int]
    uniform: bool


def importance_of(run: RunFiles, *, most: int = 12) -> Importance | None:
    """Shares for every objective; `None` without enough feasible candidates."""
    if run.candidates is None:
        return None
    table = run.candidates.table[run.candidates.table["feasible"] == 1]
    axes = [a for a in run.axes if a in table]
    shares: dict[str, Array] = {}
    rows: dict[str, int] = {}
    for objective in run.objectives:
        values = table[objective.metric].to_numpy(dtype=np.float64)
        known = np.isfinite(values)
        if known.sum() >= MIN_ROWS:
            shares[objective.metric] = np.array(
                [explained_share(values[known], _codes(table[a][known])) for a in axes]
            )
            rows[objective.metric] = int(known.sum())
    if not shares or not axes:
        return None
    order = np.argsort(-np.max(list(shares.values()), axis=0), kind="stable")[:most]
    return Importance(
        tuple(axes[i] for i in order),
        {metric: tuple(v[order].tolist()) for metric, v in shares.items()},
        rows,
        run.candidates.uniform,
    )


def explained_share(values: Array, codes: NDArray[np.int64]) -> float:
    """Share of the variance of `(n,)` values that `(n,)` group codes explain, between 0 and 1.

    `1 - (within / (n - k)) / (total / (n - 1))` with k groups: chance alone gives 0 on average. Over a
    uniform sample it estimates the first-order Sobol index. Positive values are compared by their logarithm.
    """
    y = np.log(values) if (values > 0).all() else values
    groups = int(codes.max()) + 1
    total = float(((y - y.mean()) ** 2).sum())
    if len(y) <= groups or total <= 0:
        return 0.0
    count = np.bincount(codes, minlength=groups)
    mean = np.bincount(codes, weights=y, minlength=groups) / np.maximum(count, 1)
    within = float(((y - mean[codes]) ** 2).sum())
    used = int((count > 0).sum())
    return max(0.0, 1 - (within / (len(y) - used)) / (total / (len(y) - 1)))


def _codes(column: pd.Series) -> NDArray[np.int64]:
    """One code per distinct value; rows where the axis does not matter are a group of their own."""
    import pandas as pd

    codes, _ = pd.factorize(column, use_na_sentinel=False)
    return np.asarray(codes, dtype=np.int64)
