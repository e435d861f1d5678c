"""How the model is trained: batch, number format, optimizer, and which ops are fused."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from perfcore.design.checks import check_choice, check_int
from perfcore.errors import DesignError

MAX_GLOBAL_BATCH = 2**31 - 1


class Precision(StrEnum):
    """Number format of the dense part; tables stay fp32 unless `table_precision` says otherwise.

    `TF32` is fp32 storage with TF32 tensor cores; `BF16` is `torch.autocast`, master weights fp32.
    """

    FP32 = "fp32"
    TF32 = "tf32"
    BF16 = "bf16"


class Optimizer(StrEnum):
    """Optimizer of the dense part, or of the tables (`ROWWISE_ADAGRAD`: tables only)."""

    SGD = "sgd"
    ADAGRAD = "adagrad"
    ROWWISE_ADAGRAD = "rowwise_adagrad"
    ADAM = "adam"


class EmbeddingFusion(StrEnum):
    """`PER_TABLE`: one `nn.EmbeddingBag(sparse=True)` a table. `TABLE_BATCHED`: FBGEMM's fused lookup+update."""

    PER_TABLE = "per_table"
    TABLE_BATCHED = "table_batched"


class MlpFusion(StrEnum):
    """`EAGER`: addmm, then the activation. `FUSED`: bias and activation in the GEMM's epilogue."""

    EAGER = "eager"
    FUSED = "fused"


class InteractionFusion(StrEnum):
    """`EAGER`: cat, bmm, index, cat. `FUSED`: one kernel forward, one backward."""

    EAGER = "eager"
    FUSED = "fused"


class OptimizerFusion(StrEnum):
    """The three implementations that `torch.optim` ships."""

    FOR_LOOP = "for_loop"
    FOREACH = "foreach"
    FUSED = "fused"


class IndexType(StrEnum):
    """Integers of the lookups' indices and offsets."""

    INT32 = "int32"
    INT64 = "int64"

    @property
    def bytes(self) -> int:
        """Bytes of one."""
        return 4 if self is IndexType.INT32 else 8


class Program(StrEnum):
    """Whose ops an iteration has.

    `PYTORCH`: a loop on PyTorch 2, with TorchRec's ops on several ranks. `DLRM_SCRIPT`: the reference script of
    facebookresearch/dlrm under PyTorch 1.x with batched tables, as published runs of 2021 and 2022 trained it
    (`perfcore.graph.script` says what differs). `NVIDIA_EXAMPLE`: that of NVIDIA's DeepLearningExamples (`perfcore.graph.nvidia`).
    """

    PYTORCH = "pytorch"
    DLRM_SCRIPT = "dlrm_script"
    NVIDIA_EXAMPLE = "nvidia_example"


class Launches(StrEnum):
    """`CUDA_GRAPH`: the whole iteration is captured once and replayed by one launch."""

    EAGER = "eager"
    CUDA_GRAPH = "cuda_graph"


class Communication(StrEnum):
    """When collectives are waited for, and which batch is exchanged.

    `SERIAL`: every collective is waited for at once. `OVERLAPPED`: waits stand where data is used. `PIPELINED`: so they
    do, and as in TorchRec's `TrainPipelineSparseDist` the batch after the next is copied to the device, and the next
    one's lookups go to the owners of the tables, while the device works on this one. `PREFETCHED`: and as in its
    `PrefetchTrainPipelineSparseDist` the caches of tables in host memory are filled for the next batch meanwhile.
    """

    SERIAL = "serial"
    OVERLAPPED = "overlapped"
    PIPELINED = "pipelined"
    PREFETCHED = "prefetched"

    @property
    def exchanges_ahead(self) -> bool:
        """The next batch's lookups go to their owners beside this batch."""
        return self in (Communication.PIPELINED, Communication.PREFETCHED)

    @property
    def fills_ahead(self) -> bool:
        """Caches are filled for the next batch beside this one."""
        return self is Communication.PREFETCHED


# Sparse gradients of per-table EmbeddingBags have as many rows as the batch has lookups, and optimizers
# coalesce them, which waits for the device: neither can be part of a captured graph.
CAPTURE_RULE = "`launches: cuda_graph` needs `embedding: table_batched`"


def can_capture(launches: Launches, embedding: EmbeddingFusion) -> bool:
    """Whether an iteration with such embeddings can be launched that way."""
    return launches is Launches.EAGER or embedding is EmbeddingFusion.TABLE_BATCHED


@dataclass(frozen=True, slots=True)
class Fusion:
    """Which ops are fused; each choice exists in PyTorch practice and leaves the mathematics alone."""

    embedding: EmbeddingFusion = EmbeddingFusion.TABLE_BATCHED
    mlp: MlpFusion = MlpFusion.EAGER
    interaction: InteractionFusion = InteractionFusion.EAGER
    optimizer: OptimizerFusion = OptimizerFusion.FOREACH
    launches: Launches = Launches.EAGER
    communication: Communication = Communication.OVERLAPPED

    def __post_init__(self) -> None:
        """Refuse pairs that cannot run."""
        check_choice("embedding", self.embedding, EmbeddingFusion)
        check_choice("mlp", self.mlp, MlpFusion)
        check_choice("interaction", self.interaction, InteractionFusion)
        check_choice("optimizer", self.optimizer, OptimizerFusion)
        check_choice("launches", self.launches, Launches)
        check_choice("communication", self.communication, Communication)
        if not can_capture(self.launches, self.embedding):
            raise DesignError(f"{CAPTURE_RULE}, but got embedding={self.embedding}.")


@dataclass(frozen=True, slots=True)
class Training:
    """Training settings.

    Attributes:
        global_batch: samples per iteration over all ranks.
        precision: number format of the dense part.
        optimizer: of the dense part.
        table_optimizer: of the embedding tables.
        table_precision: storage of the tables (`fp32` or `bf16`).
        pinned_input: the host batch lies in pinned memory (H2D copies do not block the host).
        read_loss: the loop reads the loss (`.item()`) every iteration, which waits for the device.
        synchronize: the loop waits for the device at the end of every iteration, as benchmarks do.
        index_dtype: of the lookups' indices and offsets.
        program: whose ops the iteration has.
    """

    global_batch: int
    precision: Precision = Precision.FP32
    optimizer: Optimizer = Optimizer.SGD
    table_optimizer: Optimizer = Optimizer.SGD
    table_precision: Precision = Precision.FP32
    pinned_input: bool = True
    read_loss: bool = False
    synchronize: bool = False
    index_dtype: IndexType = IndexType.INT64
    program: Program = Program.PYTORCH

    def __post_init__(self) -> None:
        """Refuse impossible settings."""
        check_int("global_batch", self.global_batch, low=1, high=MAX_GLOBAL_BATCH)
        check_choice("precision", self.precision, Precision)
        check_choice("optimizer", self.optimizer, Optimizer)
        check_choice("table_optimizer", self.table_optimizer, Optimizer)
        check_choice("table_precision", self.table_precision, Precision)
        check_choice("index_dtype", self.index_dtype, IndexType)
        check_choice("program", self.program, Program)
        if self.optimizer is Optimizer.ROWWISE_ADAGRAD:
            raise DesignError("`rowwise_adagrad` is an optimizer of tables, but `optimizer` names it.")
        if self.table_precision is Precision.TF32:
            raise DesignError("`table_precision` must be fp32 or bf16, but got tf32.")
