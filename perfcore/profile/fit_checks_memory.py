"""Errors of a written profile on the bandwidth-bound kernels of a published V100 trace, by kind.

The table names each kernel and the shapes of its operator. Durations are whole microseconds: kernels shorter than
`SHORTEST_US` say nothing and are left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from perfcore.cost.model import CostModel
from perfcore.graph.kernels import Concat, CopyKind, Elementwise, Kernel, Memcpy, PairGather, Reduction
from perfcore.profile.fit_gemm import Errors, errors

if TYPE_CHECKING:
    import pandas as pd

MEMORY_FILE = "kernel_times_with_shapes_v100_mlperf_bs2048_agg.csv"
SHORTEST_US = 3.0
FLOAT = 4.0
MEMORY_SPLITS = {
    "elementwise (activations and SGD in a trace)": "never fitted on; whole microseconds",
    "elementwise (zeroing and broadcasting in a trace)": "never fitted on; whole microseconds",
    "concat (trace)": "never fitted on",
    "pair_gather (forward, trace)": "never fitted on",
    "reduction (mean of the loss, trace)": "never fitted on",
    "memcpy (within the device, trace)": "never fitted on",
}

Shape = tuple[float, ...]


class Point(NamedTuple):
    """A kernel of the trace, its time, and the kind that it counts as."""

    kind: str
    kernel: Kernel
    us: float


def memory_kernel_errors(paper: Path, costs: CostModel) -> list[tuple[str, Errors]]:
    """Errors of each kind of `MEMORY_SPLITS` that the published table holds.

    Args:
        paper: folder of the table.
        costs: of the V100 that was traced.
    """
    import pandas as pd

    points = trace_points(pd.read_csv(paper / MEMORY_FILE))
    out = []
    for kind in MEMORY_SPLITS:
        of_kind = [p for p in points if p.kind == kind]
        if of_kind:
            us = [float(u) for u in costs.predict_us([p.kernel for p in of_kind])]
            out.append((kind, errors(np.array(us), np.array([p.us for p in of_kind]))))
    return out


def trace_points(frame: pd.DataFrame) -> list[Point]:
    """The kernels of the table whose work their operator's shapes tell."""
    points = []
    for row in frame.to_dict("records"):
        shapes = [
            tuple(float(v) for v in re.findall(r"\d+", text))
            for text in re.findall(r"\(([^()]*)\)", str(row["op_input_shapes"]))
        ]
        name, us = str(row["kernel"]), float(row["mean_us"]) / float(row["kernels_per_op"])
        if "CatArray" in name:
            points += _concats(float(row["min_us"]), float(row["max_us"]))
            continue
        for fragment, known in _KNOWN.items():
            found = known(shapes) if name.startswith(fragment) else None
            if found is not None and us >= SHORTEST_US:
                points.append(Point(*found, us))
    return points


def _pointwise(shapes: Sequence[Shape]) -> tuple[str, Kernel] | None:
    """Activations, their gradients and SGD read one or two tensors and write one; zeroing only writes."""
    full = [s for s in shapes if len(s) > 1]
    if not full or full[0][-1] == 1:
        return None
    count = float(np.prod(full[0]))
    if len(shapes) == 2 and len(full) == 1:
        return _WRITES, Elementwise("zero_", count, 0.0, FLOAT * count)
    function = "relu" if len(full) == 1 else "add"
    return _READS, Elementwise(function, count, FLOAT * count * len(full), FLOAT * count)


def _unrolled(shapes: Sequence[Shape]) -> tuple[str, Kernel] | None:
    """The bias of a linear layer, spread over its output: `(bias, input, weight)`."""
    if len(shapes) < 3 or len(shapes[0]) != 1 or len(shapes[1]) != 2 or len(shapes[2]) != 2:
        return None
    rows, cols = shapes[1][0], shapes[2][1]
    return _WRITES, Elementwise("copy", rows * cols, FLOAT * cols, FLOAT * rows * cols)


def _gather(shapes: Sequence[Shape]) -> tuple[str, Kernel] | None:
    batch, features, _ = shapes[0]
    return "pair_gather (forward, trace)", PairGather(batch, features, features * (features - 1) / 2, FLOAT)


def _mean(shapes: Sequence[Shape]) -> tuple[str, Kernel] | None:
    rows, cols = shapes[0]
    return "reduction (mean of the loss, trace)", Reduction(rows, cols, FLOAT, axis=None)


def _copy(shapes: Sequence[Shape]) -> tuple[str, Kernel] | None:
    count = float(np.prod(shapes[0])) if shapes[0] else 0.0
    return "memcpy (within the device, trace)", Memcpy(FLOAT * count, CopyKind.D2D)


def _concats(shortest_us: float, longest_us: float) -> list[Point]:
    """DLRM_MLPerf joins 27 features of 128, and 128 columns with 351 pairs, at batch 2048."""
    joined = ((2048 * (128 + 351), 2.0, shortest_us), (2048 * 27 * 128, 27.0, longest_us))
    return [Point("concat (trace)", Concat(FLOAT * count, parts), us) for count, parts, us in joined]


_READS, _WRITES = list(MEMORY_SPLITS)[:2]
_KNOWN: dict[str, Callable[[Sequence[Shape]], tuple[str, Kernel] | None]] = {
    "vectorized_elementwise": _pointwise,
    "unrolled_elementwise": _unrolled,
    "index_elementwise": _gather,
    "reduce_kernel": _mean,
    "Memcpy DtoD": _copy,
}
