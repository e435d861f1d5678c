from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from perfcore.design.design import Design
from perfcore.design.hardware import Device, Node, System
from perfcore.design.model import EmbeddingTable, Interaction, Model
from perfcore.design.sharding import ShardingPlan, ShardingType, Shards, TableSharding
from perfcore.design.training import (
    EmbeddingFusion,
    Fusion,
    InteractionFusion,
    MlpFusion,
    Optimizer,
    Precision,
    Training,
)
from perfcore.graph.dims import Dims, dims_of, structure_of
from perfcore.graph.kernels import Total
from perfcore.measure.model import build_model, make_batch, make_optimizers, train_step
from perfcore.memory import (
    KINDS,
    MemoryOfGrid,
    dense_parameters,
    framework_reserve,
    interaction_width,
    memory_of,
    memory_terms,
)

DEVICE = Device("test", "a test device", 16e9, 1e12, 6e6, 3e12, 80, 1.5e9, 1e13, 1e13, 1e14, 1e10)
NODE = Node("test", "a test node", "test", 8, 1e11, 5.0, 1e10, 10.0, 1e12)


def design(
    *,
    batch: int = 64,
    dim: int = 16,
    bottom: tuple[int, ...] = (32, 24),
    top: tuple[int, ...] = (48, 40),
    rows: tuple[int, ...] = (100, 50, 70),
    interaction: Interaction = Interaction.DOT,
    world_size: int = 1,
    plan: ShardingPlan | None = None,
    fusion: Fusion | None = None,
    **training: object,
) -> Design:
    tables = tuple(EmbeddingTable(f"t{i}", r, pooling_factor=2.0) for i, r in enumerate(rows))
    model = Model(13, tables, dim, bottom, top, interaction, cross_layers=3, cross_rank=8)
    return Design(
        model=model,
        training=Training(batch, **training),  # type: ignore[arg-type]
        fusion=fusion or Fusion(),
        sharding=plan or ShardingPlan.on_one_rank(model),
        system=System(DEVICE, NODE, world_size),
    )


