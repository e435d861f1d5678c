"""Which measurements each bundled profile takes, and the `profile.json` made of them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from perfcore.cost.gemm import GemmParams
from perfcore.graph.kernels import DType
from perfcore.profile.fit_batched import SPLIT as BATCHED_SPLIT
from perfcore.profile.fit_tables import COMMON, curve_errors
from perfcore.profile.schema import SCHEMA_VERSION

if TYPE_CHECKING:
    from perfcore.profile.fit import Fits
    from perfcore.profile.fit_gemm import Errors

SOURCES = {
    DType.BF16: "aiconfigurator tables, bf16 GEMM under CUDA-graph replay",
    DType.FP32: "NeuSight train data, fp32 linear and bmm, one eager op between events",
}
BATCHED_SOURCE = "aiconfigurator tables, bf16 products around latent attention, one for each head"
NK_SPLIT = "unseen (n, k) pairs"
DATE = "2026-11-29"


@dataclass(frozen=True, slots=True)
class Recipe:
    """What one profile is made of.

    Attributes:
        name: of the profile and, except for the pooled one, of the device.
        gemm: format to the board whose fit is taken; formats not named take the pooled fit.
        gemm_folder: format to the profile whose file holds that fit, where not this one.
        kin: format to a board of the same generation whose roofline is taken, without its correction.
        owns: boards that count as this device (its fits are `measured`).
        vector: board whose pointwise rates are taken; `None` takes the median of all.
        curves: key of the collectives; `None` prices by links.
        curves_folder: profile whose file holds them, where not this one.
        overheads_from: profile whose overheads are taken where this one has none of its own.
    """

    name: str
    gemm: Mapping[DType, str] = field(default_factory=dict)
    gemm_folder: Mapping[DType, str] = field(default_factory=dict)
    kin: Mapping[DType, str] = field(default_factory=dict)
    owns: tuple[str, ...] = ()
    vector: str | None = None
    curves: str | None = None
    curves_folder: str | None = None
    overheads_from: str = "v100-sxm2-16gb"


V100, A100 = "v100-sxm2-16gb", "a100-sxm4-80gb"
RECIPES = (
    Recipe("shared", overheads_from=A100),
    Recipe(V100, gemm={DType.FP32: "v100-pcie-32gb"}, vector="v100-pcie-32gb", curves="v100"),
    Recipe(
        "v100-sxm2-32gb",
        gemm={DType.FP32: "v100-pcie-32gb"},
        gemm_folder={DType.FP32: V100},
        vector="v100-pcie-32gb",
        curves="v100",
        curves_folder=V100,
    ),
    Recipe(
        "p100-pcie-16gb",
        gemm={DType.FP32: "p100-pcie-16gb"},
        owns=("p100-pcie-16gb",),
        vector="p100-pcie-16gb",
    ),
    Recipe("titan-xp", kin={DType.FP32: "p100-pcie-16gb"}),
    Recipe("t4", gemm={DType.FP32: "t4"}, owns=("t4",), vector="t4"),
    Recipe(
        A100,
        gemm={DType.BF16: A100, DType.FP32: "a100-pcie-40gb"},
        owns=(A100,),
        vector="a100-pcie-40gb",
        curves="a100_sxm",
        overheads_from=A100,
    ),
    Recipe(
        "a100-sxm4-40gb",
        gemm={DType.BF16: A100, DType.FP32: "a100-pcie-40gb"},
        gemm_folder={DType.BF16: A100, DType.FP32: A100},
        vector="a100-pcie-40gb",
        curves="a100_sxm",
        curves_folder=A100,
        overheads_from=A100,
    ),
    Recipe(
        "h100-sxm", gemm={DType.BF16: "h100-sxm"}, owns=("h100-sxm",), curves="h100_sxm", overheads_from=A100
    ),
    Recipe(
        "h200-sxm", gemm={DType.BF16: "h200-sxm"}, owns=("h200-sxm",), curves="h200_sxm", overheads_from=A100
    ),
    Recipe(
        "b200-sxm", gemm={DType.BF16: "b200-sxm"}, owns=("b200-sxm",), curves="b200_sxm", overheads_from=A100
    ),
    Recipe("l40s", overheads_from=A100),
)


def document(recipe: Recipe, fits: Fits, constants: Mapping[str, Any]) -> dict[str, Any]:
    """The content of `profile.json`."""
    kernels = {name: copy.deepcopy(entry) for name, entry in constants["kernels"].items()}
    errors: list[dict[str, Any]] = []
    for dtype in (DType.FP32, DType.BF16):
        entry, known = _gemm_entry(recipe, fits, dtype)
        kernels[f"gemm_{dtype.value}"] = entry
        errors += known
    errors += _add_batched(kernels["gemm_bf16"], fits, recipe.gemm.get(DType.BF16))
    kernels |= _pointwise_entries(recipe, fits, constants["kernels"])
    vectors = constants["vector_products"]
    kernels["gemm_fp32"]["parameters"] |= {
        "vector_floor_us": vectors["floor_us"],
        "vector_efficiency": vectors["efficiency"],
    }
    kernels["gemm_fp32"]["source"] += "; products by vectors: " + vectors["source"]
    clock = constants["clock_shares"].get(recipe.name)
    if clock is not None:
        for dtype in DType:
            kernels[f"gemm_{dtype.value}"]["parameters"]["clock_share"] = clock["share"]
            kernels[f"gemm_{dtype.value}"]["source"] += "; clock: " + clock["source"]
    if recipe.name in constants["update_widths"]["profiles"]:
        update, widths = kernels["embedding_update"], constants["update_widths"]
        update["parameters"]["by_row_bytes"] = widths["by_row_bytes"]
        update["source"] += "; by_row_bytes: " + widths["source"]
    if recipe.vector is not None:
        fit = fits.vector[recipe.vector]
        errors.append(
            known_error(
                "elementwise", fit.held_out, "every fifth row", "NeuSight train data, rows of 0.2 ms and more"
            )
        )
    if recipe.curves is not None:
        errors += _curve_errors(recipe, fits)
    return {
        "schema_version": SCHEMA_VERSION,
        "name": recipe.name,
        "device": None if recipe.name == "shared" else recipe.name,
        "overheads_from": recipe.overheads_from,
        "host_log_error_90": constants["host_log_error_90"][_host(recipe)],
        "collectives": _collectives_file(recipe),
        "kernels": dict(sorted(kernels.items())),
        "known_errors": errors,
    }


def _host(recipe: Recipe) -> str:
    return "own" if recipe.name in (V100, A100) else "borrowed"


def _gemm_entry(recipe: Recipe, fits: Fits, dtype: DType) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    kernel, source = f"gemm_{dtype.value}", SOURCES[dtype]
    board = recipe.gemm.get(dtype)
    if board is None:
        pool = fits.pools[dtype]
        folder = "" if recipe.name == "shared" else "../shared/"
        known = [
            known_error(f"{kernel} ({n} left out)", e, "its generation left out of the fit", source)
            for n, e in pool.left_out.items()
        ]
        of = recipe.kin.get(dtype)
        params, text = (pool.params, f"pooled over {', '.join(pool.left_out)}")
        if of is not None:
            params, text = replace(fits.gemm[dtype, of].params, correction_from_us=0.0), f"roofline of {of}"
        file = None if pool.file is None or of is not None else folder + pool.file
        entry = _entry(params, "extrapolated", file, f"{source}; {text}", pool.samples)
        return entry | {"log_error_90": pool.params.log_error_90}, known
    fit = fits.gemm[dtype, board]
    basis = "measured" if board in recipe.owns else "extrapolated"
    folder = f"../{recipe.gemm_folder[dtype]}/" if dtype in recipe.gemm_folder else ""
    entry = _entry(fit.params, basis, f"{folder}{kernel}.npz", f"{source}; {board}", fit.samples)
    outside = fits.pools[dtype].params.log_error_90
    spread = fit.params.log_error_90 if basis == "measured" else outside
    entry |= {
        "log_error_90": spread,
        "log_error_90_outside": outside,
        "coverage_pct": round(fit.coverage_pct, 1),
    }
    shown = {
        "": fit.held_out,
        " (roofline alone)": fit.analytic,
        " (m >= 1024; n, k <= 2048)": fit.dlrm_like,
        " (single framework versions)": fit.single,
    }
    text = f"{source}; {board}"
    known = [known_error(kernel + what, e, NK_SPLIT, text) for what, e in shown.items() if e is not None]
    return entry, known


def _add_batched(entry: dict[str, Any], fits: Fits, board: str | None) -> list[dict[str, Any]]:
    """Put the constants of batched half-precision products into an entry: the board's, or the median of all."""
    boards = [board] if board else sorted(fits.batched)
    entry["parameters"] |= {
        "batched_efficiency": _median([fits.batched[b].efficiency for b in boards]),
        "batched_floor_us": _median([fits.batched[b].floor_us for b in boards]),
    }
    source = f"{BATCHED_SOURCE}; {', '.join(boards)}"
    entry["source"] += f"; batched: {source}"
    if board is None:
        return []
    fit = fits.batched[board]
    shown = {"bmm_bf16": fit.held_out, "bmm_bf16 (roofline alone)": fit.plain}
    return [known_error(kernel, e, BATCHED_SPLIT, source) for kernel, e in shown.items()]


