"""Device memory of a training rank, in bytes, by kind.

What is alive at the peak, the end of the forward pass:

- weights and optimizer state;
- the gradients of the iteration before, as `zero_grad` runs between forward and backward (the loop of DLRM),
  and, when distributed, the all-reduce buckets, which copy them;
- everything that autograd has saved: per linear layer its output after the activation (its input is the
  output of the layer below), the interaction's operands, and under autocast the bf16 copies of weights;
- the embedding outputs, the batch, and the buffers of the exchanges;
- what the framework holds for itself (`perfcore/profile/data/framework.json`).

Tables in the host's memory leave their cached rows, and optimizer state of one value a row, on the device.

Left out: temporaries of single kernels (the `(features, features)` products before the gather, a foreach
optimizer's intermediates, the sort of a fused embedding backward), which live when other tensors are already
freed, and the fragmentation of the caching allocator.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from perfcore.design.design import Design
from perfcore.design.hardware import CATALOGUE, Node, System
from perfcore.design.model import Interaction, Loss
from perfcore.design.training import Communication, EmbeddingFusion, Fusion, Optimizer, Precision
from perfcore.errors import ProfileError
from perfcore.graph.dims import Dims, Structure, dims_of, structure_of
from perfcore.graph.kernels import Total
from perfcore.graph.sizes import whole_dims, whole_poolings

Array: TypeAlias = NDArray[np.float64]
Term: TypeAlias = "Array | Total"

KINDS = ("weights", "optimizer_state", "gradients", "activations", "communication", "input", "framework")

# Values kept per weight: none for plain SGD, a sum of squares for Adagrad, two moments for Adam.
_STATES = {Optimizer.SGD: 0, Optimizer.ADAGRAD: 1, Optimizer.ROWWISE_ADAGRAD: 0, Optimizer.ADAM: 2}


@dataclass(frozen=True, slots=True)
class FrameworkReserve:
    """What a process holds on its device beside the tensors of the model; see the data file for sources.

    Attributes:
        context_bytes: CUDA context with its modules.
        cublas_workspace_bytes: of one handle and stream, on the GPUs that want most.
        nccl_bytes: of a communicator.
        nccl_bytes_per_local_peer: more for each peer on the same machine.
        index_bytes: one lookup index or offset.
        state_bytes: one fp32 value: a master weight, its gradient or a value of optimizer state.
    """

    context_bytes: float
    cublas_workspace_bytes: float
    nccl_bytes: float
    nccl_bytes_per_local_peer: float
    index_bytes: float
    state_bytes: float


@functools.cache
def framework_reserve() -> FrameworkReserve:
    """The bundled numbers.

    Raises:
        ProfileError: the file is missing, or lacks a number.
    """
    path = CATALOGUE / "framework.json"
    try:
        data: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return FrameworkReserve(**{k: float(data[k]) for k in FrameworkReserve.__dataclass_fields__})
    except (OSError, ValueError, KeyError) as err:
        raise ProfileError(f"{path.name} cannot be read: {err}.") from err


@dataclass(frozen=True, slots=True, eq=False)
class MemoryBreakdown:
    """Bytes per rank by kind, each of shape `(r,)`.

    Attributes:
        weights: fp32 dense weights, table shards.
        optimizer_state: of both.
        gradients: of the dense part, and the sparse gradients of per-table embeddings.
        activations: saved for the backward pass, embedding outputs, autocast's copies of weights.
        communication: exchange buffers and gradient buckets.
        input: the batch.
        framework: context, workspaces, communicator.
        host: in the host's memory, and in no total: tables that lie there.
        local_world_size: ranks that share a host.
    """

    weights: Array
    optimizer_state: Array
    gradients: Array
    activations: Array
    communication: Array
    input: Array
    framework: Array
    host: Array
    local_world_size: int

    @property
    def total(self) -> Array:
        """`(r,)`: the sum over kinds."""
        return np.asarray(sum(getattr(self, kind) for kind in KINDS), dtype=np.float64)

    def fullest(self, system: System) -> tuple[int, float]:
        """The rank with the least memory left, the first of equals, and the bytes left; negative where it lacks some."""
        left = np.array(system.rank_hbm_bytes) - self.total
        return int(np.argmin(left)), float(left.min())

    def shortfall_bytes(self, system: System) -> float:
        """What the fullest rank lacks, 0 when all fit."""
        return max(0.0, -self.fullest(system)[1])

    def host_shortfall_bytes(self, node: Node) -> float:
        """What the fullest machine's host memory lacks, 0 when its tables fit."""
        machines = np.add.reduceat(self.host, np.arange(0, len(self.host), self.local_world_size))
        return max(0.0, float(machines.max()) - node.host_memory_bytes)

    def by_kind(self, rank: int) -> dict[str, float]:
        """Bytes of one rank by kind."""
        return {kind: float(getattr(self, kind)[rank]) for kind in KINDS}


