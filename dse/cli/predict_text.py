"""What a person reads of a prediction."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console, JustifyMethod
from rich.table import Table

from dse.cli._console import new_console
from dse.ranks import differing_text
from perfcore.breakdown import OpCost
from perfcore.design.design import Design
from perfcore.graph.kernels import CollectiveKind
from perfcore.predictor import Prediction
from perfcore.units import BYTES_PER_GIB, US_PER_MS
from perfcore.whatif import WhatIf

MAX_OPS = 15
TEXT_COLUMNS = ("part", "ops")


def print_prediction(design: Design, prediction: Prediction, interval_us: tuple[float, float]) -> None:
    """Headline, breakdown, ops, memory, and how far to trust it."""
    console = new_console()
    _headline(console, design, prediction)
    low, high = (us / US_PER_MS for us in interval_us)
    console.print(f"Nine in ten measurements should lie within {low:.3f} to {high:.3f} ms.", highlight=False)
    console.print(_breakdown(prediction))
    console.print(_ops(console, prediction))
    console.print(_memory(design, prediction))
    _trust(console, design, prediction)


def print_explanation(
    design: Design, prediction: Prediction, effects: Sequence[WhatIf], timeline: Path | None
) -> None:
    """Headline, critical path, what-if table."""
    console = new_console()
    _headline(console, design, prediction)
    console.print(_critical_path(console, prediction))
    console.print(_what_if(prediction, effects))
    if timeline is not None:
        console.print(f"Timeline for Perfetto: {timeline}", highlight=False)


def _headline(console: Console, design: Design, p: Prediction) -> None:
    system = design.system
    console.print(
        f"[bold]{p.iteration_time_us / US_PER_MS:.3f} ms[/bold] an iteration, "
        f"{p.samples_per_second:,.0f} samples/s, bound by [bold]{p.bound_by}[/bold] "
        f"({system.world_size} × {system.device.name}, global batch {p.global_batch:,})",
        highlight=False,
    )
    if p.host_shortfall_bytes:
        console.print(
            f"[red]Does not fit:[/red] the host's memory lacks {p.host_shortfall_bytes / BYTES_PER_GIB:.1f} GiB "
            "for the tables of one machine.",
            highlight=False,
        )
    if system.uneven:
        console.print(f"Ranks that differ: {differing_text(system)}.", highlight=False)
    if p.shortfall_bytes:
        console.print(
            f"[red]Does not fit:[/red] rank {p.memory.fullest(system)[0]} lacks {p.shortfall_bytes / BYTES_PER_GIB:.1f} GiB.",
            highlight=False,
        )


def _breakdown(p: Prediction) -> Table:
    host = p.host
    rows = [
        ("device active", p.device_active_us),
        ("device idle", p.device_idle_us),
        ("exposed communication", p.exposed_communication_us),
        ("host T1 between ops", host.t1_us),
        ("host T2 to the first launch", host.t2_us),
        ("host T3 after the last launch", host.t3_us),
        ("host T4 launch calls", host.t4_us),
        ("host T5 between launches", host.t5_us),
        ("host, ops without a launch", host.alone_us),
    ]
    table = _table(f"Time of one iteration (rank {p.rank})", "", "ms", "% of iteration")
    for name, us in rows:
        table.add_row(name, f"{us / US_PER_MS:.3f}", f"{100 * us / p.iteration_time_us:.1f}")
    return table


def _ops(console: Console, p: Prediction) -> Table:
    table = _table("Ops, dearest first", "op", "part", "n", "kernels", "device ms", "path ms")
    room = max(14, console.width - 66)
    for op in p.ops[:MAX_OPS]:
        part = op.module if op.module == op.phase else f"{op.module} {op.phase}"
        table.add_row(_cut(_short(op.name), room), part, *_op_columns([op]))
    rest = p.ops[MAX_OPS:]
    if rest:
        table.add_row(f"{len(rest)} more", "", *_op_columns(rest))
    return table


def _short(name: str) -> str:
    """An op's name without the namespaces that repeat what the rest says."""
    return name.removeprefix("torch::autograd::").removeprefix("Optimizer.")


