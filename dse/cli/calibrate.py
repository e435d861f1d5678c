"""`dse calibrate`: measure a device of this machine, fit its profile, say how well it predicts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from perfcore.profile.fit_samples import FittedProfile

Out = Annotated[Path, typer.Option("-o", "--out", help="The profile's folder.", show_default=False)]
DeviceName = Annotated[str, typer.Option("--device", help="What is measured: cpu, cuda or cuda:<index>.")]
Budget = Annotated[str, typer.Option(help="Time to spend, e.g. 90s or 3m.")]
Threads = Annotated[int, typer.Option(help="CPU threads; one is the steadiest.")]
Samples = Annotated[
    Path | None, typer.Option(help="Folder for the samples; `<out>-samples` by default, continued if there.")
]


def calibrate(
    out: Out,
    device: DeviceName = "cpu",
    budget: Budget = "3m",
    threads: Threads = 1,
    samples: Samples = None,
) -> None:
    """Measure kernels and training loops of a device, and write a profile for `--profile`."""
    from perfcore.profile.fit_samples import check_output, fit_profile

    check_output(out)
    folder = samples or out.with_name(f"{out.name}-samples")
    collect_samples(folder, device=device, budget_s=seconds_of(budget), threads=threads)
    print_fitted(fit_profile(folder, out))


def collect_samples(folder: Path, *, device: str, budget_s: float, threads: int) -> None:
    """Measure into a folder, telling of it on stderr.

    Raises:
        MissingPackageError: torch is not installed.
        UnsupportedError: no such device.
    """
    from dse.validate import check_device

    check_device(device)
    import torch

    from perfcore.measure.collect import collect

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        done = collect(folder, device=device, budget_s=budget_s, say=lambda text: typer.echo(text, err=True))
    finally:
        torch.set_num_threads(before)
    for line in done.remarks:
        typer.echo(line, err=True)


def seconds_of(text: str) -> float:
    """Seconds of `90s` or `3m`.

    Raises:
        DseError: not a duration.
    """
    from dse.errors import DseError
    from perfcore.measure.__main__ import duration_s

    try:
        return duration_s(text)
    except ValueError as err:
        raise DseError(f"`--budget`: {err}.") from None


def print_fitted(fitted: FittedProfile) -> None:
    """The profile's errors on what its fit had not seen."""
    from rich.table import Table

    from dse.cli._console import new_console

    table = Table(
        title="Errors on samples left out of the fit", title_justify="left", box=None, pad_edge=False
    )
    table.add_column("kernels")
    for column in ("samples", "GMAE %", "MAPE %"):
        table.add_column(column, justify="right")
    for e in fitted.errors:
        table.add_row(e.kernel, str(e.n), f"{e.gmae_pct:.1f}", f"{e.mape_pct:.1f}")
    console = new_console()
    console.print(table)
    if fitted.noisy > 0.1:
        console.print(
            f"{100 * fitted.noisy:.0f} % of the timings spread by more than a fifth: something else was running.",
            highlight=False,
        )
    console.print(f"{fitted.folder}: use it with --profile {fitted.folder}", highlight=False, markup=False)
