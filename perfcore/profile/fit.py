"""Fit the bundled profiles from raw measurements.

`python -m perfcore.profile.fit --data PATH` reads `PATH/kernels`, `PATH/paper` and `PATH/traces` and writes a folder a device;
`python -m perfcore.profile.fit --report` prints the errors that the written profiles state. Fits are deterministic:
fixed seed, one thread.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfcore.cost.gemm import GemmParams
from perfcore.cost.model import Calibration, CostModel
from perfcore.design import hardware
from perfcore.design.hardware import Device
from perfcore.errors import ProfileError
from perfcore.graph.kernels import DType
from perfcore.profile import fit_fp32, fit_gemm, fit_tables
from perfcore.profile.accuracy import AWKWARD
from perfcore.profile.build import embedding_formulas, kernel_models
from perfcore.profile.fit_batched import BatchedFit, fit_batched
from perfcore.profile.fit_checks import (
    EMBEDDING_FILE,
    EMBEDDING_SPLITS,
    GEMM_FILE,
    awkward_products,
    published_kernel_errors,
)
from perfcore.profile.fit_checks_memory import MEMORY_FILE, MEMORY_SPLITS, memory_kernel_errors
from perfcore.profile.fit_gemm import Errors, GemmFit, Samples
from perfcore.profile.fit_layers import add_layers
from perfcore.profile.fit_trees import Trees
from perfcore.profile.plots import HELD_OUT
from perfcore.profile.profile import BUNDLED, POOLED
from perfcore.profile.recipes import RECIPES, Recipe, curves_source, document, known_error
from perfcore.profile.schema import known_errors, read_json

if TYPE_CHECKING:
    import pandas as pd

logger = logging.getLogger(__name__)

CHECKED = "v100-sxm2-16gb"
AWKWARD_SOURCE = (
    "ml_perf_model, V100 at a locked clock: products of training traces, dims that 32 does not divide"
)
BF16_TREES = Trees(iterations=400, learning_rate=0.2, borders=128, repeats=3)
FP32_TREES = Trees(iterations=1000)
# Few questions a tree: what deeper trees learn of one device misleads about another.
BF16_POOLED_TREES = Trees(iterations=450, depth=4, learning_rate=0.12, columns=1.0, strength=0.5)
BF16_SYSTEMS = {
    "a100_sxm": "a100-sxm4-80gb",
    "h100_sxm": "h100-sxm",
    "h200_sxm": "h200-sxm",
    "b200_sxm": "b200-sxm",
}
FP32_GPUS = {
    "Tesla V100-PCIE-32GB": "v100-pcie-32gb",
    "Tesla P100-PCIE-16GB": "p100-pcie-16gb",
    "Tesla T4": "t4",
    "NVIDIA A100-PCIE-40GB": "a100-pcie-40gb",
}
# At 70 W it sustains about half of the boost clock: what it reaches of its data sheet says little of others.
THROTTLED = ("t4",)


@dataclass(frozen=True, slots=True)
class Pool:
    """A roofline for any device, perhaps with a file of corrections, and the errors of each device when it was left out."""

    params: GemmParams
    file: str | None
    left_out: Mapping[str, Errors]
    samples: int


@dataclass(frozen=True, slots=True)
class Fits:
    """Everything fitted, by the name of the board that was measured."""

    gemm: Mapping[tuple[DType, str], GemmFit]
    pools: Mapping[DType, Pool]
    vector: Mapping[str, fit_tables.VectorFit]
    curves: Mapping[str, list[fit_tables.CurvePoints]]
    batched: Mapping[str, BatchedFit]


def fit_all(data: Path, out: Path) -> None:
    """Fit every kernel that has data and write all bundled profiles.

    Args:
        data: folder with `kernels/*.parquet`, `kernels/nccl.csv.gz`, `paper/*.csv` and two of `traces/`.
        out: folder of the profiles; `shared/constants.json` and `shared/boards.json` lie there already.

    Raises:
        ProfileError: a data file is missing.
    """
    constants = json.loads((out / POOLED / "constants.json").read_text(encoding="utf-8"))
    floors = constants["kernels"]
    boards = board_devices(out)
    bf16 = _bf16(data)
    vector = _vector(data, boards, floors)
    fp32 = _fp32(data, boards, floors, vector)
    gemm = {**_fit_each(bf16, BF16_TREES, floors), **_fit_each(fp32, FP32_TREES, floors)}
    fits = Fits(
        gemm=gemm,
        pools={
            DType.BF16: _pool([s for s, _ in bf16.values()], BF16_POOLED_TREES, out, floors),
            # Libraries differ in what trees would learn: with them, devices left out are predicted worse.
            DType.FP32: _pool([s for n, (s, _) in fp32.items() if n not in THROTTLED], None, out, floors),
        },
        vector=vector,
        curves=_curves(data),
        batched=_batched(data, {name: gemm[DType.BF16, name].params for name in BF16_SYSTEMS.values()}),
    )
    for recipe in RECIPES:
        write_profile(recipe, fits, constants, out)
    add_layers(data / "traces", out, boards)
    held_out = {
        f"gemm_{t.value}, {board}": _plain(fit.points)
        for (t, board), fit in fits.gemm.items()
        if t is DType.BF16
    }
    _write_lines(out / POOLED / HELD_OUT, held_out)
    add_checks(data / "paper", out / CHECKED, rows=constants["mlperf_rows"]["rows"])


def add_checks(paper: Path, folder: Path, *, rows: list[float]) -> None:
    """State the errors on published V100 kernels in the profile at the same clock."""
    for name in (GEMM_FILE, EMBEDDING_FILE, MEMORY_FILE):
        _require(paper / name)
    content = json.loads((folder / "profile.json").read_text(encoding="utf-8"))
    device, section = hardware.device(folder.name), read_json(folder / "profile.json")
    costs = CostModel(kernel_models(section, folder, device=device, node=hardware.default_node(device.name)))
    formulas = embedding_formulas(section.section("kernels"), device)
    found = published_kernel_errors(paper, costs, formulas, mlperf_rows=rows)
    splits = EMBEDDING_SPLITS | MEMORY_SPLITS
    content["known_errors"] += [
        known_error(
            kernel, error, splits.get(kernel, "never fitted on"), "ml_perf_model, V100 at a locked clock"
        )
        for kernel, error in (*found, *memory_kernel_errors(paper, costs))
    ]
    _write_json(folder / "profile.json", content)
    _write_json(folder / AWKWARD, {"source": AWKWARD_SOURCE, "products": awkward_products(paper)})


def write_profile(recipe: Recipe, fits: Fits, constants: Mapping[str, Any], out: Path) -> None:
    """Write one profile's folder; `overheads.json` beside it is left alone."""
    folder = out / recipe.name
    folder.mkdir(parents=True, exist_ok=True)
    for dtype, board in recipe.gemm.items():
        if dtype not in recipe.gemm_folder:
            fits.gemm[dtype, board].model.save(folder / f"gemm_{dtype.value}.npz")
    if recipe.curves is not None and recipe.curves_folder is None:
        curves = [c.as_json() for c in fits.curves[recipe.curves]]
        content = {
            "basis": "measured",
            "source": curves_source(recipe.curves),
            "log_error_90": fit_tables.curve_spread(fits.curves[recipe.curves]),
            "curves": curves,
        }
        _write_json(folder / "collectives.json", content)
    _write_json(folder / "profile.json", document(recipe, fits, constants))


