"""A bridge to TorchRec: its prices, its plans, its planner; the package `torchrec` is optional."""

from __future__ import annotations

from dse.placement.torchrec.compare import compare, compare_design
from dse.placement.torchrec.comparison import Comparison, PricedPlan
from dse.placement.torchrec.estimate import estimate
from dse.placement.torchrec.export import export_plan
from dse.placement.torchrec.job import Job, Machine, job_of, machine_of
from dse.placement.torchrec.reading import plan_of_json, plan_of_torchrec, read_plan

__all__ = [
    "Comparison",
    "Job",
    "Machine",
    "PricedPlan",
    "compare",
    "compare_design",
    "estimate",
    "export_plan",
    "job_of",
    "machine_of",
    "plan_of_json",
    "plan_of_torchrec",
    "read_plan",
]
