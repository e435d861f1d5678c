"""From a policy's name to a placement."""

from __future__ import annotations

from dataclasses import dataclass, field

from dse.placement.policy.choose import Candidate, Case, by_policies, fastest, placed
from dse.placement.policy.options import Policy
from dse.placement.policy.place import Placement
from perfcore.design.design import Design
from perfcore.design.hardware import Device, Node, System
from perfcore.design.model import Model
from perfcore.design.sharding import ShardingPlan
from perfcore.design.training import Fusion, Training
from perfcore.predictor import Predictor
from perfcore.profile.profile import Profile, profile_for

DEFAULT_FUSION = Fusion()


@dataclass(frozen=True, eq=False)
class Planner:
    """Places tables by a policy; `auto` takes the plan with the shortest predicted iteration under a fusion.

    Attributes:
        profile: what predicts; each device's own when `None`.
    """

    profile: Profile | None = None
    _predictors: dict[tuple[Device, Node], Predictor] = field(default_factory=dict, init=False, repr=False)

    def __call__(
        self,
        model: Model,
        training: Training,
        system: System,
        policy: str,
        fusion: Fusion = DEFAULT_FUSION,
    ) -> ShardingPlan:
        """The plan; where nothing fits, the one with the least overflow, which memory limits refuse.

        Raises:
            SpaceError: the policy is unknown.
            DesignError: the batch does not divide by the ranks.
            ProfileError: `auto` found no profile to predict with.
        """
        return self.place(model, training, system, policy, fusion).plan

    def place(
        self,
        model: Model,
        training: Training,
        system: System,
        policy: str,
        fusion: Fusion = DEFAULT_FUSION,
    ) -> Placement:
        """As a call, with loads and memory by rank."""
        if policy == Policy.AUTO and system.world_size > 1:
            found = by_policies(model, training, system)
            design = Design(model, training, fusion, found[0].plan, system)
            candidates = tuple(Candidate(p.plan, float(p.load_us.max())) for p in found)
            (best,) = fastest([Case(design, candidates)], predictor=self._predictor(system))
            return next(p for p in found if p.plan == best)
        return placed(model, training, system, policy)

    def _predictor(self, system: System) -> Predictor:
        key = (system.device, system.node)
        if key not in self._predictors:
            self._predictors[key] = Predictor(self.profile or profile_for(*key))
        return self._predictors[key]


plan_for = Planner()
