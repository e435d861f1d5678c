"""`dse trace`: where the time of a real step went, and what would change it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from perfcore.trace.records import KinetoTrace

Files = Annotated[
    list[Path],
    typer.Argument(
        help="Kineto traces (.json, .json.gz), one a rank; execution traces beside them.", show_default=False
    ),
]


def trace(
    files: Files,
    *,
    what_if: Annotated[
        list[str] | None,
        typer.Option("--what-if", help='A change such as "T1 / 2" or "kernel:*gemm* / 2"; may be repeated.'),
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", help="Kernels as on this device or profile instead.")
    ] = None,
    timeline: Annotated[
        Path | None, typer.Option(help="Write measured beside predicted for Perfetto (ui.perfetto.dev).")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write the tables as a page.")] = None,
    write_profile: Annotated[
        str | None, typer.Option("--write-profile", help="Write the traces' host overheads as this profile.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable on stdout.")] = False,
) -> None:
    """Account for every millisecond of traced steps, replay them, and ask what would change."""
    from dse.cli.trace_json import to_json
    from dse.cli.trace_text import html_page, print_analysis
    from perfcore.trace.analysis import analyse
    from perfcore.trace.study import effects, linked, retimed, timeline_of

    traces, execution_traces, unread = _read(files)
    for message in unread:
        typer.echo(f"not read: {message}", err=True)
    analysis = analyse(traces)
    links = linked(traces, execution_traces)
    changed = effects(analysis, what_if or [])
    other = retimed(analysis, device) if device else None
    if timeline is not None:
        _write(timeline, json.dumps(timeline_of(analysis)))
        typer.echo(f"Timeline for Perfetto: {timeline}", err=True)
    if html is not None:
        _write(html, html_page(analysis, effects=changed, retimed=other, links=links))
        typer.echo(f"Page: {html}", err=True)
    if write_profile is not None:
        from perfcore.trace.write_profile import write_profile as write

        folder = write(traces, write_profile, skip_steps=analysis.ranks[0].dropped)
        typer.echo(f"Profile {write_profile}: {folder}", err=True)
    if as_json:
        typer.echo(json.dumps(to_json(analysis, effects=changed, retimed=other, links=links, unread=unread)))
    else:
        print_analysis(analysis, effects=changed, retimed=other, links=links)


def _write(path: Path, text: str) -> None:
    from perfcore.errors import TraceError

    try:
        path.write_text(text, encoding="utf-8")
    except OSError as err:
        raise TraceError(f"{path}: cannot be written: {err.strerror or err}.") from None


def _read(files: list[Path]) -> tuple[list[KinetoTrace], list[Path], list[str]]:
    """Kineto traces, execution traces, and why other files could not be read; all unreadable is an error."""
    from perfcore.errors import TraceError
    from perfcore.trace.execution_trace import is_execution_trace
    from perfcore.trace.kineto import read_kineto

    traces, execution_traces, failures = [], [], []
    for path in files:
        try:
            if is_execution_trace(path):
                execution_traces.append(path)
            else:
                traces.append(read_kineto(path))
        except TraceError as err:
            failures.append(err)
    if not traces and failures:
        raise failures[0]
    if not traces:
        raise TraceError(
            "A Kineto trace is needed, but only execution traces were given.",
            hint="An execution trace has no times: pass the file of torch.profiler's export_chrome_trace as well.",
        )
    return traces, execution_traces, [f.message for f in failures]