def memory_terms(dims: Dims, structure: Structure) -> dict[str, Term]:
    """Bytes per rank as terms to be added, each broadcasting to `(..., r)`.

    Only `embedding` varies by rank, so a maximum over ranks may be taken of it alone; whatever depends on
    all widths is a `Total` (`dense`, `activations`).
    """
    per_parameter = sum(_bytes_per_parameter(structure).values())
    rest = _shared_bytes(dims, structure)
    return {
        "embedding": embedding_bytes(dims, structure),
        "dense": _scaled(dense_parameters(dims, structure), per_parameter),
        "activations": _activation_bytes(dims, structure),
        "rest": np.asarray(sum(rest.values()), dtype=np.float64),
    }


class MemoryOfGrid:
    """`memory_terms` of one grid's structures, worked out once for all that memory cannot tell apart."""

    def __init__(self) -> None:
        self._known: dict[Structure, tuple[Dims, dict[str, Term]]] = {}

    def __call__(self, dims: Dims, structure: Structure) -> dict[str, Term]:
        """The same object for structures that memory cannot tell apart."""
        seen = _as_memory_sees(structure)
        if seen not in self._known or self._known[seen][0] is not dims:
            self._known[seen] = dims, memory_terms(dims, seen)
        return self._known[seen][1]


def _as_memory_sees(structure: Structure) -> Structure:
    """The structure with a default for everything that memory does not ask for."""
    communication = structure.fusion.communication if _batches(structure) > 1 else Communication.SERIAL
    return replace(
        structure,
        loss=Loss.BCE,
        pinned_input=False,
        read_loss=False,
        synchronize=False,
        fusion=Fusion(embedding=structure.fusion.embedding, communication=communication),
    )


def embedding_bytes(dims: Dims, structure: Structure) -> Array:
    """`(..., r)` bytes that a rank's shards need: weights, optimizer state, gradients, exchange buffers."""
    return np.asarray(sum(_rank_bytes(dims, structure).values()), dtype=np.float64)


def memory_of(design: Design) -> MemoryBreakdown:
    """Bytes per rank, `(r,)` by kind, of one design."""
    return memory_at(dims_of([design]), structure_of(design))


def memory_at(dims: Dims, structure: Structure) -> MemoryBreakdown:
    """Bytes per rank, `(r,)` by kind, of the first design of `(n, r)` dims."""
    parameters = dense_parameters(dims, structure).value()
    kinds: dict[str, Array] = {kind: np.zeros((1, dims.num_ranks)) for kind in KINDS}
    parts: list[Mapping[str, Array]] = [
        {kind: parameters * each for kind, each in _bytes_per_parameter(structure).items()},
        {"activations": _activation_bytes(dims, structure).value()},
        _rank_bytes(dims, structure),
        _shared_bytes(dims, structure),
    ]
    for part in parts:
        for kind, value in part.items():
            kinds[kind] = kinds[kind] + value
    return MemoryBreakdown(
        **{kind: value[0] for kind, value in kinds.items()},
        host=host_bytes(dims, structure)[0],
        local_world_size=int(dims.local_world_size.flat[0]),
    )


