"""Classes of ops by which a measured iteration is put beside a predicted one."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum


class OpClass(StrEnum):
    """What an op is for; every op is of one class. Gradients of lookups, with what they update, are `UPDATES`."""

    PRODUCTS = "matrix products"
    LOOKUPS = "lookups"
    UPDATES = "table updates"
    DENSE_OPTIMIZER = "dense optimizer"
    COMMUNICATION = "communication"
    REST = "pointwise and the rest"


COLLECTIVES = ("collective: ", "c10d::", "gloo:", "nccl:", "record_param_comms")
OPTIMIZER_STEP = "Optimizer.step#"
_GRADIENTS = ("embeddingbagbackward", "embedding_bag_backward", "embedding_bag_sparse", "embedding_bag_dense")
_FUSED_GRADIENTS = ("splitlookupfunction", "embedding_backward")
_LOOKUPS = ("embedding_bag", "embedding_codegen_lookup", "bounds_check_indices")
_PRODUCTS = frozenset(
    {"aten::addmm", "aten::mm", "aten::bmm", "aten::baddbmm", "aten::_addmm_activation", "aten::linear"}
)
_INTERACTION = "_PairProducts"  # one op of the design, whatever it calls


def class_of(names: Sequence[str], *, first_optimizer: bool) -> OpClass:
    """The class of an op.

    Args:
        names: its own, then those of the ops around it, the nearest first.
        first_optimizer: where it is part of an optimizer's step, that of the dense part, which is the first.
    """
    if any(n.startswith(COLLECTIVES) for n in names):
        return OpClass.COMMUNICATION
    if any(n.startswith(OPTIMIZER_STEP) for n in names):
        return OpClass.DENSE_OPTIMIZER if first_optimizer else OpClass.UPDATES
    lower = [n.lower() for n in names]
    if any(word in n for n in lower for word in (*_GRADIENTS, *_FUSED_GRADIENTS)):
        return OpClass.UPDATES
    if any(word in n for n in lower for word in _LOOKUPS):
        return OpClass.LOOKUPS
    if names[0] in _PRODUCTS and not any(n.startswith(_INTERACTION) for n in names):
        return OpClass.PRODUCTS
    return OpClass.REST
