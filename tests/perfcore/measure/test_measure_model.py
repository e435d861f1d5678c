from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from measure_designs import EAGER, TABLES, small

from perfcore.design.design import Design
from perfcore.design.model import EmbeddingTable, Interaction, Loss
from perfcore.design.training import (
    EmbeddingFusion,
    InteractionFusion,
    MlpFusion,
    Optimizer,
    OptimizerFusion,
    Precision,
    Program,
)
from perfcore.errors import UnsupportedError
from perfcore.measure import table_batched
from perfcore.measure.batch import bag_lengths, zipf_rows
from perfcore.measure.model import build_model, make_batch, make_optimizers, numerics, train_step
from perfcore.measure.table_batched import has_fbgemm


def losses(design: Design, steps: int = 3) -> list[float]:
    model = build_model(design)
    optimizers = make_optimizers(model, design)
    batch = make_batch(design, rng=np.random.default_rng(1))
    with numerics(design):
        return [float(train_step(model, optimizers, batch)) for _ in range(steps)]


@pytest.mark.parametrize("interaction", Interaction)
@pytest.mark.parametrize("optimizer", [o for o in Optimizer if o is not Optimizer.ROWWISE_ADAGRAD])
def test_a_step_lowers_the_loss(interaction: Interaction, optimizer: Optimizer) -> None:
    first, *_, last = losses(small(interaction=interaction, optimizer=optimizer))
    assert last < first


@pytest.mark.parametrize("interaction", Interaction)
@pytest.mark.parametrize("optimizer", [Optimizer.SGD, Optimizer.ADAM])
@pytest.mark.parametrize(
    "change",
    [
        {"embedding": EmbeddingFusion.TABLE_BATCHED},
        {"mlp": MlpFusion.FUSED},
        {"interaction": InteractionFusion.FUSED},
        {"optimizer": OptimizerFusion.FOREACH},
        {"optimizer": OptimizerFusion.FUSED},
    ],
    ids=str,
)
def test_fusion_leaves_the_losses_alone(
    change: dict[str, object], interaction: Interaction, optimizer: Optimizer
) -> None:
    eager = small(interaction=interaction, optimizer=optimizer)
    fused = replace(eager, fusion=replace(EAGER, **change))
    assert losses(fused) == pytest.approx(losses(eager), rel=1e-5)


@pytest.mark.parametrize("table_optimizer", Optimizer)
@pytest.mark.parametrize("embedding", EmbeddingFusion)
def test_only_looked_up_rows_are_trained(
    table_optimizer: Optimizer, embedding: EmbeddingFusion, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_batched, "has_fbgemm", lambda: False)
    design = small(replace(EAGER, embedding=embedding), table_optimizer=table_optimizer)
    model, batch = build_model(design), make_batch(design, rng=np.random.default_rng(1))
    before = [bag.weight.detach().clone() for bag in model.bags]
    train_step(model, make_optimizers(model, design), batch)
    for bag, old, indices in zip(model.bags, before, batch.indices, strict=True):
        changed = (bag.weight.detach() != old).any(1).nonzero()[:, 0]
        assert set(changed.tolist()) == set(indices.tolist())


@pytest.mark.skipif(not has_fbgemm(), reason="needs FBGEMM")
@pytest.mark.parametrize("table_optimizer", [o for o in Optimizer if o is not Optimizer.ADAM])
def test_fbgemm_equals_one_bag_a_table(table_optimizer: Optimizer) -> None:
    eager = small(table_optimizer=table_optimizer)
    fused = replace(eager, fusion=replace(EAGER, embedding=EmbeddingFusion.TABLE_BATCHED))
    assert losses(fused) == pytest.approx(losses(eager), rel=1e-5)


def test_rowwise_adagrad_is_adagrad_for_one_column() -> None:
    designs = [
        small(interaction=Interaction.CAT, embedding_dim=1, table_optimizer=o)
        for o in (Optimizer.ADAGRAD, Optimizer.ROWWISE_ADAGRAD)
    ]
    exact, rowwise = map(losses, designs)
    assert rowwise == pytest.approx(exact, rel=1e-5)


