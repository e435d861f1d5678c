"""What predicts the iterations that a validation measures."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfcore.design import hardware
from perfcore.design.design import Design
from perfcore.design.hardware import System

if TYPE_CHECKING:
    from perfcore.measure.isolate import Settings
    from perfcore.predictor import Prediction


@dataclass(frozen=True, slots=True)
class Pricing:
    """How the iterations of measured designs are predicted.

    Attributes:
        iteration_us: a design's predicted iteration time.
        source: what the prediction rests on, in a sentence.
        errors_pct: held-out errors by kind of kernel, where known.
        facts: of the calibration, for the record.
        warnings: where the prediction is not of what was asked.
        why: what a design's prediction consists of and how far it is known, where that can be said.
        predict: the whole prediction of a design, where there is more than its time.
    """

    iteration_us: Callable[[Design], float]
    source: str
    errors_pct: dict[str, float] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    why: Callable[[Design], str] | None = None
    predict: Callable[[Design], Prediction] | None = None


def pricing_of(design: Design, *, settings: Settings, calibration_s: float) -> Pricing:
    """What predicts on the device: a calibration of this CPU, or the profile of the GPU that measures.

    A GPU that the catalogue does not know is predicted as the design's own device, with a warning.
    """
    if settings.device == "cpu":
        return cpu_pricing(threads=settings.threads, seconds=calibration_s)
    import torch

    return gpu_pricing(design.system, measuring=torch.cuda.get_device_name(settings.device))


def gpu_pricing(system: System, *, measuring: str) -> Pricing:
    """The profile of the GPU that measures, by the name that CUDA has for it.

    Raises:
        ProfileError: its profile is corrupt.
    """
    from dse.validation.why import why
    from perfcore.predictor import Predictor
    from perfcore.profile.profile import profile_for

    known = hardware.device_of_cuda_name(measuring)
    here = system
    warnings: tuple[str, ...] = ()
    if known is None:
        warnings = (
            f"{measuring} measures, which the catalogue does not know: predicted is {system.device.name}",
        )
    elif known != system.device:
        warnings = (f"{known.name} measures and is predicted, but the designs are for {system.device.name}",)
        here = System(known, hardware.default_node(known.name), 1)
    profile = profile_for(here.device, here.node)
    predictor = Predictor(profile)
    errors = {e.kernel: e.mape_pct for e in profile.known_errors}

    def predict(design: Design) -> Prediction:
        return predictor.predict(replace(design, system=here.even(design.system.world_size)))

    own = "the design's own device" if here is system else "the GPU that measures"
    return Pricing(
        lambda d: predict(d).iteration_time_us,
        f"the profile of {here.device.name}, {own}",
        errors,
        {"profile": profile.name, "profile_hash": profile.hash, "device": here.device.name},
        warnings,
        why=lambda d: why(predict(d), errors),
        predict=predict,
    )


def cpu_pricing(*, threads: int | None, seconds: float) -> Pricing:
    """Calibrate this machine's CPU, with as many threads as the designs are measured with."""
    import torch

    from perfcore.measure.collect import collect
    from perfcore.measure.iteration import host_clock
    from perfcore.profile.fit_samples import fit_profile

    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        with tempfile.TemporaryDirectory() as folder:
            samples, profile = Path(folder) / "samples", Path(folder) / "this-cpu"
            collect(samples, device="cpu", budget_s=seconds)
            fit_profile(samples, profile)
            pricing = profile_pricing(str(profile))
        facts = {"seconds": seconds, "threads": torch.get_num_threads(), "clock": host_clock()[0]}
    finally:
        torch.set_num_threads(before)
    source = f"a calibration of this CPU in about {seconds:g} s: kernels and small training loops"
    return replace(pricing, source=source, facts={**pricing.facts, **facts})


def profile_pricing(profile: str) -> Pricing:
    """A profile by name or folder, such as one that `dse calibrate` made.

    Raises:
        ProfileError: there is none, or it is corrupt.
    """
    from dse.validation.why import why
    from perfcore.predictor import Predictor
    from perfcore.profile.profile import load_profile, measured_machine, on_machine

    loaded, machine = load_profile(profile), measured_machine(profile)
    predictor = Predictor(loaded)
    errors = {e.kernel: e.mape_pct for e in loaded.known_errors}

    def predict(design: Design) -> Prediction:
        return predictor.predict(design.with_system(on_machine(machine, design.system)))

    return Pricing(
        lambda design: predict(design).iteration_time_us,
        f"the profile {loaded.name}, {loaded.device.description}",
        errors,
        {"profile": loaded.name, "profile_hash": loaded.hash, "device": loaded.device.name},
        why=lambda design: why(predict(design), errors),
        predict=predict,
    )