def dense_parameters(dims: Dims, structure: Structure) -> Total:
    """Weights and biases of the dense part, one term per layer; an absent layer has none."""
    features = interaction_width(dims, structure)
    bottom = (*dims.bottom_hidden, dims.embedding_dim)
    top = (*dims.top_hidden, np.ones(1))
    terms = [*_layers(np.asarray(float(dims.num_dense_features)), bottom), *_layers(features, top)]
    cross = 2 * features * dims.cross_rank + features  # two low-rank factors and a bias
    return Total((*terms, cross * structure.cross_layers))


def interaction_width(dims: Dims, structure: Structure) -> Array:
    """Width of the top MLP's input, `(..., 1)`."""
    if structure.interaction is Interaction.DOT:
        features = dims.num_tables + 1
        return dims.embedding_dim + features * (features - 1) / 2
    width: Array = dims.embedding_dim + whole_dims(dims).sum(axis=-1)
    return width


def _layers(inputs: Array, widths: tuple[Array, ...]) -> list[Array]:
    """Parameters of each slot; the first present layer reads `inputs`."""
    below = [inputs, *(np.where(w > 0, w, inputs) for w in widths[:-1])]
    return [b * w + w for b, w in zip(below, widths, strict=True)]


def _bytes_per_parameter(structure: Structure) -> dict[str, float]:
    """Bytes of each kind for one dense parameter."""
    value = framework_reserve().state_bytes
    return {
        "weights": value,
        "optimizer_state": value * _STATES[structure.optimizer],
        "gradients": value,
        "communication": value if structure.distributed else 0.0,
        "activations": _element_bytes(structure.precision) if structure.precision is Precision.BF16 else 0.0,
    }


def _activation_bytes(dims: Dims, structure: Structure) -> Total:
    """What autograd saves of the dense part: a term per layer output, and those of the interaction."""
    batch, each = dims.local_batch, _element_bytes(structure.precision)
    widths = (*dims.bottom_hidden, dims.embedding_dim, *dims.top_hidden)
    outputs = [batch * w * each for w in widths] + [batch * framework_reserve().state_bytes]  # a probability
    return Total((*outputs, *_interaction_bytes(dims, structure)))


def _interaction_bytes(dims: Dims, structure: Structure) -> list[Array]:
    """Saved operands of the interaction and its output, which the top MLP reads."""
    batch, each = dims.local_batch, _element_bytes(structure.precision)
    features = interaction_width(dims, structure)
    copied = structure.precision is Precision.BF16
    # Autocast saves a bf16 copy of the dense input beside the batch's fp32 one.
    kept = [features * each] + [np.asarray(dims.num_dense_features * each)] * copied
    if structure.interaction is Interaction.DOT:
        operand = dims.embedding_dim * (dims.num_tables + 1)
        kept.append(operand * each * (2 if copied else 1))  # each operand of the product is cast by itself
    elif structure.interaction is Interaction.DCN_V2:
        layer = (
            features * 2 + dims.cross_rank
        )  # the layer's input, the product's operand, the low-rank middle
        kept.append(layer * each * structure.cross_layers)
        kept += [features * framework_reserve().state_bytes] * copied  # every layer multiplies by the fp32 x0
    return [batch * width for width in kept]


