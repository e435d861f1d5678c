"""What speaks for and against the predictions: known errors, extrapolation, measurements."""

from __future__ import annotations

from dse.report.breakdown import Breakdowns, KnownErrors
from dse.report.data import RunFiles
from dse.report.markup import escaped, table_of
from dse.report.measured import measured_section
from dse.report.words import number

MEANING = {
    "measured": "inside the range of shapes that were measured on this device",
    "extrapolated": "from a fitted model outside its range of shapes or devices",
    "analytic": "from data-sheet numbers and a formula; no measurement of these kernels went in",
}


def trust_section(run: RunFiles, found: Breakdowns) -> str:
    """HTML: on what the times rest, the profile's held-out errors, and a validation if there is one."""
    parts = [_basis(found), _errors(found.errors)]
    parts.append(measured_section(run.validation) if run.validation else _no_validation())
    return "".join(parts)


def _basis(found: Breakdowns) -> str:
    if not found.designs:
        return ""
    mean = {
        k: sum(d.calibration_share.get(k, 0.0) for d in found.designs) / len(found.designs) for k in MEANING
    }
    said = "; ".join(f"<b>{share:.0%} {k}</b> ({MEANING[k]})" for k, share in mean.items() if share >= 0.005)
    fallback = max(d.fallback_ops for d in found.designs)
    more = (
        f" Up to {fallback} host ops of an iteration have no overheads of their own and take the average of all ops."
        if fallback
        else ""
    )
    return f"<p>Of the kernel time of the designs drawn above: {said}.{more}</p>"


def _errors(errors: KnownErrors) -> str:
    if not errors.rows:
        return (
            f'<div class="warn">The profile {escaped(errors.profile)} states no held-out errors: '
            "treat times as estimates and trust orders more than values.</div>"
        )
    rows = [
        [
            escaped(kernel),
            f"{n:,}",
            number(gmae, digits=3),
            number(mape, digits=3),
            escaped(split),
            escaped(source),
        ]
        for kernel, n, gmae, mape, split, source in errors.rows
    ]
    head = ["kernel", "held-out samples", "GMAE (%)", "MAPE (%)", "held out by", "data"]
    return (
        f"<h3>Errors that the profile {escaped(errors.profile)} is known to make</h3>"
        "<p class='soft'>Of single kernels: an iteration adds host overheads and waiting, with errors of their own. "
        "GMAE is the geometric, MAPE the arithmetic mean of absolute errors.</p>"
        f"<div class='scroll'>{table_of(head, rows, numeric=(1, 2, 3))}</div>"
    )


def _no_validation() -> str:
    return (
        "<h3>Measured designs</h3><p>None of these designs has been run. <code>dse validate</code> trains the best ones on a "
        "real device and puts measured times beside predicted ones, here.</p>"
    )
