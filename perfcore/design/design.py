"""A design: everything a prediction needs, as one frozen value that reads from and writes to JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from perfcore.design.hardware import Device, Node, System, from_mapping
from perfcore.design.model import EmbeddingTable, Interaction, Loss, Model
from perfcore.design.sharding import (
    ON_HOST,
    ComputeKernel,
    ShardingPlan,
    ShardingType,
    TableSharding,
    shards_of,
)
from perfcore.design.training import (
    Communication,
    EmbeddingFusion,
    Fusion,
    IndexType,
    InteractionFusion,
    Launches,
    MlpFusion,
    Optimizer,
    OptimizerFusion,
    Precision,
    Program,
    Training,
)
from perfcore.errors import DesignError


@dataclass(frozen=True, slots=True)
class Design:
    """Model, training, fusion, placement and hardware of one training job."""

    model: Model
    training: Training
    fusion: Fusion
    sharding: ShardingPlan
    system: System

    def __post_init__(self) -> None:
        """Refuse combinations that no job can run."""
        world_size, batch = self.system.world_size, self.training.global_batch
        if batch % world_size:
            raise DesignError(
                f"`global_batch % world_size == 0` must hold, but got (global_batch={batch}, {world_size=})."
            )
        local = self.system.local_world_size
        shards_of(self.sharding, self.model, world_size=world_size, local_world_size=local)
        on_host = [t for t in self.sharding.tables if t.kernel in ON_HOST]
        if on_host and self.fusion.embedding is not EmbeddingFusion.TABLE_BATCHED:
            raise DesignError(
                f"Tables in host memory need `embedding: table_batched`, but table {on_host[0].table!r} has the "
                f"kernel {on_host[0].kernel} and embedding={self.fusion.embedding}."
            )
        _check_program(self)

    @property
    def local_batch(self) -> int:
        """Samples per rank."""
        return self.training.global_batch // self.system.world_size

    def with_system(self, system: System) -> Design:
        """The same job on other hardware of the same world size."""
        return replace(self, system=system)


# What a published program has, by section and key.
PROGRAMS: dict[Program, dict[str, dict[str, object]]] = {
    Program.DLRM_SCRIPT: {
        "model": {"interaction": Interaction.DOT},
        "training": {
            "precision": Precision.FP32,
            "optimizer": Optimizer.SGD,
            "table_optimizer": Optimizer.SGD,
            "table_precision": Precision.FP32,
        },
        "fusion": {
            "embedding": EmbeddingFusion.TABLE_BATCHED,
            "mlp": MlpFusion.EAGER,
            "interaction": InteractionFusion.EAGER,
            "optimizer": OptimizerFusion.FOR_LOOP,
            "launches": Launches.EAGER,
        },
        "system": {"world_size": 1},
    },
    Program.NVIDIA_EXAMPLE: {
        "model": {"interaction": Interaction.DOT},
        "training": {
            "optimizer": Optimizer.SGD,
            "table_optimizer": Optimizer.SGD,
            "table_precision": Precision.FP32,
            "pinned_input": True,
        },
        "fusion": {
            "embedding": EmbeddingFusion.TABLE_BATCHED,
            "mlp": MlpFusion.EAGER,
            "interaction": InteractionFusion.FUSED,
            "optimizer": OptimizerFusion.FUSED,
        },
        "system": {"world_size": 1},
    },
}


def _check_program(design: Design) -> None:
    program = design.training.program
    for section, settings in PROGRAMS.get(program, {}).items():
        for key, needed in settings.items():
            got = getattr(getattr(design, section), key)
            if got != needed:
                raise DesignError(
                    f"`program: {program}` needs `{key}: {needed}`, but got {key}={got}.",
                    hint="`program: pytorch` takes every combination.",
                )
    if program is Program.PYTORCH:
        return
    if any(t.kernel is not ComputeKernel.FUSED for t in design.sharding.tables):
        raise DesignError(f"`program: {program}` needs `kernel: fused` for every table.")
    pooled = [t for t in design.model.tables if t.pooling_factor != 1.0]
    if program is Program.NVIDIA_EXAMPLE and pooled:
        raise DesignError(
            f"`program: {program}` needs one lookup a sample, but table {pooled[0].name!r} has "
            f"pooling_factor={pooled[0].pooling_factor}."
        )


def to_dict(design: Design) -> dict[str, Any]:
    """Plain JSON values; `from_dict` is its inverse."""
    plain: dict[str, Any] = _plain(asdict(design))
    return plain


def from_dict(data: Mapping[str, Any]) -> Design:
    """A design from plain JSON values.

    Raises:
        DesignError, HardwareError: a key is missing or unknown, or a value is impossible.
    """
    try:
        model, training, fusion = dict(data["model"]), dict(data["training"]), dict(data["fusion"])
        return Design(
            model=_model(model),
            training=_training(training),
            fusion=_fusion(fusion),
            sharding=ShardingPlan(tuple(_table_sharding(t) for t in data["sharding"]["tables"])),
            system=System(
                device=from_mapping(Device, data["system"]["device"]),
                node=from_mapping(Node, data["system"]["node"]),
                world_size=data["system"]["world_size"],
                slowness=tuple(data["system"].get("slowness", ())),
                hbm_bytes=tuple(data["system"].get("hbm_bytes", ())),
            ),
        )
    except KeyError as err:
        raise DesignError(f"A design needs the key {err.args[0]!r}, but it is missing.") from None
    except TypeError as err:
        raise DesignError(f"A design's keys do not fit: {err}.") from None


def _model(data: dict[str, Any]) -> Model:
    return Model(
        **data
        | {
            "tables": tuple(EmbeddingTable(**t) for t in data["tables"]),
            "bottom_hidden": tuple(data["bottom_hidden"]),
            "top_hidden": tuple(data["top_hidden"]),
            "interaction": _member(Interaction, data["interaction"]),
            "loss": _member(Loss, data["loss"]),
        }
    )


def _training(data: dict[str, Any]) -> Training:
    kinds = {
        "precision": Precision,
        "optimizer": Optimizer,
        "table_optimizer": Optimizer,
        "table_precision": Precision,
        "index_dtype": IndexType,
        "program": Program,
    }
    return Training(**data | {k: _member(kind, data[k]) for k, kind in kinds.items() if k in data})


def _fusion(data: dict[str, Any]) -> Fusion:
    kinds = {
        "embedding": EmbeddingFusion,
        "mlp": MlpFusion,
        "interaction": InteractionFusion,
        "optimizer": OptimizerFusion,
        "launches": Launches,
        "communication": Communication,
    }
    return Fusion(**data | {k: _member(kind, data[k]) for k, kind in kinds.items() if k in data})


def _table_sharding(data: Mapping[str, Any]) -> TableSharding:
    return TableSharding(
        table=data["table"],
        type=_member(ShardingType, data["type"]),
        ranks=tuple(int(r) for r in data["ranks"]),
        kernel=_member(ComputeKernel, data.get("kernel", ComputeKernel.FUSED)),
        cache_ratio=data.get("cache_ratio"),
    )


def _member(kind: Any, value: Any) -> Any:
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(m.value for m in kind)
        raise DesignError(f"`{kind.__name__}` must be one of {known}, but got {value!r}.") from None


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value.value if hasattr(value, "value") else value
