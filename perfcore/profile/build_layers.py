"""Kernel models of convolution, normalisation, pooling, softmax and dropout from a profile's entries.

A profile that was written before there were such entries takes those of the pooled profile.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from perfcore.cost.convolution import ConvolutionModel, ConvolutionParams, ProductShares
from perfcore.cost.gemm import GemmModel
from perfcore.cost.layers import LayerFormulas, LayerRate
from perfcore.cost.memory_bound import Rate
from perfcore.cost.stacking import FormulaModel
from perfcore.design.hardware import Device
from perfcore.graph import kernels as k
from perfcore.profile.schema import Section, read_json

KINDS = ("batch_norm", "pooling", "layer_norm", "softmax", "dropout")
POOLED_PROFILE = Path(__file__).parent / "data" / "shared" / "profile.json"


def layer_models(entries: Section, device: Device, gemm: GemmModel) -> dict[type, Any]:
    """One model a kind; convolutions run at the clocks of products.

    Raises:
        ProfileError: an entry is wrong.
    """
    sections = {name: _section(entries, name) for name in ("convolution", *KINDS)}
    formulas = LayerFormulas(device, {name: _rate(sections[name]) for name in KINDS})

    def formula(price: Any, name: str) -> FormulaModel[Any]:
        section = sections[name]
        return FormulaModel(price, section.calibration("basis"), section.number("log_error_90"))

    return {
        k.Convolution: _convolution(sections["convolution"], device, gemm),
        k.BatchNorm: formula(formulas.batch_norm, "batch_norm"),
        k.Pooling: formula(formulas.pooling, "pooling"),
        k.LayerNorm: formula(formulas.layer_norm, "layer_norm"),
        k.Softmax: formula(formulas.softmax, "softmax"),
        k.Dropout: formula(formulas.dropout, "dropout"),
    }


def _section(entries: Section, name: str) -> Section:
    if name in entries:
        return entries.section(name)
    return read_json(POOLED_PROFILE).section("kernels").section(name)


def _convolution(entry: Section, device: Device, gemm: GemmModel) -> ConvolutionModel:
    values = entry.section("parameters")
    return ConvolutionModel(
        device=device,
        params=ConvolutionParams(**{f.name: values.number(f.name) for f in fields(ConvolutionParams)}),
        basis=entry.calibration("basis"),
        error=entry.number("log_error_90"),
        products=ProductShares(gemm),
    )


def _rate(entry: Section) -> LayerRate:
    values = entry.section("parameters")
    forward, backward = (
        Rate(values.number(f"{prefix}efficiency"), values.number("floor_us")) for prefix in ("", "backward_")
    )
    return LayerRate(forward, backward)
