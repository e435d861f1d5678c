"""Tables of bulk prediction, kept between runs in the user's cache folder.

An entry is named for everything that its tables follow from: the space, the profile, the sources of both packages
and the versions of what computes. So an entry is never out of date; what is no longer asked for goes first.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dse.space import SearchSpace
from perfcore.profile.profile import Profile

Arrays: TypeAlias = Mapping[str, NDArray[Any]]

PACKAGES = ("dse", "perfcore")
DEPENDENCIES = ("numpy", "numba", "catboost")


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/dlrm-dse`, by default in `~/.cache`; a relative path does not count."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (named if named.is_absolute() else Path.home() / ".cache") / "dlrm-dse" / "tables"


@dataclass(frozen=True, slots=True)
class TableCache:
    """A folder of `.npz` files that no failure of the disk turns into an error.

    Attributes:
        folder: made when first written to.
        smallest_bytes: tables below this are built again in no time, and not kept.
        most_bytes: of all entries; the ones longest unused make room.
    """

    folder: Path
    smallest_bytes: int = 4 * 2**20
    most_bytes: int = 2**30

    def read(self, key: str) -> dict[str, NDArray[Any]] | None:
        """The arrays of an entry; `None` where there is none that can be read whole."""
        path = self._path(key)
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as entry:
                arrays = {name: entry[name] for name in entry.files}  # each read to its checksum
        except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error):
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return arrays

    def write(self, key: str, arrays: Arrays) -> None:
        """Keep the arrays, in one step, if they are large enough and the disk lets us."""
        size = sum(a.nbytes for a in arrays.values())
        if not self.smallest_bytes <= size <= self.most_bytes:
            return
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._make_room(size)
            handle, name = tempfile.mkstemp(dir=self.folder, suffix=".part")
            part = Path(name)
            try:
                with os.fdopen(handle, "wb") as file:
                    np.savez(file, **arrays)  # type: ignore[arg-type]
                part.replace(self._path(key))
            finally:
                part.unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.npz"

    def _make_room(self, size: int) -> None:
        """Remove the entries longest unused, and what a killed run left half written."""
        entries = [(p.stat(), p) for p in self.folder.glob("*.npz")]
        entries += [(p.stat(), p) for p in self.folder.glob("*.part")]
        total = size + sum(s.st_size for s, _ in entries)
        for status, path in sorted(entries, key=lambda e: e[0].st_mtime):
            if total <= self.most_bytes:
                return
            path.unlink(missing_ok=True)
            total -= status.st_size


def table_key(space: SearchSpace, profile: Profile, *, distributed: bool, asked: object = None) -> str:
    """The name of an entry: a digest of what the tables of a space's designs of one kind follow from.

    Placements of several ranks follow from what is `asked` as well: which settings are worth one.
    """
    said = (
        space,
        profile.hash,
        distributed,
        asked if distributed else None,
        _sources(),
        *(version(name) for name in DEPENDENCIES),
    )
    return hashlib.sha256(repr(said).encode()).hexdigest()


@cache
def _sources() -> str:
    """A digest of the packages' code."""
    digest = hashlib.sha256()
    for name in PACKAGES:
        root = Path(__file__).parents[2] / name
        for path in sorted(root.rglob("*.py")):
            digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()
