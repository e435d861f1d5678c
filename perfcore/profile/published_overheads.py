"""Reads published host overheads of DLRM training on a V100 (HiPC 2022 study and the runs of 2021 before it)."""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from perfcore.trace.extract import Overhead

Means: TypeAlias = dict[tuple[str, Overhead], float]
ANY_OP = "(all)"
_MODELS = ("DLRM_default", "DLRM_MLPerf", "DLRM_DDP")
# Ops of other DLRM variants, which the study saw in other models only.
_ELSEWHERE = ("MulBackward0", "ToCopyBackward0", "aten::add", "aten::mul")
_BATCHES = ("512", "1024", "2048", "4096")
# At this batch the table kept every sample of the 100 iterations (whole hundreds of them, wide spread). Beside it stands
# the next batch whose run on one GPU dropped outliers: of DLRM_MLPerf's 512, a run on several GPUs took the key.
_UNTRIMMED_BATCH = "256"
_TRIMMED_BATCH = {"DLRM_default": "512", "DLRM_MLPerf": "1024"}
# The study's launch call, of every runtime function: 10 us profiled, less 2 of a host event and 4 of a device event.
_LAUNCH_CALL_US = 10.0 - 2.0 - 4.0
# From this batch on products of wide layers split their inner dim and zero the output first (traces at batch 2048): the
# study's T5 of these ops holds that call, which is no launch by its rule. Layers of 512 columns and less show no step.
_ZEROING, _ZEROING_FROM = ("AddmmBackward0", "aten::linear"), 2048
# Autograd nodes got a number in 2021; the study's custom functions keep their names.
_NUMBERED = ("Addmm", "BinaryCrossEntropy", "Cat", "Index", "MseLoss", "Sigmoid", "Slice", "T", "View")
_NEW_NAMES = {f"{op}Backward": f"{op}Backward0" for op in _NUMBERED} | {
    "AccumulateGrad": "torch::autograd::AccumulateGrad"
}


@dataclass(frozen=True, slots=True)
class Published:
    """Means in microseconds by (op, kind), and how often the 2022 study saw each op.

    Attributes:
        figures: read off figures, the profiler's cost taken off, outliers dropped; without a product's zeroing of its output.
        all_figures: with it, as the other sources have it.
        table_2022: likewise, from the notebook's table.
        runs_2021: without any correction.
        counts: samples of each op in `table_2022`.
        trimming: by kind (T1, T2) and model on one GPU, mean with outliers over mean without, both in the table.
        launch_call_us: T4 of any op, the profiler's cost taken off.
    """

    figures: Means
    all_figures: Means
    table_2022: Means
    runs_2021: Means
    counts: Mapping[str, int]
    trimming: Mapping[str, Mapping[str, float]]
    launch_call_us: float = _LAUNCH_CALL_US


@dataclass(frozen=True, slots=True)
class _Entry:
    op: str
    kind: str
    us: float
    weight: float


def read_published(folder: Path) -> Published:
    """The study's means from its CSV files in `folder`."""
    figures = [
        (_Entry(_op_name(row["op"]), row["overhead_type"], float(row["mean_us(read off)"]), 1.0), row)
        for name in ("overheads_T1_from_figure.csv", "overheads_T2_T3_T5_top10_ops_from_figure.csv")
        for row in _rows(folder / name)
    ]
    rows_2022 = _rows(folder / "overheads_T1_T2_by_op_model_batch_2022.csv")
    table = [
        _Entry(_op_name(row["op"]), row["overhead_type"], float(row["mean_us"]), float(row["count"]))
        for row in rows_2022
        if _is_wanted(row)
    ]
    runs = _entries_2021(folder)
    all_figures = [entry for entry, _ in figures]
    launching = {e.op for e in (*all_figures, *table, *runs) if e.kind in {"T2", "T3"}}
    counts: dict[str, int] = defaultdict(int)
    for entry in table:
        counts[entry.op] += int(entry.weight)
    return Published(
        figures=_averaged([entry for entry, row in figures if not _zeroes_output(row)], launching),
        all_figures=_averaged(all_figures, launching),
        table_2022=_averaged(table, launching),
        runs_2021=_averaged(runs, launching),
        counts=dict(counts),
        trimming={kind: _trimming(rows_2022, kind) for kind in ("T1", "T2")},
    )


def _trimming(rows: Sequence[Mapping[str, str]], kind: str) -> dict[str, float]:
    """What dropping outliers took from a kind's total over the ops of a model, by model that the table has both of."""
    means = {
        (r["model"], r["batch_size"], r["op"]): float(r["mean_us"])
        for r in rows
        if r["overhead_type"] == kind
    }
    factors = {}
    for model, batch in _TRIMMED_BATCH.items():
        kept = [
            r
            for r in rows
            if (r["overhead_type"], r["model"], r["batch_size"]) == (kind, model, _UNTRIMMED_BATCH)
        ]
        both = [(r, means[key]) for r in kept if (key := (model, batch, r["op"])) in means]
        if both:
            trimmed_us = sum(us * float(r["count"]) for r, us in both)
            factors[model] = sum(float(r["mean_us"]) * float(r["count"]) for r, _ in both) / trimmed_us
    return factors


def _entries_2021(folder: Path) -> list[_Entry]:
    """Both runs of DLRM_default, and one of DLRM_MLPerf."""
    rows = _rows(folder / "overheads_T1_to_T5_dlrm_default_2021.csv")
    # DLRM_MLPerf's T5 is the sum over an op's launches, not the time between two.
    rows += [
        r for r in _rows(folder / "overheads_T1_to_T5_dlrm_mlperf_2021.csv") if r["overhead_type"] != "T5"
    ]
    return [
        _Entry(_op_name(row["op_or_launch"]), row["overhead_type"], float(row["mean_us"]), 1.0)
        for row in rows
        # T4 is kept by runtime call, not by op; a T5 of 0 means that there is no second launch; the T3 of
        # one `aten::to` is mostly a wait for the stream (its spread exceeds its mean's half).
        if row["overhead_type"] != "T4" and float(row["mean_us"]) > 0 and not _is_wait(row)
    ]


def _is_wanted(row: Mapping[str, str]) -> bool:
    """DLRM keys with other batch sizes hold runs on several GPUs."""
    if row["op"] in _ELSEWHERE:
        return not row["model"].startswith("DLRM")
    return row["model"] in _MODELS and row["batch_size"] in _BATCHES


def _zeroes_output(row: Mapping[str, str]) -> bool:
    wide = row["op"] in _ZEROING and int(row["batch_size"]) >= _ZEROING_FROM
    return row["overhead_type"] == "T5" and wide


def _is_wait(row: Mapping[str, str]) -> bool:
    return (row["op_or_launch"], row["overhead_type"]) == ("aten::to", "T3") and float(row["std_us"]) > 100


def _averaged(entries: Sequence[_Entry], launching: Collection[str]) -> Means:
    """Weighted means; the T5 of an op that launches nothing is its whole host time."""
    totals: dict[tuple[str, Overhead], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for entry in entries:
        alone = entry.kind == "T5" and entry.op not in launching
        kind = Overhead.ALONE if alone else Overhead(entry.kind.lower())
        totals[entry.op, kind][0] += entry.us * entry.weight
        totals[entry.op, kind][1] += entry.weight
    return {key: total / weight for key, (total, weight) in totals.items()}


def _op_name(name: str) -> str:
    return ANY_OP if name.startswith("(all") else _NEW_NAMES.get(name, name)


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
