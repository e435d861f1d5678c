"""Writes the trace section of `docs/accuracy.md`: every error over a folder of traces.

    python -m perfcore.trace.accuracy --data FOLDER

Traces of one folder that are of different ranks of one job are replayed together; others one by one; execution traces are
matched to the Kineto traces beside them.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from perfcore.errors import PerfcoreError, TraceError
from perfcore.trace.account import mean_account
from perfcore.trace.analysis import Analysis, Errors, RankAnalysis, analyse
from perfcore.trace.execution_trace import is_execution_trace
from perfcore.trace.kineto import read_kineto
from perfcore.trace.records import KinetoTrace
from perfcore.trace.retime import PricedStep
from perfcore.trace.study import Link, linked, priced
from perfcore.units import US_PER_MS

BEGIN, END = "<!-- traces: begin -->", "<!-- traces: end -->"
EXECUTION_TRACES = "execution_traces"  # a folder of this name lies beside the Kineto traces
PAGE = Path("docs") / "accuracy.md"
# Shorter traces are unit inputs: they are replayed, but say nothing of accuracy.
_FEWEST_LAUNCHES = 200


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """Traces that were analysed together."""

    name: str
    analysis: Analysis
    links: tuple[Link, ...]


def cases_of(folder: Path) -> tuple[list[Case], list[str]]:
    """Every trace below a folder, and why other files could not be read."""
    by_folder: dict[Path, list[Path]] = defaultdict(list)
    for path in sorted([*folder.rglob("*.json.gz"), *folder.rglob("*.json")]):
        beside = path.parent.parent if path.parent.name == EXECUTION_TRACES else path.parent
        by_folder[beside].append(path)
    cases: list[Case] = []
    unread: list[str] = []
    for parent, paths in by_folder.items():
        traces, execution_traces = _read(paths, unread)
        name = parent.relative_to(folder).as_posix()
        for label, group in _groups(name, traces):
            near = [
                p for p in execution_traces if len(traces) == len(group) or _stem(p) == _stem_of(group[0])
            ]
            cases.append(Case(label, analyse(group), linked(group, near)))
    return cases, unread


def _read(paths: Sequence[Path], unread: list[str]) -> tuple[list[KinetoTrace], list[Path]]:
    traces, execution_traces = [], []
    for path in paths:
        try:
            if is_execution_trace(path):
                execution_traces.append(path)
            else:
                traces.append(read_kineto(path))
        except TraceError as err:
            unread.append(err.message)
    return traces, execution_traces


def _groups(name: str, traces: Sequence[KinetoTrace]) -> Iterator[tuple[str, list[KinetoTrace]]]:
    ranks = {t.rank for t in traces}
    if len(traces) > 1 and len(ranks) == len(traces):
        yield f"{name} ({len(traces)} ranks)", list(traces)
        return
    for trace in traces:
        yield (name if len(traces) == 1 else f"{name}/{trace.name.split('.')[0]}"), [trace]


def _stem(path: Path) -> str:
    return path.name.split(".")[0]


def _stem_of(trace: KinetoTrace) -> str:
    return trace.name.split(".")[0]


def section(cases: Sequence[Case], unread: Sequence[str]) -> str:
    """The section's text."""
    large = [
        c for c in cases if len(c.analysis.ranks[0].steps[0].launched) >= _FEWEST_LAUNCHES or c.analysis.joint
    ]
    lines = [
        BEGIN,
        "## Traces",
        "",
        *_replays(large),
        "",
        *_small(cases, large),
        *_joint(cases),
        "",
        *_links(cases),
        "",
        *_kernels(large),
    ]
    if unread:
        lines += ["", "Not read: " + "; ".join(unread)]
    return "\n".join([*lines, END]) + "\n"


def _replays(cases: Sequence[Case]) -> Iterator[str]:
    yield "Error of the replayed step against the profiled one, %. *exact*: the step's own host times, worst step. *left out*:"
    yield "mean host times of the other steps, kernels as measured in the step. *wholly left out*: graphs, kernels and host times of"
    yield "other steps. *closes*: what the account of the step lacks. Warm-up steps at the start are dropped."
    yield ""
    yield "| trace | device | steps | step, ms | unexplained, ms | closes | exact | left out, mean / max | wholly left out, mean / max |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for case in cases:
        ranks = case.analysis.ranks
        for rank in ranks:
            name = case.name if len(ranks) == 1 else f"{case.name}, rank {rank.trace.rank}"
            yield f"| {name} | {rank.trace.device_name} | {_steps(rank)} | {_cells(rank)} |"


