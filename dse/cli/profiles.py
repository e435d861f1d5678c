"""`dse profiles`: what is calibrated, from what, how well."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from perfcore.profile.profile import Profile


def profiles(
    name: Annotated[
        str | None,
        typer.Argument(help="A profile by name or folder; all of them when left out. `fit` makes one."),
    ] = None,
    samples: Annotated[
        str | None, typer.Argument(help="After `fit`: the folder of samples that `collect` wrote.")
    ] = None,
    *,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="With `fit`: the profile's folder.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print for a machine.")] = False,
) -> None:
    """List the profiles, or show what one of them rests on and how well it predicts."""
    import json

    from dse.cli import profiles_fit
    from dse.errors import DseError
    from perfcore.profile.profile import load_profile, profile_names

    if name == "fit":
        return profiles_fit.fit(samples, out)
    if samples is not None or out is not None:
        raise DseError("A folder of samples and `-o` belong to `dse profiles fit`.")
    names = profile_names() if name is None else [name]
    entries = [_entry(load_profile(n)) for n in names]
    if as_json:
        typer.echo(json.dumps(entries if name is None else entries[0], default=str))
        return None
    for entry in entries:
        _print(entry, detailed=name is not None)
    return None


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
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print(f"{entry['name']}: {entry['description']}", markup=False, highlight=False)
    if not detailed:
        return
    errors = Table(
        title="Errors on data that the models have not seen", title_justify="left", box=None, pad_edge=False
    )
    columns = list(dict.fromkeys(key for error in entry["known_errors"] for key in error))
    for column in columns:
        errors.add_column(column.replace("_", " "))
    for error in entry["known_errors"]:
        errors.add_row(*(_cell(error[column]) for column in columns))
    console.print(errors)
    for kernel, source in entry["provenance"].items():
        console.print(f"{kernel}: {source}", markup=False, highlight=False)


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
