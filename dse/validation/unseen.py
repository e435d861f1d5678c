"""`python -m dse.validation.unseen`: calibrate this CPU, predict twelve designs it was not fitted on, measure them.

Calibrating and measuring take turns, so that both see the same machine also where other programs use it; each
design is measured in several rounds, and the median over rounds counts. Four sharded designs follow, each trained by
two processes where the machine has a core for each.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from dse.validate import gmae_pct, kendall_tau, mape_pct
from dse.validation_pricing import profile_pricing
from perfcore.design.design import Design
from perfcore.design.hardware import System, default_node, device
from perfcore.design.model import EmbeddingTable, Interaction, Model
from perfcore.design.sharding import ShardingPlan, ShardingType, TableSharding
from perfcore.design.training import EmbeddingFusion, Fusion, Optimizer, OptimizerFusion, Training
from perfcore.measure.__main__ import duration_s
from perfcore.measure.collect import collect
from perfcore.measure.host import cores, measured_system
from perfcore.measure.isolate import Settings, measure_isolated
from perfcore.measure.iteration import measure_iteration
from perfcore.measure.record import NamedDesign
from perfcore.profile.fit_samples import fit_profile
from perfcore.profile.profile import load_profile
from perfcore.units import US_PER_MS

ROUNDS = 5
SHARDED_EVERY = 2  # rounds: their processes take long to start
SECONDS_A_DESIGN = 1.2
START, SHARDED_START, END = "<!-- unseen designs -->\n", "<!-- sharded designs -->\n", "<!-- end -->\n"
# Batch, tables, rows, lookups a bag, columns, bottom and top hidden widths.
_SHAPES = (
    (256, 2, 50_000, 1.0, 64, (64,), (64,)),
    (256, 26, 10_000, 1.0, 16, (512, 256), (512, 256)),
    (512, 8, 100_000, 4.0, 32, (128,), (128, 64)),
    (512, 13, 1_000, 1.0, 64, (256,), (256, 256)),
    (1024, 4, 200_000, 1.0, 48, (512, 256), (512, 256)),
    (1024, 26, 5_000, 1.0, 16, (64,), (128,)),
    (1024, 13, 20_000, 2.0, 32, (128, 64), (256, 128)),
    (2048, 2, 100_000, 1.0, 64, (256,), (512,)),
    (2048, 8, 1_000, 1.0, 24, (64,), (64,)),
    (2048, 26, 20_000, 1.0, 16, (128,), (256,)),
    (4096, 4, 50_000, 8.0, 32, (128,), (128,)),
    (4096, 8, 10_000, 1.0, 16, (256, 128), (256, 128)),
)


RANKS, GPU = 2, "t4"
# Batch, kinds of placement by turns, fusion.
_SHARDED = (
    (512, (ShardingType.TABLE_WISE,), EmbeddingFusion.PER_TABLE),
    (2048, (ShardingType.COLUMN_WISE,), EmbeddingFusion.TABLE_BATCHED),
    (1024, (ShardingType.ROW_WISE,), EmbeddingFusion.PER_TABLE),
    (2048, (ShardingType.TABLE_WISE, ShardingType.DATA_PARALLEL), EmbeddingFusion.PER_TABLE),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One design: predicted, and measured in rounds; `spread_pct` is of the rounds."""

    name: str
    what: str
    predicted_ms: float
    measured_ms: float
    spread_pct: float

    @property
    def error_pct(self) -> float:
        """Signed error of the prediction."""
        return 100 * (self.predicted_ms / self.measured_ms - 1)


@dataclass(frozen=True, slots=True)
class Outcome:
    """All designs, and what those of one rank say together; `sharded` ones were trained by two processes."""

    rows: tuple[Row, ...]
    device: str
    kernels: int
    seconds: float
    sharded: tuple[Row, ...] = ()

    @property
    def mape_pct(self) -> float:
        """Mean absolute error."""
        return mape_pct(*self._times())

    @property
    def gmae_pct(self) -> float:
        """Geometric mean absolute error."""
        return gmae_pct(*self._times())

    @property
    def tau(self) -> float:
        """Kendall's rank correlation."""
        return kendall_tau(*self._times()) or 0.0

    @property
    def best_pct(self) -> float:
        """How much slower the design predicted to be the best is than the one that is."""
        best = min(self.rows, key=lambda r: r.predicted_ms)
        return 100 * (best.measured_ms / min(r.measured_ms for r in self.rows) - 1)

    def _times(self) -> tuple[list[float], list[float]]:
        return [r.predicted_ms for r in self.rows], [r.measured_ms for r in self.rows]


