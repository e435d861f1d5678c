"""Fills a table of overheads from the means that were found: defaults, kin, sources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from perfcore.overheads import OpOverheads, OverheadTable
from perfcore.profile.published_overheads import ANY_OP, Means
from perfcore.trace.extract import Overhead

SCALED = (Overhead.T2, Overhead.T3, Overhead.T5, Overhead.ALONE)
_QUEUE_DEPTH = (1024, "about 1,024 launches, seen where launch calls begin to block in profiled runs")
_LOOKUPS = "fbgemm::split_embedding_codegen_lookup_adagrad_function"
_LOOKUPS_BACKWARD = "torch::autograd::CppNode<SplitLookupFunction_adagrad_Op>"
_TABLE_OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad", "adam")
# Ops without measurements of their own, and the nearest kin that has some.
_KIN = {
    **{
        f"{p}split_embedding_codegen_lookup_{o}_function": _LOOKUPS
        for o in _TABLE_OPTIMIZERS
        for p in ("", "fbgemm::")
    },
    **{f"torch::autograd::CppNode<SplitLookupFunction_{o}_Op>": _LOOKUPS_BACKWARD for o in _TABLE_OPTIMIZERS},
    **{f"Optimizer.step#{o}.step": "Optimizer.step#Adagrad.step" for o in ("Adam", "RowwiseAdagrad")},
    **{
        f"Optimizer.zero_grad#{o}.zero_grad": "Optimizer.zero_grad#SGD.zero_grad"
        for o in ("Adam", "Adagrad", "RowwiseAdagrad")
    },
    **{
        f"ReduceScatter_{part}": f"All2All_Pooled_{part}"
        for part in ("Req", "Wait", "ReqBackward", "WaitBackward")
    },
    "aten::embedding_bag": "fbgemm::dense_embedding_codegen_lookup_function",
    "EmbeddingBagBackward0": "torch::autograd::CppNode<SplitLookupFunction_Dense_Op>",
    # Functions written in Python, as the study's lookups are.
    "_PairProducts": "LookupFunction",
    "_PairProductsBackward": "LookupFunctionBackward",
    "MmBackward0": "AddmmBackward0",
    "AddBackward0": "MulBackward0",
    "aten::_addmm_activation": "aten::linear",
    "cudaDeviceSynchronize": "aten::item",  # what the host does itself; the wait is the schedule's
    "nccl:all_reduce": "c10d::allreduce_",
    "nccl:all_to_all": "c10d::alltoall_base_",
    "nccl:all_gather": "c10d::alltoall_base_",
    "nccl:reduce_scatter": "c10d::alltoall_base_",
    "c10d::_allgather_base_": "c10d::alltoall_base_",
    "c10d::_reduce_scatter_base_": "c10d::alltoall_base_",
}
# Ops whose host time is a whole phase: they would distort the mean over ops.
_PHASES = ("Optimizer.", "enumerate(", "record_param_comms", "CompiledFunction", "cuda")


@dataclass(frozen=True, slots=True)
class Built:
    """Means of one device and what went into them."""

    means: Means
    counts: Mapping[str, int]
    factors: dict[str, Any] = field(default_factory=dict)


def assemble(
    built: Built,
    *,
    t1_us: Mapping[str, float],
    constants: Mapping[str, tuple[float, str]],
    provenance: Mapping[str, Any],
) -> OverheadTable:
    """Fill what an op was not seen to do: T2 to T5 from the mean over ops, `alone` from its own T2 and T3."""
    ops = sorted({op for op, _ in built.means} - {ANY_OP, "(end of step)"})
    default = _default(built, t1_us, ops)
    by_op = {}
    for op in ops:
        own = {k: built.means.get((op, k), getattr(default, f"{k}_us")) for k in (*SCALED, Overhead.T4)}
        if (op, Overhead.ALONE) not in built.means:
            own[Overhead.ALONE] = own[Overhead.T2] + own[Overhead.T3]
        times = {f"{kind}_us": round(us, 3) for kind, us in own.items()}
        by_op[op] = OpOverheads(**times, t1_us=round(t1_us[op], 3), count=built.counts.get(op, 0))
    return OverheadTable(
        by_op={name: by_op[kin] for name, kin in _KIN.items() if kin in by_op and name not in by_op} | by_op,
        default=default,
        queue_depth=_QUEUE_DEPTH[0],
        provenance={
            **provenance,
            "factors": {**provenance["factors"], **built.factors},
            "aliases": {name: kin for name, kin in _KIN.items() if kin in by_op and name not in by_op},
            "constants": {
                "queue_depth": _QUEUE_DEPTH[1],
                **{name: source for name, (_, source) in constants.items()},
            },
        },
        kernels_block_host=False,
        **{name: round(us, 3) for name, (us, _) in constants.items()},
    )


def _default(built: Built, t1_us: Mapping[str, float], ops: Sequence[str]) -> OpOverheads:
    """Means over ops, weighted by how often each was seen."""
    usual = [op for op in ops if not op.startswith(_PHASES)]

    def mean(values: Mapping[str, float]) -> float:
        weights = [max(1, built.counts.get(op, 1)) for op in values]
        return round(float(np.average(list(values.values()), weights=weights)), 3)

    times = {
        f"{kind}_us": mean({op: built.means[op, kind] for op in usual if (op, kind) in built.means})
        for kind in (*SCALED, Overhead.T4)
    }
    return OpOverheads(
        **times,
        t1_us=mean({op: t1_us[op] for op in usual}),
        count=sum(built.counts.get(op, 0) for op in usual),
    )
