"""The page: text, cards and tables around the figures."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import resources
from string import Template

import numpy as np

from dse.report.breakdown import Breakdown, Breakdowns, breakdowns_of
from dse.report.data import RunFiles, row_of
from dse.report.figures import (
    QUALITY,
    UNCERTAINTY,
    compute_memory,
    compute_pareto,
    compute_stacks,
    draw_importance,
    draw_pareto,
    draw_stacks,
    second_metric,
    shown_rows,
)
from dse.report.importance import importance_of
from dse.report.markup import escaped, table_of
from dse.report.trust import trust_section
from dse.report.words import (
    axis_label,
    compact,
    joined,
    label,
    limit,
    name_and_value,
    number,
    setting,
)
from dse.search.outputs import GAP

MAX_BARS = 6
MAX_ROWS = 25
CARD_METRICS = (
    "iteration_time_ms",
    "samples_per_second",
    "hbm_gib",
    "hours_per_epoch",
    "cost_per_epoch_usd",
    QUALITY,
    GAP,
)


def page_of(run: RunFiles) -> str:
    """The whole page; the same files give the same text."""
    from plotly.offline import get_plotlyjs

    rows = shown_rows(run.front, run.knee, most=MAX_ROWS)
    chosen = shown_rows(run.front, run.knee, most=MAX_BARS)
    profile = run.manifest.profile
    found = breakdowns_of([run.run_dir / run.front["design"].iloc[i] for i in chosen], profile=profile)
    by_row = {int(d.name) - 1: d for d in found.designs if d.name.isdigit()}
    pareto = compute_pareto(run)
    template = Template(resources.files("dse.report").joinpath("template.html").read_text(encoding="utf-8"))
    return template.substitute(
        title=escaped(f"{run.manifest.name}: design report"),
        heading=escaped(run.manifest.name),
        subtitle=escaped(_subtitle(run)),
        headline=_headline(run, by_row),
        cards="".join(_card(title, run, i, by_row.get(i)) for title, i in _picks(run)),
        pareto_note=_pareto_note(run),
        pareto=draw_pareto(pareto),
        breakdown=_breakdown(found, run),
        table_note=_table_note(run, rows),
        table=_front_table(run, rows),
        importance=_importance(run),
        trust=trust_section(run, found),
        commands=escaped(_commands(run)),
        provenance=table_of(["", ""], _provenance(run)),
        space=escaped(run.manifest.space),
        plotly=get_plotlyjs(),
    )


def _subtitle(run: RunFiles) -> str:
    counts = run.manifest.counts
    priced, size = counts.get("candidates_evaluated", 0), counts.get("space_size", 0)
    promise = (
        "every design was priced, so the front is exact"
        if run.manifest.method == "exact"
        else "found by search"
    )
    return (
        f"{number(priced)} designs priced in a space of {number(size)} ({promise}); "
        f"{len(run.front)} of them are on the Pareto front. Search took {number(run.manifest.wall_s, digits=3)} s."
    )


def _picks(run: RunFiles) -> list[tuple[str, int]]:
    """The designs that most readers look for first: best of each drawn objective, and the knee."""
    first = run.objectives[0]
    picks = {
        _best(run, first.metric, minimize=first.minimize): f"Best {label(first.metric).partition(' (')[0]}"
    }
    if run.knee is not None:
        picks.setdefault(run.knee, "Knee: the balanced choice")
    if len(run.objectives) > 1:
        second = run.objectives[1]
        best = _best(run, second.metric, minimize=second.minimize)
        picks.setdefault(best, f"Best {label(second.metric).partition(' (')[0]}")
    return [(title, index) for index, title in picks.items()]


def _best(run: RunFiles, metric: str, *, minimize: bool) -> int:
    values = run.front[metric].to_numpy(dtype=np.float64)
    return int(np.nanargmin(values) if minimize else np.nanargmax(values))


def _headline(run: RunFiles, by_row: dict[int, Breakdown]) -> str:
    """The best design in words."""
    index = _picks(run)[0][1]
    row = run.front.iloc[index]
    first = run.objectives[0]
    said = f"The best design by {escaped(label(first.metric).partition(' (')[0])} "
    iteration, rate = (number(float(row.get(m, np.nan))) for m in ("iteration_time_ms", "samples_per_second"))
    said += f"needs <b>{iteration} ms</b> per iteration, that is <b>{rate} samples per second</b>"
    design = by_row.get(index)
    if design is None:
        return said + "."
    where = f"{design.gpus} × {design.device}" if design.gpus > 1 else f"one {design.device}"
    where += f"; ranks that differ: {design.ranks}" * bool(design.ranks)
    return said + f", on {escaped(where)}. {_bound(design)} Everything here is predicted, not measured."


def _bound(design: Breakdown) -> str:
    """What sets the iteration time."""
    meaning = {
        "host": "the host, which cannot launch kernels fast enough",
        "compute": "the GPU's kernels",
        "communication": "communication between GPUs",
        "copy": "copies from the host",
        "input": "the data loader",
    }[design.bound_by]
    share = design.bound_share.get(design.bound_by)
    return f"It is bound by {meaning}" + (f" ({share:.0%} of its critical path)." if share else ".")


def _card(title: str, run: RunFiles, index: int, design: Breakdown | None) -> str:
    row = row_of(run, index)
    first = run.objectives[0].metric
    metrics = [m for m in CARD_METRICS if m in row and m != first and np.isfinite(row[m])]
    facts = [name_and_value(m, float(row[m])) for m in metrics]
    if QUALITY in metrics and UNCERTAINTY in row:
        facts[metrics.index(QUALITY)] = (
            label(QUALITY),
            f"{number(float(row[QUALITY]))} ± {number(float(row[UNCERTAINTY]), digits=2)}",
        )
    facts += [("bound by", design.bound_by)] if design else []
    facts += list(compact(row, run.axes).items())
    shown = "".join(f"<dt>{escaped(k)}</dt><dd>{escaped(v)}</dd>" for k, v in facts)
    kind = "card knee" if index == run.knee else "card"
    name, big = name_and_value(first, float(row[first]))
    return (
        f'<div class="{kind}"><div class="soft">{escaped(title)} · row {index + 1}</div>'
        f'<div class="big">{escaped(big)}</div><div class="soft">{escaped(name)}</div><dl>{shown}</dl></div>'
    )


def _pareto_note(run: RunFiles) -> str:
    texts = [
        "Each point is a design that no other priced design beats in every objective. Point at one to see it."
    ]
    if second_metric(run) == QUALITY and UNCERTAINTY in run.front:
        loss, std = (run.front[m].to_numpy(dtype=np.float64) for m in (QUALITY, UNCERTAINTY))
        best = int(np.nanargmin(loss))
        alike = int((loss - std <= loss[best] + std[best]).sum())
        texts.append(
            f"The loss is a proxy, not a measurement: <b>{alike} of {len(loss)}</b> designs overlap with the best "
            "one's band, so their order by loss is not to be trusted. Train a few before you decide."
        )
    if run.candidates is not None:
        kind = (
            "a uniform sample of the space"
            if run.candidates.uniform
            else "the trials that the sampler asked for"
        )
        broken = bool((run.candidates.table["feasible"] == 0).any())
        crosses = (
            f"crosses break a limit ({', '.join(map(limit, run.limits))})" if broken else "all are feasible"
        )
        texts.append(escaped(f"Behind the front: {kind}; {crosses}."))
    return " ".join(texts)


def _breakdown(found: Breakdowns, run: RunFiles) -> str:
    """Stacked bars of time and memory, or why there are none."""
    notes = "".join(f'<div class="warn">{escaped(f)}</div>' for f in found.failures)
    if not found.designs:
        return f"<section><h2>Where the time goes</h2>{notes}</section>" if notes else ""
    names = [_bar_name(run, d) for d in found.designs]
    device, host = (compute_stacks(found.designs, names, host=on_host) for on_host in (False, True))
    capacities = {d.capacity_gib for d in found.designs}
    capacity = capacities.pop() if len(capacities) == 1 else None
    return (
        "<section><h2>Where the time goes</h2>"
        "<p>Time per sample, so that designs of different batches compare. First the GPU on the critical path: kernels by part "
        "of the model, communication that nothing hides, and time in which it has nothing to do.</p>"
        f"{draw_stacks(device, div_id='device')}"
        "<h3>The same time, as the host sees it</h3>"
        "<p>T1: between ops; T2: before an op's first launch; T3: after its last; T4: launch calls; T5: between launches.</p>"
        f"{draw_stacks(host, div_id='host')}{notes}</section>"
        "<section><h2>Where the memory goes</h2>"
        f"{draw_stacks(compute_memory(found.designs, names), div_id='memory', limit=capacity)}</section>"
    )


def _bar_name(run: RunFiles, design: Breakdown) -> str:
    mark = " ★" if run.knee is not None and design.name == f"{run.knee + 1:03d}" else ""
    gpus = f"{design.gpus} GPUs, " if design.gpus > 1 else ""
    return f"row {int(design.name)}{mark}: {gpus}batch {design.global_batch:,}"


def _table_note(run: RunFiles, rows: Sequence[int]) -> str:
    shown = "All" if len(rows) == len(run.front) else f"{len(rows)} of {len(run.front)}"
    return (
        f"{shown} designs of the front, best first; the knee is marked. The links open design files for "
        '<code>dse predict</code>; <a href="pareto.csv">pareto.csv</a> has every row and every metric.'
    )


def _front_table(run: RunFiles, rows: Sequence[int]) -> str:
    front = run.front.iloc[list(rows)]
    metrics = [o.metric for o in run.objectives]
    metrics += [m for m in CARD_METRICS if m in front and m not in metrics]
    settings = [compact(row_of(run, i), run.axes) for i in front.index]
    varied = [k for k in settings[0] if len({s.get(k) for s in settings}) > 1]
    lines = []
    for i, chosen in zip(front.index, settings, strict=True):
        row = front.loc[i]
        file = escaped(row["design"])
        link = f'<a href="{file}">{int(row["row"])}</a>' + (" ★" if i == run.knee else "")
        values = [number(float(row[m])) for m in metrics]
        lines.append([link, *values, *(escaped(chosen.get(k, "–")) for k in varied)])
    html_table = table_of(
        ["row", *(escaped(label(m)) for m in metrics), *map(escaped, varied)],
        lines,
        numeric=range(1, len(metrics) + 1),
    )
    same = {k: v for k, v in settings[0].items() if k not in varied}
    shared = joined([f"{escaped(k)} {escaped(v)}" for k, v in same.items()]) if same else ""
    return html_table + (f'<p class="soft">The same in all of them: {shared}.</p>' if shared else "")


def _importance(run: RunFiles) -> str:
    found = importance_of(run)
    if found is None:
        return ""
    rows = joined([f"{n:,} feasible designs for {escaped(label(m))}" for m, n in found.rows.items()])
    what = (
        "a uniform sample of the space: these are first-order Sobol indices"
        if found.uniform
        else "the designs that the sampler asked for, which crowd where it looked: read them as a hint"
    )
    return (
        "<section><h2>What matters</h2>"
        f"<p>Share of the variance (of the logarithm) that each choice explains by itself, over {what} ({rows}). "
        "What is missing to 100 % is interplay between choices.</p>"
        f"{draw_importance(found)}</section>"
    )


def _commands(run: RunFiles) -> str:
    command = " ".join(run.manifest.command) or f"dse run SPACE.yaml --seed {run.manifest.seed}"
    here, first = run.run_dir.name, run.front["design"].dropna()
    design = f"runs/{here}/{first.iloc[0]}" if len(first) else f"runs/{here}/designs/001.yaml"
    return "\n".join(
        [
            f"{command:<58} # this run (seed {run.manifest.seed})",
            f"{f'dse predict {design}':<58} # one design's time, memory and bounds",
            f"{f'dse explain {design}':<58} # its critical path and what would help",
            f"{f'dse validate runs/{here} --top 3 --device cuda':<58} # predicted beside measured, on your GPU",
        ]
    )


def _provenance(run: RunFiles) -> list[list[str]]:
    m = run.manifest
    pairs: list[tuple[str, object]] = [
        ("started", m.started),
        ("method", f"{m.method}, sampler {m.sampler}, seed {m.seed}"),
        ("trials", number(float(m.counts.get("trials", 0)))),
        ("limits", ", ".join(map(limit, run.limits))),
        ("axes", ", ".join(axis_label(a) for a in run.axes)),
        ("overrides", ", ".join(m.overrides) or "none"),
        ("profile", f"{m.profile} ({m.profile_hash[:12]})"),
        ("space", m.space_hash[:12]),
        ("versions", ", ".join(f"{k} {v}" for k, v in sorted(m.versions.items()))),
        ("machine", ", ".join(f"{k} {setting(v)}" for k, v in sorted(m.host.items()))),
    ]
    return [[escaped(k), escaped(re.sub(r"\s+", " ", str(v)))] for k, v in pairs]
