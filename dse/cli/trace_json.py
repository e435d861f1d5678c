"""What `dse trace --json` prints: milliseconds and percent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from perfcore.errors import PerfcoreError
from perfcore.steps import HostKind
from perfcore.trace.account import StepAccount, mean_account
from perfcore.trace.analysis import Analysis, Errors, JointAnalysis, RankAnalysis
from perfcore.trace.critical import by_reason_us
from perfcore.trace.pool import HostPool
from perfcore.trace.retime import PricedStep, Retimed
from perfcore.trace.study import Link, path_of, priced
from perfcore.trace.whatif import Effect
from perfcore.units import US_PER_MS

_TIMES = ("t1", "t2", "t3", "t4", "t5", "alone")


def to_json(
    analysis: Analysis,
    *,
    effects: Sequence[Effect],
    retimed: Retimed | None,
    links: Sequence[Link],
    unread: Sequence[str],
) -> dict[str, Any]:
    """Everything that the analysis found."""
    return {
        "ranks": [_rank(r, analysis) for r in analysis.ranks],
        "joint": _joint(analysis.joint) if analysis.joint else None,
        "not_joint": analysis.not_joint or None,
        "overheads": _overheads(analysis),
        "what_if": [effect_json(e) for e in effects],
        "device": _retimed(retimed) if retimed else None,
        "links": [asdict(link) | {"linked_pct": 100.0 * link.share} for link in links],
        "unread": list(unread),
    }


def effect_json(effect: Effect) -> dict[str, Any]:
    """A change and its effect."""
    return {
        "change": effect.change.text,
        "before_ms": effect.before_us / US_PER_MS,
        "iteration_time_ms": effect.after_us / US_PER_MS,
        "saved_pct": 100.0 * effect.saved_share,
    }


def account_json(account: StepAccount) -> dict[str, float]:
    """Milliseconds; those of the host add up to the step."""
    a = account
    host = {
        "t1": a.t1_us,
        "t2": a.t2_us,
        "t3": a.t3_us,
        "t4": a.t4_us,
        "t5": a.t5_us,
        "launchless_ops": a.alone_us,
        "blocking_waits": a.blocking_us,
        "full_launch_queue": a.queue_us,
        "unexplained": a.unexplained_us,
        "sum": a.explained_us,
        "step": a.step_us,
        "device_busy": a.device_busy_us,
        "communication": a.communication_us,
        "exposed_communication": a.exposed_communication_us,
        "waiting_for_other_ranks": a.waiting_for_ranks_us,
    }
    out = {f"{name}_ms": us / US_PER_MS for name, us in host.items()}
    return out | {"closes_within_pct": 100.0 * abs(a.explained_us / a.step_us - 1.0) if a.step_us else 0.0}


def priced_or_none(rank: RankAnalysis, analysis: Analysis) -> tuple[PricedStep, ...] | None:
    """Kernel durations from shapes, where the device is known and at least one kernel's work is."""
    try:
        steps = priced(rank, analysis)
    except PerfcoreError:
        return None
    return steps if any(s.errors for s in steps) else None


def _rank(rank: RankAnalysis, analysis: Analysis) -> dict[str, Any]:
    account, trace, path = mean_account(rank.accounts), rank.trace, path_of(rank, analysis)
    steps = rank.steps
    return {
        "file": trace.name,
        "rank": trace.rank,
        "world_size": trace.world_size,
        "device": trace.device_name,
        "steps": len(steps),
        "dropped_steps": rank.dropped,
        "measured_ms": rank.measured_us / US_PER_MS,
        "measured_steps_ms": [s.window.duration_us / US_PER_MS for s in steps],
        "unexplained_ms": account.unexplained_us / US_PER_MS,
        "account": account_json(account),
        "replay": {
            "exact_error_pct": _signed(rank.exact),
            "mean_error_pct": _signed(rank.mean),
            "exact": _errors(rank.exact),
            "mean": _errors(rank.mean),
            "shared": _errors(rank.shared) if rank.shared.pct else None,
        },
        "leave_one_out": _errors(rank.leave_one_out) if rank.leave_one_out.pct else None,
        "leave_all_out": _errors(rank.leave_all_out) if rank.leave_all_out.pct else None,
        "launches": len(steps[0].launched),
        "unlaunched_kernels": sum(s.unlaunched for s in steps),
        "stream_waits": _counts([w.how for s in steps for w in s.waits]),
        "critical_path": {
            "by_reason_ms": {k: us / US_PER_MS for k, us in by_reason_us(path).items()},
            "parts": [
                {"op": p.op, "rank": trace.rank, "what": p.what, "reason": p.reason, "us": round(p.us, 3)}
                for p in path
            ],
        },
        "predicted_kernels": _priced(priced_or_none(rank, analysis)),
    }


def _joint(joint: JointAnalysis) -> dict[str, Any]:
    return {
        "steps": joint.steps,
        "exact": _errors(joint.exact),
        "mean": _errors(joint.mean),
        "leave_one_out": _errors(joint.leave_one_out),
        "collective_time_waiting_pct": 100.0 * joint.waiting_share,
    }


def _errors(errors: Errors) -> dict[str, Any]:
    return {
        "mean_abs_pct": errors.mean_abs_pct if errors.pct else None,
        "max_abs_pct": errors.max_abs_pct if errors.pct else None,
        "errors_pct": [round(e, 4) for e in errors.pct],
    }


def _signed(errors: Errors) -> float | None:
    """The error of largest size, with its sign."""
    return max(errors.pct, key=abs) if errors.pct else None


def _priced(steps: Sequence[PricedStep] | None) -> dict[str, Any] | None:
    if not steps:
        return None
    last = steps[-1]
    return {
        "profile": last.profile,
        "priced_share": last.priced_share,
        "active_error_pct": sum(s.active_error_pct for s in steps) / len(steps),
        "step_error_pct": sum(s.step_error_pct for s in steps) / len(steps),
        "active_max_abs_pct": max(abs(s.active_error_pct) for s in steps),
        "step_max_abs_pct": max(abs(s.step_error_pct) for s in steps),
        "kernels": [asdict(e) for e in last.errors],
    }


def _overheads(analysis: Analysis) -> dict[str, Any]:
    """Shared overheads over all traces: untrimmed means, µs, with counts and spread."""
    device = analysis.device
    return {
        "launch_latency_us": device.latency_us,
        "kernel_gap_us": device.gap_us,
        "by_op": {name: _op(analysis.pool, name) for name in analysis.pool.ops()},
    }


def _op(pool: HostPool, name: str) -> dict[str, dict[str, float]]:
    spread = {kind: pool.spread(name, HostKind[kind.upper()]) for kind in _TIMES}
    return {
        kind: {"mean": s.mean_us, "std": s.std_us, "median": s.median_us, "count": s.count}
        for kind, s in spread.items()
        if s is not None and not math.isnan(s.mean_us)
    }


def _retimed(retimed: Retimed) -> dict[str, Any]:
    return {
        "source": retimed.source,
        "target": retimed.target,
        "before_ms": retimed.before_us / US_PER_MS,
        "iteration_time_ms": retimed.after_us / US_PER_MS,
        "predicted_share": retimed.predicted_share,
        "bandwidth_share": retimed.bandwidth_share,
    }


def _counts(names: Sequence[str]) -> dict[str, int]:
    return {name: names.count(name) for name in dict.fromkeys(names)}
