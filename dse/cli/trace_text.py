"""What a person reads of traces."""

from __future__ import annotations

from collections.abc import Sequence
from io import StringIO

from rich import box
from rich.console import Console
from rich.table import Table

from dse.cli.trace_json import priced_or_none
from perfcore.trace.account import StepAccount, mean_account
from perfcore.trace.analysis import Analysis, Errors
from perfcore.trace.critical import PathPart, by_reason_us
from perfcore.trace.retime import Retimed
from perfcore.trace.study import Link, path_of
from perfcore.trace.whatif import Effect
from perfcore.units import US_PER_MS

_MAX_PARTS = 12
_PAGE_WIDTH = 130
# Unexplained time is pointed out from this share of the step on.
_WORTH_SAYING = 0.005
_ACCOUNT = (
    ("T1", "t1_us"),
    ("T2", "t2_us"),
    ("T3", "t3_us"),
    ("T4", "t4_us"),
    ("T5", "t5_us"),
    ("no launch", "alone_us"),
    ("waits", "blocking_us"),
    ("queue", "queue_us"),
    ("unexplained", "unexplained_us"),
    ("step", "step_us"),
)
_DEVICE = (
    ("busy", "device_busy_us"),
    ("communication", "communication_us"),
    ("exposed", "exposed_communication_us"),
    ("waiting for ranks", "waiting_for_ranks_us"),
)


def html_page(
    analysis: Analysis, *, effects: Sequence[Effect], retimed: Retimed | None, links: Sequence[Link]
) -> str:
    """The same tables as a page that needs no network."""
    console = Console(record=True, file=StringIO(), width=_PAGE_WIDTH)
    print_analysis(analysis, effects=effects, retimed=retimed, links=links, console=console)
    return console.export_html(inline_styles=True)


def print_analysis(
    analysis: Analysis,
    *,
    effects: Sequence[Effect],
    retimed: Retimed | None,
    links: Sequence[Link],
    console: Console | None = None,
) -> None:
    """Accounts, replays, the critical path, and answers to what was asked."""
    console = console or Console()
    console.print(_accounts(analysis, "Where the host's time goes, ms of the mean step", _ACCOUNT))
    console.print(_accounts(analysis, "What the device does, ms", _DEVICE))
    _unexplained(console, analysis)
    console.print(_replays(analysis))
    if analysis.not_joint:
        console.print(f"Not replayed together: {analysis.not_joint}", highlight=False, markup=False)
    console.print(_path(path_of(analysis.ranks[0], analysis), analysis.ranks[0].trace.rank))
    _priced(console, analysis)
    for link in links:
        console.print(
            f"{link.execution_trace}: {link.matched} of {link.nodes} ops ({100 * link.share:.1f} %) are in "
            f"{link.trace}, by {link.how}.",
            highlight=False,
            markup=False,
        )
    if effects:
        console.print(_effects(effects))
    if retimed is not None:
        _retimed(console, retimed)


def _accounts(analysis: Analysis, title: str, columns: Sequence[tuple[str, str]]) -> Table:
    """One row a rank, milliseconds of the mean step."""
    table = _table(title)
    table.add_column("rank")
    for label, _ in columns:
        table.add_column(label, justify="right", overflow="fold")
    for rank in analysis.ranks:
        account = mean_account(rank.accounts)
        table.add_row(str(rank.trace.rank), *(f"{_ms(account, name):.2f}" for _, name in columns))
    return table


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE, padding=(0, 1, 0, 0))


def _ms(account: StepAccount, name: str) -> float:
    return float(getattr(account, name)) / US_PER_MS


def _unexplained(console: Console, analysis: Analysis) -> None:
    for rank in analysis.ranks:
        account = mean_account(rank.accounts)
        if account.unexplained_us > _WORTH_SAYING * account.step_us:
            console.print(
                f"Rank {rank.trace.rank}: {account.unexplained_us / US_PER_MS:.1f} ms a step are unexplained: the host "
                "waits while the device runs nothing that was recorded.",
                highlight=False,
            )
        lost = sum(s.unlaunched for s in rank.steps)
        if lost:
            console.print(
                f"Rank {rank.trace.rank}: {lost} kernels have no launch record; they occupy their streams.",
                highlight=False,
            )


