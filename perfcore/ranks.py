"""Ranks that do the same work are one rank: the traversal of thousands of GPUs then has a few."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from perfcore.steps import Steps

# One machine or a few are walked rank by rank; more are merged first.
SHOWN = 64


def merged(steps: Steps) -> tuple[Steps, NDArray[np.int64]]:
    """The steps of different ranks alone, and `(k,)` which ranks those are; few ranks stay as they are.

    Ranks of equal durations and masks have equal clocks at all times, so the iteration time is the same.
    """
    if steps.num_ranks <= SHOWN:
        return steps, np.arange(steps.num_ranks)
    work = [*steps.durations_us.reshape(-1, steps.num_ranks), *steps.masks.reshape(-1, steps.num_ranks)]
    _, first = np.unique(np.stack(work, axis=1), axis=0, return_index=True)
    kept = np.sort(first)
    durations_us = np.ascontiguousarray(steps.durations_us[:, :, kept])
    return replace(
        steps, durations_us=durations_us, masks=np.ascontiguousarray(steps.masks[:, :, kept])
    ), kept
