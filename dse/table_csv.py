"""Embedding tables from CSV files: the bundled sets and a person's own."""

from __future__ import annotations

import csv
import functools
import io
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dse.errors import ConfigError
from dse.schema import MAX_TABLES, TableEntry
from dse.validation_text import message_of, nearest
from dse.yaml_loader import read_text
from perfcore.design.model import EmbeddingTable

BUNDLED = Path(__file__).parent / "tables"
SYNONYMS = {"rows": "num_embeddings", "dim": "embedding_dim", "pooling": "pooling_factor", "table": "name"}
COLUMNS = ("name", "num_embeddings", "embedding_dim", "pooling_factor", "skew")


def bundled_table_sets() -> list[str]:
    """Names of the bundled table sets."""
    return sorted(p.stem for p in BUNDLED.glob("*.csv"))


@functools.cache
def bundled_tables(name: str) -> tuple[EmbeddingTable, ...]:
    """The bundled set of that name.

    Raises:
        ConfigError: there is none; the message names the nearest.
    """
    known = bundled_table_sets()
    if name not in known:
        raise ConfigError(
            f"no bundled table set is called `{name}`, and a file ends in .csv; {nearest(name, known)}"
        )
    return read_tables(BUNDLED / f"{name}.csv")


def read_tables(path: Path) -> tuple[EmbeddingTable, ...]:
    """Tables of a CSV file, in its order.

    Raises:
        ConfigError: the file cannot be read or has mistakes: all of them, `file:line:col: column: message` each.
    """
    lines = _lines(path)
    header, problems = _header(lines[0][1] if lines else [], path)
    if problems:
        raise ConfigError("\n".join(problems))
    tables: list[EmbeddingTable] = []
    seen: dict[str, int] = {}
    for position, (number, row) in enumerate(lines[1:]):
        table, mistakes = _table(header, row, f"{path}:{number}", default_name=f"table_{position}")
        problems += mistakes
        if table is None:
            continue
        if table.name in seen:
            line = seen[table.name]
            problems.append(f"{path}:{number}:1: name: {table.name!r} is already there, in line {line}")
        seen.setdefault(table.name, number)
        tables.append(table)
    if not problems and not 1 <= len(tables) <= MAX_TABLES:
        problems = [f"{path}:1:1: (top level): 1 to {MAX_TABLES} tables are needed, but got {len(tables)}"]
    if problems:
        raise ConfigError("\n".join(problems))
    return tuple(tables)


def _lines(path: Path) -> list[tuple[int, list[str]]]:
    """Line number and cells of every line that is not empty."""
    reader = csv.reader(io.StringIO(read_text(path)))
    try:
        return [(reader.line_num, row) for row in reader if any(cell.strip() for cell in row)]
    except csv.Error as err:
        raise ConfigError(f"{path}:{reader.line_num}:1: not CSV: {err}") from None


def _header(cells: Sequence[str], path: Path) -> tuple[list[str], list[str]]:
    """Column names in our words, and what is wrong with them."""
    names = [SYNONYMS.get(c.strip(), c.strip()) for c in cells]
    problems = []
    for position, name in enumerate(names):
        at = f"{path}:1:{_column(cells, position)}"
        if name not in COLUMNS:
            problems.append(f"{at}: {name}: unknown column; {nearest(name, [*COLUMNS, *SYNONYMS])}")
        elif name in names[:position]:
            problems.append(f"{at}: {name}: this column is there twice")
    if "num_embeddings" not in names:
        problems.append(f"{path}:1:1: num_embeddings: this column is needed, but it is missing")
    return names, problems


def _table(
    header: Sequence[str], row: Sequence[str], at: str, *, default_name: str
) -> tuple[EmbeddingTable | None, list[str]]:
    if len(row) != len(header):
        return None, [f"{at}:1: (row): {len(header)} cells are needed, but got {len(row)}"]
    cells = {k: c.strip() for k, c in zip(header, row, strict=True) if c.strip() and k in COLUMNS}
    data: dict[str, Any] = {k: c if k == "name" else _number(c) for k, c in cells.items()}
    try:
        entry = TableEntry.model_validate({"name": default_name} | data)
    except ValidationError as err:
        return None, list(_mistakes(err, header, row, at))
    return table_of(entry), []


def _mistakes(err: ValidationError, header: Sequence[str], row: Sequence[str], at: str) -> Iterator[str]:
    for e in err.errors(include_url=False):
        name = str(e["loc"][0])
        column = _column(row, header.index(name)) if name in header else 1
        yield f"{at}:{column}: {name}: {message_of(e, TableEntry)}"


def table_of(entry: TableEntry) -> EmbeddingTable:
    """The design's value of a checked entry."""
    return EmbeddingTable(
        name=entry.name,
        num_embeddings=entry.num_embeddings,
        pooling_factor=entry.pooling_factor,
        skew=entry.skew,
        embedding_dim=entry.embedding_dim,
    )


def _number(cell: str) -> int | float | str:
    if re.fullmatch(r"[-+]?\d{1,4000}", cell):
        return int(cell)
    try:
        return float(cell)
    except ValueError:
        return cell


def _column(cells: Sequence[str], position: int) -> int:
    """Where a cell begins in its line, counted from 1 (quotes are not counted)."""
    return 1 + sum(len(c) + 1 for c in cells[:position])
