"""Validating on another machine: a folder to carry there, and its results read back.

    designs.json    what is measured
    settings.json   caps and limits
    run.py          the one command: python3 run.py --device cuda
    perfcore/       the measuring code; it needs torch and numpy alone

There, `run.py` writes `samples.json` (the designs' iterations) and `samples/` (kernels and training loops of that
machine, from which its profile is fitted here).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import perfcore
from dse.errors import DseError

if TYPE_CHECKING:
    from dse.validation_pricing import Pricing
    from perfcore.measure.isolate import Settings
    from perfcore.measure.record import DesignSample, NamedDesign

DESIGNS, SETTINGS, SAMPLES, KERNELS, SCRIPT = (
    "designs.json",
    "settings.json",
    "samples.json",
    "samples",
    "run.py",
)
# What the measuring code reads of the profiles' data: the catalogue of devices.
_DATA = ("devices", "nodes", "framework.json")

_HERE_ALONE = ("device", "profile", "traces")

_RUN = '''"""Measures the designs of this folder: python3 run.py --device cuda. Needs torch and numpy."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main():
    settings = json.loads((HERE / "settings.json").read_text())
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default=settings["device"], help="cpu, cuda or cuda:<index>")
    parser.add_argument("--budget", default="3m", help="time for this machine's kernels; 0s leaves them out")
    options = parser.parse_args()
    measure = [sys.executable, "-m", "perfcore.measure"]
    limits = []
    for name, value in settings["limits"].items():
        limits += ["--" + name.replace("_", "-"), str(value)]
    common = ["--device", options.device]
    commands = [[*measure, "run", "designs.json", "--out", "samples.json", *common, *limits]]
    if options.budget not in ("0", "0s"):
        threads = ["--threads", str(settings["limits"].get("threads", 1))]
        commands.append([*measure, "collect", "--out", "samples", "--budget", options.budget, *common, *threads])
    for command in commands:
        code = subprocess.run(command, cwd=HERE).returncode
        if code:
            return code
    print("Carry this folder home, and name it after `dse validate RUN --collect`.")
    return 0


sys.exit(main())
'''


def emit(designs: Sequence[NamedDesign], folder: Path, settings: Settings) -> None:
    """Write the folder to carry to the machine that measures.

    Raises:
        DseError: the folder is not empty, or cannot be written.
    """
    from perfcore.measure.record import write_designs

    if folder.exists() and any(folder.iterdir()):
        raise DseError(
            f"{folder} is not empty, but a folder to carry is written whole.", hint="Name another one."
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_designs(folder / DESIGNS, designs)
        (folder / SETTINGS).write_text(json.dumps(_plain(settings), indent=1) + "\n", encoding="utf-8")
        (folder / SCRIPT).write_text(_RUN, encoding="utf-8")
        _copy_code(folder / "perfcore")
    except OSError as err:
        raise DseError(f"{folder}: cannot be written: {err.strerror}.") from None


def read_back(folder: Path) -> tuple[list[DesignSample], Mapping[str, Any], Path | None]:
    """What was measured, where, and the folder of the machine's samples if there is one.

    Raises:
        DseError: nothing was measured, or other designs than were sent.
        DesignError: a file is corrupt.
    """
    from perfcore.measure.record import read_designs, read_samples

    path = folder / SAMPLES
    if not path.exists():
        raise DseError(
            f"{folder} holds no {SAMPLES}.", hint=f"Run `python3 {SCRIPT} --device ...` there first."
        )
    samples = read_samples(path)
    sent = {d.name for d in read_designs(folder / DESIGNS)}
    strange = sorted({s.name for s in samples} - sent)
    if strange:
        raise DseError(f"{path} holds designs that {folder / DESIGNS} does not: {', '.join(strange)}.")
    here = json.loads(path.read_text(encoding="utf-8"))["environment"]
    kernels = folder / KERNELS
    return samples, here, kernels if (kernels / "kernels.jsonl").exists() else None


def pricing_of_box(
    folder: Path,
    here: Mapping[str, Any],
    kernels: Path | None,
    samples: Sequence[DesignSample],
    *,
    profile: str | None,
) -> Pricing:
    """What predicts that machine's iterations: the profile asked for, its own samples', else its GPU's.

    Raises:
        DseError: a CPU measured and nothing says how fast it is.
        ProfileError: the samples do not make a profile, or there is none of that name.
    """
    from dse.validation_pricing import gpu_pricing, profile_pricing
    from perfcore.profile.fit_samples import fit_profile

    if profile is not None:
        return profile_pricing(profile)
    if kernels is not None:
        fit_profile(kernels, folder / "profile")
        return profile_pricing(str(folder / "profile"))
    if here["device_kind"] == "cuda":
        return gpu_pricing(samples[0].design.system, measuring=here["device"])
    raise DseError(
        f"{folder} holds no samples of its machine's kernels, so nothing predicts it.",
        hint=f"Run `python3 {SCRIPT} --budget 3m` there, or name a profile with --profile.",
    )


def _plain(settings: Settings) -> dict[str, Any]:
    limits = {k: v for k, v in asdict(settings).items() if v is not None and k not in _HERE_ALONE}
    return {"device": settings.device, "limits": limits}


def _copy_code(target: Path) -> None:
    """The package without tests' caches and fitted data."""
    source = Path(perfcore.__file__).parent
    for path in sorted(source.rglob("*.py")):
        into = target / path.relative_to(source)
        into.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, into)
    for name in _DATA:
        data = source / "profile" / "data" / name
        into = target / "profile" / "data" / name
        if data.is_dir():
            shutil.copytree(data, into, dirs_exist_ok=True)
        else:
            shutil.copyfile(data, into)
