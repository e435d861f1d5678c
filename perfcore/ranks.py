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
    durations, masks = (
        np.ascontiguousarray(work.reshape(-1, steps.num_ranks).T)
        for work in (steps.durations_us, steps.masks)
    )
    first: dict[tuple[bytes, bytes], int] = {}
    for rank, work in enumerate(zip(durations, masks, strict=True)):
        first.setdefault((work[0].tobytes(), work[1].tobytes()), rank)
    kept = np.array(list(first.values()))
    durations_us = np.ascontiguousarray(steps.durations_us[:, :, kept])
    return replace(
        steps, durations_us=durations_us, masks=np.ascontiguousarray(steps.masks[:, :, kept])
    ), kept
