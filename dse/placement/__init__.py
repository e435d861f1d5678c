"""The inner solver: where each embedding table lives."""

from __future__ import annotations

from dse.placement.planner import Planner, plan_for
from dse.placement.solve import Placement, place

__all__ = ["Placement", "Planner", "place", "plan_for"]
