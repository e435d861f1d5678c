"""`dse run`: search a space."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from dse.search.run import RunSummary
    from dse.search.study import Progress
    from dse.study_config import StudyConfig

TOP_ROWS = 12
NARROW = 120  # columns
ALSO_SHOWN = ("iteration_time_ms", "samples_per_second", "hbm_gib", "certified_gap_pct")
HEADS = {
    "time_per_sample_us": "µs per sample",
    "time_per_sample_ns": "ns per sample",
    "quality_loss": "loss (proxy)",
    "iteration_time_ms": "ms per iteration",
    "samples_per_second": "samples per s",
    "hbm_gib": "GiB",
    "hbm_left_gib": "GiB left",
    "certified_gap_pct": "gap % of placement",
}
# What a setting is called in a line; nothing where its value says it all.
SHORT = {
    "system.world_size": "GPUs",
    "training.global_batch": "batch",
    "model.embedding_dim": "dim",
    "training.precision": "",
    "fusion.embedding": "",
    "fusion.launches": "",
    "fusion.communication": "",
}


def run(
    space: Annotated[Path, typer.Argument(help="A space file; see `dse init` for one to start from.")],
    *,
    trials: Annotated[
        int | None, typer.Option("-n", "--trials", help="Outer trials; by default the file's.")
    ] = None,
    workers: Annotated[int, typer.Option(help="Processes that price designs; more than 1 starts Ray.")] = 1,
    address: Annotated[
        str | None, typer.Option(help="A running Ray cluster: auto, or ray://host:port.")
    ] = None,
    storage: Annotated[
        str | None,
        typer.Option(help="sqlite:///file.db or postgresql://…; by default a journal in the run folder."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of everything random; by default the file's.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an interrupted run.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a run of the same name.")] = False,
    profile: Annotated[
        str | None, typer.Option(help="Profile by name or folder; see `dse profiles`.")
    ] = None,
    runs_dir: Annotated[Path, typer.Option(help="Where run folders lie.")] = Path("runs"),
    name: Annotated[str | None, typer.Option(help="Of the run; by default the space's.")] = None,
    designs: Annotated[int, typer.Option(min=1, help="Designs of the front to write as files.")] = 20,
    replan: Annotated[
        bool, typer.Option(help="Search the placements of the front's designs anew at the end.")
    ] = True,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="section.key=value, as often as needed.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result for a machine.")] = False,
) -> None:
    """Search SPACE for its best designs and write runs/NAME/.

    A space small enough is priced whole, and its front is exact.
    """
    import logging
    import sys
    from datetime import UTC, datetime

    from rich.console import Console

    from dse.progress import ProgressLine
    from dse.search.evaluator import pricing_of
    from dse.search.request import RunRequest
    from dse.search.run import run_space

    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    request = RunRequest(
        space_file=space,
        overrides=tuple(overrides or ()),
        trials=trials,
        workers=workers,
        address=address,
        storage=storage,
        seed=seed,
        resume=resume,
        overwrite=overwrite,
        profile=profile,
        runs_dir=runs_dir,
        name=name,
        designs=designs,
        replan=replan,
        command=("dse", *(word.replace(str(Path.home()), "~") for word in sys.argv[1:])),
        started=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    with ProgressLine(Console(stderr=True)) as line:
        done = run_space(
            request,
            pricing_of=pricing_of,
            on_batch=lambda config, progress: line.update(progress, best=_best_so_far(config, progress)),
        )
    note = _write_report(done.run_dir)
    _print(done, as_json=as_json)
    if note:
        typer.echo(note, err=True)


def _write_report(run_dir: Path) -> str | None:
    """Write `report.html`; where that fails, what went wrong: a search must not be lost for its picture."""
    try:
        from dse.report import write_report

        write_report(run_dir)
    except Exception as err:
        return f"report.html could not be written ({type(err).__name__}: {err}); try `dse report {run_dir}`."
    return None


def _best_so_far(config: StudyConfig, progress: Progress) -> str:
    from dse.search.outputs import people_value

    if not len(progress.found.objectives):
        return "nothing feasible yet"
    best = progress.found.objectives.min(axis=0)
    pairs = zip(config.objectives, best.tolist(), strict=True)
    return "best " + ", ".join(f"{o.metric} {people_value(o, v):.4g}" for o, v in pairs)


def _print(done: RunSummary, *, as_json: bool) -> None:
    import json

    if as_json:
        typer.echo(json.dumps(done.summary))
        return
    from dse.cli._console import new_console

    console = new_console()
    console.print(_title(done), markup=False, highlight=False, soft_wrap=True)
    for renderable in _table(done, narrow=console.width < NARROW), *_closing(done):
        console.print(renderable, markup=False, highlight=False, soft_wrap=isinstance(renderable, str))


def _table(done: RunSummary, *, narrow: bool) -> object:
    """The best rows of the front, the knee among them; a narrow one has the objectives alone."""
    from rich.table import Table

    from dse.objective import METRICS
    from dse.search.outputs import spread

    front = done.front
    metrics = [o.metric for o in done.config.objectives]
    metrics += [m for m in ALSO_SHOWN if m not in metrics and not narrow]
    table = Table(box=None, pad_edge=False, show_edge=False)
    table.add_column("", justify="right")
    for metric in metrics:
        table.add_column(
            HEADS[metric] if metric in HEADS else METRICS[metric].label, justify="right", max_width=12
        )
    table.add_column("design", ratio=1)
    shared = _shared(done)
    for i in spread(len(front), front.knee, TOP_ROWS):
        values = [_number(float(front.metrics[m][i])) for m in metrics]
        mark = "knee ▸ " if i == front.knee else ""
        settings = {k: v for k, v in front.settings[i].items() if k not in shared}
        table.add_row(f"{mark}{i + 1}", *values, short_settings(settings))
    return table


def _number(value: float) -> str:
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


def _shared(done: RunSummary) -> dict[str, object]:
    """Settings that all designs of the front have in common."""
    first, *rest = done.front.settings
    return {k: v for k, v in first.items() if all(other.get(k) == v for other in rest)}


def short_settings(settings: Mapping[str, object]) -> str:
    """Settings in a line: `batch 8192 · dim 64 · bottom 256 · top 512-512 · tf32`."""
    parts = [
        f"{SHORT.get(name, name.rpartition('.')[2])} {value}".strip()
        for name, value in settings.items()
        if "_hidden." not in name
    ]
    for mlp in ("bottom", "top"):
        prefix = f"model.{mlp}_hidden."
        widths = [str(v) for k, v in settings.items() if k.startswith(prefix) and not k.endswith(".depth")]
        if widths:
            parts.append(f"{mlp} {'-'.join(widths)}")
    return " · ".join(parts)


def _title(done: RunSummary) -> str:
    s = done.summary
    promise = "exact: every design was priced" if s["method"] == "exact" else "found by search"
    return f"Pareto front of {s['name']}, {s['front_size']} designs ({promise})"


def _closing(done: RunSummary) -> list[str]:
    from dse.progress import people

    s = done.summary
    files = ["pareto.csv", f"designs/ ({len(done.front.exported)} of {s['front_size']})", "manifest.json"]
    files += ["report.html"] if (done.run_dir / "report.html").exists() else []
    priced = f"{people(s['candidates_evaluated'])} designs priced, of {people(s['space_size'])} in the space,"
    rate = f"in {s['wall_s']:.1f} s, {s['preparing_s']:.1f} s of them for tables ({people(s['candidates_per_s'])}/s); {people(s['feasible'])} feasible."
    common = short_settings(_shared(done))
    return [
        *([f"All of them: {common}"] if common else []),
        f"{priced} {rate}",
        f"Files in {done.run_dir}: {', '.join(files)}",
    ]
