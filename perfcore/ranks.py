"""Ranks that do the same work are one rank: the traversal of thousands of GPUs then has a few."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from perfcore.errors import UnsupportedError
from perfcore.steps import Steps

# One machine or a few are walked rank by rank; more are merged first.
SHOWN = 64
# The folded matrix and its longest paths grow with the square and the cube of the ranks.
MOST = 256


def merged(steps: Steps) -> tuple[Steps, NDArray[np.int64]]:
    """The steps of different ranks alone, and `(k,)` which ranks those are; few ranks stay as they are.

    Ranks of equal durations and masks have equal clocks at all times, so the iteration time is the same.

    Raises:
        UnsupportedError: too many ranks differ.
    """
    if steps.num_ranks <= SHOWN:
        return steps, np.arange(steps.num_ranks)
    work = [*steps.durations_us.reshape(-1, steps.num_ranks), *steps.masks.reshape(-1, steps.num_ranks)]
    _, first = np.unique(np.stack(work, axis=1), axis=0, return_index=True)
    kept = np.sort(first)
    if len(kept) > MOST:
        raise UnsupportedError(
            f"At most {MOST} ranks may differ in their work, but of {steps.num_ranks} ranks {len(kept)} do.",
            hint="Place tables by row_wise or data_parallel, which gives all ranks alike, or lower world_size.",
        )
    durations_us = np.ascontiguousarray(steps.durations_us[:, :, kept])
    return replace(
        steps, durations_us=durations_us, masks=np.ascontiguousarray(steps.masks[:, :, kept])
    ), kept
