"""Kernel models of a device from a profile folder."""

from __future__ import annotations

import itertools
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np

from perfcore.cost.collective import CollectiveModel, Curves, SizeCurve, bytes_factor
from perfcore.cost.embedding import EmbeddingFormulas
from perfcore.cost.gemm import Correction, GemmModel, GemmParams
from perfcore.cost.host_rows import HostedModel, HostRows
from perfcore.cost.learned import Residual
from perfcore.cost.measured import Fit, MeasuredModel
from perfcore.cost.memory_bound import MemoryBoundFormulas, Rate
from perfcore.cost.model import Calibration
from perfcore.cost.paced import Pace
from perfcore.cost.simt import SimtTiles
from perfcore.cost.stacking import FormulaModel
from perfcore.design.hardware import Device, Node
from perfcore.graph import kernels as k
from perfcore.profile.build_layers import layer_models
from perfcore.profile.schema import Section, read_json

MEASURED = "measured"
RATES = (
    "elementwise",
    "reduction",
    "concat",
    "transpose",
    "pair_gather",
    "fused_interaction",
    "sort",
    "multi_tensor",
    "memcpy",
    "memcpy_host",
    "memset",
)


def kernel_models(profile: Section, folder: Path, *, device: Device, node: Node | None) -> dict[type, Any]:
    """One model for every kernel class.

    Raises:
        ProfileError: an entry is missing or wrong, or a file beside it is.
    """
    entries = profile.section("kernels")
    fits = measured_fits(entries)
    if fits:
        model = MeasuredModel(fits)
        kinds = (kind for kind in get_args(k.Kernel) if kind not in (k.Collective, k.MeasuredKernel))
        return dict.fromkeys(kinds, model) | {k.Collective: _collectives(profile, folder, node)}
    memory, embedding = _memory(entries, device), embedding_formulas(entries, device)
    host = HostRows(device)

    def formula(price: Any, entry: str, *, sum_tables: bool = False) -> FormulaModel[Any]:
        section = entries.section(entry)
        return FormulaModel(price, section.calibration("basis"), _stated(section), sum_tables=sum_tables)

    gemm = gemm_model(entries, folder, device)
    return {
        k.Gemm: gemm,
        k.Elementwise: formula(memory.elementwise, "elementwise"),
        k.Reduction: formula(memory.reduction, "reduction"),
        k.Concat: formula(memory.concat, "concat"),
        k.Transpose: formula(memory.transpose, "transpose"),
        k.PairGather: formula(memory.pair_gather, "pair_gather"),
        k.FusedInteraction: formula(memory.fused_interaction, "fused_interaction"),
        k.Sort: formula(memory.sort, "sort"),
        k.MultiTensor: formula(memory.multi_tensor, "multi_tensor"),
        k.Memcpy: formula(memory.memcpy, "memcpy_host"),
        k.Memset: formula(memory.memset, "memset"),
        k.EmbeddingForward: HostedModel(
            formula(embedding.forward, "embedding_lookup", sum_tables=True), host.lookup
        ),
        k.EmbeddingBackward: HostedModel(
            formula(embedding.backward, "embedding_update", sum_tables=True), host.update
        ),
        k.CachePopulate: FormulaModel(
            host.populate, Calibration.ANALYTIC, _stated(entries.section("memcpy_host")), sum_tables=True
        ),
        k.SparseUpdate: formula(embedding.sparse_update, "embedding_update"),
        k.Collective: _collectives(profile, folder, node),
        **layer_models(entries, device, gemm),
    }


def measured_fits(entries: Section) -> dict[str, Fit]:
    """The entries that hold samples of the device itself, by kind of work.

    Raises:
        ProfileError: the lists of an entry do not fit together.
    """
    return {
        name: replace(
            _fit(entries.section(name).section("parameters")), log_error_90=_stated(entries.section(name))
        )
        for name in entries.names()
        if entries.section(name).text("model") == MEASURED
    }


def _fit(values: Section) -> Fit:
    weights, residuals = values.numbers("weights_us"), values.numbers("residuals")
    points = values.numbers("log_work")
    if not residuals or len(points) != len(weights) * len(residuals):
        raise values.error(
            f"must have {len(weights)} numbers for each of {len(residuals)} residuals, but has {len(points)}",
            "log_work",
        )
    shape = (len(residuals), len(weights))
    return Fit(
        np.array(weights), np.array(points).reshape(shape), np.array(residuals), values.number("scale")
    )


def gemm_model(entries: Section, folder: Path, device: Device) -> GemmModel:
    """The model of matrix products.

    Raises:
        ProfileError: an entry is missing or wrong, or a file beside it is.
    """
    params: dict[k.DType, GemmParams] = {}
    corrections: dict[k.DType, Correction] = {}
    for dtype in k.DType:
        entry = entries.section(f"gemm_{dtype.value}")
        values = entry.section("parameters")
        params[dtype] = GemmParams(
            efficiency=values.number("efficiency"),
            floor_us=values.number("floor_us"),
            low=_quad(values, "low"),
            high=_quad(values, "high"),
            basis=entry.calibration("basis"),
            correction_from_us=values.number("correction_from_us") if "correction_from_us" in values else 0.0,
            log_error_90=_stated(entry),
            log_error_90_outside=_stated(entry, "log_error_90_outside") or _stated(entry),
            clock_share=values.number("clock_share") if "clock_share" in values else 1.0,
            batched_efficiency=_stated(values, "batched_efficiency"),
            batched_floor_us=_stated(values, "batched_floor_us"),
            tiles=_tiles(values),
            vector_floor_us=_stated(values, "vector_floor_us"),
            vector_efficiency=_stated(values, "vector_efficiency"),
            pace=_pace(values.section("pace")) if "pace" in values else None,
            widths=_increasing(values, "widths") if "widths" in values else (),
        )
        if "correction" in entry:
            path = (folder / entry.text("correction")).resolve()
            if not path.is_file():
                raise entry.error(f"names a file that is missing: {path}", "correction")
            corrections[dtype] = Residual(path)
    return GemmModel(device, params, corrections)


