"""The inner loops of a sum of oblivious trees."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from perfcore.compiled import compiled, inner

BLOCK = 2048  # rows whose leaf numbers and sums fit in a core's first cache


@compiled()
def add_trees(
    bins: NDArray[np.uint8],
    features: NDArray[np.uint8],
    numbers: NDArray[np.uint8],
    leaves: NDArray[np.float32],
    total: NDArray[np.float64],
) -> None:
    """Add each row's leaves to `total` `(s,)`; bins `(f, s)`, questions `(t, d <= 8)`, leaves `(t, 2^d)`."""
    rows, (trees, depth) = bins.shape[1], features.shape
    for start in range(0, rows, BLOCK):
        part = total[start : start + BLOCK]
        block = bins[:, start : start + BLOCK]
        leaf = np.empty(len(part), dtype=np.uint8)
        for tree in range(trees):
            leaf[:] = 0
            for level in range(depth):
                _answer(block[features[tree, level]], numbers[tree, level], np.uint8(1 << level), leaf)
            _add(leaves[tree], leaf, part)


@compiled()
def fill_bins(
    features: NDArray[np.float32],
    borders: NDArray[np.float32],
    starts: NDArray[np.int64],
    bins: NDArray[np.uint8],
) -> None:
    """How many borders of its feature lie below each value; features and bins `(f, s)`, borders increasing."""
    for feature in range(features.shape[0]):
        for row in range(features.shape[1]):
            value, low, high = features[feature, row], starts[feature], starts[feature + 1]
            while low < high:
                middle = (low + high) // 2
                if borders[middle] < value:
                    low = middle + 1
                else:
                    high = middle
            bins[feature, row] = low - starts[feature]


@inner(_nrt=False)
def _answer(column: NDArray[np.uint8], number: np.uint8, bit: np.uint8, leaf: NDArray[np.uint8]) -> None:
    zero = np.uint8(0)
    for row in range(len(leaf)):
        leaf[row] |= bit if column[row] > number else zero


@inner(_nrt=False)
def _add(values: NDArray[np.float32], leaf: NDArray[np.uint8], total: NDArray[np.float64]) -> None:
    for row in range(len(leaf)):
        total[row] += values[leaf[row]]