def _replays(analysis: Analysis) -> Table:
    table = _table("Replayed: error of the step, %")
    columns = ("exact", "mean host times", "left out, mean", "left out, max", "wholly left out, mean", "max")
    table.add_column("", no_wrap=True)
    for column in ("steps", *columns):
        table.add_column(column, justify="right")
    for rank in analysis.ranks:
        left, all_left = rank.leave_one_out, rank.leave_all_out
        table.add_row(
            f"rank {rank.trace.rank}",
            str(len(rank.steps)),
            _size(rank.exact),
            _size(rank.mean),
            _mean(left),
            _size(left),
            _mean(all_left),
            _size(all_left),
        )
    if analysis.joint is not None:
        j = analysis.joint
        row = (_size(j.exact), _size(j.mean), _mean(j.leave_one_out), _size(j.leave_one_out), "", "")
        table.add_row("together", str(j.steps), *row)
    return table


def _size(errors: Errors) -> str:
    return f"{errors.max_abs_pct:.2f}" if errors.pct else ""


def _mean(errors: Errors) -> str:
    return f"{errors.mean_abs_pct:.2f}" if errors.pct else ""


def _path(parts: Sequence[PathPart], rank: int) -> Table:
    """The longest parts of the critical path, and its time by reason."""
    total = max(sum(p.us for p in parts), 1e-9)
    reasons = ", ".join(
        f"{reason} {100 * us / total:.0f} %"
        for reason, us in sorted(by_reason_us(parts).items(), key=lambda r: -r[1])
    )
    sums: dict[tuple[str, str, str], float] = {}
    for part in parts:
        key = (part.op, part.what, part.reason)
        sums[key] = sums.get(key, 0.0) + part.us
    table = _table(f"Critical path of rank {rank}: {reasons}")
    table.add_column("op", overflow="fold")
    for column in ("what", "why not earlier"):
        table.add_column(column)
    table.add_column("ms", justify="right")
    for (op, what, reason), us in sorted(sums.items(), key=lambda s: -s[1])[:_MAX_PARTS]:
        table.add_row(op, what, reason, f"{us / US_PER_MS:.3f}")
    return table


def _priced(console: Console, analysis: Analysis) -> None:
    steps = priced_or_none(analysis.ranks[0], analysis)
    if not steps:
        return
    last = steps[-1]
    table = _table(
        f"Kernels priced from shapes by {last.profile} ({100 * last.priced_share:.0f} % of kernel time), last step"
    )
    table.add_column("kernel")
    for column in ("count", "measured ms", "predicted ms", "GMAE %", "MAPE %"):
        table.add_column(column, justify="right")
    for e in last.errors:
        times = (f"{e.measured_us / US_PER_MS:.3f}", f"{e.predicted_us / US_PER_MS:.3f}")
        table.add_row(e.kernel, str(e.count), *times, f"{e.gmae_pct:.1f}", f"{e.mape_pct:.1f}")
    console.print(table)
    active = sum(s.active_error_pct for s in steps) / len(steps)
    step = sum(s.step_error_pct for s in steps) / len(steps)
    console.print(
        f"With them the device's active time is off by {active:+.1f} %, the step by {step:+.1f} %.",
        highlight=False,
    )


def _effects(effects: Sequence[Effect]) -> Table:
    table = _table("What if")
    table.add_column("change", overflow="fold")
    for column in ("steady ms", "after ms", "saves %"):
        table.add_column(column, justify="right")
    for e in effects:
        times = (f"{e.before_us / US_PER_MS:.3f}", f"{e.after_us / US_PER_MS:.3f}")
        table.add_row(e.change.text, *times, f"{100 * e.saved_share:.1f}")
    return table


def _retimed(console: Console, r: Retimed) -> None:
    console.print(
        f"On {r.target}: {r.after_us / US_PER_MS:.3f} ms an iteration instead of {r.before_us / US_PER_MS:.3f} on "
        f"{r.source} (models rescale {100 * r.predicted_share:.0f} % of the kernel time, memory bandwidth the rest; "
        "host times and collectives as traced).",
        highlight=False,
    )