def _tiles(values: Section) -> SimtTiles | None:
    if "tile_efficiency" not in values:
        return None
    return SimtTiles(
        tuple(values.numbers("tile_efficiency")),
        tuple(mark > 0 for mark in values.numbers("batched_tiles")),
        values.number("memory_efficiency"),
    )


def _pace(values: Section) -> Pace:
    """The pace of blocks that an entry states: shares in (0, 1], the rest 0 or more."""
    numbers = {f.name: values.number(f.name) for f in fields(Pace)}
    for name, value in numbers.items():
        share = name.endswith("_share")
        if not (0 < value <= 1 if share else value >= 0):
            raise values.error(f"must be {'in (0, 1]' if share else '0 or more'}, but got {value}", name)
    return Pace(**numbers)


def _increasing(values: Section, key: str) -> tuple[float, ...]:
    numbers = tuple(values.numbers(key))
    if not all(a < b for a, b in itertools.pairwise(numbers)):
        raise values.error(f"must increase, but is {list(numbers)}", key)
    return numbers


def _quad(values: Section, key: str) -> tuple[float, float, float, float]:
    numbers = values.numbers(key)
    if len(numbers) != 4:
        raise values.error(f"must have 4 numbers (batch, m, n, k), but has {len(numbers)}", key)
    return (numbers[0], numbers[1], numbers[2], numbers[3])


def _rate(entries: Section, name: str) -> Rate:
    values = entries.section(name).section("parameters")
    return Rate(values.number("efficiency"), values.number("floor_us"))


def _memory(entries: Section, device: Device) -> MemoryBoundFormulas:
    functions = entries.section("elementwise").section("parameters").section("functions")
    return MemoryBoundFormulas(
        device=device,
        rates={name: _rate(entries, name) for name in RATES},
        function_rates={
            name: Rate(
                functions.section(name).number("efficiency"), functions.section(name).number("floor_us")
            )
            for name in functions.names()
        },
        scatter_cycles_per_element=entries.section("pair_gather")
        .section("parameters")
        .number("scatter_cycles_per_element"),
        pageable_share=entries.section("memcpy_host").section("parameters").number("pageable_share"),
    )


def embedding_formulas(entries: Section, device: Device) -> EmbeddingFormulas:
    """The formulas of embedding kernels that a profile's entries describe.

    Raises:
        ProfileError: an entry is missing or wrong.
    """
    update = entries.section("embedding_update").section("parameters")
    return EmbeddingFormulas(
        device=device,
        lookup=_rate(entries, "embedding_lookup"),
        update=_rate(entries, "embedding_update"),
        l2_share=entries.section("embedding_lookup").section("parameters").number("l2_share"),
        update_widths=_widths(update) if "by_row_bytes" in update else (),
    )


def _widths(update: Section) -> tuple[tuple[float, float], ...]:
    """Bytes of a row and the efficiency of its update, by increasing width."""
    found = update.list_of_sections("by_row_bytes")
    widths = tuple((w.number("row_bytes"), w.number("efficiency")) for w in found)
    increasing = all(a[0] < b[0] for a, b in itertools.pairwise(widths))
    if not widths or widths[0][0] <= 0 or not increasing or not all(0 < e <= 1 for _, e in widths):
        raise update.error("must have increasing `row_bytes` and efficiencies in (0, 1]", "by_row_bytes")
    return widths


def _collectives(profile: Section, folder: Path, node: Node | None) -> CollectiveModel:
    kernels = profile.section("kernels")
    analytic = _stated(kernels.section("collective")) if "collective" in kernels else 0.0
    if "collectives" not in profile:
        return CollectiveModel({}, node, analytic_log_error_90=analytic)
    data = read_json(folder / profile.text("collectives"))
    curves: dict[tuple[k.CollectiveKind, int], SizeCurve] = {}
    for entry in data.list_of_sections("curves"):
        kind, gpus = _kind(entry), int(entry.number("num_gpus"))
        curves[kind, gpus] = SizeCurve(
            entry.numbers("bytes"), entry.numbers("us"), bytes_factor=bytes_factor(kind, gpus)
        )
    own = data.calibration("basis") is Calibration.MEASURED
    return CollectiveModel(
        _frozen(curves),
        node,
        own=own,
        log_error_90_inside=_stated(data),
        analytic_log_error_90=analytic,
    )


def _stated(values: Section, key: str = "log_error_90") -> float:
    """A number that an entry states, 0 where it states none."""
    return values.number(key) if key in values else 0.0


def _frozen(curves: dict[tuple[k.CollectiveKind, int], SizeCurve]) -> Curves:
    return dict(sorted(curves.items(), key=lambda item: (item[0][0].value, item[0][1])))


def _kind(entry: Section) -> k.CollectiveKind:
    name = entry.text("kind")
    if name not in list(k.CollectiveKind):
        raise entry.error(f"must be one of {', '.join(k.CollectiveKind)}, but got {name!r}", "kind")
    return k.CollectiveKind(name)
