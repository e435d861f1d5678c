"""A CSV file of kernels, one a line, priced with a profile."""

from __future__ import annotations

import csv
import math
import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

from dse.errors import ConfigError, StorageError
from perfcore.cost.model import CostModel
from perfcore.graph import kernels as k

# A kernel's own field `kind` has a column named for what it says; `kind` names the kernel.
RENAMED = {k.Memcpy: {"kind": "copy"}, k.Collective: {"kind": "collective"}}
ADDED = ("predicted_us", "low_us", "high_us", "calibrated")
FLAGS = {"true": True, "false": False}


def _snake(name: str) -> str:
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).removeprefix("_")


KINDS: Mapping[str, type] = {
    _snake(kind.__name__): kind for kind in get_args(k.Kernel) if kind is not k.MeasuredKernel
}


@dataclass(frozen=True, slots=True)
class KernelTable:
    """Kernels of a file.

    Attributes:
        columns: of the file, in order.
        rows: cells by column.
        kernels: one a row.
    """

    columns: tuple[str, ...]
    rows: tuple[dict[str, str], ...]
    kernels: tuple[k.Kernel, ...]


def read_kernels(path: Path) -> KernelTable:
    """The kernels of a CSV file: `kind`, and a column for each field of the kinds in it; an empty cell is left out.

    Raises:
        ConfigError: it cannot be read, a kind or cell is wrong, or a field is missing; the message names the line.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            rows = tuple(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as err:
        raise ConfigError(f"{path} cannot be read: {err}.") from err
    columns = tuple(reader.fieldnames or ())
    if "kind" not in columns:
        raise ConfigError(f"{path}:1: a column `kind` is needed, but the columns are {', '.join(columns)}.")
    kernels = tuple(_kernel(row, f"{path}:{line}") for line, row in enumerate(rows, start=2))
    return KernelTable(columns, rows, kernels)


def priced_rows(table: KernelTable, costs: CostModel) -> list[dict[str, str]]:
    """The rows with the predicted time, the interval that holds nine in ten measurements, and its basis."""
    out = []
    for row, kernel, us in zip(table.rows, table.kernels, costs.predict_us(table.kernels), strict=True):
        time_us, factor = float(us.sum()), math.exp(costs.log_error_90(kernel))
        values = (f"{time_us:.6g}", f"{time_us / factor:.6g}", f"{time_us * factor:.6g}")
        out.append(row | dict(zip(ADDED, (*values, costs.calibration(kernel).value), strict=True)))
    return out


def write_rows(path: Path, table: KernelTable, rows: Sequence[Mapping[str, str]]) -> None:
    """Write the file's columns and those that were added.

    Raises:
        StorageError: it cannot be written.
    """
    try:
        with path.open("w", encoding="utf-8", newline="") as file:
            names = [*table.columns, *(c for c in ADDED if c not in table.columns)]
            writer = csv.DictWriter(file, names, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    except OSError as err:
        raise StorageError(f"{path} cannot be written: {err.strerror or err}.") from err


def _kernel(row: Mapping[str, Any], at: str) -> k.Kernel:
    name = str(row["kind"])
    if name not in KINDS:
        raise ConfigError(f"{at}: `kind` must be one of {', '.join(KINDS)}, but got {name!r}.")
    kind = KINDS[name]
    values: dict[str, Any] = {}
    hints = _hints(kind)
    for field in fields(kind):
        column = RENAMED.get(kind, {}).get(field.name, field.name)
        text = (row.get(column) or "").strip()
        if text:
            values[field.name] = _value(text, hints[field.name], f"{at}: `{column}`")
        elif field.default is MISSING:
            raise ConfigError(f"{at}: a {name} needs a value in column `{column}`.")
    kernel: k.Kernel = kind(**values)
    return kernel


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, vars(k))


def _value(text: str, hint: Any, what: str) -> Any:
    """A cell as what the field holds."""
    options = get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if hint is bool:
        return _one_of(FLAGS, text.lower(), what)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return _one_of({str(v): v for v in hint}, text, what)
    if str in options:
        return text
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number >= 0):
        raise ConfigError(f"{what} must be a number of at least 0, but got {text!r}.")
    return int(number) if int in options and float not in options else number


def _one_of(known: Mapping[str, Any], text: str, what: str) -> Any:
    if text not in known:
        raise ConfigError(f"{what} must be one of {', '.join(known)}, but got {text!r}.")
    return known[text]
