"""Numbers and designs in words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dse.objective import METRICS
from dse.search.outputs import GAP

SHORT = {
    "system.world_size": "GPUs",
    "training.global_batch": "batch",
    "training.precision": "precision",
    "model.embedding_dim": "embedding dim",
    "model.bottom_hidden.depth": "bottom layers",
    "model.top_hidden.depth": "top layers",
    "sharding.policy": "sharding",
    "fusion.embedding": "embedding kernels",
    "fusion.mlp": "MLP kernels",
    "fusion.interaction": "interaction kernels",
    "fusion.optimizer": "optimizer kernels",
    "fusion.launches": "launches",
    "fusion.communication": "communication",
}
_LEAST_GIB = 0.001
_HIDDEN = ("model.bottom_hidden", "model.top_hidden")


def number(value: float, *, digits: int = 4) -> str:
    """A number to some significant digits, thousands apart, never in exponents between 1e-4 and 1e15."""
    if not math.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    if not 1e-4 <= abs(value) < 1e15:
        return f"{value:.{digits - 1}e}"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    text = f"{round(value, decimals):,.{decimals}f}" if decimals else f"{round(value):,}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def gib(value: float) -> str:
    """Memory in GiB as a person wants it: three digits, and nothing below a mebibyte."""
    return "<0.001" if 0 < value < _LEAST_GIB else number(value, digits=3)


# Columns that are no metrics: nothing is made small or large by them.
_OTHERS = {GAP: "certified gap of the placement (%)"}


def label(metric: str) -> str:
    """What people call a metric, with its unit."""
    return METRICS[metric].label if metric in METRICS else _OTHERS.get(metric, metric)


def name_and_value(metric: str, value: float) -> tuple[str, str]:
    """A metric's name, and its value with the unit."""
    name, _, unit = label(metric).partition(" (")
    unit = unit.rstrip(")")
    shown = number(value)
    return name, shown if unit in ("", "proxy", "samples") else f"{shown} {unit}"


def limit(text: str) -> str:
    """`hbm_gib <= 80` as people read it."""
    metric, _, rest = text.partition(" ")
    sign, _, value = rest.partition(" ")
    return f"{label(metric)} {sign.replace('<=', '≤').replace('>=', '≥')} {number(float(value))}"


def axis_label(axis: str) -> str:
    """What people call an axis."""
    if axis in SHORT:
        return SHORT[axis]
    section, _, layer = axis.rpartition(".")
    if section in _HIDDEN and layer.isdigit():
        return f"{section.removeprefix('model.').removesuffix('_hidden')} width {layer}"
    return axis.rpartition(".")[2].replace("_", " ")


def setting(value: Any) -> str:
    """An axis value; a dash where the axis does not matter."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if isinstance(value, float) and value.is_integer():
        return f"{int(value):,}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def compact(row: Mapping[str, Any], axes: tuple[str, ...]) -> dict[str, str]:
    """A design's settings by label, the layers of an MLP in one: `512-256`."""
    shown: dict[str, str] = {}
    for axis in axes:
        section = next((h for h in _HIDDEN if axis.startswith(f"{h}.")), None)
        if section is None:
            shown[axis_label(axis)] = setting(row.get(axis))
            continue
        name = f"{section.removeprefix('model.').removesuffix('_hidden')} MLP"
        width = setting(row.get(axis)).replace(",", "")
        if not axis.endswith(".depth") and width != "–":
            shown[name] = f"{shown[name]}-{width}" if name in shown else width
        elif axis.endswith(".depth") and not any(a.startswith(f"{section}.") and a != axis for a in axes):
            shown[name] = f"{width} layers"
    return shown


def joined(parts: list[str]) -> str:
    """`a, b and c`."""
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
