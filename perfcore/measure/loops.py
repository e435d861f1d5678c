"""Small training loops: what an op costs the host, and how kernels run inside a loop instead of alone."""

from __future__ import annotations

import gzip
import tempfile
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import torch

from perfcore.design.design import Design
from perfcore.design.hardware import System
from perfcore.design.model import EmbeddingTable, Interaction, Loss, Model
from perfcore.design.sharding import ShardingPlan
from perfcore.design.training import (
    EmbeddingFusion,
    Fusion,
    InteractionFusion,
    MlpFusion,
    Optimizer,
    OptimizerFusion,
    Precision,
    Training,
)
from perfcore.measure.model import build_model, make_batch, make_optimizers, numerics, train_step
from perfcore.measure.record import NamedDesign
from perfcore.measure.table_batched import has_fbgemm

STEP_PREFIX = "ProfilerStep#"  # what torch.profiler's own schedule calls a step
TRACED_STEPS = 12
STEPS_BEFORE = 3


def host_bound(system: System) -> list[NamedDesign]:
    """Designs so small that their iterations are host time, in every way that the builder knows."""
    designs = []
    kinds = product(Interaction, (Optimizer.SGD, Optimizer.ADAGRAD, Optimizer.ADAM), OptimizerFusion)
    for position, (interaction, optimizer, fusion) in enumerate(kinds):
        tables = tuple(EmbeddingTable(f"t{i}", 100) for i in range(2 + 7 * (position % 3)))
        hidden = (8,) * (1 + position % 4)
        model = Model(4, tables, 8, hidden, hidden, interaction, cross_layers=2, cross_rank=4)
        if position % 5 == 4:
            model = replace(model, loss=Loss.MSE)
        precision = Precision.BF16 if position % 4 == 3 else Precision.FP32
        training = Training(
            4, precision=precision, optimizer=optimizer, table_optimizer=_table_optimizer(position)
        )
        fused = position % 2 == 1
        choice = Fusion(
            # Without FBGEMM, what runs instead has other ops than the design.
            EmbeddingFusion.TABLE_BATCHED
            if position % 3 == 2 and has_fbgemm()
            else EmbeddingFusion.PER_TABLE,
            MlpFusion.FUSED if fused else MlpFusion.EAGER,
            InteractionFusion.FUSED if fused else InteractionFusion.EAGER,
            fusion,
        )
        designs.append(NamedDesign(f"host-{position:02d}", _alone(system, model, training, choice)))
    return designs


def kernel_bound(system: System, *, scale: int) -> list[NamedDesign]:
    """Designs whose iterations are kernel time, each of another kind; `scale` multiplies the batch."""
    rows = (
        (512, 4, 1_000, 1.0, 32, (384, 384), Interaction.DOT),
        (128, 4, 1_000, 1.0, 64, (640,), Interaction.CAT),
        (1024, 12, 30_000, 1.0, 16, (32,), Interaction.DOT),
        (256, 12, 100_000, 8.0, 48, (32,), Interaction.CAT),
        (384, 20, 5_000, 1.0, 48, (64,), Interaction.DOT),
        (256, 6, 10_000, 2.0, 32, (160,), Interaction.DCN_V2),
        (2048, 8, 20_000, 1.0, 24, (96, 96), Interaction.DOT),
        (2048, 3, 50_000, 1.0, 16, (256, 128), Interaction.CAT),
    )
    designs = []
    for position, (batch, count, height, pooling, dim, hidden, kind) in enumerate(rows):
        tables = tuple(EmbeddingTable(f"t{i}", height, pooling) for i in range(count))
        for fusion in EmbeddingFusion:
            design = _alone(
                system, Model(16, tables, dim, hidden, hidden, kind), Training(batch * scale), Fusion(fusion)
            )
            designs.append(NamedDesign(f"kernels-{position:02d}-{fusion.value}", design))
    return designs


def record_trace(design: Design, path: Path, *, device: str) -> None:
    """Train under torch.profiler and keep the trace, gzipped; steps are marked as the profiler's own would be."""
    from torch.profiler import ProfilerActivity, profile, record_function

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.startswith("cuda") else [])]
    with numerics(design):
        model = build_model(design, device=device)
        optimizers = make_optimizers(model, design)
        batch = make_batch(design, rng=np.random.default_rng(0), device=device)
        for _ in range(STEPS_BEFORE):
            train_step(model, optimizers, batch)
        with profile(activities=activities) as profiler:
            for step in range(TRACED_STEPS):
                with record_function(f"{STEP_PREFIX}{step}"):
                    train_step(model, optimizers, batch)
            if device.startswith("cuda"):
                torch.cuda.synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(plain))
        path.write_bytes(gzip.compress(plain.read_bytes(), 6))


def _table_optimizer(position: int) -> Optimizer:
    return tuple(Optimizer)[position % len(Optimizer)]


def _alone(system: System, model: Model, training: Training, fusion: Fusion) -> Design:
    return Design(model, training, fusion, ShardingPlan.on_one_rank(model), system.even(1))
