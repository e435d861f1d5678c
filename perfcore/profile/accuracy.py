"""Write the kernel section of `docs/accuracy.md` from the errors that the bundled profiles state.

`python -m perfcore.profile.accuracy`
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from perfcore.graph.kernels import DType, Gemm
from perfcore.profile.plots import plot
from perfcore.profile.profile import BUNDLED, POOLED, load_profile
from perfcore.profile.schema import KnownError, Section, known_errors, read_json

NEAR = 0.25
ROOFLINE = " (roofline alone)"
# Published errors of kernel models (GMAE, percent): Lin et al. 2022 and 2024, and the preset that came with the data.
PUBLISHED = {
    "gemm_fp32": "< 10",
    "gemm_bf16": "2.3, 1.3, 1.35 (A100, H100, H200)",
    "embedding_lookup": "9.8; 4.4 to 5.6 with a network",
    "embedding_update": "9.8; 3.1 to 3.6 with a network",
    "elementwise": "< 10",
    "convolution": "< 10",
    "batch_norm": "< 10",
    "all_reduce": "5 to 10",
    "all_to_all": "5 to 10",
    "all_gather": "5 to 10",
    "reduce_scatter": "5 to 10",
}
CHECKED, AWKWARD = "v100-sxm2-16gb", "awkward.json"
BEGIN, END = "<!-- kernels: begin -->", "<!-- kernels: end -->"
PAGE = Path("docs") / "accuracy.md"
PICTURE = "accuracy.png"
INTRODUCTION = """## Kernel models

Written by `make accuracy` from the errors that the bundled profiles state; `docs/profiles.md` says how they come about.
GMAE is `exp(mean(ln(|predicted/measured - 1| + 4e-4)))`, MAPE the mean of |predicted/measured - 1|, both in percent, on rows
that the fit has not seen (*split*). *Roofline* is the analytic estimate alone on the same rows; *published* are GMAE of published models of
such kernels, on their own data. Iterations measured after a calibration: `docs/validation.md` (`make validate-cpu`).

![predicted over measured times, one panel a kernel and device](accuracy.png)

Predicted over measured time of rows that no fit has seen (300 half-precision products and all inner sizes of the collectives); the band is ± 10 %.
"""
NOISE = """
### What limits the products

The label of a shape is the median over framework versions. How far do the versions themselves agree?

| device | shapes | half of the versions against the other half, GMAE / MAPE | one version against the median of the others |
|---|---|---|---|
| A100 | 8,316 | 2.9 / 5.1 | 2.1 / 4.4 to 4.7 / 9.2 |
| H100 | 32,586 | 1.2 / 2.2 | 1.4 / 2.8 to 3.8 / 8.6 |
| H200 | 32,190 | 1.4 / 2.3 | 1.7 / 2.8 to 4.8 / 6.3 |
| B200 | 35,742 | 1.8 / 3.0 | 1.8 / 3.7 to 5.5 / 7.7 |

Neighbouring `m` from 3 to 14 fill the same tile, and their labels scatter by 2.0 / 3.4 % on the A100, by 0.6 / 0.8 % on the H100.
On the A100 three quarters of the shapes (all but 21 values of `m`) were measured with one version only. Where the others overlap with it, it is 2 to 5 % slower, by how much cannot be told:
its ratio to the mean of two versions that agree (within 1.2 / 2.5 %) spreads by 2.8 / 4.3 % at each `m`, and still by 2.6 / 3.8 % around what neighbouring pairs (n, k) tell. So some 2.5 / 3.5 % of
error on three quarters of the labels is their own scatter. Which versions measured a shape is a function of the shape, and the trees may learn it; labels are not shifted to one version, since most have
no other and a smooth shift explains a tenth of the scatter. On H100 and H200 the model is as close to a label as two halves of the measurements are
to each other. What is left lies in the products that another tile of the library happens to serve.
"""
AWKWARD_TEXT = """
### Awkward shapes

Products whose dims no tile divides, from training traces on a V100, never fitted on; `m × n × k`. All bf16 data has multiples of 32, so such shapes are
flagged `extrapolated` there; predictions are continuous across the padding edges (`tests/perfcore/profile/test_golden_kernels.py`).

| batch | m × n × k | measured, µs | predicted, µs | error, % |
|---|---|---|---|---|
"""
INTERVALS = """
### Intervals