@pytest.mark.parametrize("precision", [Precision.TF32, Precision.BF16])
@pytest.mark.parametrize("mlp", MlpFusion)
@pytest.mark.parametrize("interaction", InteractionFusion)
def test_precisions_agree_with_fp32(
    precision: Precision, mlp: MlpFusion, interaction: InteractionFusion
) -> None:
    fusion = replace(EAGER, mlp=mlp, interaction=interaction)
    assert losses(small(fusion, precision=precision)) == pytest.approx(losses(small()), rel=0.02)


@pytest.mark.parametrize("embedding", EmbeddingFusion)
def test_bf16_tables_agree_with_fp32(embedding: EmbeddingFusion) -> None:
    fusion = replace(EAGER, embedding=embedding)
    assert losses(small(fusion, table_precision=Precision.BF16)) == pytest.approx(losses(small()), rel=0.02)


def test_mse_differs_from_bce() -> None:
    assert losses(small(loss=Loss.MSE)) != losses(small())


def test_dot_interaction_against_a_loop() -> None:
    design = small()
    model, batch = build_model(design), make_batch(design, rng=np.random.default_rng(1))
    dense = model.bottom(batch.dense)
    pooled = [b(i, o) for b, i, o in zip(model.bags, batch.indices, batch.offsets, strict=True)]
    features = [dense, *pooled]
    pairs = [(features[i] * features[j]).sum(1) for i in range(4) for j in range(i)]
    expected = torch.cat([dense, torch.stack(pairs, dim=1)], dim=1)
    torch.testing.assert_close(model.interaction(dense, pooled), expected)


def test_more_than_one_rank_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="one device, but got world_size=8"):
        build_model(small(world_size=8))


def test_a_published_program_is_predicted_and_not_run() -> None:
    fusion = replace(EAGER, embedding=EmbeddingFusion.TABLE_BATCHED, optimizer=OptimizerFusion.FOR_LOOP)
    with pytest.raises(
        UnsupportedError, match="`program: pytorch` alone is run, but got program=dlrm_script"
    ):
        build_model(small(fusion, program=Program.DLRM_SCRIPT))


def test_batched_tables_of_several_dims_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_batched, "has_fbgemm", lambda: False)
    tables = (TABLES[0], EmbeddingTable("wide", 5, embedding_dim=4))
    design = small(
        replace(EAGER, embedding=EmbeddingFusion.TABLE_BATCHED), interaction=Interaction.CAT, tables=tables
    )
    with pytest.raises(UnsupportedError, match=r"one embedding_dim, but got \[4, 8\]"):
        build_model(design)


@given(
    rows=st.integers(1, 10**12),
    skew=st.floats(0, 5),
    lookups=st.integers(0, 200),
    seed=st.integers(0, 99),
)
@settings(max_examples=50, deadline=None)
def test_rows_lie_in_their_table(rows: int, skew: float, lookups: int, seed: int) -> None:
    drawn = zipf_rows(EmbeddingTable("t", rows, 1.0, skew), lookups, rng=np.random.default_rng(seed))
    assert drawn.shape == (lookups,)
    assert lookups == 0 or (drawn.min() >= 0 and drawn.max() < rows)


@given(pooling=st.floats(0, 50), bags=st.integers(1, 300))
@settings(max_examples=50, deadline=None)
def test_bags_are_even_and_exact(pooling: float, bags: int) -> None:
    lengths = bag_lengths(pooling, bags)
    assert lengths.sum() == round(pooling * bags)
    assert lengths.max() - lengths.min() <= 1


def test_skew_makes_the_first_rows_hot() -> None:
    uniform, skewed = (
        zipf_rows(EmbeddingTable("t", 1000, 1.0, s), 4000, rng=np.random.default_rng(0)) for s in (0.0, 1.1)
    )
    assert (skewed < 10).mean() > 0.2
    assert (uniform < 10).mean() < 0.03
