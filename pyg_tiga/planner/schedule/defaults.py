"""The shipped table of schedules (`defaults.json`): the first rule that fits answers.

A rule may bound the mean degree and the bytes of a feature row from above, and may ask
that one feature slice of the whole source table stays in L2. Sizes in the table are in
bytes and per element count, so that one rule serves every dtype: `slice_bytes` is what
one program holds of a row, `step_bytes` what it loads in one step of its loop.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources

from pyg_tiga.problem import Problem, Schedule


@dataclass(frozen=True)
class Rule:
    """One row of the table; see the module's text."""

    op: str
    slice_bytes: int
    step_bytes: int
    rows: int
    warps: int
    chunk: int
    mean_degree_at_most: float = float("inf")
    row_bytes_at_most: float = float("inf")
    slice_table_bytes_at_most: float = float("inf")

    def fits(self, problem: Problem) -> bool:
        """Whether the rule speaks of this problem."""
        held = min(self.slice_bytes, problem.row_bytes)
        return (
            problem.op == self.op
            and problem.mean_degree <= self.mean_degree_at_most
            and problem.row_bytes <= self.row_bytes_at_most
            and problem.num_src * held <= self.slice_table_bytes_at_most
        )

    def schedule(self, problem: Problem) -> Schedule:
        """The rule's schedule in elements of the problem's dtype and width."""
        itemsize = problem.dtype.itemsize
        width = _power_of_2(max(problem.features, 1))
        columns = min(width, self.slice_bytes // itemsize)
        edges = max(1, self.step_bytes // (columns * itemsize * self.rows))
        return Schedule(self.rows, edges, columns, self.warps, self.chunk)


@cache
def rules() -> tuple[Rule, ...]:
    """The shipped table."""
    text = resources.files(__package__).joinpath("defaults.json").read_text("utf-8")
    return tuple(Rule(**row) for row in json.loads(text)["rules"])


def default_schedule(problem: Problem) -> Schedule:
    """The schedule that the shipped table gives a problem."""
    for rule in rules():
        if rule.fits(problem):
            return rule.schedule(problem)
    raise LookupError(f"defaults.json has no rule for {problem}")


def _power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()