def _rank_bytes(dims: Dims, structure: Structure) -> dict[str, Array]:
    """`(..., r)` bytes by kind of what depends on the shards that a rank holds."""
    shards, reserve = dims.shards, framework_reserve()
    weights = shards.rows * shards.dim
    states = weights * _STATES[structure.table_optimizer]
    if structure.table_optimizer is Optimizer.ROWWISE_ADAGRAD:
        states = shards.rows
    batch = np.where(shards.replicated, dims.local_batch[..., None], dims.global_batch[..., None])
    lookups = np.where(shards.present, batch * shards.pooling, 0.0)
    each = _element_bytes(structure.table_precision)
    sparse = lookups * (shards.dim * each + reserve.index_bytes)
    kept = structure.fusion.embedding is EmbeddingFusion.PER_TABLE
    on_device = np.where(shards.host, shards.cache_ratio, 1.0)
    kinds = {
        "weights": weights * each * on_device,
        "optimizer_state": states * reserve.state_bytes * ~_state_on_host(dims, structure),
        "gradients": np.where(shards.dense, weights * each, sparse * kept),
        # `EmbeddingBag` saves which bag each lookup belongs to, and two values a bag.
        "activations": (lookups + 2 * np.where(shards.present, batch, 0.0)) * reserve.index_bytes * kept,
    }
    if structure.distributed:
        # A dense gradient, all-reduced as the MLPs'.
        reduced = np.where(shards.replicated, weights * each, 0.0)
        sent = np.where(shards.present & ~shards.replicated, batch, 0.0)
        output, received = sent * shards.dim * each, sent * (shards.pooling + 1) * reserve.index_bytes
        # Lookups of how many batches: the factors of TorchRec's `calculate_pipeline_io_cost`.
        mode = structure.fusion.communication
        received = received * (1 + mode.exchanges_ahead + mode.fills_ahead)
        # What a machine has summed is kept for the second stage, a share on each of its ranks.
        output = output + np.where(shards.staged, output / dims.local_world_size[..., None], 0.0)
        kinds["gradients"] = np.where(shards.replicated, reduced, kinds["gradients"])
        kinds["communication"] = output + received + reduced
    return {kind: value.sum(axis=-1) for kind, value in kinds.items()}


def _batches(structure: Structure) -> int:
    """How many are on the device: what is exchanged ahead has the next two as well, what fills caches one more."""
    mode = structure.fusion.communication
    return 1 + 2 * (structure.distributed and mode.exchanges_ahead) + mode.fills_ahead


def host_bytes(dims: Dims, structure: Structure) -> Array:
    """`(..., r)` bytes of host memory that a rank's shards need: weights, and optimizer state as wide as they."""
    shards = dims.shards
    weights = shards.rows * shards.dim * shards.host
    state = weights * _STATES[structure.table_optimizer] * _state_on_host(dims, structure)
    stored = weights * _element_bytes(structure.table_precision)
    return np.asarray((stored + state * framework_reserve().state_bytes).sum(axis=-1))


def _state_on_host(dims: Dims, structure: Structure) -> NDArray[np.bool_]:
    """FBGEMM keeps one value a row in device memory, and wider state with the rows."""
    return dims.shards.host & (structure.table_optimizer is not Optimizer.ROWWISE_ADAGRAD)


def _shared_bytes(dims: Dims, structure: Structure) -> dict[str, Array]:
    """`(..., 1)` bytes by kind that are equal on all ranks and depend on no hidden width."""
    reserve, batch = framework_reserve(), dims.local_batch
    bags = (whole_poolings(dims) + 1).sum(axis=-1) * reserve.index_bytes  # indices and offsets
    outputs = whole_dims(dims).sum(axis=-1) * reserve.state_bytes  # fp32, whatever the tables store
    dense = (dims.num_dense_features + 1) * reserve.state_bytes  # features and label
    peers = reserve.nccl_bytes + reserve.nccl_bytes_per_local_peer * (dims.local_world_size - 1)
    return {
        "activations": batch * outputs,
        "input": batch * (dense + bags) * _batches(structure),
        "framework": np.asarray(
            reserve.context_bytes + reserve.cublas_workspace_bytes + peers * structure.distributed
        ),
    }


def _element_bytes(precision: Precision) -> float:
    return 2.0 if precision is Precision.BF16 else 4.0


def _scaled(total: Total, factor: float) -> Total:
    return Total(tuple(term * factor for term in total.terms))
