"""Fit kernels of convolution, batch normalisation and pooling, and put the layers' entries into every profile.

`python -m perfcore.profile.fit_layers --data PATH` reads the traces that `perfcore.profile.layer_samples` names, under
`PATH/traces`. Errors are stated on each trace by constants fitted on the other alone, and on shapes of filters and images
that the fit has not seen.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfcore.cost.convolution import ConvolutionModel, ConvolutionParams, ProductShares
from perfcore.cost.layers import LayerFormulas, LayerRate
from perfcore.cost.memory_bound import Rate
from perfcore.cost.model import Calibration, CostModel
from perfcore.cost.stacking import stack
from perfcore.design import hardware
from perfcore.design.hardware import Device
from perfcore.graph.kernels import BatchNorm, Convolution, DType, Kernel, Pooling
from perfcore.profile.build import gemm_model, kernel_models
from perfcore.profile.fit_gemm import errors
from perfcore.profile.layer_samples import Samples, layer_samples, left_out_samples
from perfcore.profile.profile import BUNDLED, POOLED
from perfcore.profile.recipes import known_error
from perfcore.profile.schema import read_json

Array = NDArray[np.float64]
Pair = tuple[Samples, Samples]

OWN = "v100-sxm2-32gb"  # the traced device
SOURCE = "ResNet-50 at batch 32 on V100-32GB, fp32, profiler on: pytorch/kineto (2021), HolisticTraceAnalysis (2024)"
DATE = "2026-11-30"
ACROSS = "each trace by constants of the other"
LEFT_OUT_BOARD = "rtx-2080-ti"
LEFT_OUT = "a device, a network and a batch that no fit has seen"
LEFT_OUT_SOURCE = (
    "ResNet-18 at batch 128, fp32, profiler on: facebookresearch/param (2023), medians over steps"
)
UNSEEN = "shapes of images and filters left out of the fit, by fifths"
FOLDS = 5
LAYERS = {"batch_norm": BatchNorm, "pooling": Pooling}
# Entries whose forward rate is that of a pointwise function of the vector measurements.
AS_FUNCTION = {"layer_norm": "native_layer_norm", "softmax": "softmax"}
_FITTED = (
    "forward",
    "grad_input",
    "grad_input_strided",
    "grad_weight",
    "winograd_fused",
    "winograd_products",
    "weight_passes",
)
_BANDWIDTHS = ("bandwidth", "efficiency", "backward_efficiency")
_MOST_PASSES = 4.0
_ROBUST = 0.1  # of the logarithm: larger misses weigh linearly
_START = 0.6


def add_layers(traces: Path, out: Path, boards: Mapping[str, Device]) -> None:
    """Fit, and write the layers' entries and errors into every profile under `out`.

    Args:
        traces: folder of the traces.
        out: folder of the profiles.
        boards: devices by name, `LEFT_OUT_BOARD` among them.

    Raises:
        ProfileError: a trace is missing or of another network.
    """
    constants = json.loads((out / POOLED / "constants.json").read_text(encoding="utf-8"))["layers"]
    entries, known = layer_entries(layer_samples(traces), constants, product_share=product_share(out))
    pointwise = _kernels(out / OWN)["elementwise"]["parameters"]["efficiency"]
    for path in sorted(out.glob("*/profile.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        own = path.parent.name == OWN
        chosen = _for_profile(entries, content["kernels"], pointwise=pointwise, own=own)
        content["kernels"] = dict(sorted((content["kernels"] | chosen).items()))
        kept = [e for e in content["known_errors"] if e["kernel"].split(" ")[0] not in entries]
        content["known_errors"] = kept + (known if own else [])
        _write(path, content)
    add_left_out(out, boards[LEFT_OUT_BOARD], left_out_samples(traces))


def add_left_out(out: Path, device: Device, samples: Samples) -> None:
    """State the pooled profile's errors on a device that no fit has seen, and widen the intervals of all but the traced one."""
    models = kernel_models(read_json(out / POOLED / "profile.json"), out / POOLED, device=device, node=None)
    costs = CostModel(models)
    known, spreads = [], {}
    for name, kind in (("convolution", Convolution), ("batch_norm", BatchNorm)):
        own = samples.of(kind)
        predicted = np.array([float(us) for us in costs.predict_us(own.kernels)])
        error = errors(predicted, own.us)
        known.append(known_error(f"{name} ({device.name} left out)", error, LEFT_OUT, LEFT_OUT_SOURCE))
        spreads[name] = _spread(predicted, own.us)
    for path in sorted(out.glob("*/profile.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        if path.parent.name != OWN:
            for name, spread in spreads.items():
                entry = content["kernels"][name]
                entry["log_error_90"] = max(spread, entry["log_error_90"])
        content["known_errors"] += known if path.parent.name == POOLED else []
        _write(path, content)


def product_share(out: Path) -> float:
    """Share of the tiled roofline that single-precision products reach on the traced device, by its profile."""
    entries = read_json(out / OWN / "profile.json").section("kernels")
    return round(ProductShares(gemm_model(entries, out / OWN, hardware.device(OWN)))(DType.FP32), 4)


def layer_entries(
    samples: Pair, constants: Mapping[str, Any], *, product_share: float
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Entries of the traced device, and its `known_errors`; what was not measured stays as in `constants`."""
    entries = dict(constants)
    entry = constants["convolution"]
    start = ConvolutionParams(
        **dict.fromkeys(_FITTED, _START) | entry["parameters"] | {"product_share": product_share}
    )
    own = [s.of(Convolution) for s in samples]
    convolution = fit_convolution(own, start)
    across = _across(own, lambda s, o: convolution_us(fit_convolution([o], start), s.kernels))
    bare = replace(
        start, **dict.fromkeys((*_FITTED, "bandwidth"), 1.0) | {"weight_passes": 0.0, "floor_us": 0.0}
    )
    alone = np.concatenate([convolution_us(bare, s.kernels) for s in own]), across[1]
    entries["convolution"] = _fitted(entry, asdict(convolution), *across)
    known = [
        known_error("convolution", errors(*across), ACROSS, SOURCE),
        known_error("convolution (roofline alone)", errors(*alone), ACROSS, SOURCE),
        known_error("convolution (unseen shapes)", errors(*_unseen(own, start)), UNSEEN, SOURCE),
    ]
    for name, kind in LAYERS.items():
        values, across = _layer_fit([s.of(kind) for s in samples], constants[name]["parameters"])
        entries[name] = _fitted(constants[name], values, *across)
        known.append(known_error(name, errors(*across), ACROSS, SOURCE))
    return entries, known


def fit_convolution(samples: Sequence[Samples], start: ConvolutionParams) -> ConvolutionParams:
    """Shares that come nearest to the measured times, in the logarithm; large misses weigh linearly."""
    from scipy.optimize import least_squares

    kernels = [k for s in samples for k in s.kernels]
    measured = np.concatenate([s.us for s in samples])

    def misses(values: Array) -> Array:
        params = replace(start, **dict(zip(_FITTED, map(float, values), strict=True)))
        missed: Array = np.log(convolution_us(params, kernels) / measured)
        return missed

    low = np.full(len(_FITTED), 0.1)
    high = np.array([_MOST_PASSES if n == "weight_passes" else 1.0 for n in _FITTED])
    first = np.array([getattr(start, n) for n in _FITTED])
    found = least_squares(misses, first, bounds=(low, high), loss="soft_l1", f_scale=_ROBUST).x
    return replace(start, **{n: round(float(v), 3) for n, v in zip(_FITTED, found, strict=True)})


def fit_rate(samples: Sequence[Samples], floor_us: float) -> LayerRate:
    """Efficiencies of one layer, forward and backward: medians over its kernels."""
    unit = LayerRate(Rate(1.0, 0.0), Rate(1.0, 0.0))
    kernels = [k for s in samples for k in s.kernels]
    ideal_us, us = layer_us(unit, kernels), np.concatenate([s.us for s in samples])
    share = ideal_us / np.maximum(us - floor_us, ideal_us)
    backward = np.array([getattr(k, "backward", False) for k in kernels])
    return LayerRate(
        *(Rate(round(float(np.median(share[backward == b])), 3), floor_us) for b in (False, True))
    )


def convolution_us(params: ConvolutionParams, kernels: Sequence[Kernel]) -> Array:
    """`(s,)` durations of convolutions on the traced device."""
    convolutions = [k for k in kernels if isinstance(k, Convolution)]
    model = ConvolutionModel(hardware.device(OWN), params, Calibration.MEASURED, 0.0)
    return np.array([float(us) for us in model.predict_us(convolutions)])


def layer_us(rate: LayerRate, kernels: Sequence[Any]) -> Array:
    """`(s,)` durations of the kernels of one layer on the traced device."""
    formulas = LayerFormulas(hardware.device(OWN), dict.fromkeys(LAYERS, rate))
    normalises = isinstance(kernels[0], BatchNorm)
    us: Array = (formulas.batch_norm if normalises else formulas.pooling)(kernels, stack(kernels))
    return us


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m perfcore.profile.fit_layers", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--data", type=Path, required=True, help="folder of raw measurements")
    parser.add_argument("--out", type=Path, default=BUNDLED, help="folder of the profiles (default: bundled)")
    options = parser.parse_args(arguments)
    from perfcore.profile.fit import board_devices  # which calls this module

    add_layers(options.data / "traces", options.out, board_devices(options.out))
    return 0


def _layer_fit(samples: Sequence[Samples], constants: Mapping[str, float]) -> tuple[dict[str, float], Any]:
    floor_us = constants["floor_us"]
    rate = fit_rate(samples, floor_us)
    values = {"efficiency": rate.forward.efficiency, "backward_efficiency": rate.backward.efficiency}
    across = _across(samples, lambda s, o: layer_us(fit_rate([o], floor_us), s.kernels))
    return values | {"floor_us": floor_us}, across


def _across(samples: Sequence[Samples], predict: Callable[[Samples, Samples], Array]) -> tuple[Array, Array]:
    """Predicted by what the other trace says, and measured."""
    pairs = zip(samples, reversed(samples), strict=True)
    return np.concatenate([predict(s, o) for s, o in pairs]), np.concatenate([s.us for s in samples])


def _unseen(samples: Sequence[Samples], start: ConvolutionParams) -> tuple[Array, Array]:
    """Predicted by fits on both traces that lack a fifth of the shapes, and measured."""
    kernels = samples[0].kernels
    shapes = [_shape(k) for k in kernels if isinstance(k, Convolution)]
    number = {shape: i for i, shape in enumerate(dict.fromkeys(shapes))}
    fold = np.array([number[shape] % FOLDS for shape in shapes])
    predicted, measured = [], []
    for left_out in range(FOLDS):
        params = fit_convolution([s.take(fold != left_out) for s in samples], start)
        for s in (x.take(fold == left_out) for x in samples):
            predicted.append(convolution_us(params, s.kernels))
            measured.append(s.us)
    return np.concatenate(predicted), np.concatenate(measured)


def _shape(kernel: Convolution) -> tuple[object, ...]:
    """What all three products of a convolution share."""
    return (kernel.channels, kernel.height, kernel.filters, kernel.kernel_height, kernel.stride)


def _fitted(
    entry: Mapping[str, Any], parameters: Mapping[str, float], predicted: Array, measured: Array
) -> dict[str, Any]:
    return {
        **entry,
        "parameters": dict(parameters),
        "log_error_90": _spread(predicted, measured),
        "basis": "measured",
        "source": f"{SOURCE}; {entry['source']}",
        "date": DATE,
        "samples": len(measured),
    }


def _for_profile(
    entries: Mapping[str, Any], kernels: Mapping[str, Any], *, pointwise: float, own: bool
) -> dict[str, dict[str, Any]]:
    """The entries of one profile: measured on the traced device alone.

    Elsewhere, bandwidths are those of the traced device times the ratio of what pointwise kernels reach on both. Rates
    of functions are the profile's own.
    """
    chosen = {name: copy.deepcopy(entry) for name, entry in entries.items()}
    elementwise = kernels["elementwise"]["parameters"]
    for name, function in AS_FUNCTION.items():
        share = elementwise["functions"][function]["efficiency"]
        chosen[name]["parameters"] |= {"efficiency": share, "backward_efficiency": share}
    if own:
        return chosen
    ratio = elementwise["efficiency"] / pointwise
    for entry in chosen.values():
        if entry["basis"] == "measured":
            entry["basis"] = "extrapolated"
            entry["parameters"] |= {
                n: round(min(1.0, ratio * v), 4) for n, v in entry["parameters"].items() if n in _BANDWIDTHS
            }
    passes = chosen["convolution"]["parameters"]["weight_passes"]
    chosen["convolution"]["parameters"]["weight_passes"] = round(passes / ratio, 3)
    return chosen


def _spread(predicted: Array, measured: Array) -> float:
    """Nine in ten measurements lie within a factor `exp` of it."""
    return round(float(np.quantile(np.abs(np.log(predicted / measured)), 0.9)), 3)


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _kernels(folder: Path) -> dict[str, Any]:
    kernels: dict[str, Any] = json.loads((folder / "profile.json").read_text(encoding="utf-8"))["kernels"]
    return kernels


if __name__ == "__main__":
    sys.exit(main())
