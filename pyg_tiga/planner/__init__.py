"""The planner: which implementation runs a problem, with which schedule, and why."""

from pyg_tiga.planner.dispatch import pin, pinned, plan
from pyg_tiga.planner.plan import Plan

__all__ = ["Plan", "pin", "pinned", "plan"]
