"""A small correction from measured designs: one factor on every time, with its error on designs left out.

All times of a prediction scaled by one factor scale the iteration by it, whatever the design, so the factor is
that of measured over predicted iterations. It corrects what all designs have in common (a slower clock, another
torch) and nothing else, which is what a handful of designs can tell.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dse.errors import DseError
from dse.validate import mape_pct
from perfcore.profile.fit_samples import check_output
from perfcore.profile.profile import find_profile

FEWEST = 3


@dataclass(frozen=True, slots=True)
class Recalibration:
    """One factor on all times.

    Attributes:
        factor: measured over predicted, the geometric mean.
        before_mape_pct: of the predictions as they were.
        after_mape_pct: of each design with the factor of all others.
        n: designs.
    """

    factor: float
    before_mape_pct: float
    after_mape_pct: float
    n: int

    @property
    def helps(self) -> bool:
        """The error on designs left out is smaller than without the factor."""
        return self.after_mape_pct < self.before_mape_pct


def recalibrated(predicted: Sequence[float], measured: Sequence[float]) -> Recalibration:
    """The factor, and the errors before and after.

    Raises:
        DseError: fewer than three designs were measured.
    """
    if len(predicted) < FEWEST:
        raise DseError(
            f"A correction needs at least {FEWEST} measured designs, but got {len(predicted)}.",
            hint="Validate with a larger --top.",
        )
    logs = np.log(np.asarray(measured) / np.asarray(predicted))
    others = (logs.sum() - logs) / (len(logs) - 1)
    after = np.asarray(predicted) * np.exp(others)
    return Recalibration(
        float(np.exp(logs.mean())),
        mape_pct(predicted, measured),
        mape_pct(after.tolist(), measured),
        len(logs),
    )


def write_recalibrated(profile: str, out: Path, found: Recalibration, *, source: str) -> None:
    """Write the profile with the factor on all its times into another folder.

    Raises:
        ProfileError: no such profile, or `out` is a bundled one or something else.
        DseError: `out` is the profile itself, or cannot be written.
    """
    folder = find_profile(profile)
    check_output(out)
    if out.resolve() == folder.resolve():
        raise DseError(f"{out} is the profile that is corrected.", hint="Name another folder.")
    data = json.loads((folder / "profile.json").read_text(encoding="utf-8"))
    data["name"] = out.resolve().name
    data["time_scale"] = round(float(data.get("time_scale") or 1.0) * found.factor, 6)
    data["time_scale_source"] = (
        f"{source}; leave-one-out MAPE {found.after_mape_pct:.1f} % over {found.n} designs, "
        f"{found.before_mape_pct:.1f} % before"
    )
    try:
        shutil.copytree(folder, out, dirs_exist_ok=True)
        # A profile may name a file of another one: it comes along.
        for entry in data["kernels"].values():
            if entry.get("correction"):
                file = (folder / entry["correction"]).resolve()
                entry["correction"] = file.name
                shutil.copyfile(file, out / file.name)
        (out / "profile.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    except OSError as err:
        raise DseError(f"{out}: cannot be written: {err.strerror}.") from None
