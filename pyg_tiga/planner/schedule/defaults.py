"""The shipped table of schedules (`defaults.json`): the first rule that fits answers.

A rule may name scores of attention, and bound the mean degree, the bytes of a feature
row, and the bytes of one feature slice of all sources (which then stays in L2). What a
program holds of a row is given in bytes, and what it loads in one step of its loop in
bytes and in elements, of which the tighter counts; so one rule serves every dtype and
width. Of attention, a step may also be given in pairs of an edge and a head, which are
what the threads of a warp share out among them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources

from pyg_tiga.problem import Problem, Schedule, power_of_2

_SMALL_TILE_BYTES = 2048  # 16 registers in each thread of a warp
# Scores of vectors keep a second row for every edge, so that their tiles hold fewer
# edges instead; of heads that are wider, even one is too much for the caps.
_MOST_CAPPED_CHANNELS = 128


@dataclass(frozen=True)
class Rule:
    """One row of the table; see the module's text."""

    op: str
    slice_bytes: int
    chunk: int
    step_bytes: int = 1 << 20
    step_elements: int = 1 << 20
    edge_heads: int = 0
    edges_at_least: int = 1
    edges_at_most: int = 1 << 20
    registers: int = 0  # only where a step's tile is small: others spill
    registers_of_halves: int = 0  # instead, where features take two bytes
    rows: int = 1
    warps: int = 1
    prescale: bool = False
    ties: tuple[str, ...] = ()
    forms: tuple[str, ...] = ()
    mean_degree_at_most: float = float("inf")
    row_bytes_at_most: float = float("inf")
    slice_table_bytes_at_most: float = float("inf")

    def fits(self, problem: Problem) -> bool:
        """Whether the rule speaks of this problem."""
        held = min(self.slice_bytes, problem.row_bytes)
        return (
            problem.op == self.op
            and (not self.ties or problem.ties in self.ties)
            and (not self.forms or problem.form in self.forms)
            and problem.mean_degree <= self.mean_degree_at_most
            and problem.row_bytes <= self.row_bytes_at_most
            and problem.num_src * held <= self.slice_table_bytes_at_most
        )

    def schedule(self, problem: Problem) -> Schedule:
        """The rule's schedule in elements of the problem's dtype and width."""
        itemsize = problem.dtype.itemsize
        width = power_of_2(problem.features)
        columns = min(width, self.slice_bytes // itemsize)
        step = min(self.step_elements, self.step_bytes // itemsize)
        edges = step // (columns * self.rows)
        if self.edge_heads:
            channels = power_of_2(problem.features // problem.heads)
            edges = min(edges, self.edge_heads // max(1, columns // channels))
        edges = min(max(edges, self.edges_at_least), self.edges_at_most)
        if problem.form in ("", "additive"):
            is_capped = edges * columns * itemsize <= _SMALL_TILE_BYTES
        else:
            channels = problem.features // problem.heads
            is_capped = bool(self.forms) and channels <= _MOST_CAPPED_CHANNELS
        registers = self.registers
        if itemsize == 2 and self.registers_of_halves:
            registers = self.registers_of_halves
        return Schedule(
            self.rows,
            edges,
            columns,
            self.warps,
            self.chunk,
            self.prescale,
            registers if is_capped else 0,
        )


@cache
def rules() -> tuple[Rule, ...]:
    """The shipped table."""
    text = resources.files(__package__).joinpath("defaults.json").read_text("utf-8")
    rows = json.loads(text)["rules"]
    lists = [{k: tuple(v) for k, v in r.items() if isinstance(v, list)} for r in rows]
    return tuple(Rule(**{**row, **made}) for row, made in zip(rows, lists, strict=True))


def default_schedule(problem: Problem) -> Schedule:
    """The schedule that the shipped table gives a problem."""
    for rule in rules():
        if rule.fits(problem):
            return rule.schedule(problem)
    raise LookupError(f"defaults.json has no rule for {problem}")
