"""`dse profiles`: what is calibrated, from what, how well."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dse.errors import DseError

if TYPE_CHECKING:
    from perfcore.profile.profile import Profile


def profiles(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME] | fit SAMPLES | price NAME KERNELS.csv",
            help="A profile by name or folder; all of them when left out. `fit` makes a profile of a folder of "
            "samples, `price` prices the kernels of a CSV file.",
        ),
    ] = None,
    *,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="With `fit`: the profile's folder; with `price`: a file."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print for a machine.")] = False,
) -> None:
    """List the profiles, show what one rests on and how well it predicts, fit one, or price kernels with one."""
    match words or []:
        case ["fit", *samples] if len(samples) <= 1:
            from dse.cli import profiles_fit

            profiles_fit.fit(samples[0] if samples else None, out)
        case ["price", name, kernels] if out is not None:
            _price(name, Path(kernels), out)
        case ["price", *_]:
            raise DseError(
                "`dse profiles price` needs a profile, a file of kernels and where the prices go.",
                hint="dse profiles price h100-sxm kernels.csv -o priced.csv",
            )
        case [] | [_] if out is None:
            _show(words[0] if words else None, as_json=as_json)
        case _:
            raise DseError("A folder of samples and `-o` belong to `dse profiles fit`, two names to nothing.")


def _price(name: str, kernels: Path, out: Path) -> None:
    from dse.kernel_table import priced_rows, read_kernels, write_rows
    from perfcore.profile.profile import load_profile

    table = read_kernels(kernels)
    rows = priced_rows(table, load_profile(name).cost_model())
    write_rows(out, table, rows)
    typer.echo(f"{len(rows)} kernels priced: {out}", err=True)


def _show(name: str | None, *, as_json: bool) -> None:
    import json

    from perfcore.profile.profile import load_profile, profile_names

    names = profile_names() if name is None else [name]
    entries = [_entry(load_profile(n)) for n in names]
    if as_json:
        typer.echo(json.dumps(entries if name is None else entries[0], default=str))
        return
    for entry in entries:
        _print(entry, detailed=name is not None)


def _entry(profile: Profile) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "name": profile.name,
        "device": profile.device.name,
        "description": profile.device.description,
        "known_errors": [asdict(error) for error in profile.known_errors],
        "provenance": dict(profile.provenance),
        "hash": profile.hash,
    }


def _print(entry: dict[str, Any], *, detailed: bool) -> None:
    from rich.table import Table

    from dse.cli._console import new_console

    console = new_console()
    console.print(f"{entry['name']}: {entry['description']}", markup=False, highlight=False)
    if not detailed:
        return
    errors = Table(
        title="Errors on data that the models have not seen", title_justify="left", box=None, pad_edge=False
    )
    columns = list(dict.fromkeys(key for error in entry["known_errors"] for key in error))
    for column in columns:
        numeric = all(isinstance(error.get(column), (int, float)) for error in entry["known_errors"])
        errors.add_column(column.replace("_", " "), justify="right" if numeric else "left")
    for error in entry["known_errors"]:
        errors.add_row(*(_cell(error[column]) for column in columns))
    console.print(errors)
    sources = Table(title="Where the numbers come from", title_justify="left", box=None, pad_edge=False)
    sources.add_column("kernels")
    sources.add_column("source", overflow="fold")
    for kernel, source in entry["provenance"].items():
        sources.add_row(kernel, source)
    console.print()
    console.print(sources)


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
