"""A profile folder's JSON as checked values.

`profile.json` holds one entry a kernel kind: model, parameters, range, basis, source, date, sample count and
held-out error. Every mistake is a `ProfileError` that names the file and the key.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perfcore.cost.model import Calibration
from perfcore.errors import ProfileError

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class KnownError:
    """Held-out error of one kernel model.

    Attributes:
        kernel: entry of the profile.
        n: rows that the error was computed on.
        gmae_pct: geometric mean absolute error.
        mape_pct: mean absolute error.
        split: how the rows were held out.
        source: data set.
    """

    kernel: str
    n: int
    gmae_pct: float
    mape_pct: float
    split: str
    source: str


class Section:
    """One JSON object of a file, read key by key; a missing or wrong key is named with its path."""

    def __init__(self, data: Any, *, file: Path, at: str = "$") -> None:
        self._file, self._at = file, at
        if not isinstance(data, dict):
            raise self.error(f"must be an object, but is {type(data).__name__}")
        self._data: dict[str, Any] = data

    def error(self, message: str, key: str = "") -> ProfileError:
        """A `ProfileError` that names file and place."""
        place = f"{self._at}.{key}" if key else self._at
        return ProfileError(
            f"{self._file}: {place} {message}.", hint="Fit the profile anew, or name another one."
        )

    def __contains__(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self._data.get(key) is not None

    def names(self) -> list[str]:
        """Names in order."""
        return list(self._data)

    def raw(self, key: str) -> Any:
        """The value, of any kind."""
        if key not in self._data:
            raise self.error("is required, but it is missing", key)
        return self._data[key]

    def text(self, key: str) -> str:
        """A string."""
        value = self.raw(key)
        if not isinstance(value, str):
            raise self.error(f"must be a string, but got {value!r}", key)
        return value

    def number(self, key: str) -> float:
        """A finite number."""
        value = self.raw(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise self.error(f"must be a finite number, but got {value!r}", key)
        return float(value)

    def numbers(self, key: str) -> list[float]:
        """A list of finite numbers."""
        value = self.raw(key)
        if not isinstance(value, list):
            raise self.error(f"must be a list of numbers, but got {value!r}", key)
        listed = Section(dict(enumerate(value)), file=self._file, at=f"{self._at}.{key}")
        return [listed.number(i) for i in range(len(value))]  # type: ignore[arg-type]

    def section(self, key: str) -> Section:
        """An object inside."""
        return Section(self.raw(key), file=self._file, at=f"{self._at}.{key}")

    def list_of_sections(self, key: str) -> list[Section]:
        """Objects of a list."""
        value = self.raw(key)
        if not isinstance(value, list):
            raise self.error(f"must be a list, but got {value!r}", key)
        return [Section(v, file=self._file, at=f"{self._at}.{key}[{i}]") for i, v in enumerate(value)]

    def calibration(self, key: str) -> Calibration:
        """One of the kinds of basis."""
        value = self.text(key)
        try:
            return Calibration(value)
        except ValueError:
            known = ", ".join(c.value for c in Calibration)
            raise self.error(f"must be one of {known}, but got {value!r}", key) from None


def read_json(path: Path) -> Section:
    """The object of a JSON file.

    Raises:
        ProfileError: no such file, not JSON, or not an object.
    """
    try:
        return Section(json.loads(path.read_text(encoding="utf-8")), file=path)
    except OSError as err:
        raise ProfileError(
            f"{path}: a profile needs this file, but it cannot be read: {err.strerror}."
        ) from None
    except ValueError as err:
        raise ProfileError(f"{path}: must be JSON, but is not: {err}.") from None


def known_errors(profile: Section) -> tuple[KnownError, ...]:
    """The held-out errors that a profile states."""
    if "known_errors" not in profile:
        return ()
    return tuple(
        KnownError(
            kernel=e.text("kernel"),
            n=int(e.number("n")),
            gmae_pct=e.number("gmae_pct"),
            mape_pct=e.number("mape_pct"),
            split=e.text("split"),
            source=e.text("source"),
        )
        for e in profile.list_of_sections("known_errors")
    )


def provenance(profile: Section, folder: Path) -> Mapping[str, str]:
    """Kernel entry to the source of its numbers; of collectives that were measured first, then of all others."""
    kernels = profile.section("kernels")
    sources = {name: kernels.section(name).text("source") for name in kernels.names()}
    if "collectives" in profile:
        measured = read_json(folder / profile.text("collectives")).text("source")
        elsewhere = sources.get("collective")
        sources["collective"] = f"{measured}; other machines: {elsewhere}" if elsewhere else measured
    return sources
