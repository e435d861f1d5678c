"""The command line: `dse COMMAND`, one module each in the order of `COMMANDS`; heavy packages load inside them."""

from __future__ import annotations

import io
import sys
from importlib import import_module
from importlib.util import find_spec

import typer

from dse.cli import _guard

# Command to module; the module's function has the command's name.
COMMANDS = {
    "init": "init",
    "run": "run",
    "report": "report",
    "compare": "compare",
    "predict": "predict",
    "explain": "predict",
    "plan": "plan",
    "validate": "validate",
    "calibrate": "calibrate",
    "trace": "trace",
    "profiles": "profiles",
}

app = typer.Typer(
    name="dse",
    help="Search the design space of DLRM training, and predict the iteration time of a design.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _register() -> None:
    for name, module in COMMANDS.items():
        if find_spec(f"dse.cli.{module}") is not None:
            app.command(name)(_guard.guarded(getattr(import_module(f"dse.cli.{module}"), name)))


@app.callback(invoke_without_command=True)
def _main(
    context: typer.Context,
    *,
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),  # noqa: FBT003
) -> None:
    if version:
        import perfcore

        typer.echo(perfcore.__version__)
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)


_register()


def main() -> None:
    """Entry point."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that knows ASCII alone reads `?`
    app()