def _cut(text: str, room: int) -> str:
    return text if len(text) <= room else f"{text[: room - 1]}…"


def _op_columns(ops: Sequence[OpCost]) -> tuple[str, str, str, str]:
    device, critical = sum(o.device_us for o in ops), sum(o.critical_us for o in ops)
    counts = sum(o.count for o in ops), sum(o.kernels for o in ops)
    return f"{counts[0]}", f"{counts[1]}", f"{device / US_PER_MS:.3f}", f"{critical / US_PER_MS:.3f}"


def _memory(design: Design, p: Prediction) -> Table:
    rank, _ = p.memory.fullest(design.system)
    total, device = float(p.memory.total[rank]), design.system.rank_hbm_bytes[rank]
    table = _table(f"Device memory of the fullest rank ({rank})", "", "GiB")
    for kind, size in p.memory.by_kind(rank).items():
        table.add_row(kind.replace("_", " "), f"{size / BYTES_PER_GIB:.2f}")
    table.add_row(
        "total",
        f"{total / BYTES_PER_GIB:.2f} of {device / BYTES_PER_GIB:.0f}",
        style="bold red" if p.shortfall_bytes else "bold",
    )
    on_host = float(p.memory.host.sum())
    if on_host:
        table.add_row("host memory, all machines", f"{on_host / BYTES_PER_GIB:.2f}")
    return table


def _trust(console: Console, design: Design, p: Prediction) -> None:
    shares = ", ".join(
        f"{100 * share:.0f} % {level}" for level, share in p.calibration_share.items() if share
    )
    console.print(f"Kernel time rests on: {shares} (profile {p.profile}).", highlight=False)
    errors = ", ".join(
        f"{e.kernel} {e.gmae_pct:.1f} / {e.mape_pct:.1f} %"
        for e in p.known_errors
        if _concerns(e.kernel, design)
    )
    if errors:
        console.print(f"Held-out errors of its kernel models (GMAE / MAPE): {errors}.", highlight=False)
    if p.fallback_ops:
        names = ", ".join(f"{name} × {count}" for name, count in sorted(p.fallback_ops.items()))
        console.print(
            f"Ops without host overheads of their own (the mean op's are used): {names}.", highlight=False
        )


def _concerns(kernel: str, design: Design) -> bool:
    """Whether a held-out error is about kernels that the design launches, on this very device."""
    if "left out" in kernel or "roofline" in kernel:
        return False
    if kernel.startswith("gemm_"):
        return kernel.startswith(f"gemm_{design.training.precision}")
    collective = kernel in {kind.value for kind in CollectiveKind}
    return not collective or design.system.world_size > 1


def _critical_path(console: Console, p: Prediction) -> Table:
    table = _table("Critical path of one steady cycle, in order of time", "resource", "part", "ms", "ops")
    room = max(20, console.width - 56)
    for piece in p.path_pieces:
        ops = ", ".join(_short(name) for name in piece.ops)
        table.add_row(piece.resource, piece.part, f"{piece.us / US_PER_MS:.3f}", _cut(ops, room))
    return table


def _what_if(p: Prediction, effects: Sequence[WhatIf]) -> Table:
    table = _table("What if", "change", "iteration ms", "saves %")
    for w in effects:
        table.add_row(w.change, f"{w.iteration_time_us / US_PER_MS:.3f}", f"{100 * w.saved_share:.1f}")
    return table


def _table(title: str, first: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column(first, overflow="ellipsis", no_wrap=True, min_width=12)
    for column in columns:
        justify: JustifyMethod = "left" if column in TEXT_COLUMNS else "right"
        table.add_column(column, justify=justify, no_wrap=True, overflow="ellipsis")
    return table
