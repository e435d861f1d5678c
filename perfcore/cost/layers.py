"""Normalisation, pooling, softmax and dropout: passes over their tensors at a share of the bandwidth, plus start-up.

Each kind has a `LayerRate` in the profile. Passes over the input's size, in training:

| kind | forward | backward |
|---|---|---|
| batch normalisation | 3: statistics, then values in and out | 5: values and gradients twice, gradients out |
| layer normalisation | 2 | 5: one kernel of three, one of two that only reads, for scale and shift |
| softmax | 2 | 3 |

Pooling moves its input and its result, and an 8-byte index a result for `max`. Dropout moves its values in and out
and a byte of mask each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perfcore.cost.memory_bound import INDEX_BYTES, Rate
from perfcore.cost.stacking import Stacked
from perfcore.design.hardware import Device
from perfcore.errors import ProfileError
from perfcore.graph.kernels import BatchNorm, Dropout, LayerNorm, Pooling, Softmax

Array = NDArray[np.float64]

BATCH_NORM_PASSES = (3.0, 5.0)
LAYER_NORM_PASSES = (2.0, 5.0)
SOFTMAX_PASSES = (2.0, 3.0)
POOLINGS = ("max", "avg")


@dataclass(frozen=True, slots=True)
class LayerRate:
    """Speed of a layer's kernels."""

    forward: Rate
    backward: Rate

    def us(self, bytes_: Array, backward: NDArray[np.bool_], bytes_per_s: float) -> Array:
        """`(s,)`: as each rate's; 0 where there are no bytes."""
        return np.where(backward, self.backward.us(bytes_, bytes_per_s), self.forward.us(bytes_, bytes_per_s))


@dataclass(frozen=True, slots=True)
class LayerFormulas:
    """Formulas of all kinds on one device; each takes kernels and dims `(s,)` to µs `(s,)`.

    Attributes:
        device: bandwidth, multiprocessors.
        rates: by kind name (`batch_norm`, `pooling`, ...).
    """

    device: Device
    rates: Mapping[str, LayerRate]

    def batch_norm(self, kernels: Sequence[BatchNorm], dims: Stacked) -> Array:
        """A block a channel: fewer channels than multiprocessors leave some of the bandwidth unused."""
        backward = dims.repeat([k.backward for k in kernels])
        used = np.clip(dims["channels"] / self.device.sm_count, 1e-9, 1.0)
        size = dims["rows"] * dims["channels"] * dims["element_bytes"]
        passes = np.where(backward, BATCH_NORM_PASSES[1], BATCH_NORM_PASSES[0])
        return self.rates["batch_norm"].us(passes * size / used, backward, self.device.hbm_bytes_per_s)

    def pooling(self, kernels: Sequence[Pooling], dims: Stacked) -> Array:
        """Input, result, and where `max` found each value of it.

        Raises:
            ProfileError: a function is neither `max` nor `avg`.
        """
        unknown = sorted({k.function for k in kernels} - set(POOLINGS))
        if unknown:
            raise ProfileError(
                f"`function` of a Pooling must be one of {', '.join(POOLINGS)}, but got {unknown[0]!r}."
            )
        index_bytes = dims.repeat([INDEX_BYTES if k.function == "max" else 0.0 for k in kernels])
        backward = dims.repeat([k.backward for k in kernels])
        size = dims["element_bytes"]
        bytes_ = dims["inputs"] * size + dims["outputs"] * (size + index_bytes)
        bytes_ = np.where(dims["inputs"] * dims["outputs"] > 0, bytes_, 0.0)
        return self.rates["pooling"].us(bytes_, backward, self.device.hbm_bytes_per_s)

    def layer_norm(self, kernels: Sequence[LayerNorm], dims: Stacked) -> Array:
        """Backward: two kernels, each with its start-up."""
        backward = dims.repeat([k.backward for k in kernels])
        us = self._rows_us("layer_norm", dims, backward, LAYER_NORM_PASSES)
        return us + np.where(backward & (us > 0), self.rates["layer_norm"].backward.floor_us, 0.0)

    def softmax(self, kernels: Sequence[Softmax], dims: Stacked) -> Array:
        """Rows that stay on chip between maximum, sum and division."""
        return self._rows_us("softmax", dims, dims.repeat([k.backward for k in kernels]), SOFTMAX_PASSES)

    def dropout(self, kernels: Sequence[Dropout], dims: Stacked) -> Array:
        """Values in and out, and the mask."""
        bytes_ = dims["elements"] * (2.0 * dims["element_bytes"] + 1.0)
        backward = dims.repeat([k.backward for k in kernels])
        return self.rates["dropout"].us(bytes_, backward, self.device.hbm_bytes_per_s)

    def _rows_us(
        self, kind: str, dims: Stacked, backward: NDArray[np.bool_], passes: tuple[float, float]
    ) -> Array:
        size = dims["rows"] * dims["cols"] * dims["element_bytes"]
        return self.rates[kind].us(
            np.where(backward, passes[1], passes[0]) * size, backward, self.device.hbm_bytes_per_s
        )
