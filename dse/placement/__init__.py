"""The inner solver: where each embedding table lives."""

from __future__ import annotations

from dse.placement.policy.place import Placement, place
from dse.placement.policy.planner import Planner, plan_for

__all__ = ["Placement", "Planner", "place", "plan_for"]
