"""What PyTorch really dispatches: a recording of the aten calls of a training step.

Recorded on a CPU, where the calls are those of a CUDA device but for the entries of `DIFFERS_ON_CUDA`, as
long as `foreach` and `fused` are set explicitly: their defaults depend on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from perfcore.graph.ops import Leaf

# What a CUDA device dispatches differently, and what `on_cuda` does about it.
DIFFERS_ON_CUDA = {
    "aten._to_copy of the batch": "on a CPU the batch is already there: the copies to the device are missing",
    "aten._embedding_bag_backward": "CUDA's forward saves the bag of each lookup and no maxima, a CPU's "
    "the opposite: the fourth and the last shape differ",
}


def capture(step: Callable[[], object]) -> tuple[Leaf, ...]:
    """The aten calls of one run of `step`, in order, each with the shapes of its tensor arguments.

    Calls that compute nothing are left out: the profiler's annotations, and fake tensors asking for a device.
    """
    from torch import Tensor
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    leaves: list[Leaf] = []

    class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            if func.namespace not in {"profiler", "prim"}:
                shapes = [
                    tuple(map(float, x.shape)) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)
                ]
                leaves.append(Leaf(str(func.overloadpacket), tuple(shapes)))
            return func(*args, **(kwargs or {}))

    with Recorder():  # type: ignore[no-untyped-call]
        step()
    return tuple(leaves)


def on_cuda(leaves: Sequence[Leaf]) -> tuple[Leaf, ...]:
    """Leaves recorded on a CPU as CUDA would have dispatched them (the batch's copies stay out)."""
    return tuple(_bag_backward(x) if x.name == "aten._embedding_bag_backward" else x for x in leaves)


def _bag_backward(leaf: Leaf) -> Leaf:
    gradient, indices, offsets, _, sizes, _ = leaf.shapes
    return Leaf(leaf.name, (gradient, indices, offsets, indices, sizes, (0.0,)))
