"""Writes the bundled `overheads.json` files from published overheads and public traces.

    python -m perfcore.profile.overhead_sources --data DATA

A mean of host time is taken, per op and kind, from the first of these sources that has it:

1. figures of the 2022 study: ten ops, the profiler's cost taken off by its authors, outliers dropped;
2. its 2022 table (T1, T2), scaled to the figures;
3. two runs of 2021 (no correction), scaled to the figures;
4. traces of 8 x V100 training a TorchRec DLRM, the profiler's cost taken off here, times the ratio of the hosts.

Sources 1 to 3 dropped outliers, which biases means of heavy-tailed times: they are multiplied by what that took from
them on the study's own host, whose table has T1 and T2 of DLRM with outliers and without (T3 and T5 lie inside ops as T2
does, and take its factor). All factors are stored beside the values. The A100's table comes from a trace of its own; ops that
it lacks are the V100's, scaled by the median ratio of the ops that both have.
"""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from perfcore.overheads import OverheadTable, overheads_from_json, to_json
from perfcore.profile.overhead_table import SCALED, Built, assemble
from perfcore.profile.published_overheads import ANY_OP, Means, Published, read_published
from perfcore.trace.extract import (
    Overhead,
    Samples,
    extract_overheads,
    kernel_gap_us,
    launch_latency_us,
    merge,
)
from perfcore.trace.kineto import KinetoTrace, read_kineto

Pooled = Mapping[str, Mapping[Overhead, Samples]]

BUNDLED = Path(__file__).parent / "data"
# Below so many samples an op's own T1 says more of its neighbours than of itself: the mean over all ops is taken.
FEWEST_T1_SAMPLES = 20
QUEUED_US = 20.0
_SOURCES = {
    "V100": [
        "owensgroup/ml_perf_model, saved notebook outputs and figures, 2021 to 2022 (BSD-3-Clause)",
        "facebookresearch/param, DLRM on 8 x V100-SXM2-32GB, Kineto traces of one step, 2023 (MIT)",
        "facebookresearch/HolisticTraceAnalysis, ResNet-50 on V100: kernel gap",
    ],
    "A100": [
        "facebookresearch/HolisticTraceAnalysis, recommendation model on A100, rank 3 of 8, first of 6 steps dropped (MIT)",
        "ops that it lacks: the V100's",
    ],
}


def build_v100(data: Path) -> OverheadTable:
    """The V100's table from the published means and the traces under `data`."""
    traces = [
        read_kineto(p) for p in sorted((data / "traces" / "param_dlrm_8xV100").glob("rank*.pt.trace.json.gz"))
    ]
    resnet = read_kineto(data / "traces" / "hta_resnet_ddp_V100_ns" / "kineto.json.gz")
    pooled = merge(extract_overheads(t) for t in traces)
    per_event_us = profiler_us_per_event(traces)
    published = read_published(data / "paper")
    means, factors = _published_means(published)
    factors["trimming by model"] = {kind: dict(by_model) for kind, by_model in published.trimming.items()}
    factors["trimming"] = trimming = _trimming(published)
    untrimmed = {k: v * trimming[k[1].value] for k, v in means.items()}
    traced = _trace_means(pooled, per_event_us=per_event_us)
    factors["trace"] = host = _host_ratio(untrimmed, traced)
    seen = {op: max(len(s.us) for s in kinds.values()) for op, kinds in pooled.items()}
    # A launch call does not depend on the op: the study's figure, or where only traces have the op, the trace's.
    scaled = {k: v * (1.0 if k[1] is Overhead.T4 else host) for k, v in traced.items()}
    calls = {(op, Overhead.T4): published.launch_call_us for op, _ in means if op != ANY_OP}
    built = Built(scaled | untrimmed | calls, {**seen, **published.counts}, factors)
    t1_us = untrimmed[ANY_OP, Overhead.T1]
    hooks = {op: 0.0 for op, kinds in pooled.items() if _follows_at_once(kinds)}
    latency = float(np.median([launch_latency_us(t).median_us() for t in traces])) - per_event_us
    return assemble(
        built,
        t1_us=dict.fromkeys({op for op, _ in built.means} - {ANY_OP}, t1_us) | hooks,
        constants={
            "launch_latency_us": (latency, "median over 8 x V100 DLRM ranks where the stream was idle, less the profiler's cost of one event"),
            "kernel_gap_us": (
                kernel_gap_us(resnet, queued_us=QUEUED_US).median_us(),
                "median between queued kernels, ResNet-50 trace on V100-SXM2-32GB with nanosecond times",
            ),
            "graph_launch_us": _graph_launch(data),
            "graph_gap_us": (0.5, "NVIDIA developer blog, Getting Started with CUDA Graphs, 2019, V100: 3.4 us a kernel in a graph less 2.9 us of work"),
        },
        provenance=_provenance("V100", per_event_us, factors, traces),
    )  # fmt: skip


