from __future__ import annotations

import itertools
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
from perfcore.design.training import EmbeddingFusion, Fusion, Optimizer, Precision, Training
from perfcore.graph.dims import Dims, dims_of, structure_of
from perfcore.graph.kernels import Total
from perfcore.memory import (
    KINDS,
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


class Dlrm(torch.nn.Module):
    """A plain DLRM, written for the tests."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        width = {
            Interaction.DOT: model.embedding_dim + (len(model.tables) + 1) * len(model.tables) // 2,
            Interaction.CAT: model.embedding_dim * (len(model.tables) + 1),
            Interaction.DCN_V2: model.embedding_dim * (len(model.tables) + 1),
        }[model.interaction]
        self.kind = model.interaction
        self.bottom = self._mlp((model.num_dense_features, *model.bottom_hidden, model.embedding_dim))
        self.top = self._mlp((width, *model.top_hidden, 1), last=torch.nn.Sigmoid())
        crosses = model.cross_layers if self.kind is Interaction.DCN_V2 else 0
        self.v = torch.nn.ModuleList(
            torch.nn.Linear(width, model.cross_rank, bias=False) for _ in range(crosses)
        )
        self.w = torch.nn.ModuleList(torch.nn.Linear(model.cross_rank, width) for _ in range(crosses))

    @staticmethod
    def _mlp(widths: tuple[int, ...], last: torch.nn.Module | None = None) -> torch.nn.Sequential:
        layers: list[torch.nn.Module] = []
        for a, b in itertools.pairwise(widths):
            layers += [torch.nn.Linear(a, b), torch.nn.ReLU()]
        return torch.nn.Sequential(*layers[:-1], last or layers[-1])

    def forward(self, dense: torch.Tensor, embedded: list[torch.Tensor]) -> torch.Tensor:
        x = self.bottom(dense)
        z = torch.cat([x, *embedded], dim=1)
        if self.kind is Interaction.DOT:
            t = z.view(len(x), -1, x.shape[1])
            products = torch.bmm(t, t.transpose(1, 2))
            i, j = torch.tril_indices(t.shape[1], t.shape[1], offset=-1)
            z = torch.cat([x, products[:, i, j]], dim=1)
        z0 = z
        for v, w in zip(self.v, self.w, strict=True):
            z = z0 * w(v(z)) + z
        out: torch.Tensor = self.top(z)
        return out


def saved_bytes(d: Design, *, autocast: bool = False) -> tuple[int, int]:
    """Bytes that autograd saves for the dense part (parameters left out), and its number of parameters."""
    torch.manual_seed(0)
    module, storages = Dlrm(d.model), {}
    owned = {p.untyped_storage().data_ptr() for p in module.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in owned and tensor.dtype.is_floating_point:
            storages[storage.data_ptr()] = storage.nbytes()
            held.append(tensor)  # so that no address is used twice
        return tensor

    held: list[torch.Tensor] = []
    batch, dim = d.training.global_batch, d.model.embedding_dim
    dense = torch.randn(batch, d.model.num_dense_features)
    embedded = [torch.randn(batch, dim, requires_grad=True) for _ in d.model.tables]
    owned |= {dense.untyped_storage().data_ptr()}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            out = module(dense, embedded)
        loss = torch.nn.functional.binary_cross_entropy(out.float(), torch.rand(batch, 1))
    assert loss.requires_grad
    return sum(storages.values()), sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize("interaction", list(Interaction))
@pytest.mark.parametrize("hidden", [((32, 24), (48, 40)), ((), ()), ((7,), (64, 32, 16))])
def test_parameters_equal_those_of_a_real_module(
    interaction: Interaction, hidden: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    d = design(interaction=interaction, bottom=hidden[0], top=hidden[1])
    counted = dense_parameters(dims_of([d]), structure_of(d)).value()
    assert counted.item() == saved_bytes(d)[1]


@pytest.mark.parametrize("interaction", list(Interaction))
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
def test_activations_equal_what_autograd_saves(interaction: Interaction, precision: Precision) -> None:
    d = design(batch=512, interaction=interaction, precision=precision)
    outputs = 512 * 3 * 16 * 4  # the embedding outputs are alive beside what is saved
    predicted = memory_of(d).activations[0] - outputs
    assert predicted == pytest.approx(saved_bytes(d, autocast=precision is Precision.BF16)[0], rel=0.03)


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
    module = Dlrm(d.model)
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.randn(64, 13), [torch.randn(64, 16) for _ in range(3)]).sum().backward()
    optimizer.step()
    moments = (v for s in optimizer.state.values() for k, v in s.items() if k != "step")
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
    assert whole.peak_rank == 0


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
    small, large = DEVICE, replace(DEVICE, hbm_bytes=float(memory.total.max()))
    assert memory.fits(large)
    assert not memory.fits(small)
    assert memory.shortfall_bytes(small) == memory.total.max() - 16e9
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
