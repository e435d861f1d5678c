"""The real PyTorch DLRM of a design, as the reference implementation structures and trains it.

Bottom MLP: ReLU after every layer; top MLP: ReLU after every layer but the last, which has a sigmoid.
One step is: copy the batch, forward (bottom MLP, embeddings, interaction, top MLP), loss, `zero_grad`
(to none), backward, step of the dense part's optimizer, step of the tables'.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from perfcore.design.design import Design
from perfcore.design.model import Interaction, Loss, Model
from perfcore.design.training import EmbeddingFusion, InteractionFusion, MlpFusion, Precision, Program
from perfcore.errors import UnsupportedError
from perfcore.measure.batch import Batch, make_batch
from perfcore.measure.layers import (
    CatInteraction,
    CrossInteraction,
    DotInteraction,
    FusedLinearReLU,
    linear,
)
from perfcore.measure.optimizers import dense_optimizer, table_optimizer
from perfcore.measure.table_batched import FusedTables, draw_tables, uses_fbgemm

__all__ = ["Batch", "Dlrm", "build_model", "make_batch", "make_optimizers", "numerics", "train_step"]


class Dlrm(nn.Module):
    """A DLRM on one device; `build_model` makes one.

    Attributes:
        device: where it lies.
        bf16: the forward pass runs under `torch.autocast`.
    """

    def __init__(
        self,
        design: Design,
        *,
        device: str,
        generator: torch.Generator,
        bags: Sequence[nn.Module] | None = None,
    ) -> None:
        super().__init__()
        model, fusion = design.model, design.fusion
        self.device, self.bf16 = torch.device(device), design.training.precision is Precision.BF16
        self.reads_loss = design.training.read_loss
        fused = fusion.mlp is MlpFusion.FUSED
        widths = (model.num_dense_features, *model.bottom_hidden, model.embedding_dim)
        self.bottom = nn.Sequential(*_relu_layers(widths, fused=fused, device=device, generator=generator))
        if bags is None:
            bags = _bags(design, device=device, generator=generator)
        self.bags = nn.ModuleList(bags)
        self.interaction = _interaction(design, device=device, generator=generator)
        widths = (interaction_width(model), *model.top_hidden)
        self.top = nn.Sequential(
            *_relu_layers(widths, fused=fused, device=device, generator=generator),
            linear(widths[-1], 1, device=device, generator=generator),
        )
        self.loss = nn.BCELoss() if model.loss is Loss.BCE else nn.MSELoss()

    def forward(self, batch: Batch) -> Tensor:
        """Click probabilities, `(b, 1)` float32."""
        with torch.autocast(self.device.type, torch.bfloat16) if self.bf16 else contextlib.nullcontext():
            logits = self.logits(batch)
        # `BCELoss` refuses autocast: the sigmoid and the loss run in float32.
        return torch.sigmoid(logits.float())

    def logits(self, batch: Batch) -> Tensor:
        """Before the sigmoid, `(b, 1)`."""
        dense = self.bottom(batch.dense)
        pooled = [
            bag(indices, offsets)
            for bag, indices, offsets in zip(self.bags, batch.indices, batch.offsets, strict=True)
        ]
        if len(pooled[0]) != len(dense):  # one bag of all tables, sample by sample
            pooled = [pooled[0].view(len(dense), -1)]
        if pooled[0].dtype is not torch.float32:
            pooled = [p.float() for p in pooled]
        out: Tensor = self.top(self.interaction(dense, pooled))
        return out

    def finish_gradients(self) -> None:
        """Nothing: one device has all of its gradients when the backward pass ends."""


def build_model(design: Design, *, device: str = "cpu", seed: int = 0) -> Dlrm:
    """The design's model; equal seeds give equal weights whatever the fusion.

    Raises:
        UnsupportedError: more than one rank, another program, or a fusion that this machine's torch does not have.
    """
    if design.training.program is not Program.PYTORCH:
        raise UnsupportedError(f"`program: pytorch` alone is run, but got program={design.training.program}.")
    if design.system.world_size != 1:
        raise UnsupportedError(
            f"A model is built for one device, but got world_size={design.system.world_size}.",
            hint="Measure the design reduced to one device.",
        )
    return Dlrm(design, device=device, generator=torch.Generator(device).manual_seed(seed))


def make_optimizers(model: Dlrm, design: Design) -> tuple[torch.optim.Optimizer, ...]:
    """The dense part's optimizer, then the tables', unless their backward pass updates them."""
    tables = set(model.bags.parameters())
    dense = dense_optimizer([p for p in model.parameters() if p not in tables], design)
    if uses_fbgemm(design):
        return (dense,)
    return dense, table_optimizer(model.bags.parameters(), design)


def train_step(model: Dlrm, optimizers: tuple[torch.optim.Optimizer, ...], batch: Batch) -> Tensor:
    """One training iteration; returns the loss, a scalar tensor on the device that nobody has waited for."""
    batch = batch.to(model.device)
    loss: Tensor = model.loss(model(batch), batch.labels)
    if model.reads_loss:
        loss.item()
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    model.finish_gradients()
    for optimizer in optimizers:
        optimizer.step()
    return loss.detach()


def numerics(design: Design) -> contextlib.AbstractContextManager[None]:
    """Run with TF32 tensor cores exactly where the design's precision is `tf32`."""
    return tf32_products(allowed=design.training.precision is Precision.TF32)