def _entry(
    params: GemmParams, basis: str, correction: str | None, source: str, samples: int
) -> dict[str, Any]:
    apart = ("basis", "tiles", "vector_floor_us", "vector_efficiency", "pace", "widths")
    values = {k: v for k, v in asdict(params).items() if k not in apart and not k.startswith("log_error")}
    values |= {"low": list(params.low), "high": list(params.high)}
    if params.tiles is not None:
        values |= {
            "tile_efficiency": list(params.tiles.efficiency),
            "batched_tiles": [float(served) for served in params.tiles.batched],
            "memory_efficiency": params.tiles.memory_efficiency,
        }
    if params.pace is not None:
        values |= {"pace": asdict(params.pace), "widths": list(params.widths)}
    corrected = {} if correction is None else {"correction": correction}
    return {
        "model": "roofline_residual" if corrected else "roofline",
        "parameters": values,
        **corrected,
        "basis": basis,
        "source": source,
        "date": DATE,
        "samples": samples,
    }


def _pointwise_entries(recipe: Recipe, fits: Fits, constants: Mapping[str, Any]) -> dict[str, Any]:
    """Pointwise functions at their own rates; multi-tensor kernels at the common one."""
    boards = [recipe.vector] if recipe.vector else sorted(fits.vector)
    names = fits.vector[boards[0]].efficiency
    share = {n: _median([fits.vector[b].efficiency[n] for b in boards]) for n in names}
    common = _median([share[n] for n in COMMON])
    floor_us = constants["elementwise"]["parameters"]["floor_us"]
    functions = {n: {"efficiency": v, "floor_us": floor_us} for n, v in sorted(share.items())}
    out = {}
    for kind in ("elementwise", "multi_tensor"):
        entry = constants[kind]
        parameters = entry["parameters"] | {"efficiency": common}
        if kind == "elementwise":
            parameters |= {"functions": functions}
        samples = sum(fits.vector[b].samples for b in boards)
        basis = "measured" if kind == "elementwise" and recipe.vector in recipe.owns else "extrapolated"
        source = f"efficiency: NeuSight train data, pointwise kernels of 0.2 ms and more, {', '.join(boards)}; {entry['source']}"
        out[kind] = entry | {
            "parameters": parameters,
            "basis": basis,
            "source": source,
            "samples": samples,
            "date": DATE,
        }
        if basis == "measured" and recipe.vector is not None:
            out[kind]["log_error_90"] = fits.vector[recipe.vector].log_error_90
    return out


