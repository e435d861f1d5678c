"""What a person may write in the sections that a design and a space share."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator

from perfcore.design.model import MAX_NUM_EMBEDDINGS, MAX_WIDTH, Interaction, Loss
from perfcore.design.sharding import ComputeKernel, ShardingType
from perfcore.design.training import (
    MAX_GLOBAL_BATCH,
    Communication,
    EmbeddingFusion,
    IndexType,
    InteractionFusion,
    Launches,
    MlpFusion,
    Optimizer,
    OptimizerFusion,
    Precision,
    Program,
)

MAX_TABLES = 100_000
MAX_LAYERS = 32
MAX_WORLD_SIZE = 65_536


class Section(BaseModel):
    """Base of every mapping in a file: an unknown key is a mistake, and so is a number that is none."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Policy(StrEnum):
    """How the sharding solver may split the tables."""

    AUTO = "auto"
    TABLE_WISE = "table_wise"
    COLUMN_WISE = "column_wise"
    ROW_WISE = "row_wise"
    TABLE_ROW_WISE = "table_row_wise"
    DATA_PARALLEL = "data_parallel"
    DATA_PARALLEL_SMALL = "data_parallel_small"


def whole(value: Any) -> Any:
    """`4.2e9` is a whole number, whatever YAML calls it."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Width: TypeAlias = Annotated[int, BeforeValidator(whole), Field(strict=True, ge=1, le=MAX_WIDTH)]
Batch: TypeAlias = Annotated[int, BeforeValidator(whole), Field(strict=True, ge=1, le=MAX_GLOBAL_BATCH)]
WorldSize: TypeAlias = Annotated[int, Field(strict=True, ge=1, le=MAX_WORLD_SIZE)]
Rank: TypeAlias = Annotated[int, Field(strict=True, ge=0, lt=MAX_WORLD_SIZE)]
CrossLayers: TypeAlias = Annotated[int, Field(strict=True, ge=1, le=100)]
Rows: TypeAlias = Annotated[int, BeforeValidator(whole), Field(strict=True, ge=1, le=MAX_NUM_EMBEDDINGS)]
Positive: TypeAlias = Annotated[float, Field(strict=True, gt=0)]
NotNegative: TypeAlias = Annotated[float, Field(strict=True, ge=0)]
Flag: TypeAlias = Annotated[bool, Field(strict=True)]


class TableEntry(Section):
    """One embedding table, written in place."""

    name: Annotated[str, Field(min_length=1, strict=True)]
    num_embeddings: Rows
    pooling_factor: Annotated[float, Field(strict=True, ge=0, le=1e6)] = 1.0
    skew: Annotated[float, Field(strict=True, ge=0, le=5)] = 0.0
    embedding_dim: Width | None = None


TableList: TypeAlias = Annotated[list[TableEntry], Field(min_length=1, max_length=MAX_TABLES)]


def _ranks(value: Any) -> Any:
    """`8-15` means all of 8 to 15, both included; a single rank may stand without brackets.

    A range beyond all ranks is not written out, so that one mistake is told once.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return [value]
    found = re.fullmatch(r"\s*(\d{1,5})\s*-\s*(\d{1,5})\s*", value) if isinstance(value, str) else None
    if found is None:
        return value
    first, last = int(found[1]), int(found[2])
    return [last] if last >= MAX_WORLD_SIZE else list(range(first, last + 1))


RankList: TypeAlias = Annotated[list[Rank], BeforeValidator(_ranks), Field(min_length=1)]


class RankEntry(Section):
    """Ranks that differ from the others."""

    ranks: RankList
    slowness: Positive | None = None
    hbm_gib: Positive | None = None

    @model_validator(mode="after")
    def _something(self) -> RankEntry:
        if self.slowness is None and self.hbm_gib is None:
            raise ValueError("give `slowness`, `hbm_gib`, or both")
        return self


def _text_or_list(value: Any) -> str:
    return "text" if isinstance(value, str) else "list"


Tables: TypeAlias = Annotated[
    Annotated[str, Tag("text")] | Annotated[TableList, Tag("list")], Discriminator(_text_or_list)
]