def saved_bytes(d: Design) -> int:
    """Bytes of floating-point tensors that autograd saves in a forward pass, weights and batch left out."""
    model, batch = build_model(d), make_batch(d, rng=np.random.default_rng(0))
    known = [*model.parameters(), *model.buffers(), batch.dense, batch.labels, *batch.indices, *batch.offsets]
    owned = {t.untyped_storage().data_ptr() for t in known}
    held: dict[int, torch.Tensor] = {}  # kept alive, so that no address is used twice

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype.is_floating_point and tensor.untyped_storage().data_ptr() not in owned:
            held[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        assert model.loss(model(batch), batch.labels).requires_grad
    return sum(t.untyped_storage().nbytes() for t in held.values())


@pytest.mark.parametrize("interaction", list(Interaction))
@pytest.mark.parametrize("hidden", [((32, 24), (48, 40)), ((), ()), ((7,), (64, 32, 16))])
def test_parameters_equal_those_of_a_real_module(
    interaction: Interaction, hidden: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    d = design(interaction=interaction, bottom=hidden[0], top=hidden[1])
    counted = dense_parameters(dims_of([d]), structure_of(d)).value()
    model = build_model(d)
    assert counted.item() == sum(p.numel() for p in set(model.parameters()) - set(model.bags.parameters()))


@pytest.mark.parametrize("interaction", list(Interaction))
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
@pytest.mark.parametrize("fused", [True, False])
def test_activations_equal_what_autograd_saves(
    interaction: Interaction, precision: Precision, *, fused: bool
) -> None:
    fusion = Fusion(interaction=InteractionFusion.FUSED if fused else InteractionFusion.EAGER)
    d = design(batch=512, interaction=interaction, precision=precision, fusion=fusion)
    outputs = 512 * 3 * 16 * 4  # the embedding outputs are alive beside what is saved
    # Autograd has no use for the bf16 copies of biases and of the first layer's weight, which are counted too.
    copies = 2 * (32 + 24 + 16 + 48 + 40 + 1 + 13 * 32) * (precision is Precision.BF16)
    saved = memory_of(d).activations[0] - outputs - copies
    assert saved == pytest.approx(saved_bytes(d), rel=1e-3)


def test_tables_and_their_optimizer_state() -> None:
    base = framework_reserve().state_bytes * (100 + 50 + 70)
    by_optimizer = {
        optimizer: memory_of(design(table_optimizer=optimizer)).optimizer_state[0] for optimizer in Optimizer
    }
    assert by_optimizer == {
        Optimizer.SGD: 0,
        Optimizer.ROWWISE_ADAGRAD: base,
        Optimizer.ADAGRAD: base * 16,
        Optimizer.ADAM: base * 16 * 2,
    }
    narrow, wide = (memory_of(design(table_precision=p)).weights[0] for p in (Precision.BF16, Precision.FP32))
    assert wide - narrow == 220 * 16 * 2


def test_dense_adam_state_equals_that_of_torch() -> None:
    d = design(optimizer=Optimizer.ADAM)
    model = build_model(d)
    optimizers = make_optimizers(model, d)
    train_step(model, optimizers, make_batch(d, rng=np.random.default_rng(0)))
    moments = [v for s in optimizers[0].state.values() for k, v in s.items() if k != "step"]
    assert memory_of(d).optimizer_state[0] == sum(v.numel() * v.element_size() for v in moments)


def test_sparse_gradients_equal_those_of_torch() -> None:
    d = design(fusion=Fusion(embedding=EmbeddingFusion.PER_TABLE))
    sparse = 0
    for table in d.model.tables:
        bag = torch.nn.EmbeddingBag(table.num_embeddings, 16, mode="sum", sparse=True)
        bag(torch.zeros(64 * 2, dtype=torch.long), torch.arange(0, 128, 2)).sum().backward()
        gradient = bag.weight.grad
        assert gradient is not None
        sparse += sum(t.numel() * t.element_size() for t in (gradient._values(), gradient._indices()))
    fused = memory_of(design()).gradients[0]
    assert memory_of(d).gradients[0] - fused == sparse


def two_ranks(kind: ShardingType, ranks: tuple[int, ...]) -> ShardingPlan:
    return ShardingPlan(tuple(TableSharding(f"t{i}", kind, ranks) for i in range(3)))


@pytest.mark.parametrize("kind", [ShardingType.COLUMN_WISE, ShardingType.ROW_WISE])
def test_split_tables_add_up_to_the_whole(kind: ShardingType) -> None:
    split = memory_of(design(world_size=2, plan=two_ranks(kind, (0, 1))))
    whole = memory_of(design(world_size=2))
    dense = dense_parameters(dims_of([design()]), structure_of(design())).value().item() * 4
    assert (split.weights - dense).sum() == pytest.approx((whole.weights - dense).sum())
    np.testing.assert_allclose(split.activations, whole.activations)
    np.testing.assert_allclose(split.input, whole.input)
    assert whole.fullest(design(world_size=2).system)[0] == 0


def test_a_replicated_table_costs_its_gradient_and_bucket_on_every_rank() -> None:
    copies = memory_of(design(world_size=2, plan=two_ranks(ShardingType.DATA_PARALLEL, (0, 1))))
    alone = memory_of(design(world_size=2))
    table = 220 * 16 * 4
    np.testing.assert_allclose(copies.weights[1] - alone.weights[1], table)
    np.testing.assert_allclose(copies.gradients - alone.gradients, table)
    np.testing.assert_allclose(copies.communication[1] - alone.communication[1], table)


def test_shortfall() -> None:
    d = design(rows=(400_000_000, 50, 70))
    memory = memory_of(d)
    large = replace(d.system, device=replace(DEVICE, hbm_bytes=float(memory.total.max())))
    assert memory.shortfall_bytes(large) == 0
    assert memory.shortfall_bytes(d.system) == memory.total.max() - 16e9
    assert sum(memory.by_kind(0).values()) == pytest.approx(memory.total[0])


designs = st.builds(
    design,
    batch=st.integers(1, 512).map(lambda b: 2 * b),
    dim=st.integers(1, 64),
    bottom=st.lists(st.integers(1, 200), max_size=3).map(tuple),
    top=st.lists(st.integers(1, 200), max_size=3).map(tuple),
    interaction=st.sampled_from(Interaction),
    world_size=st.just(2),
    precision=st.sampled_from(Precision),
    optimizer=st.sampled_from([o for o in Optimizer if o is not Optimizer.ROWWISE_ADAGRAD]),
    table_optimizer=st.sampled_from(Optimizer),
)


@given(designs)
@settings(deadline=None, max_examples=50)
def test_terms_add_up_to_the_breakdown(d: Design) -> None:
    terms = memory_terms(dims_of([d]), structure_of(d))
    total = sum(t.value() if isinstance(t, Total) else t for t in terms.values())
    np.testing.assert_allclose(np.broadcast_to(total, (1, 2))[0], memory_of(d).total)
    for kind in KINDS:
        assert (getattr(memory_of(d), kind) >= 0).all()


@given(designs, st.sampled_from(["batch", "bottom", "top", "rows"]))
@settings(deadline=None, max_examples=50)
def test_more_never_needs_less(d: Design, what: str) -> None:
    model, training = d.model, d.training
    wider = {
        "batch": replace(d, training=replace(training, global_batch=training.global_batch * 2)),
        "bottom": replace(d, model=replace(model, bottom_hidden=tuple(2 * w for w in model.bottom_hidden))),
        "top": replace(d, model=replace(model, top_hidden=tuple(w + 1 for w in model.top_hidden))),
        "rows": replace(
            d,
            model=replace(
                model,
                tables=tuple(replace(t, num_embeddings=t.num_embeddings + 1) for t in model.tables),
            ),
        ),
    }[what]
    assert (memory_of(wider).total >= memory_of(d).total).all()


@given(
    st.lists(st.integers(1, 64).map(lambda b: 2 * b), min_size=1, max_size=3),
    st.lists(st.integers(0, 64), min_size=1, max_size=3),
    st.lists(st.integers(1, 64), min_size=1, max_size=3),
    st.sampled_from(Interaction),
)
@settings(deadline=None, max_examples=30)
def test_a_grid_equals_one_by_one(
    batches: list[int], firsts: list[int], dims: list[int], interaction: Interaction
) -> None:
    """Axes (batch, first bottom width with 0 for an absent layer, embedding_dim, rank)."""
    first = design(world_size=2, interaction=interaction)
    one = dims_of([first])
    grid = Dims(
        global_batch=np.array(batches, dtype=float)[:, None, None, None],
        world_size=np.full((1, 1, 1, 1), 2.0),
        local_world_size=np.full((1, 1, 1, 1), 2.0),
        num_dense_features=13,
        embedding_dim=np.array(dims, dtype=float)[:, None],
        bottom_hidden=(np.array(firsts, dtype=float)[:, None, None], np.full((1, 1, 1, 1), 24.0)),
        top_hidden=tuple(np.full((1, 1, 1, 1), w) for w in (48.0, 40.0)),
        cross_rank=np.full((1, 1, 1, 1), 8.0),
        shards=Shards(
            **{
                name: getattr(one.shards, name)[None, None]
                for name in Shards.__dataclass_fields__
                if name != "dim"
            },
            dim=one.shards.dim[None, None] / 16 * np.array(dims, dtype=float)[:, None, None],
        ),
    )
    terms = memory_terms(grid, structure_of(first))
    assert all(
        len(batches) == 1 or np.shape(t)[0] == 1
        for t in dense_parameters(grid, structure_of(first)).terms
        if np.ndim(t) == 4
    )
    total = np.asarray(sum(t.value() if isinstance(t, Total) else t for t in terms.values()))
    for index in np.ndindex(len(batches), len(firsts), len(dims)):
        b, w, e = (values[i] for values, i in zip((batches, firsts, dims), index, strict=True))
        d = design(batch=b, bottom=(w, 24) if w else (24,), dim=e, world_size=2, interaction=interaction)
        np.testing.assert_allclose(total[index], memory_of(d).total)


def test_widths_of_the_interaction() -> None:
    widths = {
        kind: interaction_width(dims_of([design(interaction=kind)]), structure_of(design(interaction=kind)))
        for kind in Interaction
    }
    assert {kind: width.item() for kind, width in widths.items()} == {
        Interaction.DOT: 16 + 6,
        Interaction.CAT: 64,
        Interaction.DCN_V2: 64,
    }


def test_structures_that_memory_cannot_tell_apart_share_their_terms() -> None:
    first = design()
    dims, own = dims_of([first]), structure_of(first)
    fused = replace(own, fusion=replace(own.fusion, mlp=MlpFusion.FUSED), read_loss=not own.read_loss)
    wide = replace(own, precision=Precision.BF16)
    remembered = MemoryOfGrid()
    assert remembered(dims, own) is remembered(dims, fused)
    for structure in (own, fused, wide):
        known, fresh = remembered(dims, structure), memory_terms(dims, structure)
        assert known.keys() == fresh.keys()
        for name, term in fresh.items():
            ours = known[name]
            values = [t.value() if isinstance(t, Total) else t for t in (ours, term)]
            np.testing.assert_array_equal(*values)
    assert remembered(dims, wide) is not remembered(dims, own)
    assert remembered(dims_of([first]), own) is not remembered(dims, own)  # another grid