def board_devices(out: Path) -> dict[str, Device]:
    """Devices that data sets measured: the catalogue's, and boards that differ from it in a few numbers."""
    boards = json.loads((out / POOLED / "boards.json").read_text(encoding="utf-8"))["boards"]
    devices = {name: hardware.device(name) for name in hardware.device_names()}
    for name, entry in boards.items():
        numbers = {k: v for k, v in entry.items() if k not in ("chip", "source")}
        devices[name] = replace(devices[entry["chip"]], name=name, **numbers)
    return devices


def report(out: Path) -> str:
    """A table of the errors that the profiles under `out` state."""
    lines = [f"{'profile':18} {'kernel':28} {'n':>7} {'GMAE %':>8} {'MAPE %':>8}  split"]
    for path in sorted(out.glob("*/profile.json")):
        for e in known_errors(read_json(path)):
            lines.append(
                f"{path.parent.name:18} {e.kernel:28} {e.n:7d} {e.gmae_pct:8.2f} {e.mape_pct:8.2f}  {e.split}"
            )
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m perfcore.profile.fit", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--data", type=Path, help="folder of raw measurements")
    parser.add_argument("--out", type=Path, default=BUNDLED, help="folder of the profiles (default: bundled)")
    parser.add_argument("--report", action="store_true", help="print the errors that the profiles state")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if options.data is None and not options.report:
        parser.error("one of --data and --report is required")
    if options.data is not None:
        fit_all(options.data, options.out)
    if options.report:
        sys.stdout.write(report(options.out))
    return 0


def _bf16(data: Path) -> dict[str, tuple[Samples, Samples]]:
    frame = _parquet(data / "kernels" / "gemm_bf16.parquet")
    out = {}
    for system, name in BF16_SYSTEMS.items():
        rows, device = frame[frame["system"] == system], hardware.device(name)
        out[name] = (fit_gemm.bf16_samples(rows, device), fit_gemm.bf16_versions(rows, device))
    return out