def _published_means(published: Published) -> tuple[Means, dict[str, Any]]:
    """Figures first, then the 2022 table, then 2021, each scaled to the figures; and the factors."""
    means: Means = dict(published.figures)
    factors: dict[str, Any] = {}
    for name, source in (("2022 table", published.table_2022), ("2021 runs", published.runs_2021)):
        factors[name] = scale = _scale(published.all_figures, source)
        means = {k: v * scale[k[1].value] for k, v in source.items() if k[1].value in scale} | means
    return means, factors


def build_a100(data: Path, v100: OverheadTable) -> OverheadTable:
    """The A100's table from its trace under `data`; ops that the trace lacks are the V100's, scaled."""
    trace = read_kineto(data / "traces" / "hta_recsys_A100_rank3of8" / "kineto.json.gz")
    pooled = extract_overheads(trace, skip_steps=1)
    per_event_us = profiler_us_per_event([trace])
    means = _trace_means(pooled, per_event_us=per_event_us)
    lent = {
        (op, kind): getattr(times, f"{kind}_us")
        for op, times in v100.by_op.items()
        for kind in (Overhead.T2, Overhead.T3, Overhead.T4, Overhead.T5)
    }
    factors = {"V100 to A100": (scale := _scale(means, lent))}
    lacking = {k: v * scale[k[1].value] for k, v in lent.items() if k not in means and k[1].value in scale}
    gaps = [s for kinds in pooled.values() if (s := kinds.get(Overhead.T1)) is not None]
    mean_t1_us = _joined(gaps).mean_us(profiler_us_per_event=per_event_us)
    t1_us = dict.fromkeys(v100.by_op, mean_t1_us) | {
        op: kinds[Overhead.T1].mean_us(profiler_us_per_event=per_event_us)
        if len(kinds[Overhead.T1].us) >= FEWEST_T1_SAMPLES or _follows_at_once(kinds)
        else mean_t1_us
        for op, kinds in pooled.items()
    }
    seen = {op: max(len(s.us) for s in kinds.values()) for op, kinds in pooled.items()}
    return assemble(
        Built(lacking | means, seen, factors),
        t1_us=t1_us,
        constants={
            "launch_latency_us": (
                launch_latency_us(trace).median_us(profiler_us_per_event=per_event_us),
                "median where the stream was idle, recommendation model on A100, less the profiler's cost of one event",
            ),
            "kernel_gap_us": (
                kernel_gap_us(trace, queued_us=QUEUED_US).median_us(),
                "median between queued kernels, recommendation model on A100, whole microseconds",
            ),
            "graph_launch_us": _graph_launch(data),
            "graph_gap_us": (v100.graph_gap_us, "taken over from the V100: " + v100.provenance["constants"]["graph_gap_us"]),
        },
        provenance=_provenance("A100", per_event_us, factors, [trace]),
    )  # fmt: skip


def profiler_us_per_event(traces: Iterable[KinetoTrace]) -> float:
    """What one profiled event costs: half the mean spacing of events in ops that launch nothing.

    The spacing bounds the cost from above, and the ops (views, strides) do little work of their own; that they share it
    evenly is an assumption.
    """
    spacings = [
        np.diff(op.event_starts_us)
        for trace in traces
        for op in trace.ops
        if not op.calls and not op.name.startswith(("enumerate", "Optimizer")) and len(op.event_starts_us) > 2
    ]
    return 0.5 * float(np.mean(np.concatenate(spacings)))