def _small(cases: Sequence[Case], large: Sequence[Case]) -> Iterator[str]:
    """Unit inputs in one line."""
    small = [c.analysis.ranks[0] for c in cases if c not in large]
    if small:
        worst = max(r.exact.max_abs_pct for r in small)
        yield f"{len(small)} traces of fewer than {_FEWEST_LAUNCHES} launches a step: exact replay within {worst:.2f} %."
        yield ""


def _steps(rank: RankAnalysis) -> str:
    return f"{len(rank.steps)}" + (f" ({rank.dropped} dropped)" if rank.dropped else "")


def _cells(rank: RankAnalysis) -> str:
    account = mean_account(rank.accounts)
    closes = max(100 * abs(a.explained_us / a.step_us - 1) for a in rank.accounts)
    return " | ".join(
        [
            f"{rank.measured_us / US_PER_MS:.2f}",
            f"{account.unexplained_us / US_PER_MS:.2f}",
            f"{closes:.2f}",
            f"{rank.exact.max_abs_pct:.2f}",
            _both(rank.leave_one_out),
            _both(rank.leave_all_out),
        ]
    )


def _both(errors: Errors) -> str:
    return f"{errors.mean_abs_pct:.2f} / {errors.max_abs_pct:.2f}" if errors.pct else ""


def _joint(cases: Sequence[Case]) -> Iterator[str]:
    yield "All ranks together: the i-th collectives of the ranks are one, transfer is the shortest of their kernels. *left out*: mean"
    yield "host times of the other ranks."
    yield ""
    yield "| traces | ranks | exact, max | left out, mean / max | collective time that is waiting for other ranks |"
    yield "|---|---|---|---|---|"
    for case in cases:
        joint = case.analysis.joint
        if joint is not None:
            share = f"{100 * joint.waiting_share:.1f} %"
            yield f"| {case.name} | {len(case.analysis.ranks)} | {joint.exact.max_abs_pct:.2f} | {_both(joint.leave_one_out)} | {share} |"


def _links(cases: Sequence[Case]) -> Iterator[str]:
    yield "| execution trace | ops | found in the Kineto trace | by |"
    yield "|---|---|---|---|"
    for case in cases:
        for link in case.links:
            yield f"| {case.name}: {link.execution_trace} | {link.nodes} | {100 * link.share:.2f} % | {link.how} |"


def _kernels(cases: Sequence[Case]) -> Iterator[str]:
    yield "Kernel durations predicted from recorded shapes, by class: kernels of the last step, GMAE / MAPE in %."
    for case in cases:
        steps = _priced(case)
        if not steps:
            continue
        last = steps[-1]
        active, step = (
            [s.active_error_pct for s in steps],
            [s.step_error_pct for s in steps],
        )
        yield ""
        yield (
            f"{case.name}, profile {last.profile}: device active {_mean(active):+.1f} % (worst {_worst(active):+.1f}), step "
            f"{_mean(step):+.1f} % (worst {_worst(step):+.1f}); {100 * last.priced_share:.0f} % of kernel time priced, the rest "
            "and collectives as measured."
        )
        yield ""
        yield "| kernel | count | measured, ms | predicted, ms | GMAE / MAPE |"
        yield "|---|---|---|---|---|"
        for e in last.errors:
            times = f"{e.measured_us / US_PER_MS:.3f} | {e.predicted_us / US_PER_MS:.3f}"
            yield f"| {e.kernel} | {e.count} | {times} | {e.gmae_pct:.1f} / {e.mape_pct:.1f} |"


def _priced(case: Case) -> Sequence[PricedStep]:
    try:
        return [s for s in priced(case.analysis.ranks[0], case.analysis) if s.errors]
    except PerfcoreError:
        return ()


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _worst(values: Sequence[float]) -> float:
    return max(values, key=abs)


def replaced(page: str, text: str) -> str:
    """The page with the section in place of its former one, or at its end."""
    if BEGIN in page and END in page:
        before, rest = page.split(BEGIN, 1)
        return before + text.rstrip("\n") + rest.split(END, 1)[1]
    return (page.rstrip("\n") + "\n\n" if page.strip() else "# Accuracy\n\n") + text


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the section into `docs/accuracy.md`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder with traces, searched to the bottom")
    parser.add_argument("--page", type=Path, default=PAGE, help="the page to write into")
    options = parser.parse_args(arguments)
    text = section(*cases_of(options.data))
    page = options.page.read_text(encoding="utf-8") if options.page.exists() else ""
    options.page.write_text(replaced(page, text), encoding="utf-8")


if __name__ == "__main__":
    main()