def unseen_designs(system: System) -> list[NamedDesign]:
    """Twelve designs, none of which is a training loop of the calibration; every design's twin times compare.

    Interaction, fusion and optimizers take turns.
    """
    designs = []
    for position, (batch, tables, rows, pooling, dim, bottom, top) in enumerate(_SHAPES):
        model = Model(
            13,
            tuple(EmbeddingTable(f"t{i}", rows, pooling) for i in range(tables)),
            dim,
            bottom,
            top,
            tuple(Interaction)[position // 2 % 3],
            cross_layers=2,
            cross_rank=64,
        )
        fusion = Fusion(
            tuple(EmbeddingFusion)[position % 2],
            optimizer=tuple(OptimizerFusion)[position % 2],
        )
        optimizer = (Optimizer.SGD, Optimizer.ADAGRAD)[position // 3 % 2]
        design = Design(
            model,
            Training(batch, optimizer=optimizer, table_optimizer=optimizer),
            fusion,
            ShardingPlan.on_one_rank(model),
            replace(system, world_size=1),
        )
        designs.append(NamedDesign(f"unseen-{position:02d}", design))
    return designs


def sharded_designs() -> list[NamedDesign]:
    """Four designs for two processes, one for each way in which tables are exchanged or kept.

    Their GPU and its machine count for nothing: a measured profile prices them.
    """
    system = System(device(GPU), default_node(GPU), RANKS)
    named = []
    for position, (batch, kinds, fusion) in enumerate(_SHARDED):
        tables = tuple(EmbeddingTable(f"t{i}", 20_000 // (1 + 9 * (i % 2))) for i in range(8))
        model = Model(13, tables, 32, (128,), (128, 64))
        placed = [kinds[i % len(kinds)] for i in range(len(tables))]
        plan = ShardingPlan(
            tuple(
                TableSharding(
                    t.name,
                    kind,
                    (i // 2 % RANKS,) if kind is ShardingType.TABLE_WISE else tuple(range(RANKS)),
                )
                for i, (t, kind) in enumerate(zip(tables, placed, strict=True))
            )
        )
        design = Design(model, Training(batch), Fusion(fusion), plan, system)
        named.append(NamedDesign(f"sharded-{position}", design))
    return named


def validate_unseen(folder: Path, *, budget_s: float, say: Callable[[str], None]) -> Outcome:
    """Calibrate into `folder`, predict the designs, measure them; about twice `budget_s` in all.

    Args:
        folder: for samples and profile; samples in it are used as well.
        budget_s: for calibrating.
        say: told a sentence a step.
    """
    begin = time.perf_counter()
    system = measured_system("cpu")
    designs, sharded = unseen_designs(system), sharded_designs() if cores() >= RANKS else []
    times: dict[str, list[float]] = {d.name: [] for d in [*designs, *sharded]}
    for round_ in range(ROUNDS):
        collect(folder / "samples", device="cpu", budget_s=budget_s / ROUNDS, say=say)
        for named in designs:
            say(f"round {round_ + 1} of {ROUNDS}: {named.name}")
            sample = measure_iteration(
                named.design, device="cpu", min_iterations=5, max_seconds=SECONDS_A_DESIGN
            )
            times[named.name].append(sample.median_us)
        for named in sharded if round_ % SHARDED_EVERY == 0 else ():
            say(f"round {round_ + 1} of {ROUNDS}: {named.name}, {RANKS} processes")
            times[named.name] += _together_us(named, say)
    fit_profile(folder / "samples", folder / "profile", name="this-cpu")
    pricing, profile = profile_pricing(str(folder / "profile")), load_profile(str(folder / "profile"))
    ran = [d for d in [*designs, *sharded] if times[d.name]]
    rows = [_row(d, pricing.iteration_us(d.design), times[d.name]) for d in ran]
    kernels = sum(
        e.n for e in profile.known_errors if not e.kernel.endswith("*") and e.kernel != "iterations"
    )
    return Outcome(
        tuple(rows[: len(designs)]),
        profile.device.description,
        kernels,
        time.perf_counter() - begin,
        tuple(rows[len(designs) :]),
    )


def _together_us(named: NamedDesign, say: Callable[[str], None]) -> list[float]:
    """An iteration of a sharded design, trained by processes of one thread each; nothing where they failed."""
    settings = Settings(threads=1, max_seconds=SECONDS_A_DESIGN, max_ranks=RANKS, profile=False)
    sample = measure_isolated(named, settings)
    if sample.iteration is None:
        say(f"{named.name} could not be measured: {sample.detail}")
        return []
    return [sample.iteration.median_us]


def _row(named: NamedDesign, predicted_us: float, measured_us: Sequence[float]) -> Row:
    middle = statistics.median(measured_us)
    return Row(
        named.name,
        _what(named.design),
        predicted_us / US_PER_MS,
        middle / US_PER_MS,
        float(100 * np.ptp(measured_us) / middle),
    )


def _what(design: Design) -> str:
    model, training, fusion = design.model, design.training, design.fusion
    kinds = sorted({str(t.type) for t in design.sharding.tables})
    placed = f", {' and '.join(kinds)}" if design.system.world_size > 1 else ""
    return (
        f"batch {training.global_batch}, {len(model.tables)} tables × {model.embedding_dim}, "
        f"{model.interaction}, {fusion.embedding}, {training.optimizer}{placed}"
    )


def table_of(outcome: Outcome) -> str:
    """The outcome as a Markdown table with its summary."""
    summary = (
        f"MAPE {outcome.mape_pct:.1f} %, GMAE {outcome.gmae_pct:.1f} %, Kendall's tau {outcome.tau:.3f}; the design "
        f"predicted to be the best of {len(outcome.rows)} is {outcome.best_pct:.1f} % slower than the best. "
        f"{outcome.device}, one thread, {outcome.seconds / 60:.1f} minutes in all; spread is the range of "
        f"{ROUNDS} rounds over their median."
    )
    return "\n".join([*_lines(outcome.rows), "", summary, ""])


def sharded_table_of(outcome: Outcome) -> str:
    """The sharded designs likewise."""
    if not outcome.sharded:
        return f"None ran: this machine has no core for each of {RANKS} processes, or they failed.\n"
    predicted, measured = (
        [r.predicted_ms for r in outcome.sharded],
        [r.measured_ms for r in outcome.sharded],
    )
    summary = f"MAPE {mape_pct(predicted, measured):.1f} %; {RANKS} processes of one thread, gloo, wall time."
    return "\n".join([*_lines(outcome.sharded), "", summary, ""])


def _lines(rows: Sequence[Row]) -> list[str]:
    head = ["| design | predicted ms | measured ms | spread % | error % |", "|---|---|---|---|---|"]
    return head + [
        f"| {r.what} | {r.predicted_ms:.2f} | {r.measured_ms:.2f} | {r.spread_pct:.0f} | {r.error_pct:+.1f} |"
        for r in rows
    ]


def put_table(path: Path, table: str, *, start: str = START) -> None:
    """Replace what stands between a mark and the next end in a Markdown file."""
    text = path.read_text(encoding="utf-8")
    head, _, rest = text.partition(start)
    _, _, tail = rest.partition(END)
    path.write_text(f"{head}{start}\n{table}\n{END}{tail}", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print the table, and put it into a document on request."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path("runs/validate-cpu"))
    parser.add_argument("--budget", type=duration_s, default=270.0, help="for calibrating, e.g. 4m")
    parser.add_argument("--document", type=Path, help="Markdown file that gets the table")
    options = parser.parse_args(arguments)
    import torch

    torch.set_num_threads(1)
    outcome = validate_unseen(
        options.folder,
        budget_s=options.budget,
        say=lambda text: print(text, file=sys.stderr),  # noqa: T201
    )
    tables = {START: table_of(outcome), SHARDED_START: sharded_table_of(outcome)}
    for start, table in tables.items():
        print(table)  # noqa: T201
        if options.document:
            put_table(options.document, table, start=start)
    return 0


if __name__ == "__main__":
    sys.exit(main())