def _follows_at_once(kinds: Mapping[Overhead, Samples]) -> bool:
    """The op is called by a hook inside another op and has no gap before it."""
    return Overhead.T1 in kinds and not kinds[Overhead.T1].us.any()


def _trimming(published: Published) -> dict[str, float]:
    """What dropping outliers took from the study's means, by kind: geometric mean over models."""
    gaps, inside = (_geometric_mean(published.trimming[kind].values()) for kind in ("T1", "T2"))
    return {Overhead.T1.value: gaps, **{kind.value: inside for kind in SCALED}}


def _geometric_mean(ratios: Iterable[float]) -> float:
    return float(np.exp(np.mean(np.log(list(ratios)))))


def _joined(samples: Sequence[Samples]) -> Samples:
    return Samples(np.concatenate([s.us for s in samples]), np.concatenate([s.events for s in samples]))


def _host_ratio(target: Means, source: Means) -> float:
    """Median ratio over all ops and kinds that both have: how much slower one host is than the other."""
    shared = [k for k in target if k[1] in SCALED and source.get(k)]
    return float(np.median([target[k] / source[k] for k in shared]))


def _trace_means(pooled: Pooled, *, per_event_us: float) -> Means:
    """Untrimmed means less the profiler's cost; T4 is a median, because a full launch queue blocks the call."""
    means: Means = {}
    for op, kinds in pooled.items():
        for kind, samples in kinds.items():
            if kind is Overhead.T4:
                means[op, kind] = samples.median_us(profiler_us_per_event=per_event_us)
            elif kind is not Overhead.BLOCKING:
                means[op, kind] = samples.mean_us(profiler_us_per_event=per_event_us)
    return means


def _scale(target: Means, source: Means) -> dict[str, float]:
    """Median ratio of target to source over the ops that both have, by kind."""
    scale = {}
    for kind in (Overhead.T1, *SCALED, Overhead.T4):
        ratios = [target[k] / source[k] for k in target if k[1] is kind and source.get(k) and target[k] > 0]
        if ratios:
            scale[kind.value] = float(np.median(ratios))
    return scale


def _graph_launch(data: Path) -> tuple[float, str]:
    trace = read_kineto(data / "traces" / "hta_torchrec_A100_rank0of16_cudagraph" / "kineto.json.gz")
    calls = [c.duration_us for op in trace.ops for c in op.calls if c.name == "cudaGraphLaunch"]
    return float(
        np.median(calls)
    ), "median of 70 cudaGraphLaunch calls, TorchRec job on A100-SXM4-80GB, profiler on"


def _provenance(
    device: str, per_event_us: float, factors: Mapping[str, Any], traces: Sequence[KinetoTrace]
) -> dict[str, Any]:
    return {
        "device": device,
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "command": "python -m perfcore.profile.overhead_sources --data DATA",
        "method": "untrimmed means per op without the profiler; T4 is a median (a full launch queue blocks the call)",
        "sources": _SOURCES[device],
        "profiler_us_per_event": {
            "published means": "2.0, taken off by the authors",
            "traces": round(per_event_us, 3),
        },
        "factors": dict(factors),
        "traces": {
            "files": len(traces),
            "device": traces[0].device_name,
            "steps": sum(len(t.steps) for t in traces),
        },
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Write `overheads.json` of every bundled device that the data covers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder with paper/ and traces/")
    parser.add_argument("--out", type=Path, default=BUNDLED, help="folder of device folders")
    options = parser.parse_args(arguments)
    v100 = build_v100(options.data)
    for name, table in (("v100-sxm2-16gb", v100), ("a100-sxm4-80gb", build_a100(options.data, v100))):
        path = options.out / name / "overheads.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        written = to_json(table)
        overheads_from_json(written)
        path.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
