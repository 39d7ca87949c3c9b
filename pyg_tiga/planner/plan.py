"""A plan: the implementation that was chosen, its schedule, and what was rejected."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pyg_tiga.impls.base import Implementation
from pyg_tiga.problem import Problem, Schedule


@dataclass(frozen=True)
class Plan:
    """How one problem runs.

    Args:
        problem: What was asked.
        implementation: What runs it.
        schedule: Launch choices, where the implementation takes any.
        source: Where the choice comes from: ``"table"`` or ``"pinned"``.
        rejected: Implementations that come first in the table but cannot run the
            problem, with every reason.
    """

    problem: Problem
    implementation: Implementation
    schedule: Schedule | None
    source: str
    rejected: dict[str, list[str]] = field(default_factory=dict)

    def run(self, *args: Any) -> Any:
        """Run the plan on a graph and the operation's tensors."""
        return self.implementation.run(self.problem, self.schedule, *args)

    def rows(self) -> list[tuple[str, str]]:
        """The plan as (field, value) pairs, in the order in which they are shown."""
        chosen = f"{self.implementation.name} ({self.implementation.family})"
        rows = [("problem", str(self.problem)), ("runs", chosen)]
        if self.schedule is not None:
            rows.append(("schedule", str(self.schedule)))
        rows.append(("chosen by", self.source))
        rows.extend(self.implementation.notes(self.problem))
        for name, reasons in self.rejected.items():
            rows.extend((f"not {name}", reason) for reason in reasons)
        return rows

    def explain(self) -> str:
        """The plan as readable text, one line per fact."""
        return "\n".join(f"{name}: {value}" for name, value in self.rows())

    def __rich__(self) -> Any:
        """The plan as a table, where `rich` prints it."""
        from rich.table import Table

        table = Table(title="plan", show_header=False)
        for row in self.rows():
            table.add_row(*row)
        return table