`low` and `high` of a prediction hold nine in ten measurements, as far as is known. A kernel's half width (the logarithm of a factor) is the 90 % quantile
on validation rows; *coverage* is the share of single measurements on the test rows inside it. Outside the fitted range, and for devices
without data, the width is that of devices that were left out of the fit.

| profile | kernel | inside | outside | coverage, % |
|---|---|---|---|---|
"""


def section(profiles: Path) -> str:
    """The section as Markdown, between its marks."""
    sections = {p.parent.name: read_json(p) for p in sorted(profiles.glob("*/profile.json"))}
    lines = ["", "| kernel | profile | n | GMAE / MAPE | roofline | published GMAE | split | source |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    rows: list[tuple[str, str]] = []
    for profile, content in sections.items():
        errors = known_errors(content)
        bare = {e.kernel.removesuffix(ROOFLINE): e for e in errors if e.kernel.endswith(ROOFLINE)}
        shown = [
            e for e in errors if e not in bare.values() and (profile == POOLED or "left out" not in e.kernel)
        ]
        rows += [(e.kernel, _row(profile, e, bare.get(e.kernel))) for e in shown]
    lines += [text for _, text in sorted(rows)]
    intervals = [text for name, content in sections.items() for text in _intervals(name, content)]
    awkward = AWKWARD_TEXT + _awkward(profiles / CHECKED)
    text = INTRODUCTION + "\n".join(lines) + "\n" + NOISE + awkward + INTERVALS + "\n".join(intervals)
    return f"{BEGIN}\n{text}\n{END}\n"


def replaced(page: str, text: str) -> str:
    """The page with its section of kernels replaced, or added at the end."""
    if BEGIN in page and END in page:
        before, rest = page.split(BEGIN, 1)
        return before + text.rstrip("\n") + rest.split(END, 1)[1]
    return (page.rstrip("\n") + "\n\n" if page else "# Accuracy\n\n") + text


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m perfcore.profile.accuracy", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "--profiles", type=Path, default=BUNDLED, help="folder of profiles (default: bundled)"
    )
    parser.add_argument("--page", type=Path, default=PAGE, help="the page to write into")
    options = parser.parse_args(arguments)
    page = options.page.read_text(encoding="utf-8") if options.page.exists() else ""
    options.page.write_text(replaced(page, section(options.profiles)), encoding="utf-8")
    plot(options.profiles, options.page.parent / PICTURE)
    return 0


def _row(profile: str, error: KnownError, bare: KnownError | None) -> str:
    cells = (
        error.kernel,
        profile,
        f"{error.n:,}",
        f"{error.gmae_pct:.1f} / {error.mape_pct:.1f}",
        f"{bare.gmae_pct:.1f} / {bare.mape_pct:.1f}" if bare else "",
        PUBLISHED.get(error.kernel.split(" ")[0], ""),
        error.split,
        error.source,
    )
    return "| " + " | ".join(cells) + " |"


def _awkward(folder: Path) -> str:
    costs = load_profile(str(folder)).cost_model()
    lines, errors = [], []
    for row in read_json(folder / AWKWARD).list_of_sections("products"):
        batch, m, n, k, us = (row.number(name) for name in ("batch", "m", "n", "k", "us"))
        predicted = float(costs.predict_us([Gemm(m, n, k, DType.FP32, batch=batch)])[0])
        errors.append(abs(predicted / us - 1))
        shape = f"{m:.0f} × {n:.0f} × {k:.0f}"
        lines.append(
            f"| {batch:.0f} | {shape} | {us:.1f} | {predicted:.1f} | {100 * (predicted / us - 1):+.0f} |"
        )
    near = sum(e <= NEAR for e in errors)
    return "\n".join(lines) + f"\n\n{near} of {len(errors)} lie within 25 %.\n"


def _intervals(profile: str, content: Section) -> list[str]:
    kernels = content.section("kernels")
    lines = []
    for name in kernels.names():
        entry = kernels.section(name)
        if "coverage_pct" not in entry or entry.text("basis") != "measured":
            continue
        inside, outside = entry.number("log_error_90"), entry.number("log_error_90_outside")
        lines.append(
            f"| {profile} | {name} | {inside:.3f} | {outside:.3f} | {entry.number('coverage_pct'):.1f} |"
        )
    return lines


if __name__ == "__main__":
    sys.exit(main())
