"""`dse init`: a commented space file to start from."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from dse.study_config import StudyConfig

TEMPLATE = Path(__file__).with_name("space_template.yaml")


def init(
    *,
    output: Annotated[Path, typer.Option("-o", "--output", help="File to write.")] = Path("space.yaml"),
    tables: Annotated[
        str, typer.Option(help="CSV of your tables (name, num_embeddings, …), or the name of a bundled set.")
    ] = "criteo_terabyte",
    system: Annotated[
        str, typer.Option(help="File of your node, or the name of a node or device of the catalogue.")
    ] = "dgx-a100-80gb",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file.")] = False,
) -> None:
    """Write a commented space file and check it."""
    from dse.errors import StudyError

    if output.exists() and not overwrite:
        raise StudyError(f"{output} exists.", hint="Give another -o, or --overwrite.")
    text = space_text(output, tables=tables, system=system)
    config = _write_checked(output, text)
    typer.echo(
        f"{output}: {config.space.size:.3g} designs on {len(config.space.axes)} axes. Next: dse run {output}"
    )


def space_text(output: Path, *, tables: str, system: str) -> str:
    """The template for these tables and this system; paths become relative to the file's folder."""
    from string import Template

    return Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        file=output.name,
        name="".join(c if c.isalnum() or c in "._-" else "_" for c in output.stem).lstrip("._-") or "space",
        tables=_reference(tables, output, endings=(".csv",)),
        system=_system(system, output),
    )


def _reference(value: str, output: Path, *, endings: tuple[str, ...]) -> str:
    import json

    if not value.endswith(endings):
        return value
    return json.dumps(os.path.relpath(value, output.parent), ensure_ascii=False)


def _system(value: str, output: Path) -> str:
    from dse.resolve import FILE_ENDINGS
    from perfcore.design.hardware import device_names

    kind = "device" if value in device_names() else "node"
    return f"{kind}: {_reference(value, output, endings=FILE_ENDINGS)}"


def _write_checked(output: Path, text: str) -> StudyConfig:
    """Write the file only if it can be read back as a space."""
    from dse.errors import StorageError
    from dse.manifest import write_atomically
    from dse.schema_space import SpaceFile
    from dse.study_config import study_of_document
    from dse.yaml_loader import parse_yaml

    config = study_of_document(parse_yaml(text, SpaceFile, source=str(output)), folder=output.parent)
    try:
        write_atomically(output, text)
    except StorageError as err:
        raise StorageError(err.message, hint="Name a file in a writable folder with -o.") from None
    return config
