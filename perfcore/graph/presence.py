"""Where ops run: absent layers, empty buckets, and the part that a CUDA graph captures."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from perfcore.graph.dim_types import Bucket
from perfcore.graph.kernels import Collective, Kernel
from perfcore.graph.ops import Op, Stream, StreamId, WorkloadGraph

Mask: TypeAlias = "NDArray[np.bool_]"
Present: TypeAlias = "Mask | bool"


def captured_streams(graph: WorkloadGraph) -> tuple[StreamId, ...]:
    """Streams that the captured part uses."""
    used = {
        x.stream for region in graph.regions[graph.captured_from :] for op in region.ops for x in op.launches
    }
    return tuple(sorted(used, key=lambda s: list(Stream).index(s) if isinstance(s, Stream) else s))


def op_present(op: Op) -> Present:
    """`op.present`, without the places where a bucket of its is empty."""
    present: Present = op.present
    for launch in op.launches:
        bucket = bucket_of(launch.kernel)
        if bucket is not None:
            present = np.asarray(present) & (bucket.value() > 0)
    return present


def bucket_of(kernel: Kernel) -> Bucket | None:
    """The bucket that a collective reduces, `None` for others."""
    return kernel.bytes if type(kernel) is Collective and type(kernel.bytes) is Bucket else None
