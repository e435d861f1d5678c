"""Texts where members of enumerations belong are refused: no `is` would hold for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from perfcore.design.model import EmbeddingTable, Model
from perfcore.design.sharding import ShardingType, TableSharding
from perfcore.design.training import Fusion, Launches, Precision, Training
from perfcore.errors import DesignError


def model(**other: Any) -> Model:
    return Model(13, (EmbeddingTable("a", 10),), 4, (), (), **other)


def sharding(**other: Any) -> TableSharding:
    return TableSharding("a", **({"type": ShardingType.TABLE_WISE, "ranks": (0,)} | other))


def training(**other: Any) -> Training:
    return Training(8, **other)


@pytest.mark.parametrize(
    ("build", "name", "value", "kind"),
    [
        (Fusion, "embedding", "per_table", "EmbeddingFusion"),
        (Fusion, "mlp", "fused", "MlpFusion"),
        (Fusion, "interaction", "fused", "InteractionFusion"),
        (Fusion, "optimizer", "fused", "OptimizerFusion"),
        (Fusion, "launches", "cuda_graph", "Launches"),
        (Fusion, "communication", "serial", "Communication"),
        (training, "precision", "bf16", "Precision"),
        (training, "optimizer", "adam", "Optimizer"),
        (training, "table_optimizer", "adam", "Optimizer"),
        (training, "table_precision", "bf16", "Precision"),
        (training, "index_dtype", "int32", "IndexType"),
        (model, "interaction", "cat", "Interaction"),
        (model, "loss", "mse", "Loss"),
        (sharding, "type", "table_wise", "ShardingType"),
        (sharding, "kernel", "dense", "ComputeKernel"),
    ],
)
def test_a_text_is_no_choice(build: Callable[..., object], name: str, value: str, kind: str) -> None:
    with pytest.raises(DesignError, match=f"`{name}` must be a member of {kind}, but got '{value}'"):
        build(**{name: value})


def test_members_are_choices() -> None:
    assert Fusion(launches=Launches.CUDA_GRAPH).launches is Launches.CUDA_GRAPH
    assert training(precision=Precision.BF16).precision is Precision.BF16
