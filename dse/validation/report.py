"""What a validation found, as values that read from and write to JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from dse.validation.compare import Compared

UNKNOWN = Compared(None, None)


@dataclass(frozen=True, slots=True)
class ValidatedDesign:
    """One design, predicted and measured.

    Attributes:
        name: its file's.
        status: how measuring ended.
        predicted_ms: of the design that was measured; `None` where measuring failed.
        measured_ms: median iteration.
        spread_pct: interquartile range of the iterations over their median.
        detail: why it failed.
        notes: how what was measured differs from the design's file.
        clock: what timed it: `cpu_time` (of one thread), `wall` or `cuda_events`.
        ranks: processes that trained it.
        active_ms: time in which a GPU runs at least one kernel; unknown on a CPU.
        memory_gib: the model's and its training's, of the fullest rank, without what the framework holds for itself.
        op_classes_ms: time of rank 0 by class of op; on a CPU everything, on a GPU kernels.
    """

    name: str
    status: str
    predicted_ms: float | None = None
    measured_ms: float | None = None
    spread_pct: float | None = None
    detail: str = ""
    notes: tuple[str, ...] = ()
    clock: str = ""
    ranks: int = 1
    active_ms: Compared = UNKNOWN
    memory_gib: Compared = UNKNOWN
    op_classes_ms: dict[str, Compared] = field(default_factory=dict)

    @property
    def error_pct(self) -> float | None:
        """Signed error of the prediction, `None` where there is no measurement."""
        if self.predicted_ms is None or self.measured_ms is None:
            return None
        return 100 * (self.predicted_ms / self.measured_ms - 1)


@dataclass(frozen=True, slots=True)
class ValidationReport:
    """What validating a run found; metrics are over the designs that were measured, `None` without any.

    Attributes:
        run: the run's name.
        device: what measured.
        designs: in the order of measuring.
        mape_pct: mean absolute error of predictions.
        gmae_pct: geometric mean absolute error.
        kendall_tau: agreement of the two orders, `None` with fewer than two.
        tolerance_pct: largest `mape_pct` that is accepted.
        prediction: what the predictions rest on.
        environment: versions and the device.
        held_out_errors_pct: of the pricing, by kind of kernel.
        calibration: facts of the pricing.
        warnings: where the prediction is not of what was asked.
        why: of the design whose prediction is off the most: what it consists of and how far that is known.
    """

    run: str
    device: str
    designs: tuple[ValidatedDesign, ...]
    mape_pct: float | None
    gmae_pct: float | None
    kendall_tau: float | None
    tolerance_pct: float
    prediction: str
    environment: dict[str, Any]
    held_out_errors_pct: dict[str, float]
    calibration: dict[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    why: str = ""

    @property
    def within_tolerance(self) -> bool:
        """Something was measured, and `mape_pct` is small enough."""
        return self.mape_pct is not None and self.mape_pct <= self.tolerance_pct

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self) | {"within_tolerance": self.within_tolerance}