def _fp32(
    data: Path,
    boards: Mapping[str, Device],
    constants: Mapping[str, Any],
    vector: Mapping[str, fit_tables.VectorFit],
) -> dict[str, tuple[Samples, None]]:
    frame = _parquet(data / "kernels" / "gemm_fp32.parquet")
    rows = {name: frame[frame["gpu"] == gpu] for gpu, name in FP32_GPUS.items()}
    launch_us = constants["elementwise"]["parameters"]["floor_us"]
    told = {n: fit_fp32.timings(r, boards[n], launch_us=launch_us) for n, r in rows.items()}
    timed = fit_fp32.filled(told)
    logger.info("host times and gaps, in us: %s", timed)
    floor_us = constants["gemm_fp32"]["parameters"]["floor_us"]
    return {
        n: (
            fit_fp32.fp32_samples(
                r, boards[n], timed[n], floor_us=floor_us, memory_efficiency=vector[n].common
            ),
            None,
        )
        for n, r in rows.items()
    }


def _fit_each(
    sets: Mapping[str, tuple[Samples, Samples | None]], trees: Trees, constants: Mapping[str, Any]
) -> dict[tuple[DType, str], GemmFit]:
    fits = {}
    for name, (samples, versions) in sets.items():
        floor_us = constants[f"gemm_{samples.dtype.value}"]["parameters"]["floor_us"]
        fit = fit_gemm.fit_gemm(
            samples, floor_us=floor_us, trees=trees, basis=Calibration.MEASURED, versions=versions
        )
        logger.info("%s %s: held out %s, analytic %s", name, samples.dtype, fit.held_out, fit.analytic)
        fits[samples.dtype, name] = fit
    return fits


def _pool(sets: list[Samples], trees: Trees | None, out: Path, constants: Mapping[str, Any]) -> Pool:
    dtype = sets[0].dtype
    floor_us = constants[f"gemm_{dtype.value}"]["parameters"]["floor_us"]
    params, model, left_out = fit_gemm.fit_pooled(sets, floor_us=floor_us, trees=trees)
    file = None if model is None else f"gemm_{dtype.value}.npz"
    if model is not None and file is not None:
        model.save(out / POOLED / file)
    logger.info("pooled %s, left out: %s", dtype, {k: asdict(v) for k, v in left_out.items()})
    samples = sum(min(len(s.us), fit_gemm.POOLED_ROWS_PER_DEVICE) for s in sets)
    return Pool(params, file, left_out, samples)


def _vector(
    data: Path, boards: Mapping[str, Device], constants: Mapping[str, Any]
) -> dict[str, fit_tables.VectorFit]:
    frame = _parquet(data / "kernels" / "vector_fp32.parquet")
    floor_us = constants["elementwise"]["parameters"]["floor_us"]
    fits = {
        name: fit_tables.fit_vector(frame[frame["gpu"] == gpu], boards[name], floor_us=floor_us)
        for gpu, name in FP32_GPUS.items()
    }
    logger.info("pointwise: %s", fits)
    return fits


def _batched(data: Path, params: Mapping[str, GemmParams]) -> dict[str, BatchedFit]:
    import pandas as pd

    frame = pd.read_csv(_require(data / "kernels" / "mla_bmm.csv.gz"))
    frame = frame[frame["bmm_dtype"] == "bfloat16"]
    return {
        name: fit_batched(frame[frame["system"] == system], hardware.device(name), params[name])
        for system, name in BF16_SYSTEMS.items()
    }


def _curves(data: Path) -> dict[str, list[fit_tables.CurvePoints]]:
    import pandas as pd

    _require(data / "kernels" / "nccl.csv.gz")
    nccl = pd.read_csv(data / "kernels" / "nccl.csv.gz")
    curves = {s: fit_tables.nccl_curves(nccl[nccl["system"] == s]) for s in BF16_SYSTEMS}
    figure = pd.read_csv(_require(data / "paper" / "collectives_4xv100_latency_busbw_from_figure.csv"))
    published = pd.read_csv(_require(data / "paper" / "collective_fit_params_v100.csv"))
    four = fit_tables.figure_curves(figure)
    curves["v100"] = [*four, *fit_tables.published_fit_curves(published, num_gpus=8)]
    return curves


def _parquet(path: Path) -> pd.DataFrame:
    import pandas as pd

    return pd.read_parquet(_require(path))


def _require(path: Path) -> Path:
    if not path.is_file():
        raise ProfileError(f"{path}: a fit needs this file, but it is missing.", hint="Pass --data PATH.")
    return path


def _plain(points: Any) -> list[list[float]]:
    return [[float(f"{v:.4g}") for v in row] for row in points]


def _write_lines(path: Path, value: Mapping[str, Any]) -> None:
    """One line an entry."""
    lines = [f"{json.dumps(key)}: {json.dumps(entry)}" for key, entry in value.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