class DeviceSection(Section):
    """A device of one's own; keys as in the catalogue."""

    name: str
    description: str = ""
    hbm_bytes: Positive
    hbm_bytes_per_s: Positive
    l2_bytes: Positive
    l2_bytes_per_s: Positive
    sm_count: Annotated[int, Field(strict=True, ge=1)]
    clock_hz: Positive
    fp32_flops_per_s: Positive
    tf32_flops_per_s: Positive
    bf16_flops_per_s: Positive
    h2d_bytes_per_s: Positive
    compute_capability: NotNegative = 0.0
    power_w: NotNegative = 0.0
    default_node: str | None = None
    cuda_names: list[str] = []
    sources: dict[str, str] = {}


class NodeSection(Section):
    """A node of one's own; keys as in the catalogue."""

    name: str
    description: str = ""
    device: str
    gpus: Annotated[int, Field(strict=True, ge=1, le=MAX_WORLD_SIZE)]
    intra_bytes_per_s: Positive
    intra_latency_us: Positive
    inter_bytes_per_s: Positive
    inter_latency_us: Positive
    host_memory_bytes: Positive
    price_per_gpu_hour: NotNegative = 0.0
    input_samples_per_s: Positive | None = None
    sources: dict[str, str] = {}


def _text_or_mapping(value: Any) -> str:
    return "text" if isinstance(value, str) else "mapping"


DeviceRef: TypeAlias = Annotated[
    Annotated[str, Tag("text")] | Annotated[DeviceSection, Tag("mapping")], Discriminator(_text_or_mapping)
]
NodeRef: TypeAlias = Annotated[
    Annotated[str, Tag("text")] | Annotated[NodeSection, Tag("mapping")], Discriminator(_text_or_mapping)
]


class DesignModel(Section):
    """Section `model` of a design."""

    num_dense_features: Width
    tables: Tables
    embedding_dim: Width
    bottom_hidden: Annotated[list[Width], Field(max_length=MAX_LAYERS)]
    top_hidden: Annotated[list[Width], Field(max_length=MAX_LAYERS)]
    interaction: Interaction = Interaction.DOT
    cross_layers: CrossLayers = 3
    cross_rank: Width = 512
    loss: Loss = Loss.BCE


class DesignTraining(Section):
    """Section `training` of a design."""

    global_batch: Batch
    precision: Precision = Precision.FP32
    optimizer: Literal["sgd", "adagrad", "adam"] = "sgd"
    table_optimizer: Optimizer = Optimizer.SGD
    table_precision: Literal["fp32", "bf16"] = "fp32"
    pinned_input: Flag = True
    read_loss: Flag = False
    synchronize: Flag = False
    index_dtype: IndexType = IndexType.INT64
    program: Program = Program.PYTORCH


class DesignFusion(Section):
    """Section `fusion` of a design."""

    embedding: EmbeddingFusion = EmbeddingFusion.TABLE_BATCHED
    mlp: MlpFusion = MlpFusion.EAGER
    interaction: InteractionFusion = InteractionFusion.EAGER
    optimizer: OptimizerFusion = OptimizerFusion.FOREACH
    launches: Launches = Launches.EAGER
    communication: Communication = Communication.OVERLAPPED


class PlacedTable(Section):
    """One table's placement, written in place."""

    table: str
    type: ShardingType
    ranks: Annotated[list[Rank], Field(min_length=1)]
    kernel: ComputeKernel = ComputeKernel.FUSED
    cache_ratio: Annotated[float, Field(strict=True, gt=0, le=1)] | None = None


class DesignSharding(Section):
    """Section `sharding` of a design: a policy for the solver, or the plan itself."""

    policy: Policy | None = None
    plan: Annotated[list[PlacedTable], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _one_of_them(self) -> DesignSharding:
        if self.policy is not None and self.plan is not None:
            raise ValueError("give `policy` or `plan`, not both")
        return self


class SystemSection(Section):
    """Where the job runs: a node, or a device and its usual node; and which ranks differ from that device."""

    node: NodeRef | None = None
    device: DeviceRef | None = None
    host_gib: Positive | None = None
    ranks: list[RankEntry] = Field(default_factory=list)

    @model_validator(mode="after")
    def _something(self) -> SystemSection:
        if self.node is None and self.device is None:
            raise ValueError("give `node`, `device`, or both")
        return self


class DesignSystem(SystemSection):
    """Section `system` of a design."""

    world_size: WorldSize = 1


class DesignFile(Section):
    """A design file."""

    model: DesignModel
    training: DesignTraining
    fusion: DesignFusion = DesignFusion()
    sharding: DesignSharding = DesignSharding()
    system: DesignSystem
