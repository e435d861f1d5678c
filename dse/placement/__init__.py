"""The inner solver: where each embedding table lives."""

from __future__ import annotations

from dse.placement.solve import Placement, place
from perfcore.design.hardware import System
from perfcore.design.model import Model
from perfcore.design.sharding import ShardingPlan
from perfcore.design.training import Training

__all__ = ["Placement", "place", "plan_for"]


def plan_for(model: Model, training: Training, system: System, policy: str) -> ShardingPlan:
    """The plan of `place` alone; where nothing fits, the one with the least overflow, which memory limits refuse.

    Raises:
        SpaceError: the policy is unknown.
        DesignError: the batch does not divide by the ranks.
    """
    return place(model, training, system, policy=policy).plan
