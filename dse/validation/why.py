"""Why a prediction may be off: what it consists of, and how far each part is known."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from perfcore.cost.work import work_of
from perfcore.errors import UnsupportedError
from perfcore.graph.kernels import Collective, Kernel, resolve
from perfcore.predictor import Prediction
from perfcore.profile.fit_collectives import collective_name

MOST = 3


def why(prediction: Prediction, errors_pct: Mapping[str, float]) -> str:
    """The dearest ops, the host's share, and the kernels whose held-out errors weigh most, in a sentence each.

    Args:
        prediction: of the design that was measured.
        errors_pct: held-out error of the pricing by kind of kernel.
    """
    total = prediction.iteration_time_us
    dearest = sorted(prediction.ops, key=lambda op: -op.device_us)[:MOST]
    ops = ", ".join(f"{op.name} {100 * op.device_us / total:.0f} %" for op in dearest)
    text = f"kernels of {ops} of the predicted time; host work {100 * prediction.host.total_us / total:.0f} %"
    doubts = doubtful_shares(prediction, errors_pct)
    if doubts:
        named = ", ".join(
            f"{kind} ({100 * share:.0f} % of the time, known to {errors_pct[kind]:.0f} %)"
            for kind, share in list(doubts.items())[:MOST]
        )
        text += f"; least certain: {named}"
    return text


def doubtful_shares(prediction: Prediction, errors_pct: Mapping[str, float]) -> dict[str, float]:
    """Share of the iteration by kind of kernel, the largest product of share and held-out error first.

    Kinds without a stated error are left out.
    """
    timeline, rank = prediction.timeline, prediction.rank
    us = np.nan_to_num(timeline.end_us[0, :, rank] - timeline.start_us[0, :, rank])
    shares: dict[str, float] = {}
    for launch, duration in zip(prediction.graph.launches(), us.tolist(), strict=True):
        kind = _kind(resolve(launch.kernel))
        if kind in errors_pct:
            shares[kind] = shares.get(kind, 0.0) + duration / prediction.iteration_time_us
    return dict(sorted(shares.items(), key=lambda item: -item[1] * errors_pct[item[0]]))


def _kind(kernel: Kernel) -> str:
    """As a profile names it among its errors; empty where it states none."""
    if isinstance(kernel, Collective):
        return collective_name(kernel.kind, int(np.max(np.asarray(kernel.world_size))))
    try:
        return work_of(kernel).kind
    except UnsupportedError:
        return ""
