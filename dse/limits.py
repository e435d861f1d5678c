"""What no design of a space can do, told before a search begins."""

from __future__ import annotations

from dse.candidate import values_of
from dse.errors import NoFeasibleCandidateError
from dse.schema import Policy
from dse.space import SearchSpace
from perfcore.units import BYTES_PER_GIB

WHOLE = (Policy.TABLE_WISE, Policy.DATA_PARALLEL, Policy.DATA_PARALLEL_SMALL)
ELEMENT_BYTES = {"fp32": 4, "bf16": 2}


def check_tables_fit(space: SearchSpace, *, where: str) -> None:
    """Return when every table's weights alone fit into some design's GPUs.

    Args:
        space: the space.
        where: begins the message: the place of the tables in their file.

    Raises:
        NoFeasibleCandidateError: a table's smallest possible share of a GPU is larger than the GPU's memory.
    """
    ranks = max(int(w) for w in values_of(space, "system.world_size"))
    policies = [Policy(str(p)) for p in values_of(space, "sharding.policy")]
    split = ranks if ranks > 1 and not all(p in WHOLE for p in policies) else 1
    element = min(ELEMENT_BYTES[str(p)] for p in values_of(space, "training.table_precision"))
    most = max(space.system(ranks).rank_hbm_bytes)
    narrowest = min(int(d) for d in values_of(space, "model.embedding_dim"))
    for table in space.tables:
        share = table.num_embeddings * (table.embedding_dim or narrowest) * element / split
        if share > most:
            raise NoFeasibleCandidateError(
                f"{where}table {table.name!r} needs at least {share / BYTES_PER_GIB:.1f} GiB on a GPU in every design "
                f"of the space (policies: {', '.join(policies)}; up to {ranks} GPUs), but {_largest(space)} has "
                f"{most / BYTES_PER_GIB:.1f}.",
                hint="Raise world_size, allow the policy `row_wise` or `auto`, lower embedding_dim, or store tables "
                "in bf16.",
            )


def _largest(space: SearchSpace) -> str:
    return "the largest GPU" if space.unequal_memory else space.device.name