@contextlib.contextmanager
def tf32_products(*, allowed: bool) -> Iterator[None]:
    """Let fp32 matrix products run on TF32 tensor cores, or not; what was set before comes back."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def interaction_width(model: Model) -> int:
    """Columns of the interaction's output."""
    if model.interaction is Interaction.DOT:
        features = len(model.tables) + 1
        return model.embedding_dim + features * (features - 1) // 2
    return model.embedding_dim + sum(model.table_dims)


def _relu_layers(
    widths: tuple[int, ...], *, fused: bool, device: str, generator: torch.Generator
) -> Iterator[nn.Module]:
    for n_in, n_out in pairwise(widths):
        layer = linear(n_in, n_out, device=device, generator=generator)
        if fused:
            yield FusedLinearReLU(layer)
        else:
            yield from (layer, nn.ReLU())


def _bags(design: Design, *, device: str, generator: torch.Generator) -> Sequence[nn.Module]:
    model = design.model
    rows = [t.num_embeddings for t in model.tables]
    shapes = list(zip(rows, model.table_dims, strict=True))
    if uses_fbgemm(design):
        optimizer = design.training.table_optimizer
        return [FusedTables(shapes, optimizer=optimizer, device=device, generator=generator)]
    batched = design.fusion.embedding is EmbeddingFusion.TABLE_BATCHED
    if batched:
        if len(set(model.table_dims)) > 1:
            raise UnsupportedError(
                f"Tables in one bag need one embedding_dim, but got {sorted(set(model.table_dims))}.",
                hint="Use fusion.embedding=per_table.",
            )
        shapes = [(sum(rows), model.table_dims[0])]
    dtype = torch.bfloat16 if design.training.table_precision is Precision.BF16 else torch.float32
    weights = [torch.empty(shape, device=device, dtype=dtype) for shape in shapes]
    tables = torch.split(weights[0], rows) if batched else weights
    draw_tables(tables, generator=generator)
    return [nn.EmbeddingBag.from_pretrained(w, freeze=False, mode="sum", sparse=True) for w in weights]


def _interaction(design: Design, *, device: str, generator: torch.Generator) -> nn.Module:
    model = design.model
    match model.interaction:
        case Interaction.DOT:
            fused = design.fusion.interaction is InteractionFusion.FUSED
            return DotInteraction(len(model.tables) + 1, device=device, fused=fused)
        case Interaction.CAT:
            return CatInteraction()
        case Interaction.DCN_V2:
            return CrossInteraction(
                interaction_width(model),
                rank=model.cross_rank,
                layers=model.cross_layers,
                device=device,
                generator=generator,
            )
