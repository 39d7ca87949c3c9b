"""The planner: which implementation runs a problem, with which schedule, and why."""

from pyg_tiga.planner.dispatch import pin, plan
from pyg_tiga.planner.plan import Plan

__all__ = ["Plan", "pin", "plan"]