def _curve_errors(recipe: Recipe, fits: Fits) -> list[dict[str, Any]]:
    assert recipe.curves is not None
    # The published fit is smooth: predicting one of its points from the others would measure nothing.
    curves = [c for c in fits.curves[recipe.curves] if recipe.curves != "v100" or c.num_gpus == 4]
    out = []
    for kind in sorted({c.kind.value for c in curves}):
        error = curve_errors([c for c in curves if c.kind.value == kind])
        out.append(
            known_error(
                kind, error, "each inner size predicted from the others", curves_source(recipe.curves)
            )
        )
    return out


def curves_source(curves: str) -> str:
    """Where the collectives of that key come from."""
    if curves == "v100":
        return "ml_perf_model: 4 GPUs read off the published figure, 8 GPUs the published fit (2022)"
    return f"nccl-tests times of the aiconfigurator tables, {curves}: median over versions and element types"


def _collectives_file(recipe: Recipe) -> str | None:
    if recipe.curves is None:
        return None
    return f"../{recipe.curves_folder}/collectives.json" if recipe.curves_folder else "collectives.json"


def known_error(kernel: str, error: Errors, split: str, source: str) -> dict[str, Any]:
    """One entry of `known_errors`."""
    return {
        "kernel": kernel,
        "n": error.n,
        "gmae_pct": round(error.gmae_pct, 3),
        "mape_pct": round(error.mape_pct, 3),
        "bias_pct": round(error.bias_pct, 3),
        "split": split,
        "source": source,
    }


def _median(values: list[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return round((ordered[middle] + ordered[-1 - middle]) / 2, 4)
