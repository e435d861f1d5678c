"""Measured designs on the page: predicted beside measured times, memory, and time by class of op."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dse.report.figures import Stacks, draw_stacks
from dse.report.markup import escaped, table_of
from dse.report.words import number

MOST_BARS = 6
MIB_PER_GIB = 1024
CLOCKS = {"cpu_time": "CPU time of one thread", "wall": "wall time", "cuda_events": "CUDA events"}


def measured_section(found: Mapping[str, Any]) -> str:
    """HTML of one `validation.json`; files of before, which say less, give a shorter section."""
    designs = list(found.get("designs") or ())
    measured = [d for d in designs if d.get("measured_ms")]
    return (
        f"<h3>Measured on {escaped(_device(found))}</h3>"
        f"{_verdict(found)}{_warnings(found)}"
        f"<div class='scroll'>{_table(designs)}</div>"
        f"{_classes(measured)}{_why(found)}{_notes(designs)}"
    )


def compute_classes(designs: Sequence[Mapping[str, Any]]) -> Stacks:
    """For each design two bars, predicted and measured, by class of op in per cent of the measured iteration."""
    known = [d for d in designs if d.get("op_classes_ms")][:MOST_BARS]
    classes = list(dict.fromkeys(name for d in known for name in d["op_classes_ms"]))
    names = [f"{d['name']} {side}" for d in known for side in ("predicted", "measured")]
    series = {
        name: tuple(
            100 * ((d["op_classes_ms"].get(name) or {}).get(side) or 0.0) / d["measured_ms"]
            for d in known
            for side in ("predicted", "measured")
        )
        for name in classes
    }
    return Stacks(tuple(names), series, "% of the measured iteration")


def _device(found: Mapping[str, Any]) -> str:
    environment = found.get("environment") or {}
    return str(environment.get("device") or found.get("device", "?"))


def _verdict(found: Mapping[str, Any]) -> str:
    totals = [("MAPE", "mape_pct", " %"), ("GMAE", "gmae_pct", " %"), ("Kendall's tau", "kendall_tau", "")]
    said = ", ".join(
        f"{n} {number(float(found[k]), digits=3)}{u}" for n, k, u in totals if found.get(k) is not None
    )
    verdict = ""
    if found.get("mape_pct") is not None and found.get("tolerance_pct") is not None:
        within = "within" if found.get("within_tolerance") else "over"
        verdict = f" That is <b>{within} the tolerance</b> of {number(float(found['tolerance_pct']))} %."
    clocks = {d.get("clock") for d in found.get("designs") or () if d.get("clock")}
    timed = f" Timed by {' and '.join(sorted(CLOCKS.get(c, c) for c in clocks))}." if clocks else ""
    return (
        f"<p>{said or 'Nothing could be measured'}.{verdict} Predicted from "
        f"{escaped(str(found.get('prediction', 'the profile')))}.{escaped(timed)}</p>"
    )


def _warnings(found: Mapping[str, Any]) -> str:
    return "".join(f'<div class="warn">{escaped(w)}.</div>' for w in found.get("warnings") or ())


def _table(designs: Sequence[Mapping[str, Any]]) -> str:
    """A row a design; columns that no design fills are left out."""
    columns = {
        "design": [escaped(str(d["name"])) for d in designs],
        "ranks": [str(d.get("ranks", 1)) for d in designs],
        "predicted (ms)": [_number(d.get("predicted_ms")) for d in designs],
        "measured (ms)": [_number(d.get("measured_ms")) for d in designs],
        "spread (%)": [_number(d.get("spread_pct"), digits=2) for d in designs],
        "error (%)": [_error(d) for d in designs],
        "GPU active, predicted (ms)": [_number(_pair(d, "active_ms", "predicted")) for d in designs],
        "measured (ms) ": [_number(_pair(d, "active_ms", "measured")) for d in designs],
        "memory, predicted (MiB)": [_mib(_pair(d, "memory_gib", "predicted")) for d in designs],
        "measured (MiB)": [_mib(_pair(d, "memory_gib", "measured")) for d in designs],
        "": [escaped("" if d.get("status") == "ok" else _failure(d)) for d in designs],
    }
    kept = {
        name: cells
        for name, cells in columns.items()
        if any(c not in ("", "–") for c in cells) and (name != "ranks" or set(cells) != {"1"})
    }
    numeric = [i for i, name in enumerate(kept) if name not in ("design", "")]
    return table_of(
        [escaped(n.strip()) for n in kept], list(zip(*kept.values(), strict=True)), numeric=numeric
    )


def _classes(designs: Sequence[Mapping[str, Any]]) -> str:
    stacks = compute_classes(designs)
    if not stacks.names:
        return ""
    left_out = len([d for d in designs if d.get("op_classes_ms")]) - MOST_BARS
    rest = f" {left_out} more designs are in <code>validation.json</code>." if left_out > 0 else ""
    return (
        "<h3>Where predicted and measured time go</h3>"
        "<p>By class of op, of the first rank; gradients of lookups count to the updates of their tables. A CPU runs its kernels itself, so there everything is counted, and the bars of "
        f"a measurement add up to 100 %; of a GPU it is the time of its kernels.{rest}</p>"
        f"{draw_stacks(stacks, div_id='classes')}"
    )


def _why(found: Mapping[str, Any]) -> str:
    return f"<p><b>The worst prediction</b>, {escaped(found['why'])}.</p>" if found.get("why") else ""


def _notes(designs: Sequence[Mapping[str, Any]]) -> str:
    """How what ran differs from what was designed, each once."""
    notes: dict[str, list[str]] = {}
    for d in designs:
        for note in d.get("notes") or ():
            notes.setdefault(str(note), []).append(str(d["name"]))
    every = len(designs)
    items = "".join(
        f"<li>{escaped(note)}{'' if len(names) == every else escaped(': ' + ', '.join(names))}</li>"
        for note, names in notes.items()
    )
    return (
        f"<p class='soft'>What ran, where it differs from the designs:</p><ul class='soft'>{items}</ul>"
        if items
        else ""
    )


def _failure(design: Mapping[str, Any]) -> str:
    words = str(design.get("status", "")).replace("_", " ")
    return f"{words}: {design['detail']}" if design.get("detail") else words


def _pair(design: Mapping[str, Any], name: str, side: str) -> float | None:
    value = (design.get(name) or {}).get(side)
    return None if value is None else float(value)


def _mib(gib: float | None) -> str:
    return "–" if gib is None else number(gib * MIB_PER_GIB, digits=3)


def _number(value: float | None, *, digits: int = 4) -> str:
    return "–" if value is None else number(float(value), digits=digits)


def _error(design: Mapping[str, Any]) -> str:
    predicted, measured = design.get("predicted_ms"), design.get("measured_ms")
    return "–" if predicted is None or not measured else f"{100 * (predicted / measured - 1):+.1f}"
