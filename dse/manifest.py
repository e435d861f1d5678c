"""What a run was: enough to repeat it, and to refuse to go on with something else."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from dse.errors import StorageError, StudyError
from dse.search.checkpoint import cannot_write

FILE = "manifest.json"
SCHEMA_VERSION = 1
PACKAGES = ("numpy", "optuna", "ray", "catboost", "torch")
IDENTITY = ("space_hash", "profile", "profile_hash", "seed", "sampler", "effort")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """One run.

    Attributes:
        name: of the run, hence of its folder.
        space_hash: of `resolved`.
        space: the space file's text.
        overrides: `section.key=value` each, applied to it.
        resolved: everything that decides what a candidate is and costs, one fact a line.
        profile: name of the profile.
        profile_hash: of its contents.
        seed: of everything random.
        sampler: Optuna's, by name.
        effort: how much was priced around each trial.
        command: as typed, without paths of the machine.
        started: UTC, ISO 8601.
        versions: of the packages that decide the result.
        host: cores, system and Python; no names.
        wall_s: search wall time, summed over resumptions; 0 until the run has ended.
        method: `exact` or `search`; empty until the run has ended.
        counts: of trials, candidates and front members.
    """

    name: str
    space_hash: str
    space: str
    overrides: Sequence[str]
    resolved: Sequence[str]
    profile: str
    profile_hash: str
    seed: int
    sampler: str
    effort: Mapping[str, int]
    command: Sequence[str]
    started: str
    versions: Mapping[str, str] = field(default_factory=dict)
    host: Mapping[str, Any] = field(default_factory=dict)
    wall_s: float = 0.0
    method: str = ""
    counts: Mapping[str, float] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION

    def finished(self, *, wall_s: float, method: str, counts: Mapping[str, float]) -> Manifest:
        """The manifest of the ended run."""
        return replace(self, wall_s=round(self.wall_s + wall_s, 3), method=method, counts=dict(counts))


def text_hash(text: str) -> str:
    """SHA-256 of a text, in hexadecimal."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def versions() -> dict[str, str]:
    """Versions of Python, of this package, and of those that decide a result."""
    import perfcore

    found = {"python": platform.python_version(), "dlrm-dse": getattr(perfcore, "__version__", "unknown")}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def host() -> dict[str, Any]:
    """What the machine is like; nothing that names it or its user."""
    return {"system": platform.system(), "machine": platform.machine(), "cores": os.cpu_count()}


def write_manifest(manifest: Manifest, run_dir: Path) -> None:
    """Replace the folder's manifest.

    Raises:
        StorageError: the folder cannot be written.
    """
    path = run_dir / FILE
    write_atomically(path, json.dumps(asdict(manifest), indent=1, ensure_ascii=False) + "\n")


def write_atomically(path: Path, text: str) -> None:
    """Write a whole file or leave the old one.

    Raises:
        StorageError: the place cannot be written.
    """
    draft = path.with_name(f"{path.name}.new")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    except OSError as err:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise cannot_write(path, err) from err


def read_manifest(run_dir: Path) -> Manifest:
    """The folder's manifest.

    Raises:
        StorageError: there is none, or it is corrupt.
    """
    path = run_dir / FILE
    try:
        return Manifest(**json.loads(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, NotADirectoryError):
        raise StorageError(f"{run_dir} holds no run: {FILE} is missing.") from None
    except (OSError, ValueError, TypeError) as err:
        raise StorageError(
            f"{path} is not the manifest of a run, or is corrupt: {err}.",
            hint="Start again with --overwrite.",
        ) from err


def check_same(old: Manifest, new: Manifest) -> None:
    """Refuse to go on with a run as another one.

    Raises:
        StudyError: space, profile, seed, sampler or effort differ; the message shows how.
    """
    changed = [name for name in IDENTITY if getattr(old, name) != getattr(new, name)]
    if not changed:
        return
    lines = [
        f"  {name}: {getattr(old, name)!r} then, {getattr(new, name)!r} now"
        for name in changed
        if name != "space_hash"
    ]
    if "space_hash" in changed:
        lines += [f"  space: {line}" for line in _difference(old.resolved, new.resolved)]
    raise StudyError(
        "A run can only be resumed as it was started, but it changed:\n" + "\n".join(lines),
        hint="Undo the change, or start afresh with --overwrite or another --name.",
    )


def _difference(old: Sequence[str], new: Sequence[str]) -> list[str]:
    import difflib

    lines = difflib.unified_diff(old, new, "then", "now", lineterm="", n=0)
    return [line for line in lines if not line.startswith(("---", "+++", "@@"))][:20]
