"""`dse compare`: runs beside each other."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from dse.report.comparison import Comparison

TOP_ROWS = 12


def compare(
    runs: Annotated[
        list[Path], typer.Argument(help="Run folders, two at least, e.g. runs/on-a100 runs/on-h100.")
    ],
    *,
    csv: Annotated[Path | None, typer.Option(help="Write the joint front as a table.")] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write fronts and tables as a page that opens offline.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result for a machine.")] = False,
) -> None:
    """Join the fronts of RUNS: which designs of all of them nothing beats, and what a run is worth beside another.

    Runs need the same objectives; machine, tables and axes may differ. So it answers which GPU, and how many:
    `dse run SPACE --set system.device=h100-sxm --name on-h100` for each, then this.
    """  # fmt: skip
    import json

    from dse.manifest import write_atomically
    from dse.report.comparison import compare_runs
    from dse.report.comparison_page import comparison_page
    from dse.report.data import read_run

    found = compare_runs([read_run(run) for run in runs])
    if csv is not None:
        write_atomically(csv, found.front.to_csv(index=False, lineterminator="\n"))
    if html is not None:
        write_atomically(html, comparison_page(found))
    if as_json:
        typer.echo(json.dumps(to_json(found)))
    else:
        _print(found)
    for path in filter(None, (csv, html)):
        typer.echo(f"Written: {path}", err=True)


def to_json(found: Comparison) -> dict[str, Any]:
    """Everything that is compared; what is not known is missing from a design, and null elsewhere."""
    import math

    def known(value: float) -> float | None:
        return value if math.isfinite(value) else None

    metrics = [o.metric for o in found.objectives]
    return {
        "objectives": [{"metric": o.metric, "minimize": o.minimize} for o in found.objectives],
        "runs": [
            {
                "run": r.name,
                "gpu": r.gpu,
                "front_size": r.members,
                "on_joint_front": r.joint,
                "best": dict(zip(metrics, r.best, strict=True)),
                "hypervolume_pct": known(r.hypervolume_pct),
                "differs": list(r.own),
            }
            for r in found.runs
        ],
        "ratios": [
            {"run": r.a, "beside": r.b, "median": known(r.median), "matched": r.matched, "of": r.of}
            for r in found.ratios
        ],
        "joint_front": [
            {k: v for k, v in row.items() if not (isinstance(v, float) and math.isnan(v))}
            for row in found.front.to_dict(orient="records")
        ],
    }


def _print(found: Comparison) -> None:
    from dse.cli._console import new_console
    from dse.report.comparison_page import ratios_note

    console = new_console()
    for part in (_runs(found), "", ratios_note(found), _ratios(found), "", _front(found), _common(found)):
        console.print(part, markup=False, highlight=False, soft_wrap=isinstance(part, str))


def _new_table(*heads: str, left: int = 1) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_edge=False)
    for i, head in enumerate(heads):
        table.add_column(head, justify="left" if i < left else "right", overflow="fold")
    return table


def _runs(found: Comparison) -> Table:
    from dse.report.words import label, number

    best = [f"best {label(o.metric)}" for o in found.objectives]
    table = _new_table("run", "GPU", "front", "on the joint front", *best, "hypervolume %", left=2)
    for r in found.runs:
        numbers = (number(v) for v in (*r.best, r.hypervolume_pct))
        table.add_row(r.name, r.gpu, str(r.members), str(r.joint), *numbers)
    return table


def _ratios(found: Comparison) -> Table:
    from dse.report.words import number

    names = [r.name for r in found.runs]
    medians = {(r.a, r.b): r for r in found.ratios}
    table = _new_table("", *names)
    for a in names:
        cells = [
            "–" if a == b else f"{number(medians[a, b].median, digits=3)} ({medians[a, b].matched} of {medians[a, b].of})"
            for b in names
        ]  # fmt: skip
        table.add_row(a, *cells)
    return table


def _front(found: Comparison) -> Table:
    from dse.cli.run import short_settings
    from dse.report.comparison import RUN
    from dse.report.words import label, number
    from dse.search.outputs import spread

    metrics = [o.metric for o in found.objectives]
    table = _new_table(f"joint front, {len(found.front)} designs", "row", *map(label, metrics))
    table.add_column("design", ratio=1)
    common = found.shared_settings()
    for i in spread(len(found.front), None, TOP_ROWS):
        row = found.front.iloc[i]
        own = short_settings({k: v for k, v in found.settings(i).items() if k not in common})
        table.add_row(str(row[RUN]), str(row["row"]), *(number(float(row[m])) for m in metrics), own)
    return table


def _common(found: Comparison) -> str:
    from dse.cli.run import short_settings

    common = short_settings(found.shared_settings())
    return f"All of them: {common}" if common else ""
