"""Plans of TorchRec's planner and of the solver here beside each other, as values, JSON and text."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from dse.placement.instances.instance import Objective

OURS, THEIRS = "dlrm-dse", "torchrec"
ITERATION = "iteration_time"
DEFAULT = "default"  # TorchRec's planner as it comes


@dataclass(frozen=True, slots=True)
class PricedPlan:
    """One plan, by every price.

    Attributes:
        planner: `torchrec` or `dlrm-dse`.
        objective: what was minimised: `rating`, `critical_path` or `iteration_time`.
        setting: how the planner was run; for `dlrm-dse` where its plan comes from.
        rating_ms: the largest sum of a rank, by TorchRec's costs; `None` where they do not know the plan's pieces.
        critical_path_ms: compute and each type's exchanges, each waiting for its slowest rank, by the same costs.
        iteration_time_ms: predicted for the whole iteration; `None` where there is no design.
        fits: within memory, by TorchRec's account.
        lower_bound_ms: no plan has a smaller objective; `None` where no bound was sought.
        wall_s: time that the planner took.
    """

    planner: str
    objective: str
    setting: str
    rating_ms: float | None
    critical_path_ms: float | None
    iteration_time_ms: float | None
    fits: bool
    lower_bound_ms: float | None
    wall_s: float

    @property
    def objective_ms(self) -> float:
        """Its price by what was minimised."""
        value: float = getattr(self, f"{self.objective}_ms")
        return value


@dataclass(frozen=True, slots=True)
class Tried:
    """One setting of TorchRec's planner: the best of its plans by either price; `None` where it found none."""

    setting: str
    rating_ms: float | None
    critical_path_ms: float | None
    plans_tried: int
    timed_out: bool
    wall_s: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """Plans of one job beside each other.

    Attributes:
        tables: number of tables.
        ranks: number of ranks.
        plans: TorchRec's default, the best that any of its settings found, and those of the solver here.
        tried: every setting of TorchRec's planner that was run.
    """

    tables: int
    ranks: int
    plans: tuple[PricedPlan, ...]
    tried: tuple[Tried, ...]

    def best(self, planner: str, objective: str) -> PricedPlan | None:
        """A planner's plan with the smallest price by an objective, whatever it minimised."""
        priced = [p for p in self.plans if p.planner == planner and getattr(p, f"{objective}_ms") is not None]
        return min(priced, key=lambda p: float(getattr(p, f"{objective}_ms")), default=None)

    def to_json(self) -> dict[str, Any]:
        """Plain values; `saved_pct` is how much smaller the best price here is than TorchRec's best."""
        return {
            "tables": self.tables,
            "ranks": self.ranks,
            "plans": [asdict(p) | {"certified_gap_pct": _gap_pct(p)} for p in self.plans],
            "torchrec_settings": [asdict(t) for t in self.tried],
            "saved_pct": {
                objective: self._saved_pct(objective)
                for objective in (*(o.value for o in Objective), ITERATION)
            },
        }

    def lines(self) -> list[str]:
        """A table for a terminal."""
        head = f"{'planner':9} {'minimises':14} {'rating ms':>10} {'crit. path':>10} {'iteration':>10} {'gap %':>7} {'s':>7}  setting"
        return [head, *(_line(p) for p in self.plans)]

    def _saved_pct(self, objective: str) -> float | None:
        ours, theirs = self.best(OURS, objective), self.best(THEIRS, objective)
        if ours is None or theirs is None:
            return None
        a, b = (float(getattr(p, f"{objective}_ms")) for p in (ours, theirs))
        return 100 * (1 - a / b) if b else 0.0


def _gap_pct(plan: PricedPlan) -> float | None:
    if plan.lower_bound_ms is None:
        return None
    if plan.lower_bound_ms <= 0:
        return 0.0 if plan.objective_ms <= 0 else None
    return max(0.0, 100 * (plan.objective_ms / plan.lower_bound_ms - 1))


def _line(plan: PricedPlan) -> str:
    prices = (plan.rating_ms, plan.critical_path_ms, plan.iteration_time_ms)
    columns = " ".join(f"{'-' if ms is None else f'{ms:.4f}':>10}" for ms in prices)
    gap = _gap_pct(plan)
    return (
        f"{plan.planner:9} {plan.objective:14} {columns} {'-' if gap is None else f'{gap:.2f}':>7} {plan.wall_s:7.2f}  "
        f"{plan.setting}{'' if plan.fits else ' (does not fit)'}"
    )
