"""Predicted instead of measured kernel durations: how well a profile prices them, and other devices.

On another device a kernel's measured duration is multiplied by the ratio of its predicted ones, so that what the models
get wrong on both cancels. Kernels whose work is not known scale with memory bandwidth; collectives keep their
transfer, and the host its times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from perfcore.cost.model import CostModel
from perfcore.design import hardware
from perfcore.errors import HardwareError
from perfcore.graph.kernels import Kernel, MeasuredKernel
from perfcore.profile.profile import Profile, load_profile, profile_for
from perfcore.trace.account import union_us
from perfcore.trace.device import device_of
from perfcore.trace.layers import stands_for
from perfcore.trace.replay import Program, replay_steps, replayed_us, walk
from perfcore.trace.whatif import scheduled_us
from perfcore.trace.workload import TracedStep

_OFFSET = 4e-4  # of the published GMAE, so that an exact prediction counts


@dataclass(frozen=True, slots=True)
class KernelError:
    """How well kernels of one class are priced.

    Attributes:
        kernel: name of the class.
        count: kernels.
        measured_us: together.
        predicted_us: together.
        gmae_pct: exp(mean(ln(|predicted / measured - 1| + 4e-4))).
        mape_pct: mean absolute error.
    """

    kernel: str
    count: int
    measured_us: float
    predicted_us: float
    gmae_pct: float
    mape_pct: float


@dataclass(frozen=True, slots=True)
class PricedStep:
    """A step with predicted kernel durations.

    Attributes:
        profile: that priced them.
        errors: by class, the dearest first.
        priced_share: share of kernel time, collectives left out, whose work is known.
        active_error_pct: of the device's active time.
        step_error_pct: of the step.
    """

    profile: str
    errors: tuple[KernelError, ...]
    priced_share: float
    active_error_pct: float
    step_error_pct: float


@dataclass(frozen=True, slots=True)
class Retimed:
    """An iteration on another device.

    Attributes:
        source: device that was traced.
        target: device asked for.
        before_us: steady spacing as traced.
        after_us: with kernels as on the other device.
        predicted_share: share of kernel time that models rescale.
        bandwidth_share: share that scales with bandwidth.
    """

    source: str
    target: str
    before_us: float
    after_us: float
    predicted_share: float
    bandwidth_share: float


def price_step(program: Program) -> PricedStep:
    """The step with predicted durations of all kernels whose work is known, its host times as in the program.

    Raises:
        TraceError: the trace's device is not in the catalogue.
    """
    step = program.step
    profile = profile_for(device_of([program.trace]))
    kernels = [x.kernel for x in step.graph.launches()]
    predicted = _predicted_us(profile.cost_model(), kernels)
    durations = [us if own is None else own for us, own in zip(step.durations_us, predicted, strict=True)]
    steps = replay_steps(step, program.device, host_us=program.host_us, durations_us=durations)
    walked = walk(steps, step.seeds_us)
    active = union_us(walked.start_us[:, 0].tolist(), walked.end_us[:, 0].tolist())
    busy = union_us([x.kernel.start_us for x in step.launched], [x.kernel.end_us for x in step.launched])
    known = [
        (p, us)
        for p, us, x in zip(predicted, step.durations_us, step.launched, strict=True)
        if not x.collective
    ]
    return PricedStep(
        profile=profile.name,
        errors=_errors(step, kernels, predicted),
        priced_share=sum(us for p, us in known if p is not None) / max(1e-9, sum(us for _, us in known)),
        active_error_pct=100.0 * (active / busy - 1.0),
        step_error_pct=100.0 * (replayed_us(step, steps) / step.window.duration_us - 1.0),
    )


def retime(programs: Sequence[Program], device: str) -> Retimed:
    """The iteration with its kernels on another device, named as in the catalogue, or as a profile.

    Raises:
        TraceError: the traces' own device is not in the catalogue.
        ProfileError: there is no such profile.
    """
    source, target = profile_for(device_of([p.trace for p in programs])), _profile(device)
    bandwidth = source.device.hbm_bytes_per_s / target.device.hbm_bytes_per_s
    shares = {"predicted": 0.0, "bandwidth": 0.0, "all": 0.0}
    after = []
    for program in programs:
        kernels = [x.kernel for x in program.step.graph.launches()]
        here = _predicted_us(source.cost_model(), kernels)
        there = _predicted_us(target.cost_model(), kernels)
        durations = []
        owners = stands_for(program.step.launched, kernels)
        for us, owner, x in zip(program.durations_us, owners, program.step.launched, strict=True):
            a, b = here[owner], there[owner]
            how = "predicted" if a and b else "bandwidth"
            ratio = 1.0 if x.collective else (b / a if a and b else bandwidth)
            durations.append(us * ratio)
            if not x.collective:
                shares[how] += us
                shares["all"] += us
        after.append(replace(program, durations_us=tuple(durations)))
    total = max(shares["all"], 1e-9)
    return Retimed(
        source=source.device.name,
        target=target.device.name,
        before_us=scheduled_us(programs),
        after_us=scheduled_us(after),
        predicted_share=shares["predicted"] / total,
        bandwidth_share=shares["bandwidth"] / total,
    )


def _profile(name: str) -> Profile:
    try:
        return profile_for(hardware.device(name))
    except HardwareError:
        return load_profile(name)


def _predicted_us(cost: CostModel, kernels: Sequence[Kernel]) -> list[float | None]:
    """One duration a kernel, `None` where its work is not known; what another stands for takes none."""
    at = [i for i, k in enumerate(kernels) if not isinstance(k, MeasuredKernel)]
    out: list[float | None] = [None] * len(kernels)
    for i, us in zip(at, cost.predict_us([kernels[i] for i in at]), strict=True):
        out[i] = float(np.asarray(us).reshape(-1)[0])
    for i, kernel in enumerate(kernels):
        if isinstance(kernel, MeasuredKernel) and kernel.us == 0.0:
            out[i] = 0.0
    return out


def _errors(
    step: TracedStep, kernels: Sequence[Kernel], predicted: Sequence[float | None]
) -> tuple[KernelError, ...]:
    measured = [0.0] * len(kernels)
    for owner, own in zip(stands_for(step.launched, kernels), step.durations_us, strict=True):
        measured[owner] += own
    groups: dict[str, list[tuple[float, float]]] = {}
    for kernel, us, own in zip(kernels, predicted, measured, strict=True):
        if us and own > 0:
            groups.setdefault(type(kernel).__name__, []).append((own, us))
    errors = [_error(name, pairs) for name, pairs in groups.items()]
    return tuple(sorted(errors, key=lambda e: -e.measured_us))


def _error(name: str, pairs: Sequence[tuple[float, float]]) -> KernelError:
    measured, predicted = np.array(pairs).T
    off = np.abs(predicted / measured - 1.0)
    gmae = float(np.exp(np.mean(np.log(off + _OFFSET))))
    return KernelError(
        name, len(pairs), float(measured.sum()), float(predicted.sum()), 100 * gmae, 100 * float(off.mean())
    )
